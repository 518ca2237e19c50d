"""A conversation that goes on: each turn's prompt is all that was said before, and what the cache holds of it costs nothing."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from atlas_jax.cache.prefix import Lease
from atlas_jax.completion import Completion, Delta
from atlas_jax.errors import RequestError

if TYPE_CHECKING:
    from atlas_jax.runtime import Runtime


class Session:
    """Made by `Runtime.session`. A client that resends its whole history gets the same answers as fast; a session keeps the history
    and lets its snapshot be among the last to go when the cache needs room, until it is closed or forgotten.

    Attributes:
        history: chat messages, or token ids.
        options: of `Runtime.generate`, for every turn that does not give its own.
    """

    def __init__(self, runtime: Runtime, history: Sequence[Any], options: Mapping[str, Any]) -> None:
        self.runtime, self.options = runtime, dict(options)
        self.chat = isinstance(history[0], Mapping) if len(history) else runtime.tokenizer is not None
        self.history: list[Any] = copy.deepcopy([*history]) if self.chat else np.asarray(history, int).tolist()
        self._lease = Lease()
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
        prompt = [*self.history, *self._turn(message)]
        deltas = self.runtime.turn(prompt, {**self.options, **options}, self._lease)
        return self._finish(prompt, deltas)

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
        if isinstance(message, str) or not len(message):
            raise RequestError("this session's history is token ids: a turn is a list of at least one token id")
        return np.asarray(message).tolist()

    def _finish(self, prompt: list[Any], deltas: Generator[Delta, None, None]) -> Generator[Delta, None, None]:
        for delta in deltas:
            if (done := delta.completion) and done.finish_reason != "error":
                answer = [dict(role="assistant", content=done.text)] if self.chat else done.token_ids
                self.history = [*prompt, *answer]
            yield delta
