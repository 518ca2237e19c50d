"""How a weight is quantised, by itself and by name."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from atlas_jax.errors import ConfigError

INT4_GROUPS = (32, 64, 128)
NAMES = "int4, int4-g32, int4-g64, int4-g128, nvfp4, fp8 or fp8-blocks, each with +head to take the head along"


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How a weight is quantised.

    Attributes:
        kind: "int4": integers times a scale; "nvfp4": E2M1 times an E4M3 scale of 16 inputs times a scale of the tensor;
            "fp8": E4M3 times a scale.
        group: inputs that share a scale; None for all of an output's (fp8: 128 for blocks of 128 x 128).
        symmetric: whether 0 is the code 8 of an int4 weight; otherwise each group has a code for it.
    """

    kind: Literal["int4", "nvfp4", "fp8"]
    group: int | None
    symmetric: bool = True

    @property
    def name(self) -> str:
        size = "" if self.group is None else "-blocks" if self.kind == "fp8" else f"-g{self.group}"
        return self.kind + ("" if self.kind == "nvfp4" else size) + ("" if self.symmetric else "-asymmetric")


NVFP4 = Scheme("nvfp4", 16)


def scheme_named(name: str) -> tuple[Scheme, bool]:
    """The scheme of a name like "int4-g32", and whether the head is quantised too ("int4+head").

    Raises:
        ConfigError: there is none of that name.
    """
    match = re.fullmatch(r"(int4|nvfp4|fp8)(?:-g(\d+)|-(blocks))?(\+head)?", name)
    if match:
        kind, group, blocks, head = match.groups()
        if kind == "int4" and not blocks and int(group or 128) in INT4_GROUPS:
            return Scheme("int4", int(group or 128)), bool(head)
        if kind == "nvfp4" and not group and not blocks:
            return NVFP4, bool(head)
        if kind == "fp8" and not group:
            return Scheme("fp8", 128 if blocks else None), bool(head)
    raise ConfigError(f"weights {name!r} are not known; there are {NAMES}")


# Leaves of the parameter tree that quantising a model quantises, the drafter's and the head apart. Routers and gates keep their
# precision, and so do the linear layers' two small projections, the last columns of their in_proj.
BLOCKS = {
    "linear_attention": ("in_proj", "out_proj"),
    "attention": ("in_proj", "out_proj"),
    "feed_forward": ("gate_up", "down", "shared_gate_up", "shared_down"),
}
