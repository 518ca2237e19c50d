"""The settings that an experiment compares."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from atlas_jax.config import Probes
from atlas_jax.decode.drafters import Drafter
from atlas_jax.decode.oracle import OracleChain
from atlas_jax.errors import RequestError
from atlas_jax.runtime import Runtime


@dataclasses.dataclass(frozen=True)
class Arm:
    """What a setting changes: fields of `RunConfig`, of `ModelConfig`, and the drafter."""

    name: str
    run: dict[str, Any] = dataclasses.field(default_factory=dict)
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    drafter: Drafter | str | None = None

    @property
    def scripted(self) -> bool:
        """Whether its drafter has to know the answer."""
        return isinstance(self.drafter, OracleChain)


ARMS = {
    arm.name: arm
    for arm in (
        Arm("full"),
        Arm("prefill_only", run=dict(drafter_context="prefill_only")),
        Arm("blind", run=dict(drafter_context="blind")),
        Arm("no_refeed", run=dict(refeed=False)),
        Arm("shifted", run=dict(probes=Probes(shift=1))),
        Arm("checked", run=dict(probes=Probes(fingerprints=True))),
        Arm("pre_norm", config=dict(mtp_hidden="pre_norm")),
        Arm("oracle", drafter=OracleChain(2)),
        Arm("int4_head", run=dict(draft_head="int4")),
    )
}
DEFAULT = "full,prefill_only,blind,no_refeed,shifted,pre_norm"


def parse_arms(text: str) -> list[Arm]:
    """Arms by name, with commas between; "blind+no_refeed" is one arm with the changes of both.

    Raises:
        RequestError: an arm is unknown or named twice, or two changes of one arm contradict each other.
    """
    arms = [_arm(name) for name in text.split(",")]
    names = [arm.name for arm in arms]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise RequestError(f"arm {', '.join(twice)} is named twice")
    return arms


def _arm(name: str) -> Arm:
    parts = name.split("+")
    if unknown := [part for part in parts if part not in ARMS]:
        raise RequestError(f"unknown arm {unknown[0]!r}; there are {', '.join(ARMS)}, and several joined by +")
    out = Arm(name)
    for part in (ARMS[part] for part in parts):
        both = [key for mine, its in ((out.run, part.run), (out.config, part.config)) for key in mine.keys() & its]
        if both or (out.drafter and part.drafter):
            raise RequestError(f"arm {name!r} sets {', '.join(both) or 'the drafter'} twice")
        out = Arm(name, out.run | part.run, out.config | part.config, part.drafter or out.drafter)
    return out


def runtimes(base: Runtime, arms: Sequence[Arm]) -> dict[str, Runtime]:
    """A runtime for each arm, with the weights of `base`, and a cache of its own: each finds the conversations new.

    Raises:
        ConfigError: the model cannot be run so.
    """
    return {
        arm.name: Runtime(
            dataclasses.replace(base.config, **arm.config),
            dataclasses.replace(base.run, **arm.run),
            base.params,
            base.tokenizer,
            base.loop.executables.progress,
        )
        for arm in arms
    }
