"""A model's parameters, cut into shares.

Weights with outputs of several kinds (queries, keys, values, …) give each device its part of every kind. Put together, the shares
of such a weight are its columns in another order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from atlas_jax.config import ModelConfig
from atlas_jax.errors import ConfigError
from atlas_jax.shapes import Array
from pallas_kernels.w4a16.forms import BLOCK, ByLayer, Int4, Nvfp4, SideBySide, outputs

Spans = list[tuple[int, int]]  # of the axis that is cut, in the order in which a share has them


class Cut(NamedTuple):
    """An array's axis, and what of it each device has. Without an axis, each has all of it."""

    axis: int | None
    spans: tuple[Spans, ...] = ()


WHOLE = Cut(None)


class Columns(NamedTuple):
    """Outputs of several kinds side by side, so many of each; `tail` more at the end belong to all."""

    widths: tuple[int, ...]
    tail: int = 0

    def spans(self, devices: int) -> tuple[Spans, ...]:
        """Of each device."""
        return tuple(self._of(device, devices) for device in range(devices))

    def _of(self, device: int, devices: int) -> Spans:
        spans, start = [], 0
        for width in self.widths:
            share = width // devices
            spans.append((start + device * share, start + (device + 1) * share))
            start += width
        return spans + ([(start, start + self.tail)] if self.tail else [])


class Rows(NamedTuple):
    """Inputs, or tokens of the vocabulary."""

    total: int


Rule = Columns | Rows | None


def rules(config: ModelConfig) -> dict[str, Rule]:
    """How each parameter is shared, by the last names of its path; None is whole on each device."""
    c = config
    H, Hkv, Hv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim, c.linear_num_value_heads
    mixed = (c.key_size, c.key_size, c.value_size)
    inner, shared = c.moe_intermediate_size if c.num_experts else c.intermediate_size, c.shared_expert_intermediate_size
    return {
        "embedding": Rows(c.vocab_size),
        "head": Columns((c.vocab_size,)),
        "draft_head.weight": Columns((c.vocab_size,)),
        "linear_attention.in_proj": Columns((*mixed, c.value_size, Hv, Hv)),
        "linear_attention.conv": Columns(mixed),
        "linear_attention.vectors": Columns((Hv, Hv), c.linear_value_head_dim),
        "linear_attention.out_proj": Rows(c.value_size),
        "attention.in_proj": Columns((2 * H, Hkv, Hkv)),
        "attention.out_proj": Rows(H),
        "feed_forward.gate_up": Columns((inner, inner)),
        "feed_forward.down": Rows(inner),
        "feed_forward.shared_gate_up": Columns((shared, shared)),
        "feed_forward.shared_down": Rows(shared),
    }


def rule_of(config: ModelConfig, path: tuple[str, ...], params: Any) -> Rule:
    """The rule of the parameter at `path` ("mtp", "attention", "in_proj"). A head that drafts from a part of the vocabulary, which
    `params` tell, is whole on each device."""
    if path[-2:-1] == ("draft_head",) and "tokens" in params["params"]["draft_head"]:
        return None
    known = rules(config)
    return known.get(".".join(path[-2:]), known.get(path[-1]) if len(path) == 1 else None)


def cuts(weight: Any, rule: Rule, devices: int, name: str) -> list[Cut]:
    """How the arrays of a weight, in whichever form, are cut, in the order of its leaves.

    Raises:
        ConfigError: a quantised weight whose blocks or order of inputs the devices cannot share.
    """
    if rule is None:
        return [WHOLE for _ in jax.tree.leaves(weight)]
    if isinstance(weight, (tuple, ByLayer)):
        several = weight.stacks if isinstance(weight, ByLayer) else weight
        return [cut for one in several for cut in cuts(one, rule, devices, name)]
    if isinstance(rule, Columns):
        return _columns(weight, rule.spans(devices))
    parts = weight.parts if isinstance(weight, SideBySide) else (weight,)
    return [cut for part in parts for cut in _rows(part, rule, devices, name)]


def _columns(weight: Any, spans: tuple[Spans, ...]) -> list[Cut]:
    if isinstance(weight, SideBySide):
        found, start = [], 0
        for part in weight.parts:
            end = start + outputs(part)
            found += _columns(part, tuple(_within(each, start, end) for each in spans))
            start = end
        return found
    codes, others = Cut(-2, spans), Cut(-1, spans)
    if isinstance(weight, jax.Array):
        return [others]
    # Scales, zeros and the scale of columns have columns last; an order is of inputs.
    ordered = isinstance(weight, Int4) and weight.order is not None
    return [codes, *[others] * (len(jax.tree.leaves(weight)) - 1 - ordered), *[WHOLE] * ordered]


def _rows(weight: Any, rule: Rows, devices: int, name: str) -> list[Cut]:
    share = rule.total // devices
    if isinstance(weight, jax.Array):
        return [_even(-2, rule.total, devices)]
    if share % BLOCK:
        raise ConfigError(
            f"{name} is quantised in blocks of {BLOCK} inputs; {devices} devices would have {share} of its {rule.total} each. "
            "Take fewer devices"
        )
    if isinstance(weight, Int4) and weight.order is not None:
        raise ConfigError(
            f"{name} is quantised by GPTQ with act-order: its groups are not of neighbouring inputs, which devices could share. "
            "Take one device, or a checkpoint without desc_act"
        )
    groups = WHOLE if weight.scales.shape[-2] == 1 else _even(-2, weight.scales.shape[-2], devices)
    found = [_even(-3, weight.codes.shape[-3], devices), groups]
    if isinstance(weight, Int4) and weight.zeros is not None:
        found.append(groups)
    return [*found, WHOLE] if isinstance(weight, Nvfp4) else found


def _even(axis: int, total: int, devices: int) -> Cut:
    return Cut(axis, Columns((total,)).spans(devices))


def _within(spans: Spans, start: int, end: int) -> Spans:
    clipped = [(max(a, start) - start, min(b, end) - start) for a, b in spans]
    return [(a, b) for a, b in clipped if a < b]


def share(x: Array, cut: Cut, device: int) -> Array:
    """A device's share of an array."""
    if cut.axis is None:
        return x
    parts = [jax.lax.slice_in_dim(x, a, b, axis=x.ndim + cut.axis) for a, b in cut.spans[device]]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=cut.axis)


def shared_size(cut: Cut) -> int:
    """How many places of the axis all shares have together."""
    return sum(b - a for spans in cut.spans for a, b in spans)
