"""Which tensors of a Hugging Face checkpoint make up which weight, and how they are joined."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from atlas_jax.config import FULL, LINEAR, ModelConfig
from atlas_jax.shapes import Array, Float

Join = Callable[..., Array]
DRAFTER_NORMS = (  # in the order of `models.drafter.DrafterNorms`
    "mtp.pre_fc_norm_embedding",
    "mtp.pre_fc_norm_hidden",
    "mtp.layers.0.input_layernorm",
    "mtp.layers.0.post_attention_layernorm",
    "mtp.norm",
)
IGNORED_PREFIXES = ("model.visual.", "visual.")  # the vision tower: this runtime reads text
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # computed from the config


class Part(NamedTuple):
    """A tensor of the checkpoint, or tensors of one shape that are stacked on a new first axis (`experts`)."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    experts: bool = False


@dataclasses.dataclass(frozen=True)
class Weight:
    """One weight of one layer: `join` of its parts. `join` is traced, once for all layers that share it."""

    parts: tuple[Part, ...]
    join: Join
    float32: bool = False


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of the parameter tree: one weight, one array of all layers' rows, or all layers' weights by layout."""

    path: tuple[str, ...]
    weights: tuple[Weight, ...]
    kind: Literal["one", "rows", "layers"]


def as_is(x: Array) -> Array:
    return x


def matrix(*parts: Float[Array, "*experts _ D"]) -> Float[Array, "*experts D N"]:
    """Outputs side by side, stored [in, out]."""
    return jnp.swapaxes(jnp.concatenate(parts, axis=-2), -1, -2)


def side_by_side(*parts: Float[Array, " _"]) -> Float[Array, " N"]:
    return jnp.concatenate(parts)


def stacked(*parts: Float[Array, " Dh"]) -> Float[Array, "parts Dh"]:
    return jnp.stack(parts)


def convolution(x: Float[Array, "C 1 W"]) -> Float[Array, "W C"]:
    return x[:, 0].T


@dataclasses.dataclass(frozen=True)
class ByKeyHead:
    """Qwen3-Next's projections, whose rows lie key head by key head ([q|k|v|z] and [b|a]) -> columns [q|k|v|z|b|a]."""

    config: ModelConfig

    def __call__(self, qkvz: Float[Array, "_ D"], ba: Float[Array, "_ D"]) -> Float[Array, "D N"]:
        return matrix(*(jnp.take(x, self.rows(i), axis=0) for i, x in enumerate((qkvz, ba))))

    def rows(self, part: int) -> np.ndarray:
        """The order in which the rows of a part follow one another."""
        c = self.config
        heads, keys, values = c.linear_num_key_heads, c.linear_key_head_dim, c.value_size // c.linear_num_key_heads
        a_head = c.linear_num_value_heads // heads
        sizes = [keys, keys, values, values] if part == 0 else [a_head, a_head]
        rows = np.arange(heads * sum(sizes)).reshape(heads, -1)
        return np.concatenate([x.reshape(-1) for x in np.split(rows, np.cumsum(sizes)[:-1], axis=1)])


def may_be_quantised(join: Join) -> bool:
    """Whether a weight so joined is that of linear layers."""
    return join is matrix or isinstance(join, ByKeyHead)


def rows_of(join: Join, part: int) -> np.ndarray | None:
    """The order in which `join` puts a part's outputs; None for that of the file."""
    return join.rows(part) if isinstance(join, ByKeyHead) else None


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is left out on purpose: not text, computed anew, or of a drafter that `config` is without."""
    dropped = name.startswith("mtp.") and not config.has_mtp
    return dropped or name.startswith(IGNORED_PREFIXES) or name.endswith(IGNORED_SUFFIXES)


def plan(config: ModelConfig, names: Collection[str]) -> list[Leaf]:
    """Every leaf of the parameter tree of `HybridModel`, made of tensors that a checkpoint with `names` should have."""
    return list(_Plan(config, names).leaves())


class _Plan:
    def __init__(self, config: ModelConfig, names: Collection[str]) -> None:
        self.config, self.names = config, names
        wrapped = any(name.startswith("model.language_model.") for name in names)
        self.trunk = "model.language_model." if wrapped else "model."

    def leaves(self) -> Iterator[Leaf]:
        c = self.config
        D, V = c.hidden_size, c.vocab_size
        yield Leaf(("embedding",), (self.one(f"{self.trunk}embed_tokens.weight", (V, D)),), "one")
        if not c.tie_word_embeddings:
            yield Leaf(("head",), (self.one("lm_head.weight", (V, D), matrix),), "one")
        layers = [f"{self.trunk}layers.{i}." for i in range(c.num_layers)]
        kinds = {
            kind: [layer for layer, of in zip(layers, c.layer_types, strict=True) if of == kind]
            for kind in (LINEAR, FULL)
        }
        norms = [f"{layer}{norm}" for layer in layers for norm in ("input_layernorm", "post_attention_layernorm")]
        norms += [f"{self.trunk}norm", *(DRAFTER_NORMS if c.has_mtp else ())]
        yield Leaf(("norms",), tuple(self.vector(f"{norm}.weight", D) for norm in norms), "rows")
        yield from self.block("linear_attention", kinds[LINEAR], self.linear_attention)
        yield from self.block("attention", kinds[FULL], self.attention)
        yield from self.block("feed_forward", layers, self.feed_forward)
        if c.has_mtp:
            for leaf in self.drafter():
                yield dataclasses.replace(leaf, path=("mtp", *leaf.path))

    def drafter(self) -> Iterator[Leaf]:
        D, layer = self.config.hidden_size, "mtp.layers.0."
        yield Leaf(("fc",), (self.one("mtp.fc.weight", (D, 2 * D), matrix),), "one")
        yield from self.block("attention", [layer], self.attention)
        yield from self.block("feed_forward", [layer], self.feed_forward)

    def block(self, name: str, layers: list[str], of: Callable[[str], dict[str, Weight]]) -> Iterator[Leaf]:
        """One leaf for each weight that `of` finds in the layers."""
        found = [of(layer) for layer in layers]
        for key in found[0]:
            yield Leaf((name, key), tuple(weights[key] for weights in found), "layers")

    def one(self, name: str, shape: tuple[int, ...], join: Join = as_is) -> Weight:
        return Weight((Part((name,), shape),), join)

    def vector(self, name: str, size: int) -> Weight:
        return self.vectors({name: size}, as_is)

    def vectors(self, sizes: dict[str, int], join: Join) -> Weight:
        return Weight(tuple(Part((name,), (size,)) for name, size in sizes.items()), join, float32=True)

    def joined(self, prefix: str, rows: dict[str, int], columns: int, join: Join = matrix) -> Weight:
        """Linear layers of common inputs, outputs side by side."""
        return Weight(tuple(Part((f"{prefix}{name}.weight",), (size, columns)) for name, size in rows.items()), join)

    def linear_attention(self, layer: str) -> dict[str, Weight]:
        c, at = self.config, f"{layer}linear_attn."
        D, C, width, heads = c.hidden_size, c.conv_channels, c.linear_conv_kernel_dim, c.linear_num_value_heads
        if c.model_type == "qwen3_next":
            rows = {"in_proj_qkvz": C + c.value_size, "in_proj_ba": 2 * heads}
            projection = self.joined(at, rows, D, ByKeyHead(c))
        else:
            rows = {"in_proj_qkv": C, "in_proj_z": c.value_size, "in_proj_b": heads, "in_proj_a": heads}
            projection = self.joined(at, rows, D)
        return {
            "in_proj": projection,
            "conv": self.one(f"{at}conv1d.weight", (C, 1, width), convolution),
            "vectors": self.vectors(
                {f"{at}A_log": heads, f"{at}dt_bias": heads, f"{at}norm.weight": c.linear_value_head_dim}, side_by_side
            ),
            "out_proj": self.one(f"{at}out_proj.weight", (D, c.value_size), matrix),
        }

    def attention(self, layer: str) -> dict[str, Weight]:
        c, at = self.config, f"{layer}self_attn."
        D, inner, keys = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        return {
            "in_proj": self.joined(at, {"q_proj": 2 * inner, "k_proj": keys, "v_proj": keys}, D),
            "norms": self.vectors({f"{at}q_norm.weight": c.head_dim, f"{at}k_norm.weight": c.head_dim}, stacked),
            "out_proj": self.one(f"{at}o_proj.weight", (D, inner), matrix),
        }

    def feed_forward(self, layer: str) -> dict[str, Weight]:
        c, at = self.config, f"{layer}mlp."
        D = c.hidden_size
        if not c.num_experts:
            return self.swiglu(at, c.intermediate_size)
        shared = self.swiglu(f"{at}shared_expert.", c.shared_expert_intermediate_size)
        return {
            "router": self.one(f"{at}gate.weight", (c.num_experts, D), matrix),
            **self.experts(f"{at}experts."),
            "shared_gate_up": shared["gate_up"],
            "shared_down": shared["down"],
            "shared_gate": self.one(f"{at}shared_expert_gate.weight", (1, D), matrix),
        }

    def swiglu(self, at: str, inner: int) -> dict[str, Weight]:
        D = self.config.hidden_size
        gate_up = self.joined(at, {"gate_proj": inner, "up_proj": inner}, D)
        return {"gate_up": gate_up, "down": self.one(f"{at}down_proj.weight", (D, inner), matrix)}

    def experts(self, at: str) -> dict[str, Weight]:
        """All experts in one tensor, or each in tensors of its own."""
        c = self.config
        D, E, inner = c.hidden_size, c.num_experts, c.moe_intermediate_size
        if f"{at}gate_up_proj" in self.names or f"{at}down_proj" in self.names:
            gate_up = self.one(f"{at}gate_up_proj", (E, 2 * inner, D), matrix)
            return {"gate_up": gate_up, "down": self.one(f"{at}down_proj", (E, D, inner), matrix)}
        shapes = {"gate_proj": (inner, D), "up_proj": (inner, D), "down_proj": (D, inner)}
        gate, up, down = (
            Part(tuple(f"{at}{e}.{name}.weight" for e in range(E)), shape, experts=True)
            for name, shape in shapes.items()
        )
        return {"gate_up": Weight((gate, up), matrix), "down": Weight((down,), matrix)}
