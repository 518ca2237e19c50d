"""Ahead-of-time compiled steps: one executable per number of rows, built once, state donated."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from atlas_jax.config import RunConfig
from atlas_jax.decode import probes
from atlas_jax.decode import round as rounds
from atlas_jax.decode.drafters import Drafter
from atlas_jax.decode.sampling import log_probabilities
from atlas_jax.decode.state import DecodeState, cut_slot, open_slot, start_slot
from atlas_jax.decode.store import ExecutableStore
from atlas_jax.models import HybridModel, call
from atlas_jax.settings import compiler_options
from atlas_jax.shapes import Array
from atlas_jax.tensor_parallel import ONE_DEVICE, OneDevice

Progress = Callable[[str], None]
SCALAR = jax.ShapeDtypeStruct((), jnp.int32)  # a slot or a count: looking an executable up makes no arrays


class Executables:
    """Compiles on first use and remembers, from any thread. `compile_s` is the time during which anything was compiled; `progress`
    is told what. A `store` remembers beyond the process."""

    def __init__(
        self,
        model: HybridModel,
        run: RunConfig,
        progress: Progress | None = None,
        store: ExecutableStore | None = None,
        placed: OneDevice = ONE_DEVICE,
    ) -> None:
        self.model, self.run, self.progress, self.store, self.placed = model, run, progress, store, placed
        self.compile_s = 0.0
        self._compiled: dict[Any, concurrent.futures.Future[Any]] = {}
        self._lock = threading.Lock()
        self._compiling, self._began = 0, 0.0  # threads that are at it, and since when any is

    def __len__(self) -> int:
        return len(self._compiled)

    def get(
        self,
        key: tuple[Any, ...],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        donate: tuple[int, ...],
        *,
        step: bool = False,
    ) -> Any:
        """The executable of `key`, compiled for the shapes of `args` if it is new. A `step` runs the model."""
        made: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            known = self._compiled.setdefault(key, made)
            if known is made:
                if not self._compiling:
                    self._began = time.perf_counter()
                self._compiling += 1
        if known is not made:
            return known.result()
        try:
            made.set_result(self._make(key, function, args, donate, step))
        except BaseException as error:
            made.set_exception(error)
            with self._lock:
                del self._compiled[key]  # to be tried again
            raise
        finally:
            with self._lock:
                self._compiling -= 1
                if not self._compiling:
                    self.compile_s += time.perf_counter() - self._began
        return made.result()

    def _make(
        self,
        key: tuple[Any, ...],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        donate: tuple[int, ...],
        step: bool,
    ) -> Any:
        options = compiler_options(self.run.row_group)

        def compile(function: Callable[..., Any]) -> Any:
            if self.progress:
                self.progress(" ".join(part for part in key if isinstance(part, str)))
            where = None if step else self.placed.out_shardings(function, args)
            function = self.placed.step(function, args) if step else function
            return jax.jit(function, donate_argnums=donate, out_shardings=where).lower(*args).compile(options)

        # Nobody knows what the name of somebody else's drafter stands for tomorrow.
        ours = all(type(part).__module__.startswith(("atlas_jax.", "builtins")) for part in key)
        if self.store is None or not ours:
            return compile(function)
        return self.store.get((key, donate), args, options, function, compile)

    def dispatch(
        self,
        drafter: Drafter,
        K: int,
        n_top: int | None,
        params: Any,
        state: DecodeState,
        slots: Array | jax.ShapeDtypeStruct,
    ) -> Any:
        """(params, state, slots, rounds) -> (state, Emitted, finish): rounds of verifies of K rows."""
        function = functools.partial(rounds.dispatch, self.model, drafter, K, n_top, self.run.rounds_per_dispatch)
        key = (
            "decode",
            f"rows={K}",
            f"sequences={slots.shape[0]}",
            drafter.name,
            drafter,
            "" if n_top is None else f"logprobs={n_top}",
            _structure(state),
        )
        return self.get(key, function, (params, state, slots, SCALAR), (1,), step=True)

    def guided(
        self,
        drafter: Drafter,
        K: int,
        n_top: int | None,
        params: Any,
        state: DecodeState,
        slots: Array | jax.ShapeDtypeStruct,
    ) -> tuple[Any, Any]:
        """A round in two dispatches: (params, state, slots) -> (state, Rows), and (params, state, slots, Rows, masks) ->
        (state, Emitted, finish)."""
        B, V = slots.shape[0], self.model.config.vocab_size
        shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.int32)  # noqa: E731
        key = (f"rows={K}", f"sequences={B}", drafter.name, drafter, _structure(state))
        draft = functools.partial(rounds.guided_rows, self.model, drafter, K)
        verify = functools.partial(rounds.guided_round, self.model, drafter, n_top)
        rows = rounds.Rows(shape(B, K), shape(B), shape(B, K - 1))  # pyright: ignore[reportArgumentType]
        logged = "" if n_top is None else f"logprobs={n_top}"
        return (
            self.get(("draft", *key), draft, (params, state, slots), (1,), step=True),
            self.get(
                ("guided", *key, logged),
                verify,
                (params, state, slots, rows, shape(B, K, -(-V // 32))),
                (1,),
                step=True,
            ),
        )

    def prefill(self, size: int, sequences: int, params: Any, state: DecodeState) -> Any:
        """(params, state, slots [sequences], tokens [size], begin [sequences], n [sequences]) -> state."""

        def prefill(params, state: DecodeState, slots, tokens, begin, n):
            args = (self.model, params, state.probe, state.target, slots, tokens, begin, n)
            target, probe = probes.prefill(*args, feed_drafter=self._feeds_drafter)
            return dataclasses.replace(state, target=target, probe=probe)

        each, tokens = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (sequences, size))
        args = (params, state, each, tokens, each, each)
        key = ("prefill", f"tokens={size}", f"sequences={sequences}", _structure(state))
        return self.get(key, prefill, args, (1,), step=True)

    def _alone(self, params: Any, state: DecodeState, slot: Array, tokens: Array, n: Array, **options: Any) -> Any:
        """The model's prefill of one sequence's chunk."""
        args = (self.model, params, state.target, slot[None], tokens, jnp.zeros(1, jnp.int32), n[None])
        return call(*args, method="prefill", **options)

    @property
    def _feeds_drafter(self) -> bool:
        return self.run.drafter_context != "blind"

    def logits(self, size: int, params: Any, state: DecodeState) -> Any:
        """(params, state, slot, tokens [size], n) -> (float32 logits [size, V], state)."""

        def logits(params, state: DecodeState, slot, tokens, n):
            hidden, _, target = self._alone(params, state, slot, tokens, n, feed_drafter=self._feeds_drafter)
            return call(self.model, params, hidden, method="logits"), dataclasses.replace(state, target=target)

        args = (params, state, SCALAR, jax.ShapeDtypeStruct((size,), jnp.int32), SCALAR)
        return self.get(("logits", f"tokens={size}", _structure(state)), logits, args, (1,), step=True)

    def score(self, n_top: int, size: int, params: Any, state: DecodeState) -> Any:
        """(params, state, slot, tokens [size], n, following [size]) -> (what `log_probabilities` gives of the following tokens,
        state)."""

        def score(params, state: DecodeState, slot, tokens, n, following):
            hidden, _, target = self._alone(params, state, slot, tokens, n, feed_drafter=False)
            out = log_probabilities(call(self.model, params, hidden, method="logits"), following, n_top)
            return out, dataclasses.replace(state, target=target)

        tokens = jax.ShapeDtypeStruct((size,), jnp.int32)
        args = (params, state, SCALAR, tokens, SCALAR, tokens)
        return self.get(
            ("score", f"tokens={size}", f"logprobs={n_top}", _structure(state)), score, args, (1,), step=True
        )

    def hiddens(self, size: int, params: Any, state: DecodeState) -> Any:
        """(params, state, slot, tokens [size], n) -> (the hiddens that the drafter reads [size, D], state)."""

        def hiddens(params, state: DecodeState, slot, tokens, n):
            _, hidden, target = self._alone(params, state, slot, tokens, n, feed_drafter=False)
            return hidden, dataclasses.replace(state, target=target)

        args = (params, state, SCALAR, jax.ShapeDtypeStruct((size,), jnp.int32), SCALAR)
        return self.get(("hiddens", f"tokens={size}", _structure(state)), hiddens, args, (1,), step=True)

    def open(self, state: DecodeState, values: dict[str, Any]) -> Any:
        """(state, slot, values) -> state."""
        return self.get(("open", _structure(state)), open_slot, (state, SCALAR, values), (0,))

    def start(self, state: DecodeState) -> Any:
        """(state, slot) -> state."""
        return self.get(("start", _structure(state)), start_slot, (state, SCALAR), (0,))

    def cut(self, state: DecodeState) -> Any:
        """(state, slot, n) -> state."""
        return self.get(("cut", _structure(state)), cut_slot, (state, SCALAR, SCALAR), (0,))


def _structure(state: DecodeState) -> Any:
    """What of a state's form an executable depends on: drafters bring their own leaves."""
    leaves, structure = jax.tree.flatten(state.drafter)
    return structure, tuple((x.shape, x.dtype) for x in leaves)
