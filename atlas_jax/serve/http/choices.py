"""Several answers to one request: submitted together, read as they come, counted together."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from atlas_jax.cache.stats import Reuse
from atlas_jax.completion import Completion
from atlas_jax.engine.api import GenerationRequest
from atlas_jax.errors import GrammarError
from atlas_jax.serve.backend import Answering, Backend
from atlas_jax.serve.faults import FieldError


async def submit_all(backend: Backend, requests: Sequence[GenerationRequest]) -> list[Answering]:
    """All of them or none. Raises EngineFull, EngineStopping, RequestError."""
    try:
        return await _submit_all(backend, requests)
    except GrammarError as error:
        kinds = {request.grammar.kind for request in requests if request.grammar}
        raise FieldError(str(error), "tools" if "tool_call" in kinds else "response_format") from None


async def _submit_all(backend: Backend, requests: Sequence[GenerationRequest]) -> list[Answering]:
    answers: list[Answering] = []
    try:
        for request in requests:
            answers.append(await backend.submit(request))
    except BaseException:
        for answer in answers:
            answer.close()
        raise
    return answers


@contextlib.contextmanager
def closing(answers: Sequence[Answering]) -> Iterator[None]:
    try:
        yield
    finally:
        for answer in answers:
            answer.close()


async def merged[T](sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """What the sources yield, as it comes; one that fails ends all."""
    if len(sources) == 1:
        async with contextlib.aclosing(sources[0]) as only:
            async for item in only:
                yield item
        return
    queue: asyncio.Queue[tuple[str, Any]] = asyncio.Queue(maxsize=len(sources))

    async def pump(source: Any) -> None:
        try:
            async with contextlib.aclosing(source):
                async for item in source:
                    await queue.put(("item", item))
            await queue.put(("end", None))
        except Exception as error:
            await queue.put(("error", error))

    tasks = [asyncio.ensure_future(pump(source)) for source in sources]
    try:
        running = len(tasks)
        while running:
            kind, value = await queue.get()
            if kind == "error":
                raise value
            if kind == "end":
                running -= 1
            else:
                yield value
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclasses.dataclass
class Usage:
    """OpenAI's `usage`, summed over the choices; a prompt counts once, however many answers it gets."""

    prompt: int = 0
    reuse: Reuse = dataclasses.field(default_factory=Reuse)
    completion: int = 0
    reasoning: int = 0
    accepted: int = 0
    drafted: int = 0

    def add(self, completion: Completion, *, first: bool, reasoning: int = 0) -> None:
        if first:
            self.prompt += completion.prompt_tokens
            self.reuse += completion.reuse
        self.completion += len(completion.token_ids)
        self.reasoning += reasoning
        self.accepted += completion.acceptance.drafts_accepted
        self.drafted += completion.acceptance.drafted

    def to_dict(self) -> dict[str, Any]:
        return dict(
            prompt_tokens=self.prompt,
            completion_tokens=self.completion,
            total_tokens=self.prompt + self.completion,
            prompt_tokens_details=dict(
                cached_tokens=self.reuse.restored,
                matched_tokens=self.reuse.matched,
                replayed_tokens=self.reuse.replayed,
                granularity_share=self.reuse.granularity_share,
            ),
            completion_tokens_details=dict(
                reasoning_tokens=self.reasoning,
                accepted_prediction_tokens=self.accepted,
                rejected_prediction_tokens=self.drafted - self.accepted,
            ),
        )
