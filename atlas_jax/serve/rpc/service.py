"""The service `atlas.v1.Atlas`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio

from atlas_jax.engine.api import MAX_DEADLINE_S
from atlas_jax.errors import GrammarError, RequestError
from atlas_jax.serve.backend import Backend
from atlas_jax.serve.faults import FieldError, SlowReader, fault
from atlas_jax.serve.rpc.errors import abort
from atlas_jax.serve.rpc.messages import (
    completion_message,
    delta_message,
    info_message,
    logprobs_of,
    prompt_of,
    request_of,
    score_message,
    stats_message,
)
from atlas_jax.serve.v1 import atlas_pb2 as pb
from atlas_jax.serve.v1.atlas_pb2_grpc import AtlasServicer

MAX_TOP_LOGPROBS = 20


class Service(AtlasServicer):
    """Calls that come and go; a client that leaves cancels its requests at their next round."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        async with self._checked(context, "Generate"):
            backend = self.backend
            made = await asyncio.to_thread(request_of, backend, request, _remaining(context))
            try:
                answer = await backend.submit(made)
            except GrammarError as error:
                raise FieldError(str(error), "grammar") from None
            try:
                async for delta in answer:
                    await self._write(context, delta_message(delta))
            finally:
                answer.close()

    async def GenerateBatch(self, request: pb.GenerateBatchRequest, context: Any) -> None:
        async with self._checked(context, "GenerateBatch"):
            most = self.backend.config.max_batch
            if not 1 <= len(request.requests) <= most:
                raise FieldError(f"requests must hold 1 … {most}, got {len(request.requests)}", "requests")
            deadline_s = _remaining(context)
            made = []
            for i, one in enumerate(request.requests):  # all are checked before any runs
                try:
                    made.append(await asyncio.to_thread(request_of, self.backend, one, deadline_s))
                except RequestError as error:
                    field = f"requests[{i}]" + (f".{error.field}" if error.field else "")
                    raise FieldError(f"requests[{i}]: {error}", field) from None
            room = asyncio.Semaphore(max(1, 2 * self.backend.engine.runtime.run.slots))  # leaves the queue to others
            tasks = [asyncio.ensure_future(self._one(i, one, room)) for i, one in enumerate(made)]
            try:
                for done in asyncio.as_completed(tasks):
                    await self._write(context, await done)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, index: int, request: Any, room: asyncio.Semaphore) -> pb.GenerateBatchResponse:
        async with room:
            ids, text, logprobs, completion = [], [], [], None
            try:
                answer = await self.backend.submit(request)
                try:
                    async for delta in answer:
                        ids += delta.token_ids
                        text.append(delta.text)
                        logprobs += logprobs_of(delta.logprobs, delta.top_logprobs)
                        completion = delta.completion or completion
                finally:
                    answer.close()
            except Exception as error:
                found = fault(error)
                return pb.GenerateBatchResponse(
                    index=index, failure=pb.Failure(code=found.grpc.value[0], message=found.message)
                )
            assert completion is not None, "an answer ends with a completion or an error"
            return pb.GenerateBatchResponse(
                index=index,
                token_ids=ids,
                text="".join(text),
                logprobs=logprobs,
                completion=completion_message(completion),
            )

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> Any:
        async with self._checked(context, "Tokenize"):
            prompt = await asyncio.to_thread(prompt_of, self.backend, request.prompt)
            return pb.TokenizeResponse(token_ids=prompt.ids.tolist())

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> Any:
        async with self._checked(context, "Detokenize"):
            most = self.backend.engine.runtime.run.max_length
            if len(request.token_ids) > most:  # decoding, too, lets nobody else run
                raise FieldError(f"token_ids may hold at most {most} here, got {len(request.token_ids)}", "token_ids")
            skip = not request.keep_special_tokens
            decode = functools.partial(self.backend.tokenizer.decode, skip_special_tokens=skip)
            return pb.DetokenizeResponse(text=await asyncio.to_thread(decode, list(request.token_ids)))

    async def Score(self, request: pb.ScoreRequest, context: Any) -> Any:
        async with self._checked(context, "Score"):
            if request.top_logprobs > MAX_TOP_LOGPROBS:
                raise FieldError(f"top_logprobs must lie in 0 … {MAX_TOP_LOGPROBS}", "top_logprobs")
            prompt = await asyncio.to_thread(prompt_of, self.backend, request.prompt)
            score = await self.backend.score(prompt.ids, request.top_logprobs, _remaining(context))
            return await asyncio.to_thread(score_message, score)

    async def ModelInfo(self, request: pb.ModelInfoRequest, context: Any) -> Any:
        async with self._checked(context, "ModelInfo"):
            return info_message(self.backend)

    async def Stats(self, request: pb.StatsRequest, context: Any) -> Any:
        async with self._checked(context, "Stats"):
            return stats_message(await asyncio.to_thread(self.backend.engine.stats))

    # ---- pieces --------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _checked(self, context: Any, method: str) -> AsyncIterator[None]:
        """Turns errors into statuses, and counts the call. A client that has left is no error: gRPC cancels the call's task."""
        outcome = "CANCELLED"
        try:
            yield
            outcome = "OK"
        except grpc.aio.InternalError:
            pass  # nothing can be written to a client that has left
        except Exception as error:
            found = fault(error)
            outcome = found.grpc.name
            await abort(context, found)
        finally:
            self.backend.metrics.response("grpc", method, outcome)

    async def _write(self, context: Any, message: Any) -> None:
        """Waits while the client's window is full. Raises SlowReader when it stays so."""
        write: Callable[[Any], Awaitable[None]] = context.write
        try:
            async with asyncio.timeout(self.backend.config.write_timeout_s):
                await write(message)
        except TimeoutError:
            self.backend.metrics.slow_reader()
            raise SlowReader("the stream was not read in time") from None


def _remaining(context: Any) -> float | None:
    """Seconds until the call's deadline; one may lie in another century."""
    seconds = context.time_remaining()
    return None if seconds is None else min(seconds, MAX_DEADLINE_S)
