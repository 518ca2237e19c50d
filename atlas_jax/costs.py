"""Cost tables: what verifies take on a device, measured by `atlas-jax bench verify-cost` and kept beside the compilation cache."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from atlas_jax.config import ModelConfig, RunConfig
from atlas_jax.settings import cost_folder


@dataclasses.dataclass(frozen=True)
class Cost:
    """At one length of context and one number of sequences: ms of a round without drafting by its rows, and ms that a draft of
    the MTP head adds (None: there is no head, or it was not measured)."""

    context: int
    batch: int
    step_ms: dict[int, float]
    draft_ms: float | None = None

    def round_s(self, rows: int, chain: int) -> float | None:
        """Seconds of a round of `rows` rows, up to `chain` of whose drafts the head makes; between measured rows, on the line
        between them; None outside."""
        known = sorted(self.step_ms)
        if not known[0] <= rows <= known[-1]:
            return None
        step = float(np.interp(rows, known, [self.step_ms[k] for k in known]))
        return (step + (self.draft_ms or 0.0) * min(rows - 1, chain)) / 1e3


def table_path(config: ModelConfig, run: RunConfig, params: Any) -> pathlib.Path | None:
    """Where the table of this model on this device is kept; None if the compilation cache is off. Its name follows from what
    times depend on: device, shape, weights as stored (dtype, quantisation) and how rows are run."""
    folder = cost_folder()
    if folder is None:
        return None
    weights = sorted(
        (jax.tree_util.keystr(path), str(x.dtype), x.shape) for path, x in jax.tree.leaves_with_path(params)
    )
    how = [run.dtype, run.row_group, run.page_size, run.layout, *([run.kv_dtype] if run.kv_dtype else [])]
    how += [f"{run.tensor_parallel} devices"] if run.tensor_parallel > 1 else []
    digest = hashlib.sha256(json.dumps([repr(config), weights, how]).encode()).hexdigest()[:16]
    device = re.sub(r"[^A-Za-z0-9]+", "-", jax.devices()[0].device_kind).strip("-").lower()
    return folder / f"{device}-{config.model_type}-{run.dtype}-{digest}.json"


def write_table(path: pathlib.Path, costs: Sequence[Cost], about: dict[str, Any]) -> None:
    """Writes costs in the form that `atlas-jax replay --cost` reads as well: the first of them stands at the top.

    Raises:
        OSError: it cannot be written.
    """
    rows = [dataclasses.asdict(cost) for cost in costs]
    first = dict(step_ms=costs[0].step_ms) | ({} if costs[0].draft_ms is None else dict(draft_ms=costs[0].draft_ms))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(about | first | dict(measured=rows), indent=1) + "\n")
    partial.replace(path)


def read_table(path: pathlib.Path | None) -> list[Cost]:
    """The costs of a table; none if there is no table or it cannot be read: what it would say is then measured while decoding."""
    try:
        rows = [] if path is None else json.loads(path.read_text())["measured"]
        costs = [
            Cost(
                int(row["context"]),
                int(row["batch"]),
                {int(k): float(ms) for k, ms in row["step_ms"].items()},
                None if row["draft_ms"] is None else float(row["draft_ms"]),
            )
            for row in rows
            if row["step_ms"]
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    return costs if all(map(_sound, costs)) else []


def merged(new: Sequence[Cost], old: Sequence[Cost]) -> list[Cost]:
    """`new`, then what `old` has at other lengths of context and other batches."""
    known = {(cost.context, cost.batch) for cost in new}
    return [*new, *(cost for cost in old if (cost.context, cost.batch) not in known)]


def _sound(cost: Cost) -> bool:
    """Whether its times can be times: policies divide by them."""
    head = cost.draft_ms is None or (math.isfinite(cost.draft_ms) and cost.draft_ms >= 0)
    return head and all(k >= 1 and math.isfinite(ms) and ms > 0 for k, ms in cost.step_ms.items())


def nearest(costs: Sequence[Cost], context: int, batch: int) -> Cost | None:
    """The cost measured at the batch nearest to this, and of these at the nearest context, by ratio."""
    ratio = lambda a, b: abs(math.log(max(a, 1) / max(b, 1)))  # noqa: E731
    return min(costs, key=lambda c: (ratio(c.batch, batch), ratio(c.context, context)), default=None)
