"""`atlas-jax convert`."""

from __future__ import annotations

import argparse
import functools
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from atlas_jax.errors import ConfigError, RequestError
from atlas_jax.input_files import read_json_lines
from atlas_jax.terminal import Progress, say
from atlas_jax.weights.quantised.scheme import INT4_GROUPS, NVFP4, Scheme

if TYPE_CHECKING:
    import numpy as np

TEXTS, TOKENS, OWN = 8, 2048, "self"  # to calibrate with


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model directory or tiny-agent")
    parser.add_argument("out", metavar="OUT", help="the folder to write; it must not be there yet")
    parser.add_argument("--weights", required=True, choices=("int4", "nvfp4"), help="what to round to")
    parser.add_argument("--group", type=int, choices=INT4_GROUPS, help="inputs that share a scale (int4; default: 128)")
    parser.add_argument("--head", action="store_true", help="round the head too")
    parser.add_argument("--search", action="store_true", help="look for each group's best scale; takes longer")
    parser.add_argument(
        "--calibrate",
        metavar="FILE.jsonl",
        help=f'text to calibrate int4 with: {{"messages": […]}} or {{"text": "…"}} a line, {TEXTS} of them, the last {TOKENS:,} '
        f"tokens of each; or {OWN}: the model writes it",
    )
    parser.add_argument(
        "--tools", metavar="FILE.json", help="tools of conversations that bring none (with --calibrate)"
    )


def run(args: argparse.Namespace) -> int:
    scheme = scheme_of(args.weights, args.group)
    if args.tools is not None and args.calibrate in (None, OWN):
        raise RequestError("--tools are those of conversations to calibrate with; add --calibrate FILE.jsonl")
    if args.calibrate is not None and args.search:
        raise RequestError("--calibrate looks for the best scales itself; leave out --search")
    if args.calibrate is not None and scheme.kind != "int4":
        raise RequestError("--calibrate is for int4; leave it out, or ask for --weights int4")
    from atlas_jax.cli import read_objects
    from atlas_jax.weights.convert import convert

    tools = None if args.tools is None else read_objects("--tools", args.tools, "function")
    texts: Callable[[], list[np.ndarray]] | None = None
    with Progress() as progress:
        if args.calibrate == OWN:
            texts = functools.partial(own_texts, args.model, progress=progress)
        elif args.calibrate is not None:
            texts = functools.partial(calibration_texts, args.model, args.calibrate, tools)
        before, after = convert(
            args.model,
            args.out,
            scheme,
            head=args.head,
            search=args.search,
            texts=texts,
            progress=functools.partial(progress.stage, "rounding"),
            calibrating=functools.partial(progress.stage, "calibrating"),
        )
    how = {None: "not calibrated", OWN: "calibrated with its own text"}.get(args.calibrate)
    how = how or f"calibrated with {args.calibrate}"
    say(
        f"{args.out}: {args.model} in {scheme.name}, {how}; {before / 1e6:,.1f} MB before, {after / 1e6:,.1f} MB now",
        "\n",
    )
    say(f"load it by this path: atlas_jax.load({args.out!r}), or atlas-jax generate {shlex.quote(args.out)} …", "\n")
    return 0


def calibration_texts(
    model: str, path: str, tools: Any = None, count: int = TEXTS, tokens: int = TOKENS
) -> list[np.ndarray]:
    """Token ids of the texts of a file, conversations as the model's own template renders them: `count` of them, spread over the
    file, those with at least `tokens` first; the last `tokens` of each.

    Raises:
        ConfigError: the model has no tokenizer.
        RequestError: naming the line that is wrong.
    """
    import numpy as np

    from atlas_jax.text.chat import render_chat
    from atlas_jax.text.tokenizer import load_tokenizer
    from atlas_jax.weights.presets import resolve

    folder = resolve(model).directory
    tokenizer = load_tokenizer(folder) if folder else None
    if tokenizer is None:
        raise ConfigError(f"{model} has no tokenizer.json, so text cannot be read for it; leave out --calibrate")

    def text_of(row: Any) -> str:
        if isinstance(row, dict) and isinstance(row.get("text"), str):
            return row["text"]
        if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
            raise RequestError("an object with messages (a list) or with a text is needed")
        own = tools if row.get("tools") is None else row["tools"]
        return render_chat(tokenizer, row["messages"], tools=own, add_generation_prompt=False)

    name = f"--calibrate {path}"
    found = read_json_lines(path, lambda _, row: list(tokenizer.encode(text_of(row))), name=name)
    found = [ids for ids in found if ids]
    if not found:
        raise RequestError(f"{name}: there is no text in it")
    long = [ids for ids in found if len(ids) >= tokens]
    if len(long) < count:
        long = sorted(found, key=len, reverse=True)[:count]
    return [np.asarray(ids[-tokens:], np.int32) for ids in long[:: max(len(long) // count, 1)][:count]]


def own_texts(
    model: str, count: int = TEXTS, tokens: int = TOKENS // 2, progress: Progress | None = None
) -> list[np.ndarray]:
    """Token ids of texts that the model itself writes: each goes on, sampled as the model has it, from how its chats begin and one
    random token, so that no two are alike.

    Raises:
        CheckpointError: the model cannot be loaded.
    """
    import numpy as np

    import atlas_jax
    from atlas_jax.text.chat import render_chat

    runtime = atlas_jax.load(
        model, slots=count, max_length=tokens + 8, max_drafts=0, prefix_cache=False, progress=progress
    )
    start: list[int] = []
    if runtime.tokenizer is not None and runtime.tokenizer.templates:
        start = list(runtime.tokenizer.encode(render_chat(runtime.tokenizer, [dict(role="user", content="-")])))[:1]
    words = np.setdiff1d(np.arange(runtime.config.vocab_size), runtime.config.eos_token_ids)
    first = np.random.default_rng(0).choice(words, count, replace=False)
    options = dict(drafter="none", temperature=1.0, seed=0, ignore_eos=True, max_tokens=tokens - len(start) - 1)
    prompts = [[*start, int(token)] for token in first]
    if progress is not None:
        progress.stage("the model writes text")
    written = runtime.generate(prompts, **options)
    return [np.array([*prompt, *answer.token_ids], np.int32) for prompt, answer in zip(prompts, written, strict=True)]


def scheme_of(weights: str, group: int | None) -> Scheme:
    """Of --weights and --group.

    Raises:
        ConfigError: nvfp4 with a group.
    """
    if weights == "nvfp4":
        if group is not None:
            raise ConfigError("nvfp4 has groups of 16; leave out --group")
        return NVFP4
    return Scheme("int4", group or 128)
