"""One model on several devices of a host: each has a share of the heads, of the feed-forward blocks' inner features and of the
vocabulary (Shoeybi et al., 2019), and with the heads of the state. The rest each computes by itself.

shares      what a share is, and what the devices tell each other
params      a model's parameters, cut into shares
placement   where parameters and state lie, and how a step runs on all devices

A step is one program (`jax.shard_map`) that sees its own share alone: layers and kernels are those of a smaller model. Twice a
layer the devices' sums are added, always in the devices' order, so that a row's bits depend on nothing but the row and the number
of devices: more rows, drafts and neighbours change none.
"""

from atlas_jax.tensor_parallel.placement import ONE_DEVICE, OneDevice, Placement, placement

__all__ = ["ONE_DEVICE", "OneDevice", "Placement", "placement"]
