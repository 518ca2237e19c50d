"""`Ticket`: the caller's end of a submitted request."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator

from atlas_jax.completion import Completion, Delta
from atlas_jax.engine.api import EngineError


class Ticket:
    """What `Engine.submit` returns: an iterator, plain or async, over the pieces of the answer.

    The last delta carries the completion; a request that ends otherwise raises its EngineError there. Pieces that are not read
    in time are joined, so a slow reader holds nobody up and costs no more memory than its answer. One reader at a time.

    Attributes:
        id: of the request.
        completion: once the answer is complete.
        error: once the request has ended otherwise.
    """

    def __init__(self, id: str, on_cancel: Callable[[Ticket], None]) -> None:
        self.id = id
        self.completion: Completion | None = None
        self.error: EngineError | None = None
        self._on_cancel = on_cancel
        self._changed = threading.Condition()
        self._unread: Delta | None = None
        self._over = False  # the reader has seen the end
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    @property
    def done(self) -> bool:
        return self.completion is not None or self.error is not None

    def cancel(self) -> None:
        """Ends the request at its next round, with Cancelled. Does nothing if it has ended. From any thread, at once."""
        if not self.done:
            self._on_cancel(self)

    def result(self, timeout: float | int | None = None) -> Completion:
        """Waits for the completion (the deltas stay to be read).

        Raises:
            EngineError: the request's.
            TimeoutError: it took longer than `timeout` seconds; the request goes on.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"request {self.id} is not complete after {timeout} s")
        if self.error:
            raise self.error
        assert self.completion is not None
        return self.completion

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        with self._changed:
            self._changed.wait_for(lambda: self._unread is not None or self.done)
            return self._take(StopIteration)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while True:
            with self._changed:
                if self._unread is not None or self.done:
                    return self._take(StopAsyncIteration)
                loop = asyncio.get_running_loop()
                future: asyncio.Future[None] = loop.create_future()
                self._waiter = loop, future
            await future

    # ---- the engine's end ------------------------------------------------------------------------------------------

    def push(self, delta: Delta) -> None:
        """Hands the reader a piece; with a completion it is the last."""
        with self._changed:
            self._unread = joined(self._unread, delta) if self._unread else delta
            self.completion = delta.completion
            self._wake()

    def fail(self, error: EngineError) -> None:
        """Ends the request. The reader gets what is unread first."""
        with self._changed:
            self.error = error
            self._wake()

    def _take(self, end: type[Exception]) -> Delta:
        delta, self._unread = self._unread, None
        if delta is not None:
            self._over = delta.completion is not None
            return delta
        if self.error and not self._over:
            self._over = True
            raise self.error
        raise end

    def _wake(self) -> None:
        self._changed.notify_all()
        if self._waiter:
            (loop, future), self._waiter = self._waiter, None
            with contextlib.suppress(RuntimeError):  # the reader's event loop is closed: nobody reads any more
                loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(None))


def joined(a: Delta, b: Delta) -> Delta:
    """Two pieces of an answer, one after the other, as one."""
    both = lambda x, y: None if x is None and y is None else (x or []) + (y or [])  # noqa: E731
    return Delta(
        a.token_ids + b.token_ids,
        a.text + b.text,
        b.finish_reason,
        b.completion,
        both(a.logprobs, b.logprobs),
        both(a.top_logprobs, b.top_logprobs),
    )
