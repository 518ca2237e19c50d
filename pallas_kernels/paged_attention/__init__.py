"""Causal attention over a paged cache.

api             what the models call, and the layout of pages
reference       the plain-JAX twin, which CPUs run
triton          GPU: a few rows a sequence, and the write before them
triton_prefill  GPU: many rows a sequence
arg_specs       named shapes and arguments; tests/test_kernels.py uses them
bench           `python -m pallas_kernels.paged_attention.bench`: times on a GPU, with the floor and the bar beside each
"""

from pallas_kernels.paged_attention.api import Pages, attend, attend_ragged, write, write_ragged

__all__ = ["Pages", "attend", "attend_ragged", "write", "write_ragged"]
