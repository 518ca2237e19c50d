"""A conversation that goes on: each turn's prompt is all that was said before, and what the cache holds of it costs nothing."""

from __future__ import annotations

import copy
import reprlib
import threading
import weakref
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from atlas_jax.cache.prefix import Lease
from atlas_jax.completion import Completion, Delta
from atlas_jax.errors import RequestError
from atlas_jax.text.chat import validated

if TYPE_CHECKING:
    from atlas_jax.runtime import Runtime


class Session:
    """Made by `Runtime.session`. A client that resends its whole history gets the same answers as fast; a session keeps the history
    and lets its snapshot be among the last to go when the cache needs room, until it is closed or forgotten.

    Attributes:
        history: chat messages, or token ids.
        options: of `Runtime.generate`, for every turn that does not give its own.
    """

    def __init__(self, runtime: Runtime, history: Any, options: Mapping[str, Any]) -> None:
        runtime.check_names(options)
        self.runtime, self.options = runtime, dict(options)
        turns = _items(history)
        if turns is None:
            raise RequestError(f"a session begins with chat messages or token ids, got {reprlib.repr(history)}")
        self.chat = isinstance(turns[0], Mapping) if turns else runtime.tokenizer is not None
        if turns:
            validated(turns) if self.chat else runtime.encode(turns)
        self.history: list[Any] = copy.deepcopy(turns)
        self._lease = Lease()
        self._turns = threading.Lock()  # held while one is answered
        weakref.finalize(self, runtime.loop.cache.end, self._lease).atexit = False

    def send(self, message: Any, **options: Any) -> Completion:
        """Adds a turn and its answer to the history.

        Args:
            message: text (what the user says), a message, or several, as results of tools; token ids where the history is such.
            **options: those of `Runtime.generate`.

        Raises:
            RequestError: as `Runtime.generate` does. The history is then as it was, as it is when the answer ends with an error.
        """
        completion = None
        for delta in self.stream(message, **options):
            completion = delta.completion or completion
        assert completion is not None, "a stream ends with a completion"
        return completion

    def stream(self, message: Any, **options: Any) -> Generator[Delta, None, None]:
        """`send`, piece by piece. The history grows with the last piece: a stream that is closed before leaves no trace in it."""
        before = self.history
        prompt = [*before, *self._turn(message)]
        deltas = self.runtime.turn(prompt, {**self.options, **options}, self._lease)
        return self._finish(before, prompt, deltas)

    def fork(self) -> Session:
        """Another session with the same history; the two go on independently and share what is cached."""
        other = Session(self.runtime, self.history, self.options)
        other.chat = self.chat
        self.runtime.loop.cache.renew(other._lease, self._lease.node)
        return other

    def close(self) -> None:
        """Gives up the session's claim on the cache. It can still be used, as a client that resends its history."""
        self.runtime.loop.cache.end(self._lease)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _turn(self, message: Any) -> list[Any]:
        if self.chat:
            if isinstance(message, str):
                return [dict(role="user", content=message)]
            messages = [message] if isinstance(message, Mapping) else message
            if isinstance(messages, Sequence) and len(messages) and all(isinstance(m, Mapping) for m in messages):
                return copy.deepcopy([*messages])
            raise RequestError("a turn of a chat is text, a message or a list of messages")
        ids = _items(message)
        if not ids:
            raise RequestError("this session's history is token ids: a turn is a list of at least one token id")
        return ids

    def _finish(
        self, before: list[Any], prompt: list[Any], deltas: Generator[Delta, None, None]
    ) -> Generator[Delta, None, None]:
        if not self._turns.acquire(blocking=False):
            raise RequestError(
                "this session is answering another turn; read that to its end or close it, or use a fork()"
            )
        try:
            if self.history is not before:
                raise RequestError("this session has gone on since the turn was asked for; ask again")
            for delta in deltas:
                if (done := delta.completion) and done.finish_reason != "error":
                    answer = [dict(role="assistant", content=done.text)] if self.chat else done.token_ids
                    self.history = [*prompt, *answer]
                yield delta
        finally:
            deltas.close()
            self._turns.release()


def _items(values: Any) -> list[Any] | None:
    """Of a sequence or an array, as plain Python values; None for anything else."""
    if isinstance(values, (np.ndarray, jax.Array)):
        values = np.asarray(values).tolist()
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes, bytearray)):
        return None
    return [value.item() if isinstance(value, np.generic) else value for value in values]
