"""What both servers stand on: the engine, once it is there, and requests made of what clients send."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np

from atlas_jax.completion import Completion, Delta
from atlas_jax.engine.api import EngineApi, EngineError, EngineStopping, GenerationRequest, Score
from atlas_jax.errors import RequestError
from atlas_jax.serve.config import ServeConfig
from atlas_jax.serve.faults import ContextTooLong, NotReady
from atlas_jax.serve.metrics import Metrics, Record
from atlas_jax.text.chat import render_chat
from atlas_jax.text.tokenizer import Tokenizer
from atlas_jax.weights.checkpoint import read_json

THINK = "<think>"
# Bytes of text that are encoded for one token that a prompt may have. Text has about four; more than this is refused unread,
# unless it is short, because encoding takes a second for some megabytes.
BYTES_A_TOKEN = 8
SHORT_BYTES = 1 << 20
COMPOSED = 3  # bytes that a tokenizer may make one of, at most, where it composes characters (NFC)
SAMPLED = "temperature top_k top_p min_p repetition_penalty".split()  # what generation_config.json may recommend
log = logging.getLogger("atlas_jax.serve")


@dataclasses.dataclass(frozen=True)
class EncodedPrompt:
    """Attributes:
    ids: int32 [T].
    history: how many of them the next turn's prompt begins with; None for all.
    reasoning: whether the prompt ends within a thinking block.
    """

    ids: np.ndarray
    history: int | None = None
    reasoning: bool = False


class Backend:
    """Attributes:
    config: how the servers are run.
    created: when the servers were started, in seconds since 1970.
    metrics: what /metrics shows.
    """

    def __init__(self, config: ServeConfig, engine: EngineApi | None = None) -> None:
        self.config = config
        self.created = int(time.time())
        self.metrics = Metrics(self)
        self.draining = False
        self._engine: Any = None
        self._scorers = concurrent.futures.ThreadPoolExecutor(4, thread_name_prefix="score")
        self.recommended: dict[str, float | int] = {}
        if engine is not None:
            self.use(engine)

    def use(self, engine: EngineApi) -> None:
        """From now on requests go to this engine."""
        tokenizer = engine.runtime.tokenizer
        self.recommended = _recommended(tokenizer) if tokenizer else {}
        if tokenizer:
            tokenizer.max_token_bytes  # noqa: B018  # is found now, not within the first request
        self._engine = engine

    @property
    def loaded(self) -> bool:
        return self._engine is not None

    def close(self) -> None:
        """Once nobody asks any more."""
        self._scorers.shutdown(wait=False, cancel_futures=True)

    @property
    def engine(self) -> EngineApi:
        """Raises NotReady while the model is being loaded."""
        if self._engine is None:
            raise NotReady("the model is being loaded; try again in some seconds")
        return self._engine

    @property
    def state(self) -> str:
        """ "loading", then the engine's own state."""
        return "loading" if self._engine is None else "draining" if self.draining else self._engine.state

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises RequestError where the model has none."""
        tokenizer = self.engine.runtime.tokenizer
        if tokenizer is None:
            raise RequestError("this model has no tokenizer; give prompts as token ids")
        return tokenizer

    # ---- prompts -------------------------------------------------------------------------------------------------------

    def encode_text(self, text: str) -> EncodedPrompt:
        return EncodedPrompt(self._encode(text))

    def encode_ids(self, ids: Sequence[int]) -> EncodedPrompt:
        """Raises RequestError for ids that are none, ContextTooLong for too many."""
        if len(ids) > self.engine.runtime.run.max_length:  # before each is looked at
            raise self._too_long(f"{len(ids)}")
        return EncodedPrompt(self.engine.runtime.encode(ids))

    def encode_chat(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        prefix: str = "",
        **template: Any,
    ) -> EncodedPrompt:
        """A chat rendered with the model's template, and the beginning of the answer, where that is given.

        Raises:
            RequestError: the messages are malformed, or the template refuses them.
        """
        tokenizer = self.tokenizer
        text = render_chat(tokenizer, messages, tools=tools, **template)
        before = render_chat(tokenizer, messages, tools=tools, **template, add_generation_prompt=False)
        reasoning = text.rstrip().endswith(THINK)
        text += prefix
        ids = self._encode(text)
        history = None
        if text.startswith(before) and len(text) > len(before):
            history = len(ids) - len(tokenizer.encode(text[len(before) :]))
        return EncodedPrompt(ids, history, reasoning)

    @property
    def max_prompt(self) -> int:
        """Tokens of a prompt that is answered."""
        limit = self.engine.runtime.run.max_length
        return min(limit - 1, self.config.max_prompt_tokens or limit)

    @property
    def max_text(self) -> int:
        """Bytes of a prompt's text: what the longest tokens come to, and not too long to encode beside other requests."""
        tokens = self.engine.runtime.run.max_length  # a score may have one more than a prompt
        longest = tokens * self.tokenizer.max_token_bytes * COMPOSED
        return min(longest, max(SHORT_BYTES, BYTES_A_TOKEN * tokens))

    def _encode(self, text: str) -> np.ndarray:
        """Token ids [T]. Raises ContextTooLong, before anything is encoded, where the text cannot fit, and RequestError."""
        tokenizer = self.tokenizer
        size = len(text.encode(errors="surrogatepass"))
        if size > self.max_text:
            raise self._too_long(f"{size} bytes, more than the {self.max_text} that are read for so many")
        return np.asarray(tokenizer.encode(text), np.int32)

    def _too_long(self, has: str) -> ContextTooLong:
        return ContextTooLong(
            f"This model's maximum prompt length is {self.max_prompt} tokens; the prompt has {has}. Shorten it."
        )

    def request(
        self,
        prompt: EncodedPrompt,
        *,
        max_tokens: int | None,
        deadline_s: float | None = None,
        **options: Any,
    ) -> GenerationRequest:
        """Checks a request. `max_tokens` None takes what the sequence has room for; `options` are those of `Engine.request`.

        Raises:
            ContextTooLong, RequestError.
        """
        engine, size = self.engine, len(prompt.ids)
        limit = engine.runtime.run.max_length
        if not size:
            raise RequestError("the prompt is empty; give at least one token")
        if size > self.max_prompt:
            raise self._too_long(f"{size}")
        if max_tokens is not None and max_tokens >= 1 and size + max_tokens > limit:
            raise ContextTooLong(
                f"This model's maximum context length is {limit} tokens. The prompt has {size} and {max_tokens} more were "
                "asked for; shorten the prompt or ask for fewer."
            )
        limits = [seconds for seconds in (deadline_s, self.config.request_timeout_s) if seconds is not None]
        options["deadline_s"] = min(limits, default=None)
        request = engine.request(
            prompt.ids,
            max_tokens=limit - size if max_tokens is None else max_tokens,
            **{name: value for name, value in options.items() if value is not None},
        )
        return dataclasses.replace(request, history=prompt.history)

    # ---- answers -------------------------------------------------------------------------------------------------------

    async def submit(self, request: GenerationRequest) -> Answering:
        """Raises EngineFull, EngineStopping or RequestError. The caller must `close` what it gets."""
        if request.grammar is None:
            return self._submit(request)
        # Compiling a grammar takes up to a second, in which others must not wait. Whoever leaves meanwhile closes what comes of it.
        task = asyncio.ensure_future(asyncio.to_thread(self._submit, request))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda done: None if done.exception() else done.result().close())
            raise

    def _submit(self, request: GenerationRequest) -> Answering:
        if self.draining:
            raise EngineStopping("the server is shutting down")
        if self.config.log_requests:
            log.info("request %s", _shown(request, self.engine.runtime.tokenizer))
        return Answering(self, request)

    async def score(self, token_ids: Any, top_logprobs: int = 0, timeout: float | None = None) -> Score:
        """`Engine.score`, in threads of its own: it waits for the engine, and others must not wait for it."""
        limits = [seconds for seconds in (timeout, self.config.request_timeout_s) if seconds is not None]
        call = functools.partial(self.engine.score, token_ids, top_logprobs, timeout=min(limits, default=None))
        return await asyncio.get_running_loop().run_in_executor(self._scorers, call)


class Answering:
    """A request that was submitted. Closing it cancels it, wherever it is; once it is over, that does nothing."""

    def __init__(self, backend: Backend, request: GenerationRequest) -> None:
        self._backend = backend
        self._record = Record()
        try:
            self.ticket = backend.engine.submit(request)
        except EngineError as error:
            backend.metrics.record(self._record, type(error).__name__)
            raise

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """The answer's pieces. Raises EngineError."""
        try:
            async for delta in self.ticket:
                self._record.tokens(len(delta.token_ids))
                if delta.completion:
                    self._record.outcome = delta.completion.finish_reason
                    if self._backend.config.log_requests:
                        log.info("answer %s %r", self.ticket.id, delta.completion.text)
                yield delta
        except EngineError as error:
            self._record.outcome = type(error).__name__
            raise

    async def stop(self) -> Completion | None:
        """Ends the request here, because the caller has enough of it; returns what it had come to."""
        self.ticket.cancel()
        try:
            async for _ in self.ticket:
                pass
        except EngineError as error:
            self._record.outcome = "stop"
            return error.completion
        return self.ticket.completion

    def close(self) -> None:
        if self._record.open:
            self.ticket.cancel()
            self._backend.metrics.record(self._record, self._record.outcome)


def _recommended(tokenizer: Tokenizer) -> dict[str, float | int]:
    """Sampling values of the model's generation_config.json."""
    path = tokenizer.directory / "generation_config.json"
    config: Mapping[str, Any] = read_json(path) if path.exists() else {}
    if not config.get("do_sample", True):
        return {}
    return {name: config[name] for name in SAMPLED if isinstance(config.get(name), (int, float))}


def _shown(request: GenerationRequest, tokenizer: Tokenizer | None) -> str:
    text = (
        tokenizer.decode(request.prompt.tolist(), skip_special_tokens=False) if tokenizer else request.prompt.tolist()
    )
    return f"{text!r} {request.params}"
