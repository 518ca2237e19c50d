"""What callers of the engine see: requests, tickets, their errors, figures.

engine = Engine(runtime, EngineConfig())
engine.start()
ticket = engine.submit(engine.request("Hello", max_tokens=32, deadline_s=10.0))
for delta in ticket:  # or `async for`
    print(delta.text, end="")
print(ticket.completion.acceptance.summary())
engine.close()
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np

from atlas_jax.cache.stats import CacheStats
from atlas_jax.completion import Completion
from atlas_jax.config import WARM_UPS, at_least
from atlas_jax.decode.protocol import Drafter
from atlas_jax.decode.request import SamplingParams
from atlas_jax.errors import AtlasError, ConfigError
from atlas_jax.metrics import Acceptance

if TYPE_CHECKING:
    from atlas_jax.engine.ticket import Ticket
    from atlas_jax.runtime import Runtime

MAX_DEADLINE_S = 1e6
FINISHED = ("stop", "length", "error", "cancelled", "deadline")  # every request ends in one of these ways


class EngineError(AtlasError, RuntimeError):
    """A request that the engine refused or ended.

    Attributes:
        completion: what had been decoded until then, with its figures; None where nothing ran.
    """

    def __init__(self, message: str, completion: Completion | None = None) -> None:
        super().__init__(message)
        self.completion = completion


class EngineFull(EngineError):
    """The queue is full; the message says how full. Try again later."""


class EngineStopping(EngineError):
    """The engine is not running, or draining: it takes no requests."""


class Cancelled(EngineError):
    """The caller cancelled the request."""


class DeadlineExceeded(EngineError):
    """The request's time was over before its answer was complete."""


class StepFailed(EngineError):
    """The step that computed the request failed, or its logits were not finite. Other requests may have gone on."""


@dataclasses.dataclass(frozen=True)
class Grammar:
    """What an answer must look like; only tokens that can lead there are picked.

    Attributes:
        kind: "json_schema" (source: a JSON schema), "json_object" (any JSON object; source ""), "regex" (the whole answer),
            "tool_call" (what follows the beginning of a call; `tool_grammar.tool_call_source`).
    """

    kind: Literal["json_schema", "json_object", "regex", "tool_call"]
    source: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class GenerationRequest:
    """One sequence to decode; `Engine.request` makes it of a prompt and the options of `Runtime.generate`.

    Attributes:
        prompt: int32 token ids [T].
        history: how many of them the next turn's prompt will begin with; None for all.
        drafter, drafts: as `Runtime.drafting` gives them.
        script: the known answer, for drafters that are taught.
        priority: higher is admitted first. A request that waits gains one for each `EngineConfig.ageing_s`.
        deadline_s: seconds from `submit` until it is ended with DeadlineExceeded, waiting or running; None: no limit.
        id: for logs and figures; `submit` gives one where it is empty.
    """

    prompt: np.ndarray
    params: SamplingParams
    drafter: Drafter
    drafts: int | Literal["auto"]
    history: int | None = None
    script: np.ndarray | None = None
    priority: int = 0
    deadline_s: float | int | None = None
    id: str = ""
    grammar: Grammar | None = None


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How requests are scheduled.

    Attributes:
        drafter, drafts: of requests that do not say, as `Runtime.generate` takes them; None leaves it to the runtime.
        warm_up: what of those requests is compiled when the engine starts, of `config.WARM_UPS`; all else is when it is first
            asked for.
        warm_up_s: seconds after which the engine starts all the same, and compiles the rest beside the requests; None: no limit.
        max_waiting: requests that may wait for a slot; one more is refused.
        ageing_s: seconds of waiting that are worth one step of priority, so that nobody waits for ever.
        dispatch_ms: about how long a dispatch of rounds may take. New requests, cancellations and deadlines are looked at
            between dispatches, and tokens come out at their ends.
        buckets: numbers of sequences that dispatches are compiled for; None for the powers of two up to the runtime's slots.
    """

    drafter: str | Drafter | None = None
    drafts: int | Literal["auto"] | None = None
    max_waiting: int = 256
    ageing_s: float | int = 5.0
    dispatch_ms: float | int = 25.0
    buckets: tuple[int, ...] | None = None
    warm_up: tuple[str, ...] = ("answers",)
    warm_up_s: float | int | None = None

    def __post_init__(self) -> None:
        at_least(1, "max_waiting", self.max_waiting)
        for name in ("ageing_s", "dispatch_ms"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)!r}")
        for bucket in self.buckets or ():
            at_least(1, "buckets", bucket)
        if unknown := [name for name in self.warm_up if name not in WARM_UPS]:
            raise ConfigError(f"warm_up knows no {', '.join(map(repr, unknown))}; there are {', '.join(WARM_UPS)}")
        if self.warm_up_s is not None and not self.warm_up_s > 0:
            raise ConfigError(f"warm_up_s must be above 0, or None, got {self.warm_up_s!r}")

    @property
    def defaults(self) -> dict[str, Any]:
        """Options of requests that do not say."""
        options = dict(drafter=self.drafter, drafts=self.drafts)
        return {name: value for name, value in options.items() if value is not None}


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """A reading of the engine's figures.

    Attributes:
        state: "starting" (compiling), "running", "draining" or "stopped".
        running: requests that have a slot, those whose prompt is still being computed included.
        waiting: requests without a slot.
        slots: how many can run together.
        submitted, refused: requests taken, and turned away because the queue was full or the engine was stopping.
        finished: requests that ended, by reason (`FINISHED`).
        prompt_tokens, restored_tokens, tokens: tokens of prompts, those of them that the prefix cache saved, tokens emitted.
        tokens_per_s: emitted over the last ten seconds.
        acceptance: of all requests that ended.
        dispatches: of rounds, since the start.
        pages, pages_free: of the pool; pages that the prefix cache could give up are not counted as free.
        cache: the prefix cache.
        compiled_late: kinds of requests whose executables were compiled when first asked for, or are being so.
        in_flight: a line for each request that has a slot: id, prompt and answer tokens, seconds since it was submitted.
    """

    state: str
    running: int
    waiting: int
    slots: int
    max_waiting: int
    submitted: int
    refused: int
    finished: dict[str, int]
    prompt_tokens: int
    restored_tokens: int
    tokens: int
    tokens_per_s: float
    acceptance: Acceptance
    dispatches: int
    pages: int
    pages_free: int
    cache: CacheStats
    uptime_s: float
    in_flight: list[InFlight]
    compiled_late: int = 0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        out = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return out | dict(
            acceptance=self.acceptance.to_dict(),
            cache=self.cache.to_dict(),
            in_flight=[dataclasses.asdict(line) for line in self.in_flight],
        )


@dataclasses.dataclass(frozen=True)
class InFlight:
    """One request that has a slot."""

    id: str
    prompt_tokens: int
    tokens: int
    max_tokens: int
    drafter: str
    age_s: float


@runtime_checkable
class EngineApi(Protocol):
    """The methods of `Engine`, for whoever needs no more of it. All may be called from any thread."""

    runtime: Runtime
    config: EngineConfig

    def start(self) -> None:
        """Compiles what dispatches need and starts the engine's thread; the runtime is the engine's until `close`."""
        ...

    @property
    def state(self) -> str:
        """As in `EngineStats`."""
        ...

    def request(self, prompt: Any, **options: Any) -> GenerationRequest:
        """Encodes and checks: `prompt` and `options` are those of `Runtime.generate`, and `priority`, `deadline_s`, `id`,
        `grammar`. Raises RequestError. Takes the caller's time, not the engine's."""
        ...

    def submit(self, request: GenerationRequest) -> Ticket:
        """Raises RequestError, EngineFull or EngineStopping at once."""
        ...

    def score(self, token_ids: Any, top_logprobs: int = 0, timeout: float | int | None = None) -> Score:
        """Waits for its turn between dispatches. Raises RequestError, EngineFull, EngineStopping, StepFailed, TimeoutError."""
        ...

    def stats(self) -> EngineStats: ...

    def drain(self, timeout: float | int | None = None) -> bool:
        """Takes no more requests and waits until those it has are done; False if some were not after `timeout` seconds."""
        ...

    def close(self) -> None:
        """Ends what still runs or waits (Cancelled), and the thread; the runtime can be used directly again."""
        ...


@dataclasses.dataclass(frozen=True)
class Score:
    """Log-probabilities of given tokens under the model's raw distribution; the first token has none.

    Attributes:
        logprobs: [T - 1], of token_ids[1:].
        top_logprobs: [T - 1] lists of the likeliest (id, log-probability), if asked for.
    """

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]] | None = None
