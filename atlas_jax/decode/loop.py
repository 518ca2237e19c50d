"""The host's side of decoding: owns the state, gives sequences slots and pages, computes their prompts, runs their rounds."""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax.cache.prefix import PrefixCache
from atlas_jax.cache.prefix import Sequence as Cached
from atlas_jax.config import ModelConfig, RunConfig
from atlas_jax.costs import nearest, read_table, table_path
from atlas_jax.decode.chunks import Chunks
from atlas_jax.decode.drafters import NoDrafter
from atlas_jax.decode.executables import Executables, Progress
from atlas_jax.decode.group import Flight, Group
from atlas_jax.decode.k_policy import AutoK, FixedK, KPolicy, Memory, Rates
from atlas_jax.decode.live import Cut, Live, Request, Step
from atlas_jax.decode.probes import Fingerprints
from atlas_jax.decode.protocol import Drafter, Taught
from atlas_jax.decode.request import SamplingParams
from atlas_jax.decode.state import DecodeState, init_decode, request_values
from atlas_jax.decode.store import ExecutableStore
from atlas_jax.errors import RequestError, StateError
from atlas_jax.metrics import Acceptance
from atlas_jax.models import HybridModel
from atlas_jax.settings import executables_folder
from atlas_jax.tensor_parallel import placement

AUTO_ROWS = (1, 2, 4, 8, 16)  # and the most there are room for; each is an executable


class Loop:
    """Owns the decoding state of one model, and its slots: `admit` gives one to a sequence, `prefill` computes prompts chunk by
    chunk, a `Group` runs their rounds, `release` takes the slot back. `decode` does all of it for a batch. One thread at a time.
    """

    def __init__(
        self,
        config: ModelConfig,
        run: RunConfig,
        params: Any,
        progress: Progress | None = None,
        keep_executables: bool = False,
    ) -> None:
        self.config, self.run = config, run
        self.placed = placement(config, run)
        self.params = self.placed.params(params)
        model = HybridModel(config, jnp.dtype(run.dtype), run.layout, run.row_group, run.tensor_parallel)
        folder = executables_folder() if keep_executables else None
        store = folder and ExecutableStore(folder, (config, run))
        self.executables = Executables(model, run, progress, store, self.placed)
        self.model = model
        self.cache = PrefixCache(config, run, self.executables)
        self.chunks = Chunks(run, self.cache.budget.interval)
        self.dispatches = 0
        self.read_s = 0.0  # spent on turning what dispatches emitted into steps
        self.last: Flight | None = None  # the dispatch that the device runs last, unless something else comes after it
        self._state: DecodeState | None = None
        self._drafters: dict[Drafter, Any] = {}  # the states of those that are in use
        self._users: dict[Drafter, int] = {}
        self._free = list(range(1, run.slots + 1))  # a heap
        self._keys = 0
        self._memories: dict[tuple[Drafter, int], Memory] = {}
        self._lives: dict[int, tuple[Live, Drafter]] = {}  # by slot

    # ---- one sequence ----------------------------------------------------------------------------------------------

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def admit(self, request: Request, drafter: Drafter, cut: Cut, index: int = 0) -> Live:
        """Gives a sequence the lowest free slot, pages, and what the cache has of its prompt. Compiles what its prompt needs.

        Raises:
            StateError: no slot, or too few pages, are free.
        """
        if not self._free:
            raise StateError(f"all {self.run.slots} slots are in use")
        fresh = self._fresh(drafter)
        known = self._known(request, drafter)
        prompt, most = request.prompt, request.prompt.size + request.params.max_tokens
        history = prompt.size if request.history is None else request.history
        sequence = self.cache.admit(prompt, history, most, request.lease)
        slot = heapq.heappop(self._free)
        chunks = collections.deque(self.cache.chunks(sequence))
        self._keys += 1
        live = Live(index, self._keys, request, slot, sequence, chunks, cut, known)
        self._lives[slot] = live, drafter
        self._users[drafter] = self._users.get(drafter, 0) + 1
        try:
            self._open(live, drafter, fresh)
        except BaseException as error:
            # Before the last slot comes back, with which the pages of a state that is gone are forgotten.
            self.doubt(error)
            self.release(live)
            raise
        return live

    def joins(self, prompt: np.ndarray, computing: Sequence[Live]) -> bool:
        """Whether a prompt without a slot might as well have one now: its first chunk fits into the next dispatch beside those of
        all that are being computed, and these will leave no snapshot that it could begin with."""
        rows = [*(live.next_rows for live in computing), self.cache.first_rows(prompt)]
        fits = len(self.chunks.together(rows)) == len(rows)
        return fits and not any(self.cache.will_save(live.sequence, prompt) for live in computing)

    def together(self, lives: Sequence[Live]) -> list[Live]:
        """Those whose next chunks one dispatch computes, the first among them."""
        return [lives[i] for i in self.chunks.together([live.next_rows for live in lives])]

    def prefill(self, lives: Sequence[Live]) -> list[Live]:
        """Computes the next chunks of prompts that go `together` (but for a prompt's last token, which the first round reads).
        Returns those whose rounds may run now."""
        state = self.state
        self.last = None
        spans = {live: live.chunks.popleft() for live in lives if live.chunks}
        if spans:
            batch = self.chunks.batch([(x.slot, x.sequence.tokens[start:end]) for x, (start, end) in spans.items()])
            run = self.executables.prefill(batch.tokens.size, batch.slots.size, self.params, state)
            self._state = state = run(self.params, state, *batch)
            for live, (_, end) in spans.items():
                self.cache.publish(live.sequence, end, state.target, live.slot)
        ready = [live for live in lives if not live.chunks]
        for live in ready:
            self._state = self.executables.start(self.state)(self.state, np.int32(live.slot))
            live.started = True
        return ready

    def cut(self, live: Live, keep: int) -> None:
        """Ends a sequence after the first `keep` tokens of its last round."""
        self._state = self.executables.cut(self.state)(self.state, np.int32(live.slot), np.int32(keep))

    def release(self, live: Live) -> None:
        """Takes slot and pages back, wherever the sequence stands. It must have left its group."""
        if live.slot not in self._lives or self._lives[live.slot][0] is not live:
            return
        _, drafter = self._lives.pop(live.slot)
        failed = live.finish_reason == "error" and self._state is not None
        live.finish_reason = live.finish_reason or "cancelled"
        self.cache.close(live.sequence, failed_in=(self.state.target, live.slot) if failed else None)
        heapq.heappush(self._free, live.slot)
        self._users[drafter] -= 1
        if not self._users[drafter]:
            del self._users[drafter]
            self._drafters.pop(drafter, None)
        if self._state is None and not self._lives:
            self.cache.reset()
            self._drafters.clear()

    def acceptance(self, live: Live) -> Acceptance:
        """Of a sequence so far, as counted on the device."""
        return Acceptance(jax.device_get(self.state.counters)[live.slot])

    def fingerprints(self, live: Live) -> Fingerprints | None:
        """What that probe counted of a sequence; None where it is off."""
        probe = self.state.probe
        if probe is None or probe.prints is None:
            return None
        return Fingerprints(*jax.device_get(probe.counts)[live.slot].tolist())

    # ---- many sequences --------------------------------------------------------------------------------------------

    def decode(
        self,
        requests: list[Request],
        drafter: Drafter,
        drafts: int | Literal["auto"] | KPolicy,
        n_top: int | None,
        cut: Cut,
        lives: list[Live] | None = None,
    ) -> Generator[Step, None, None]:
        """Decodes up to `run.slots` requests together, yielding tokens as they arrive.

        `drafts` are those of every round; "auto" chooses their number between dispatches (see `k_policy`).

        `cut(index, token_ids)` sees each round's tokens of a request with stop strings before they are yielded and returns
        how many of them the answer keeps if it ends there. `lives` takes the sequences as they are admitted.
        """
        lives = [] if lives is None else lives
        bucket = 1 << (len(requests) - 1).bit_length()
        context = max(r.prompt.size for r in requests)
        group = Group(self, drafter, lambda batch: self.policy(drafter, drafts, context, batch), (bucket,))
        try:
            group.prepare(bucket, n_top)
            if any(r.params.stop for r in requests):
                self.executables.cut(self.state)
            computing: list[Live] = []
            while computing or len(lives) < len(requests):
                while len(lives) < len(requests) and self.joins(requests[len(lives)].prompt, computing):
                    try:
                        live = self.admit(requests[len(lives)], drafter, cut, len(lives))
                    except StateError as error:
                        raise RequestError(
                            f"the {len(requests)} prompts do not fit into {self.cache.pages.total} pages together ({error}): "
                            "give fewer at once, ask for shorter answers, or load with more kv_pages"
                        ) from error
                    lives.append(live)
                    computing.append(live)
                self.prefill(self.together(computing))
                computing = [live for live in computing if not live.started]
            for live in lives:
                group.join(live)
            while group.lives:
                yield from [step for _, step in group.step(n_top)]
        except BaseException as error:
            if not isinstance(error, GeneratorExit):  # a closed generator has lost nothing
                self.doubt(error)
            raise
        finally:
            for live in lives:
                self.release(live)

    def policy(self, drafter: Drafter, drafts: int | Literal["auto"] | KPolicy, context: int, batch: int) -> KPolicy:
        """What chooses the rows of a batch of so many sequences, about `context` tokens long."""
        if isinstance(drafts, int):
            return FixedK((drafts + 1,))
        if drafts != "auto":
            return drafts
        most, rows = self.run.max_rows, self.rows("auto")
        memory = self._memories.get((drafter, batch))
        if memory is None:
            cost = nearest(read_table(table_path(self.config, self.run, self.params)), context, batch)
            chain = getattr(drafter, "chain", most) if getattr(drafter, "feeds", True) else 0
            times = {k: cost.round_s(k, chain) for k in rows} if cost else {}
            memory = Memory(Rates(most - 1), expected_s={k: s for k, s in times.items() if s is not None})
            self._memories[drafter, batch] = memory
        return AutoK(rows, memory)

    def rows(self, drafts: int | Literal["auto"] | KPolicy) -> tuple[int, ...]:
        """The numbers of rows that dispatches of such requests may have."""
        if isinstance(drafts, int):
            return (drafts + 1,)
        most = self.run.max_rows
        return tuple(sorted({k for k in AUTO_ROWS if k <= most} | {most})) if drafts == "auto" else drafts.rows

    def dispatcher(self, drafter: Drafter, rows: int, n_top: int | None, bucket: int) -> Any:
        """The executable of a dispatch of `bucket` sequences, compiled if it is new: see `Executables.dispatch`."""
        slots = jax.ShapeDtypeStruct((bucket,), jnp.int32)
        return self.executables.dispatch(drafter, rows, n_top, self.params, self._with_drafter(drafter), slots)

    def guided(self, drafter: Drafter, rows: int, n_top: int | None, bucket: int) -> tuple[Any, Any]:
        """The executables of a round of sequences with guides, compiled if they are new: see `Executables.guided`."""
        slots = jax.ShapeDtypeStruct((bucket,), jnp.int32)
        return self.executables.guided(drafter, rows, n_top, self.params, self._with_drafter(drafter), slots)

    def shapes(self, drafter: Drafter) -> DecodeState:
        """Of the state that a dispatch with this drafter takes; for `compile_dispatch`."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._with_drafter(drafter))

    def compile_dispatch(
        self, drafter: Drafter, rows: int, n_top: int | None, bucket: int, shapes: DecodeState, guided: bool = False
    ) -> None:
        """What `dispatcher` or `guided` does on first use, from any thread."""
        slots = jax.ShapeDtypeStruct((bucket,), jnp.int32)
        compile = self.executables.guided if guided else self.executables.dispatch
        compile(drafter, rows, n_top, self.params, shapes, slots)

    def compile_score(self, n_top: int, shapes: DecodeState) -> None:
        """What `score` does on first use, from any thread."""
        for size in self.chunks.sizes:
            self.executables.score(n_top, size, self.params, shapes)

    def preparations(self) -> list[Callable[[], object]]:
        """What compiles all that is not a dispatch or a score, from any thread; the longest first."""
        shapes, make = self.shapes(NoDrafter()), self.executables
        values = request_values(self.config, self.run, np.zeros(1, np.int32), SamplingParams(), [])
        prefill = [
            functools.partial(make.prefill, size, self.chunks.sequences(size), self.params, shapes)
            for size in self.chunks.sizes
        ]
        small = [
            functools.partial(make.open, shapes, values),
            *(functools.partial(f, shapes) for f in (make.start, make.cut)),
        ]
        return [*prefill[::-1], *small, functools.partial(self.cache.snapshots.prepare, shapes.target)]

    def dispatch(self, drafter: Drafter, run: Any, *args: Any) -> tuple[Any, ...]:
        """Launches one; returns what it returns beside the state, still on the device."""
        state, *results = run(self.params, self._with_drafter(drafter), *args)
        self._state, self._drafters[drafter] = dataclasses.replace(state, drafter=()), state.drafter
        self.dispatches += 1
        return tuple(results)

    def doubt(self, error: BaseException) -> bool:
        """After an error: gives the state up if a step has consumed it, or may have failed on the device. Returns whether it is
        gone; then every sequence that has a slot must be released."""
        state = self._state
        consumed = state is not None and any(x.is_deleted() for x in jax.tree.leaves((state, self._drafters)))
        if consumed or isinstance(error, jax.errors.JaxRuntimeError):
            self._state = self.last = None
        return self._state is None

    # ---- every position of a sequence ------------------------------------------------------------------------------

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Float32 logits [T, V] of every position of a prompt, by prefill."""
        return np.concatenate([*self.by_position(tokens, self.executables.logits)])

    def score(self, tokens: np.ndarray, n_top: int) -> Generator[Any, None, None]:
        """Log-probability of the token after each position (of a token 0 after the last), and the `n_top` likeliest with their ids,
        chunk by chunk: [T], [T, n_top], [T, n_top]."""
        score = functools.partial(self.executables.score, n_top)
        return self.by_position(tokens, score, np.append(tokens[1:], 0).astype(np.int32))

    def by_position(
        self, tokens: np.ndarray, executable: Callable[..., Any], *beside: np.ndarray
    ) -> Generator[Any, None, None]:
        """What `executable` gives for every position of a prompt, chunk by chunk, in a slot that is taken for that long; arrays
        `beside` the tokens are passed on with them."""
        if not self._free:
            raise StateError(f"all {self.run.slots} slots are in use")
        sequence = self.cache.scratch(tokens)
        slot = np.int32(heapq.heappop(self._free))
        try:
            values = request_values(self.config, self.run, tokens, SamplingParams(), sequence.pages)
            self._state = self.executables.open(self.state, values)(self.state, slot, values)
            for start, end in self.cache.chunks(sequence):
                padded, n = self.chunks.padded(tokens[start:end]), np.int32(end - start)
                run = executable(padded.size, self.params, self.state)
                self.last = None
                more = [self.chunks.padded(x[start:end]) for x in beside]
                out, self._state = run(self.params, self.state, slot, padded, n, *more)
                yield jax.tree.map(lambda x: np.asarray(x)[:n], out)  # noqa: B023  # called at once
        except BaseException as error:
            if not isinstance(error, GeneratorExit):
                self.doubt(error)
            raise
        finally:
            self.cache.close(sequence)
            heapq.heappush(self._free, int(slot))
            if self._state is None and not self._lives:
                self.cache.reset()

    # ---- pieces ----------------------------------------------------------------------------------------------------

    @property
    def live(self) -> bool:
        """Whether there is a state to read: not before the first batch, nor after a step that failed."""
        return self._state is not None

    @property
    def state(self) -> DecodeState:
        """The newest, as yet without a drafter's; an empty one where there is none."""
        if self._state is None:
            self._state = state = self.placed.made(
                lambda: init_decode(self.config, self.run, self.cache.budget.spare_pages)
            )
            return state
        return self._state

    @state.setter
    def state(self, state: DecodeState) -> None:
        self._state = state

    def _with_drafter(self, drafter: Drafter) -> DecodeState:
        extra = self._drafters[drafter] if drafter in self._drafters else self._fresh(drafter)
        return dataclasses.replace(self.state, drafter=extra)

    def _fresh(self, drafter: Drafter) -> Any:
        # Copies, as the state is donated: a drafter may return the same arrays each time.
        return jax.tree.map(jnp.array, drafter.init(self.config, self.run))

    def _known(self, request: Request, drafter: Drafter) -> np.ndarray | None:
        """What a drafter that knows the answer is told of a request: its tokens, or their hiddens."""
        if not isinstance(drafter, Taught) or request.script is None:
            return None
        tokens = np.concatenate([request.prompt, request.script])[: self.run.max_length]
        return np.concatenate([*self.by_position(tokens, self.executables.hiddens)]) if drafter.by_hidden else tokens

    def _open(self, live: Live, drafter: Drafter, fresh: Any) -> None:
        """Makes the slot the sequence's, and restores what was found of it."""
        slot, sequence = live.slot, live.sequence
        request, state = live.request, self.state
        restored = sequence.reuse.restored
        values = request_values(
            self.config, self.run, request.prompt, request.params, sequence.pages, restored, request.drafts
        )
        self._compile(state, sequence)
        self._state = state = self.executables.open(state, values)(state, np.int32(slot), values)
        if sequence.base:
            target = self.cache.snapshots.load(state.target, slot, sequence.base)
            self._state = dataclasses.replace(state, target=target)
        if drafter in self._drafters:
            fresh = _with_slot(self._drafters[drafter], fresh, slot, self.run.slots + 1)
        if isinstance(drafter, Taught) and live.known is not None:
            fresh = drafter.teach(fresh, slot, live.known)
        self._drafters[drafter] = fresh

    def _compile(self, state: DecodeState, sequence: Cached) -> None:
        """Compiles what a sequence's prefill needs before any of it runs; if both overlapped, neither could be timed."""
        self.executables.start(state)
        if sequence.saves or sequence.base:
            self.cache.snapshots.prepare(state.target)
        for size in {self.chunks.size(end - start) for start, end in self.cache.chunks(sequence)}:
            self.executables.prefill(size, self.chunks.sequences(size), self.params, state)


def _with_slot(state: Any, fresh: Any, slot: int, slots: int) -> Any:
    """A drafter's state in which one slot is as at first. Leaves without an axis of slots stay."""

    def put(old: Any, new: Any) -> Any:
        return old.at[slot].set(jnp.asarray(new)[slot]) if old.shape[:1] == (slots,) else old

    return jax.tree.map(put, state, fresh)
