"""The host's side of decoding: opens slots, prefills prompts, dispatches rounds and reads what they emitted one dispatch behind."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax.cache.prefix import Lease, PrefixCache, Sequence
from atlas_jax.cache.stats import Reuse
from atlas_jax.config import ModelConfig, RunConfig
from atlas_jax.costs import nearest, read_table, table_path
from atlas_jax.decode.executables import Executables, Progress
from atlas_jax.decode.k_policy import AutoK, FixedK, KPolicy, Memory, Outcome, Rates
from atlas_jax.decode.probes import Fingerprints
from atlas_jax.decode.protocol import Drafter, Taught
from atlas_jax.decode.request import SamplingParams
from atlas_jax.decode.state import ERROR, FINISH_REASONS, RUNNING, DecodeState, init_decode, request_values
from atlas_jax.metrics import Acceptance
from atlas_jax.models import HybridModel

AUTO_ROWS = (1, 2, 4, 8, 16)  # and the most there are room for; each is an executable
PREFILL_SIZES = (16, 64)  # executables for the last, partial chunk of a prompt, beside that of whole chunks


@dataclasses.dataclass(frozen=True)
class Request:
    """One sequence to decode.

    Attributes:
        script: the known answer that a ScriptedDrafter drafts from.
        history: how many of the prompt's tokens the next turn's prompt will begin with; None for all of them.
        lease: of the conversation that the request belongs to.
    """

    prompt: np.ndarray
    params: SamplingParams
    script: np.ndarray | None = None
    history: int | None = None
    lease: Lease | None = None


@dataclasses.dataclass(frozen=True)
class Step:
    """Tokens of one sequence that one round emitted."""

    index: int
    token_ids: list[int]
    logprobs: list[float] | None
    top_logprobs: list[list[tuple[int, float]]] | None
    finish_reason: str | None


class Loop:
    """Owns the decoding state of one model and runs batches of requests through it, one batch at a time."""

    def __init__(self, config: ModelConfig, run: RunConfig, params: Any, progress: Progress | None = None) -> None:
        self.config, self.run, self.params = config, run, params
        model = HybridModel(config, dtype=jnp.dtype(run.dtype), layout=run.layout, row_group=run.row_group)
        self.executables = Executables(model, run, progress)
        self.model = model
        self._state: DecodeState | None = None
        self.cache = PrefixCache(config, run, self.executables)
        self.reuse: list[Reuse] = []  # of the last batch's requests
        self._memories: dict[tuple[Drafter, int], Memory] = {}
        self.dispatches = 0
        self.read_s = 0.0  # spent on turning what dispatches emitted into steps

    def decode(
        self,
        requests: list[Request],
        drafter: Drafter,
        drafts: int | Literal["auto"] | KPolicy,
        n_top: int | None,
        cut: Callable[[int, list[int]], int | None],
    ) -> Generator[Step, None, None]:
        """Decodes up to `run.slots` requests together, yielding tokens as they arrive.

        `drafts` are those of every round; "auto" chooses their number between dispatches (see `k_policy`).

        `cut(index, token_ids)` sees each round's tokens of a request with stop strings before they are yielded and returns
        how many of them the answer keeps if it ends there.
        """
        slots = np.zeros(1 << (len(requests) - 1).bit_length(), np.int32)
        slots[: len(requests)] = 1 + np.arange(len(requests))
        known = [self._known(r, drafter) for r in requests]
        state = self._take_state(drafter)
        sequences: list[Sequence] = []
        failed: set[int] = set()
        try:
            policy = self._policy(drafter, drafts, requests, slots.size)
            state = self._open(state, requests, known, sequences, drafter, policy, n_top, slots)
            for latest, steps in self._rounds(state, requests, drafter, policy, n_top, slots, cut):
                self._state = latest
                failed |= {step.index for step in steps if step.finish_reason == FINISH_REASONS[ERROR]}
                yield from steps
        except BaseException as error:
            # A step that failed half-way has consumed its donated state. A closed generator has not.
            if not isinstance(error, GeneratorExit):
                self._state = state if _is_whole(state) else None
            raise
        finally:
            for i, sequence in enumerate(sequences):
                here = (self._state.target, i + 1) if self._state and i in failed else None
                self.cache.close(sequence, failed_in=here)
            if not self._state:
                self.cache.reset()

    @property
    def live(self) -> bool:
        """Whether there is a state to read: not before the first batch, nor after a step that failed."""
        return self._state is not None

    def acceptance(self, index: int) -> Acceptance:
        """Acceptance of request `index` of the last batch, as counted on the device."""
        assert self._state is not None
        return Acceptance(jax.device_get(self._state.counters)[index + 1])

    def fingerprints(self, index: int) -> Fingerprints | None:
        """What that probe counted of request `index` of the last batch; None where it is off."""
        assert self._state is not None
        probe = self._state.probe
        if probe is None or probe.prints is None:
            return None
        return Fingerprints(*jax.device_get(probe.counts)[index + 1].tolist())

    def logits(self, prompt: np.ndarray) -> np.ndarray:
        """Float32 logits [T, V] of every position of a prompt, by prefill."""
        return self._by_position(prompt, self.executables.logits)

    def _by_position(self, prompt: np.ndarray, executable: Callable[..., Any]) -> np.ndarray:
        """What `executable` gives for every position of a prompt."""
        state = self._take_state(None)
        sequence = self.cache.scratch(prompt)
        parts = []
        try:
            values = request_values(self.config, self.run, prompt, SamplingParams(), sequence.pages)
            state = self.executables.open(state, values)(state, np.int32(1), values)
            for start, end in self.cache.chunks(sequence):
                tokens, n = self._padded(prompt[start:end]), np.int32(end - start)
                out, state = executable(tokens.size, self.params, state)(self.params, state, np.int32(1), tokens, n)
                parts.append(np.asarray(out)[:n])
            self._state = state
        finally:
            self.cache.close(sequence)
            if not self._state:
                self.cache.reset()
        return np.concatenate(parts)

    # ---- pieces ----------------------------------------------------------------------------------------------------

    def _take_state(self, drafter: Drafter | None) -> DecodeState:
        # Copies, as the state is donated: a drafter may return the same arrays each time.
        extra = jax.tree.map(jnp.array, drafter.init(self.config, self.run)) if drafter else ()
        state, self._state = self._state, None
        if state is None:
            state = init_decode(self.config, self.run, self.cache.budget.spare_pages)
        return dataclasses.replace(state, drafter=extra)

    def _known(self, request: Request, drafter: Drafter) -> np.ndarray | None:
        """What a drafter that knows the answer is told of a request: its tokens, or their hiddens."""
        if not isinstance(drafter, Taught) or request.script is None:
            return None
        tokens = np.concatenate([request.prompt, request.script])[: self.run.max_length]
        return self._by_position(tokens, self.executables.hiddens) if drafter.by_hidden else tokens

    def _padded(self, tokens: np.ndarray) -> np.ndarray:
        """A chunk in the smallest size that there is an executable of."""
        whole = self.run.prefill_chunk
        sizes = {*PREFILL_SIZES, self.cache.budget.interval, whole}
        size = min(s for s in sizes if tokens.size <= s <= whole)
        return np.pad(tokens, (0, size - tokens.size)).astype(np.int32)

    def _open(
        self,
        state: DecodeState,
        requests: list[Request],
        known: list[np.ndarray | None],
        sequences: list[Sequence],
        drafter: Drafter,
        policy: KPolicy,
        n_top: int | None,
        slots: np.ndarray,
    ) -> DecodeState:
        """Compiles what the batch needs, then admits and prefills every prompt but for its last token, which the first round reads.

        `sequences` takes those admitted.
        """
        for rows in policy.rows:
            self.executables.dispatch(drafter, rows, n_top, self.params, state, jnp.asarray(slots))
        if any(r.params.stop for r in requests):
            self.executables.cut(state)
        self.reuse = []
        for i, request in enumerate(requests):
            slot = np.int32(i + 1)
            prompt, most = request.prompt, request.prompt.size + request.params.max_tokens
            history = prompt.size if request.history is None else request.history
            sequence = self.cache.admit(prompt, history, most, request.lease)
            sequences.append(sequence)
            self.reuse.append(sequence.reuse)
            restored = sequence.reuse.restored
            values = request_values(self.config, self.run, prompt, request.params, sequence.pages, restored)
            self._compile(state, sequence)
            state = self.executables.open(state, values)(state, slot, values)
            state = self._prefill(state, sequence, i + 1)
            state = self.executables.start(state)(state, slot)
            if isinstance(drafter, Taught) and (answer := known[i]) is not None:
                state = dataclasses.replace(state, drafter=drafter.teach(state.drafter, i + 1, answer))
        return state

    def _compile(self, state: DecodeState, sequence: Sequence) -> None:
        """Compiles what a sequence's prefill needs before any of it runs; if both overlapped, neither could be timed."""
        self.executables.start(state)
        if sequence.saves or sequence.base:
            self.cache.snapshots.prepare(state.target)
        for size in {self._padded(sequence.tokens[start:end]).size for start, end in self.cache.chunks(sequence)}:
            self.executables.prefill(size, self.params, state)

    def _prefill(self, state: DecodeState, sequence: Sequence, slot: int) -> DecodeState:
        """Restores what was found of an admitted sequence and computes the rest of its prompt."""
        if sequence.base:
            target = self.cache.snapshots.load(state.target, slot, sequence.base)
            state = dataclasses.replace(state, target=target)
        for start, end in self.cache.chunks(sequence):
            tokens, n = self._padded(sequence.tokens[start:end]), np.int32(end - start)
            run = self.executables.prefill(tokens.size, self.params, state)
            state = run(self.params, state, np.int32(slot), tokens, n)
            self.cache.publish(sequence, end, state.target, slot)
        return state

    def _rounds(
        self,
        state: DecodeState,
        requests: list[Request],
        drafter: Drafter,
        policy: KPolicy,
        n_top: int | None,
        slots: np.ndarray,
        cut: Any,
    ) -> Iterator[tuple[DecodeState, list[Step]]]:
        # A stop string is found on the host, which may then have to take back part of the last round: no round may follow it.
        eager = any(r.params.stop for r in requests)
        depth, rounds = (1, 1) if eager else (2, self.run.rounds_per_dispatch)
        finished = [False] * len(requests)
        on_device = jnp.asarray(slots)
        run_rounds = {
            rows: self.executables.dispatch(drafter, rows, n_top, self.params, state, on_device) for rows in policy.rows
        }
        flying: collections.deque[Any] = collections.deque()
        limit = 1  # the first round alone: the first token need not wait for the others
        free_at = None  # when the device had done all before; at first it may still be at the prompts
        while not all(finished):
            while len(flying) < depth:
                rows, most = policy.choose()
                count = jnp.int32(min(limit, most or rounds))
                launched = time.perf_counter()
                state, emitted, finish = run_rounds[rows](self.params, state, on_device, count)
                self.dispatches += 1
                flying.append((rows, launched, emitted, finish))
                limit = rounds
            rows, launched, *results = flying.popleft()
            asked = time.perf_counter()
            emitted, finish = jax.device_get(results)
            began = time.perf_counter()
            taken = None if free_at is None else began - max(launched, free_at)
            if taken is not None and began - asked < 0.2 * taken:
                taken = None  # a host that found the results ready does not know when they were
            policy.observe(_outcome(rows, emitted, len(requests), taken))
            free_at = began
            steps: list[Step] = []
            for i, request in enumerate(requests):
                if finished[i]:
                    continue
                step, keep = self._read(i, request, emitted, int(finish[i]), cut)
                if keep is not None:
                    state = self.executables.cut(state)(state, jnp.int32(i + 1), jnp.int32(keep))
                finished[i] = step.finish_reason is not None
                if step.token_ids or finished[i]:
                    steps.append(step)
            self.read_s += time.perf_counter() - began
            yield state, steps

    def _policy(
        self, drafter: Drafter, drafts: int | Literal["auto"] | KPolicy, requests: list[Request], batch: int
    ) -> KPolicy:
        if isinstance(drafts, int):
            return FixedK((drafts + 1,))
        if drafts != "auto":
            return drafts
        most, context = self.run.max_rows, max(r.prompt.size for r in requests)
        rows = sorted({k for k in AUTO_ROWS if k <= most} | {most})
        memory = self._memories.get((drafter, batch))
        if memory is None:
            cost = nearest(read_table(table_path(self.config, self.run, self.params)), context, batch)
            chain = getattr(drafter, "chain", most) if getattr(drafter, "feeds", True) else 0
            times = {k: cost.round_s(k, chain) for k in rows} if cost else {}
            memory = Memory(Rates(most - 1), expected_s={k: s for k, s in times.items() if s is not None})
            self._memories[drafter, batch] = memory
        return AutoK(rows, len(requests), memory)

    def _read(self, i: int, request: Request, emitted: Any, finish: int, cut: Any) -> tuple[Step, int | None]:
        """One request's part of a dispatch; also how many of its tokens a stop string leaves, if one was found."""
        rounds = range(emitted.tokens.shape[0])
        token_ids = [int(t) for r in rounds for t in emitted.tokens[r, i, : emitted.counts[r, i]]]
        reason = None if finish == RUNNING else FINISH_REASONS[finish]
        keep = cut(i, token_ids) if request.params.stop and token_ids else None
        if keep is not None:
            token_ids, reason = token_ids[:keep], "stop"
        logprobs = top = None
        if request.params.logprobs:
            places = [(r, k) for r in rounds for k in range(emitted.counts[r, i])][: len(token_ids)]
            logprobs = [float(emitted.logprobs[r, i, k]) for r, k in places]
            n = request.params.top_logprobs
            pairs = [
                zip(emitted.top_ids[r, i, k, :n], emitted.top_logprobs[r, i, k, :n], strict=True) for r, k in places
            ]
            top = [[(int(t), float(p)) for t, p in pair] for pair in pairs]
        return Step(i, token_ids, logprobs, top, reason), keep


def _is_whole(state: DecodeState) -> bool:
    """Whether no step has consumed the state's arrays."""
    return not any(x.is_deleted() for x in jax.tree.leaves(state))


def _outcome(rows: int, emitted: Any, sequences: int, seconds: float | None) -> Outcome:
    ran = int((emitted.n_rows > 0).any(1).sum())
    n_rows, source, counts = (x[:ran, :sequences] for x in (emitted.n_rows, emitted.source, emitted.counts))
    return Outcome(rows, n_rows, source, counts, seconds / ran if seconds and ran else None)
