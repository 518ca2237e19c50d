"""The Python API: load a model, generate, stream, score."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import reprlib
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from typing import Any, Literal, cast

import jax
import numpy as np

from atlas_jax.cache.prefix import Lease
from atlas_jax.cache.stats import CacheStats
from atlas_jax.completion import Answer, Completion, Delta
from atlas_jax.config import ModelConfig, RunConfig
from atlas_jax.decode.drafters import DRAFTERS, Drafter, HybridDrafter, MtpChain, NoDrafter, drafter_named
from atlas_jax.decode.executables import Progress
from atlas_jax.decode.live import Live, Request
from atlas_jax.decode.loop import Loop
from atlas_jax.decode.oracle import OracleChain
from atlas_jax.decode.request import SamplingParams
from atlas_jax.decode.warm_up import WarmUp, warm_up
from atlas_jax.errors import ConfigError, RequestError
from atlas_jax.metrics import Acceptance, AcceptanceLog
from atlas_jax.models.draft_head import with_draft_head
from atlas_jax.session import Session
from atlas_jax.settings import enable_compilation_cache, row_group_on_gpu
from atlas_jax.tensor_parallel import placement
from atlas_jax.text.chat import render_chat
from atlas_jax.text.tokenizer import Tokenizer, load_tokenizer
from atlas_jax.weights.presets import resolve

PROMPTS = "text, a list of token ids, or a list of chat messages"
Message = Mapping[str, Any]
Drafts = int | Literal["auto"]
Prompt = str | Sequence[int] | Sequence[Message] | np.ndarray | jax.Array


def load(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    max_length: int | None = None,
    slots: int = 1,
    max_drafts: int = 7,
    row_group: int | None = None,
    mtp_hidden: str | None = None,
    seed: int = 0,
    weights: str | None = None,
    warm: bool = False,
    keep_executables: bool = False,
    progress: Callable[..., None] | None = None,
    **run: Any,
) -> Runtime:
    """Loads a model: a directory of Hugging Face files, a packaged model ("tiny-agent"), or "shape:NAME" (random weights).

    Args:
        dtype: "float32" or "bfloat16"; by default float32 on a CPU, bfloat16 on a GPU.
        max_length: tokens of a sequence, prompt and answer; by default 4096 or the model's limit.
        slots: sequences decoded together.
        max_drafts: the longest draft that a request may ask for.
        row_group: see `RunConfig`; by default 1 on a CPU, where a padded row costs as much as a real one, on a GPU as many as
            all slots can have, within 16 … 64.
        mtp_hidden: "pre_norm" feeds the drafter the target's hidden before the final norm, for comparison.
        seed: of random weights.
        weights: how random weights are quantised: "int4", "int4-g32", "nvfp4", "fp8", "fp8-blocks", "int4+head", … (None: not
            at all). A directory's weights are used in the form that they are stored in.
        warm: compiles all that requests with the default drafter need (`Runtime.warm_up`) before it returns.
        keep_executables: keeps what is compiled, beside the compilation cache, in a form that later processes need not trace
            either; it is found as long as neither the sources nor anything else changes that it depends on.
        progress: called with (bytes read, bytes in all) while loading and with a text for each compilation.
        **run: further fields of `RunConfig`: `draft_head` and `draft_vocabulary` (a cheaper head to draft with), `kv_dtype`,
            `prefix_cache`, `tensor_parallel` (devices that share the model), …

    Raises:
        CheckpointError: the model is missing, damaged or of a form that is not supported.
        ConfigError: the run configuration cannot work.
    """
    enable_compilation_cache()
    if unknown := sorted(set(run) - {f.name for f in dataclasses.fields(RunConfig)}):
        fields = ", ".join(RunConfig.__dataclass_fields__)
        raise ConfigError(f"load knows no {', '.join(unknown)}; fields of RunConfig are {fields}")
    source = resolve(os.fspath(name_or_path))
    config = dataclasses.replace(source.config, mtp_hidden=mtp_hidden) if mtp_hidden else source.config
    on_gpu = jax.default_backend() == "gpu"
    defaults: dict[str, Any] = dict(row_group=1, layout="layers")
    if on_gpu:
        defaults = dict(row_group=row_group_on_gpu(slots * (max_drafts + 1)), layout="stacked")
    if row_group is not None:
        defaults["row_group"] = row_group
    settings = RunConfig(
        dtype=dtype or ("bfloat16" if on_gpu else "float32"),  # pyright: ignore[reportArgumentType]  # RunConfig checks it
        max_length=min(4096, config.max_position_embeddings) if max_length is None else max_length,
        slots=slots,
        max_drafts=max_drafts,
        **(defaults | run),
    )
    params = source.load(
        dtype=settings.dtype,
        layout=settings.layout,
        seed=seed,
        weights=weights,
        placed=placement(config, settings),
        progress=progress,
    )
    tokenizer = load_tokenizer(source.directory) if source.directory else None
    runtime = Runtime(config, settings, params, tokenizer, progress, keep_executables)
    if warm:
        runtime.warm_up()
    return runtime


class Runtime:
    """A loaded model, ready to decode. One call runs at a time; those of other threads wait, also for a stream that is read
    half-way. A thread that has such a stream itself would wait for ever, so its calls are refused.

    Attributes:
        config, run: what the model is, how it is run.
        params: the Flax parameters, plain arrays, or shares of them on several devices; `loop.model` is the Flax module they belong
            to.
        acceptance: of all requests since the last `reset`, those that were broken off included.
    """

    def __init__(
        self,
        config: ModelConfig,
        run: RunConfig,
        params: Any,
        tokenizer: Tokenizer | None = None,
        progress: Progress | None = None,
        keep_executables: bool = False,
    ) -> None:
        if run.max_length > config.max_position_embeddings:
            raise ConfigError(
                f"max_length {run.max_length} is beyond the model's {config.max_position_embeddings} positions"
            )
        if run.probes and not config.has_mtp:
            raise ConfigError(f"{run.probes} look at an MTP drafter, and this model has none: it lacks mtp.* tensors")
        if not config.has_mtp and (run.drafter_context != "full" or not run.refeed):
            setting = f"drafter_context {run.drafter_context!r}" if run.refeed else "refeed=False"
            raise ConfigError(f"{setting} is about the model's own drafter, and this model has no mtp.* tensors")
        self.config, self.run, self.tokenizer = config, run, tokenizer
        self.loop = Loop(config, run, with_draft_head(config, run, params), progress, keep_executables)
        self.params = self.loop.params
        self.acceptance = AcceptanceLog()
        self._lock = threading.Lock()
        self._reader: int | None = None  # the thread whose call holds the lock
        self._lent_to = ""

    @property
    def default_drafter(self) -> str:
        return "mtp" if self.config.has_mtp else "none"

    @property
    def in_force(self) -> str:
        """One line on what carries over between turns."""
        sizes, run = self.loop.cache.budget, self.run
        drafter = f"drafter context {run.drafter_context}, accepted rows {'refed' if run.refeed else 'left as drafted'}"
        drafter += ", drafts by an int4 copy of the head" if run.draft_head == "int4" else ""
        drafter += f", drafts from {run.draft_vocabulary} token ids" if run.draft_vocabulary else ""
        cache = "prefix cache off"
        if run.prefix_cache:
            tokens = self.loop.cache.pages.total * run.page_size
            cache = f"prefix cache of {tokens} tokens, {sizes.snapshots} snapshots, one in {sizes.interval} tokens"
            cache += f", {sizes.host_snapshots} on the host" if sizes.host_snapshots else ""
        cache += f"; keys and values in {run.kv_dtype}" if run.kv_dtype else ""
        cache += f"; shared by {run.tensor_parallel} devices" if run.tensor_parallel > 1 else ""
        probes = f"; {run.probes}" if run.probes else ""
        return f"{cache}; {drafter}{probes}" if self.config.has_mtp else cache

    def cache_stats(self) -> CacheStats:
        """What the prefix cache holds and has saved so far."""
        return self.loop.cache.stats()

    def warm_up(self, *, top_logprobs: int | None = None, **options: Any) -> WarmUp:
        """Compiles, several at once, all executables that requests with these options of `generate` (`drafter`, `drafts`) can need:
        every number of rows and of sequences, every size of chunk, stops, snapshots; and runs each once, if nobody has asked
        for anything before. Afterwards such requests compile nothing.

        Args:
            top_logprobs: makes those ready as well that ask for log-probabilities and so many of the likeliest tokens.

        Returns: how many executables were made and how long that took; `str` of it says so.
        """
        if unknown := sorted(set(options) - {"drafter", "drafts"}):
            raise RequestError(f"warm_up knows no {', '.join(unknown)}; it takes drafter, drafts and top_logprobs")
        drafter, drafts = self.drafting(options)
        with self._turn():
            return warm_up(self.loop, drafter, drafts, (None,) if top_logprobs is None else (None, top_logprobs))

    def session(self, history: Sequence[int] | Sequence[Message] | np.ndarray = (), **options: Any) -> Session:
        """A conversation that keeps its history: chat messages (also where none are given, if the model has a tokenizer) or token
        ids. `options` are those of `generate`, for all turns."""
        return Session(self, history, options)

    def encode(
        self, prompt: Prompt, *, tools: Sequence[Mapping[str, Any]] | None = None, **template: Any
    ) -> np.ndarray:
        """Token ids of text, of ids, or of chat messages rendered with the model's template.

        Raises:
            RequestError: the prompt is empty, too long, holds unknown ids, or needs a tokenizer that the model lacks.
        """
        return self._encode(prompt, tools=tools, **template)[0]

    def _encode(self, prompt: Prompt, *, tools: Sequence[Mapping[str, Any]] | None = None, **template: Any) -> Any:
        """Token ids, and how many of them come before the part that asks a chat's model for an answer: those come again in the next
        turn."""
        asking = 0
        if isinstance(prompt, (np.ndarray, jax.Array)):
            prompt = np.asarray(prompt).tolist()
        if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray, memoryview)):
            raise RequestError(f"a prompt is {PROMPTS}, got {reprlib.repr(prompt)}")
        chat = is_chat(prompt)
        if not chat and (tools is not None or template):
            raise RequestError("tools and enable_thinking belong to a chat; give the prompt as a list of messages")
        if isinstance(prompt, str) or chat:
            if self.tokenizer is None:
                raise RequestError("this model has no tokenizer.json; give the prompt as token ids")
            text: Any = prompt
            if chat:
                messages: Any = prompt
                text = render_chat(self.tokenizer, messages, tools=tools, **template)
                unasked: dict[str, Any] = template | dict(add_generation_prompt=False)
                before = render_chat(self.tokenizer, messages, tools=tools, **unasked)
                if text.startswith(before) and len(text) > len(before):
                    asking = len(self.tokenizer.encode(text[len(before) :]))
            ids: Sequence[Any] = self.tokenizer.encode(text)
        else:
            ids = prompt  # pyright: ignore[reportAssignmentType]
        if not len(ids):
            raise RequestError("the prompt is empty; give at least one token")
        if not all(isinstance(i, (int, np.integer)) and not isinstance(i, bool) for i in ids):
            raise RequestError(f"a prompt is {PROMPTS}, got {reprlib.repr(prompt)}")
        if min(ids) < 0 or max(ids) >= self.config.vocab_size:
            raise RequestError(f"token ids must lie in 0 … {self.config.vocab_size - 1}, got {min(ids)} … {max(ids)}")
        return np.asarray(ids, np.int32), len(ids) - asking

    def generate(self, prompt: Prompt | Sequence[Prompt], **options: Any) -> Any:
        """Completes one prompt, or several together (a list of prompts gives a list of completions).

        Args:
            prompt: text, token ids, or chat messages; or a list of these.
            **options: `drafter` (a name or a Drafter; "none" is plain decoding, None the default: "mtp" where the model has a
                head), `drafts` (default 3; "auto" chooses the number by what it gains, up to `max_drafts`), every field of
                `SamplingParams` (max_tokens, temperature, top_k, top_p, min_p, seed, stop, …), `tools` and `enable_thinking` for
                chat messages, `script` (the known answer, for a ScriptedDrafter).

        Raises:
            RequestError: naming the option and what is allowed, before anything runs.
        """
        many = is_batch(prompt)
        prompts: Sequence[Any] = prompt if many else [prompt]  # pyright: ignore[reportAssignmentType]
        requests, drafter, drafts = self._asked(prompts, options)
        completions: list[Completion] = []
        for start in range(0, len(requests), self.run.slots):
            wave = requests[start : start + self.run.slots]
            done = {i: d.completion for i, d in self._decode(wave, drafter, drafts) if d.completion}
            completions += [done[i] for i in range(len(wave))]
        return completions if many else completions[0]

    def stream(self, prompt: Prompt, **options: Any) -> Generator[Delta, None, None]:
        """Completes one prompt, yielding text as it is decided. Options are those of `generate`. Closing the iterator cancels."""
        if is_batch(prompt):
            raise RequestError("stream takes one prompt; use generate for several")
        return (delta for _, delta in self._stream([prompt], options))

    def turn(self, prompt: Prompt, options: Mapping[str, Any], lease: Lease) -> Generator[Delta, None, None]:
        """`stream` for a `Session`, whose claim on the cache is `lease`."""
        return (delta for _, delta in self._stream([prompt], options, lease))

    def logits(self, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Float32 logits [T, V] of the next token at every position."""
        ids = self.fit(self.encode(token_ids), 0)
        with self._turn():
            return self.loop.logits(ids)

    # ---- pieces ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        if self._lent_to:
            raise RequestError(f"this runtime is lent to {self._lent_to}: submit requests there, or close it first")
        if self._reader == threading.get_ident():
            raise RequestError(
                "this thread has a stream of this runtime that is not at its end; read on or close() it first"
            )
        with self._lock:
            self._reader = threading.get_ident()
            try:
                yield
            finally:
                self._reader = None

    def lend(self, to: str) -> None:
        """Gives the loop to somebody else until `take_back`; calls that decode are refused meanwhile.

        Raises:
            RequestError: it is in use, or lent already.
        """
        if self._lent_to or not self._lock.acquire(blocking=False):
            raise RequestError(
                f"this runtime is lent to {self._lent_to}" if self._lent_to else "a call of this runtime is going on"
            )
        self._lent_to = to

    def take_back(self) -> None:
        """Ends what `lend` began."""
        self._lent_to = ""
        self._lock.release()

    def fit(self, ids: np.ndarray, max_tokens: int) -> np.ndarray:
        """The ids. Raises RequestError if they and so many more are too long."""
        if ids.size + max_tokens > self.run.max_length:
            raise RequestError(
                f"the prompt has {ids.size} tokens and {max_tokens} more were asked for; a sequence holds {self.run.max_length}: "
                f"shorten them or load with a larger max_length (the model's limit is {self.config.max_position_embeddings})"
            )
        return ids

    def _request(self, prompt: Prompt, options: Mapping[str, Any], lease: Lease | None) -> Request:
        template = {k: options[k] for k in ("tools", "enable_thinking") if options.get(k) is not None}
        fields = {f.name for f in dataclasses.fields(SamplingParams)}
        values = {k: v for k, v in options.items() if k in fields and v is not None}
        for name in ("stop", "stop_token_ids"):
            if name in values:
                value = values[name]
                several = isinstance(value, (Sequence, Set)) and not isinstance(value, (str, bytes))
                several |= isinstance(value, np.ndarray) and value.ndim > 0
                values[name] = tuple(value) if several else (value,)
        params = SamplingParams(**values)
        params.validate(self.config.vocab_size)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, which this model lacks; use stop_token_ids")
        script = options.get("script")
        ids, history = self._encode(prompt, **template)
        return Request(
            self.fit(ids, params.max_tokens),
            params,
            None if script is None else self.encode(script),
            history=history,
            lease=lease,
        )

    def drafting(self, options: Mapping[str, Any]) -> tuple[Drafter, Drafts]:
        """The drafter and the number of drafts that `options` of `generate` ask for. Raises RequestError."""
        drafter: Any = options.get("drafter")
        drafter = self.default_drafter if drafter is None else drafter
        drafter = drafter_named(drafter) if isinstance(drafter, str) else drafter
        if isinstance(drafter, HybridDrafter) and not self.run.refeed:
            raise RequestError(
                "the hybrid refeeds accepted rows, and this runtime was loaded with refeed=False; use 'mtp'", "drafter"
            )
        if isinstance(drafter, MtpChain):
            if self.run.refeed and not drafter.refeed:
                raise RequestError("MtpChain(refeed=False) needs a runtime that was loaded with refeed=False")
            drafter = dataclasses.replace(drafter, refeed=self.run.refeed)
        if isinstance(drafter, (MtpChain, HybridDrafter)) and not self.config.has_mtp:
            raise RequestError(
                f"drafter {drafter.name!r} needs a checkpoint with mtp.* tensors, and this model has none; use drafter 'lookup' or "
                "'none'",
                "drafter",
            )
        functions = (getattr(drafter, name, None) for name in ("init", "propose"))
        named = isinstance(getattr(drafter, "name", None), str) and not isinstance(drafter, type)
        try:  # a frozen dataclass that holds an array has the method, but it fails
            hash(drafter)
        except TypeError:
            named = False
        if not named or not all(map(callable, functions)):
            raise RequestError(
                f"drafter is one of {', '.join(DRAFTERS)} or an object with a `name` and functions `init` and `propose`, which "
                f"can be hashed (a frozen dataclass can); got {reprlib.repr(drafter)}"
            )
        drafts = options.get("drafts")
        if drafts is None:
            drafts = 0 if isinstance(drafter, NoDrafter) else min(3, self.run.max_drafts)
        if isinstance(drafts, str) and drafts == "auto" and not isinstance(drafter, OracleChain):
            return cast(Drafter, drafter), 0 if isinstance(drafter, NoDrafter) else "auto"
        if (
            isinstance(drafts, bool)
            or not isinstance(drafts, (int, np.integer))
            or not 0 <= drafts <= self.run.max_drafts
        ):
            raise RequestError(
                f"drafts must be 'auto' or an integer in 0 … {self.run.max_drafts}, got {drafts!r}; "
                "the most is set when the model is loaded: load(…, max_drafts=N), serve --max-drafts N",
                "drafts",
            )
        if isinstance(drafter, OracleChain):
            self._check_oracle(drafter, int(drafts), options)
        if isinstance(drafter, NoDrafter) and drafts:
            raise RequestError(
                f"drafter 'none' drafts nothing, and {drafts} drafts were asked for; leave one of them out", "drafts"
            )
        return cast(Drafter, drafter), int(drafts)

    def _check_oracle(self, drafter: OracleChain, drafts: int, options: Mapping[str, Any]) -> None:
        if not self.config.has_mtp:
            raise RequestError("the oracle looks at an MTP drafter, and this model has none: it lacks mtp.* tensors")
        if options.get("script") is None:
            raise RequestError("the oracle needs the answer beforehand: give its token ids as script")
        if drafts < drafter.draft:
            raise RequestError(f"the oracle looks at draft {drafter.draft}, and only {drafts} drafts were asked for")
        if not self.run.refeed:
            raise RequestError("the oracle refeeds accepted rows, and this runtime was loaded with refeed=False")

    def request(self, prompt: Prompt, options: Mapping[str, Any]) -> tuple[Request, Drafter, Drafts]:
        """What a prompt and the options of `generate` ask for, encoded and checked. Raises RequestError."""
        requests, drafter, drafts = self._asked([prompt], options)
        return requests[0], drafter, drafts

    def check_names(self, options: Mapping[str, Any]) -> None:
        """Raises RequestError for an option that `generate` does not know."""
        known = {f.name for f in dataclasses.fields(SamplingParams)} | {
            "drafter",
            "drafts",
            "tools",
            "enable_thinking",
            "script",
        }
        if unknown := sorted(set(options) - known):
            raise RequestError(f"unknown option {', '.join(unknown)}; there are {', '.join(sorted(known))}")

    def _stream(
        self, prompts: Sequence[Any], options: Mapping[str, Any], lease: Lease | None = None
    ) -> Iterator[tuple[int, Delta]]:
        return self._decode(*self._asked(prompts, options, lease))

    def _asked(
        self, prompts: Sequence[Any], options: Mapping[str, Any], lease: Lease | None = None
    ) -> tuple[list[Request], Drafter, Drafts]:
        """What prompts and options ask for, all of it checked. Raises RequestError."""
        self.check_names(options)
        return ([self._request(p, options, lease) for p in prompts], *self.drafting(options))

    def _decode(self, requests: list[Request], drafter: Drafter, drafts: Drafts) -> Iterator[tuple[int, Delta]]:
        with self._turn():
            answers = [Answer(self.tokenizer, r.params) for r in requests]
            logged = [r.params.top_logprobs for r in requests if r.params.logprobs]
            executables = self.loop.executables
            began, compiled_before = time.perf_counter(), executables.compile_s
            cut = lambda i, token_ids: answers[i].cut(token_ids)  # noqa: E731
            lives: list[Live] = []
            counted: set[int] = set()
            steps = self.loop.decode(requests, drafter, drafts, max(logged) if logged else None, cut, lives)
            try:
                for step in steps:
                    answer = answers[step.index]
                    text = answer.add(step)
                    completion = None
                    if step.finish_reason:
                        live, compile_s = lives[step.index], executables.compile_s - compiled_before
                        counted.add(step.index)
                        completion = answer.complete(
                            self._count(live),
                            live.sequence.reuse,
                            began + compile_s,
                            compile_s,
                            fingerprints=self.loop.fingerprints(live),
                        )
                    yield step.index, Delta(step.token_ids, text, step.finish_reason, completion, *answer.logged(step))
                    self._reader = threading.get_ident()  # another thread may be reading on
            finally:
                if self.loop.live:
                    for live in lives:
                        if live.index not in counted:
                            self._count(live)
                steps.close()

    def _count(self, live: Live) -> Acceptance:
        """A sequence's acceptance so far, which is added to the log."""
        acceptance = self.loop.acceptance(live)
        self.acceptance.add(acceptance, warm=live.sequence.reuse.restored > 0)
        return acceptance


def is_chat(prompt: Sequence[Any]) -> bool:
    """Whether `prompt` is a list of chat messages."""
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def is_batch(prompt: Any) -> bool:
    """Whether `prompt` is a list of prompts rather than one."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, str) or not len(prompt):
        return False
    return isinstance(prompt[0], (Sequence, np.ndarray, jax.Array))
