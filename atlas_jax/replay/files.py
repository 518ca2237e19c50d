"""What a replay reads and writes besides transcripts: acceptance traces, and the time that steps take."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from atlas_jax.errors import RequestError
from atlas_jax.input_files import read_text
from atlas_jax.replay.simulate import MTP, SOURCES, RecordedMtp, Round, Turn


def write_trace(file: io.TextIOBase, policy: str, turns: Sequence[Turn], rounds: Sequence[Sequence[Round]]) -> None:
    """A JSON object a line, for each turn; its rounds are [source, drafted, accepted, emitted], as in `Round`."""
    for turn, steps in zip(turns, rounds, strict=True):
        line = dict(id=turn.conversation, turn=turn.number, policy=policy, rounds=[list(step) for step in steps])
        file.write(json.dumps(line) + "\n")


def read_trace(path: str | pathlib.Path) -> RecordedMtp:
    """The MTP rounds of a trace in the form that `write_trace` gives, in order.

    Taken are rounds of the source "mtp" in lines of the policy "mtp", or in lines that name no policy. The last round of
    an answer is left out where the answer ended within the accepted drafts: it does not say how many more were right.

    Raises:
        RequestError: the file cannot be read, a line is wrong, or there is no such round.
    """
    lengths: list[int] = []
    drafts = 0
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rounds = [Round(*step) for step in row["rounds"]] if row.get("policy", MTP) == MTP else []
            for source, drafted, accepted, emitted in rounds:
                counts = (drafted, accepted, emitted)
                if source not in SOURCES or not all(type(count) is int for count in counts):
                    raise ValueError
                if not (0 <= accepted <= drafted and accepted <= emitted <= accepted + 1):
                    raise ValueError
                if source == MTP and emitted > accepted:
                    lengths.append(accepted)
                    drafts = max(drafts, drafted)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise RequestError(
                f'{path}, line {number}: needs {{"rounds": [["mtp", drafted, accepted, emitted], …]}}, with accepted <= '
                "drafted and emitted one more than accepted, or equal at an answer's end"
            ) from None
    if not lengths:
        raise RequestError(f"{path}: holds no round of MTP; record some with MTP alone")
    return RecordedMtp(lengths, drafts)


@dataclasses.dataclass(frozen=True)
class CostTable:
    """What steps take, in ms.

    Attributes:
        step_ms: a verify by its rows, which are the drafts and one more. A round runs as the smallest of these numbers of
            rows that holds it, as executables compiled for them would.
        draft_ms: one draft of the MTP head; lookup is taken to cost nothing.
    """

    step_ms: dict[int, float]
    draft_ms: float = 0.0

    def __post_init__(self) -> None:
        values = [*self.step_ms.values(), self.draft_ms]
        if not self.step_ms or min(self.step_ms) < 1 or not all(math.isfinite(ms) and ms >= 0 for ms in values):
            raise RequestError("a cost table needs rows of 1 or more and finite times in ms, as in 1:10,2:10.2,4:10.9")

    def round_ms(self, step: Round) -> float:
        """Raises `RequestError` for more rows than the table has."""
        rows = min((rows for rows in self.step_ms if rows > step.drafted), default=0)
        if not rows:
            most = max(self.step_ms)
            raise RequestError(f"the cost table ends at {most} rows; rounds of {step.drafted} drafts need one more row")
        return self.step_ms[rows] + (self.draft_ms * step.drafted if step.source == MTP else 0.0)


def read_cost(text: str, draft_ms: float | None = None) -> CostTable:
    """A cost table from "ROWS:MS,…", or from a JSON file: {"step_ms": {"ROWS": MS, …}, "draft_ms": MS}.

    Args:
        draft_ms: goes before the file's, which may be left out: 0.

    Raises:
        RequestError: it is neither.
    """
    table: Any
    if ":" in text and not pathlib.Path(text).exists():
        pairs = [part.partition(":") for part in text.split(",")]
        table = dict(step_ms={rows: ms for rows, _, ms in pairs})
    else:
        try:
            table = json.loads(read_text(text))
        except RecursionError:
            table = None
        except json.JSONDecodeError as error:
            raise RequestError(f"{text} is not JSON: {error}") from None
    try:
        steps = {int(rows): float(ms) for rows, ms in table["step_ms"].items()}
        own = float(table.get("draft_ms", 0))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise RequestError(
            f'{text} is no cost table; give 1:10,2:10.2 or a file {{"step_ms": {{"1": 10, "2": 10.2}}}}'
        ) from None
    return CostTable(steps, own if draft_ms is None else draft_ms)
