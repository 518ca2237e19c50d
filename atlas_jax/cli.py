"""The command line: generate, chat, serve, demo, inspect, convert, bench, replay, experiment.

stdout carries the answer alone; progress and errors go to stderr. JAX is imported once the arguments make sense.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pathlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from atlas_jax import bench_command, convert_command, draft_head_options
from atlas_jax.config import DRAFTER_CONTEXTS
from atlas_jax.errors import AtlasError, RequestError
from atlas_jax.experiment import command as experiment_command
from atlas_jax.replay import command as replay_command
from atlas_jax.serve import command as serve_command
from atlas_jax.terminal import Progress, ask, exit_on_interrupt, note, say

MAX_DRAFTS = 31  # beyond any drafter's use; the state grows with it
MODEL = "a model directory, tiny-agent, or shape:NAME for a known shape with random weights"
SAMPLING = {
    "temperature": (float, "T", "0 takes the likeliest token (default: 0)"),
    "top_k": (int, "K", "sample from the K likeliest tokens; 0 from all"),
    "top_p": (float, "P", "sample from the fewest tokens whose probabilities reach P; 1 from all"),
    "min_p": (float, "P", "sample from tokens at least P times as likely as the likeliest"),
    "presence_penalty": (float, "X", "taken from the logits of generated tokens"),
    "frequency_penalty": (float, "X", "taken from the logits of generated tokens, once per occurrence"),
    "repetition_penalty": (float, "X", "divides the logits of prompt and generated tokens; 1 for none"),
    "seed": (int, "S", "makes sampling repeatable"),
}


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument as `RequestError`, in one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise RequestError(f"{message}; see {self.prog} --help")


def parser() -> Parser:
    top = Parser(prog="atlas-jax", description="Run hybrid language models with speculative decoding.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    generate = commands.add_parser("generate", help="answer one prompt", description="Answer one prompt.")
    _model_options(generate)
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue, as it is")
    prompt.add_argument("--prompt-ids", metavar='"1 2 3"', help="token ids to continue")
    prompt.add_argument("--messages", metavar="FILE.json", help="chat messages to answer: a JSON list ('-': stdin)")
    _answer_options(generate, max_tokens=128)
    _warm_option(generate)
    generate.add_argument("--logprobs", action="store_true", help="log-probabilities of the tokens (with --json)")
    generate.add_argument("--top-logprobs", type=int, metavar="N", help="and of the N likeliest at each place")
    generate.add_argument("--json", action="store_true", help="print one JSON object instead of streaming text")
    generate.set_defaults(run=run_generate)

    chat = commands.add_parser("chat", help="talk to a model", description="Talk to a model; end with Ctrl-D.")
    _model_options(chat)
    chat.add_argument(
        "--prefix-cache",
        action=argparse.BooleanOptionalAction,
        help="go on from the turn before instead of reading the conversation anew (default: yes)",
    )
    chat.add_argument("--system", metavar="TEXT", help="the system message")
    _answer_options(chat, max_tokens=512)
    _warm_option(chat)
    chat.set_defaults(run=run_chat)

    serve = commands.add_parser(
        "serve",
        help="serve a model to others",
        description="Serve a model by gRPC, by OpenAI-compatible HTTP, or both. SIGTERM lets running answers end.",
    )
    _model_options(serve)
    serve_command.add_options(serve)
    serve.set_defaults(run=serve_command.run)

    demo = commands.add_parser(
        "demo",
        help="see it work",
        description="A small packaged model answers three tasks, with and without speculation.",
    )
    demo.set_defaults(run=run_demo)

    inspect = commands.add_parser(
        "inspect", help="describe a checkpoint", description="Describe a checkpoint and say whether it can be run."
    )
    inspect.add_argument("model", metavar="MODEL", help=MODEL)
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    inspect.set_defaults(run=run_inspect)

    convert = commands.add_parser(
        "convert",
        help="round a model's weights to four bits",
        description="Write a model with its linear layers rounded to four bits, as a compressed-tensors checkpoint.",
    )
    convert_command.add_options(convert)
    convert.set_defaults(run=convert_command.run)

    bench = commands.add_parser("bench", help="measure this machine", description="Measure this machine.")
    benches = bench.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK", parser_class=Parser)
    cost = benches.add_parser(
        "verify-cost",
        help="what a verify takes by its rows",
        description="Time verifies by their rows, beside what memory allows; drafts=auto goes by the table that this keeps.",
    )
    bench_command.add_options(cost)
    cost.set_defaults(run=bench_command.run)

    replay = commands.add_parser(
        "replay",
        help="try drafting on transcripts",
        description="Count what drafting saves on transcripts; no model runs.",
    )
    replay_command.add_options(replay)
    replay.set_defaults(run=replay_command.run)

    experiment = commands.add_parser(
        "experiment", help="compare settings of drafting", description="Compare settings of drafting."
    )
    experiment_command.add_options(experiment, Parser)
    return top


def _warm_option(command: Parser) -> None:
    command.add_argument("--warm", action="store_true", help="compile all that answers can need before the first one")


def _model_options(command: Parser) -> None:
    command.add_argument("model", metavar="MODEL", help=MODEL)
    command.add_argument("--dtype", choices=("float32", "bfloat16"), help="of weights and activations")
    command.add_argument("--kv-dtype", choices=("float8_e4m3fn",), help="keeps keys and values in eight bits")
    command.add_argument("--tensor-parallel", type=int, metavar="N", help="devices that share the model (default: 1)")
    command.add_argument("--max-length", type=int, metavar="N", help="tokens of prompt and answer together, at most")
    command.add_argument(
        "--drafter", metavar="NAME", help="none, mtp, lookup, hybrid, … (default: mtp where the model has it)"
    )
    command.add_argument(
        "--drafts", type=draft_count, metavar="D", help="tokens drafted ahead, or auto: as many as pay (default: 3)"
    )
    command.add_argument(
        "--drafter-context",
        choices=DRAFTER_CONTEXTS,
        help="what of the prompt the model's own drafter sees; all but full are for comparison (default: full)",
    )
    command.add_argument(
        "--refeed",
        action=argparse.BooleanOptionalAction,
        help="rewrite the drafter's rows of accepted drafts with the target's hiddens (default: yes)",
    )
    draft_head_options.add_options(command)


def _answer_options(command: Parser, max_tokens: int) -> None:
    command.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N", help=f"of the answer (default: {max_tokens})"
    )
    for name, (kind, letter, text) in SAMPLING.items():
        command.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=letter, help=text)
    command.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before TEXT (repeatable)")
    command.add_argument("--stop-token-ids", metavar='"1 2 3"', help="ids that end the answer")
    command.add_argument("--ignore-eos", action="store_true", help="go on after the model's end of text")
    command.add_argument("--tools", metavar="FILE.json", help="tools that the model may call: a JSON list")
    command.add_argument("--thinking", action=argparse.BooleanOptionalAction, help="let the model think first")


# ---- commands --------------------------------------------------------------------------------------------------------


def run_generate(args: argparse.Namespace) -> int:
    prompt: Any = args.prompt
    if args.prompt_ids is not None:
        prompt = read_ids("--prompt-ids", args.prompt_ids)
    elif args.messages is not None:
        prompt = read_objects("--messages", args.messages, "role")
    else:
        encodable("--prompt", prompt)
    if args.messages is None and (args.tools is not None or args.thinking is not None):
        raise RequestError("--tools and --thinking belong to a chat; give the prompt as --messages")
    if (args.logprobs or args.top_logprobs is not None) and not args.json:
        raise RequestError("--logprobs and --top-logprobs are shown with --json only; add it")
    options = answer_options(args)
    if args.logprobs or args.top_logprobs is not None:
        options |= dict(logprobs=True, top_logprobs=args.top_logprobs or 0)
    check(options)
    with Progress() as progress:
        runtime = load(args, progress)
        if args.json:
            completion = runtime.generate(prompt, **options)
            progress.clear()
            say(json.dumps(completion.to_dict(), allow_nan=False), "\n")
        else:
            completion = show(runtime.stream(prompt, **options), progress, has_text=runtime.tokenizer is not None)
    return finish(completion)


def run_chat(args: argparse.Namespace) -> int:
    options = answer_options(args)
    check(options)
    start = [] if args.system is None else [dict(role="system", content=encodable("--system", args.system))]
    with Progress() as progress:
        runtime = load(args, progress)
        if runtime.tokenizer is None:
            raise RequestError("chat needs a tokenizer, which this model lacks; use generate --prompt-ids")
        progress.clear()
        note("Ctrl-D ends the conversation, /new starts another.")
        session = runtime.session(start, **options)
        while (line := ask()) is not None:
            if line == "/new":
                session.close()
                session = runtime.session(start, **options)
            elif line and (status := finish(show(session.stream(encodable("the message", line)), progress))):
                return status
    return 0


def run_demo(args: argparse.Namespace) -> int:
    from atlas_jax import demo

    with Progress() as progress:
        return demo.run(progress)


def run_inspect(args: argparse.Namespace) -> int:
    from atlas_jax.weights.inspect import inspect_model

    report = inspect_model(args.model)
    say(json.dumps(report.to_dict(), allow_nan=False) if args.json else report.text(), "\n")
    return 0


# ---- pieces ----------------------------------------------------------------------------------------------------------


def load(args: argparse.Namespace, progress: Progress) -> Any:
    """The `Runtime` that the arguments name."""
    import atlas_jax

    given = draft_head_options.given(args)
    if isinstance(args.drafts, int) and args.drafts > 7:
        given["max_drafts"] = args.drafts
    names = (
        "drafter_context",
        "refeed",
        "prefix_cache",
        "slots",
        "kv_dtype",
        "tensor_parallel",
        "weights",
        "keep_executables",
    )
    for name in (*names, *serve_command.RUN_FIELDS):
        if (value := getattr(args, name, None)) is not None:
            given[name] = value
    runtime = atlas_jax.load(args.model, dtype=args.dtype, max_length=args.max_length, progress=progress, **given)
    progress.clear()
    note(f"[{runtime.in_force}]")
    if getattr(args, "warm", False):
        report = runtime.warm_up(drafter=args.drafter, drafts=args.drafts)
        progress.clear()
        note(f"[{report}]")
    return runtime


def answer_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options of `Runtime.generate`; what was not given is left out, so that the defaults stand in one place."""
    names = (*SAMPLING, "max_tokens", "drafter", "drafts")
    options = {name: value for name in names if (value := getattr(args, name)) is not None}
    if args.stop is not None:
        options["stop"] = tuple(encodable("--stop", text) for text in args.stop)
    if args.stop_token_ids is not None:
        options["stop_token_ids"] = tuple(read_ids("--stop-token-ids", args.stop_token_ids))
    if args.tools is not None:
        options["tools"] = read_objects("--tools", args.tools, "function")
    if args.thinking is not None:
        options["enable_thinking"] = args.thinking
    return options | (dict(ignore_eos=True) if args.ignore_eos else {})


def check(options: dict[str, Any]) -> None:
    """Refuses bad values before a model is loaded for them; the vocabulary is checked when it is known."""
    from atlas_jax.decode.request import SamplingParams

    fields = SamplingParams.__dataclass_fields__
    SamplingParams(**{name: value for name, value in options.items() if name in fields}).validate(2**31)
    drafts = options.get("drafts", 0)
    if drafts != "auto" and not 0 <= drafts <= MAX_DRAFTS:
        raise RequestError(f"drafts must be an integer in 0 … {MAX_DRAFTS}, got {options['drafts']}")
    if options.get("drafter") == "none" and drafts not in (0, "auto"):
        raise RequestError(f"drafter 'none' drafts nothing, and {drafts} drafts were asked for; leave one of them out")


def show(deltas: Iterable[Any], progress: Progress, has_text: bool = True) -> Any:
    """Streams an answer to stdout, as ids where there is no text; returns the completion."""
    completion = None
    for delta in deltas:
        progress.clear()
        say(delta.text if has_text else "".join(f"{token} " for token in delta.token_ids))
        completion = delta.completion or completion
    say("\n")
    assert completion is not None, "the stream ended without a completion"
    found = (
        f"{completion.restored} of {completion.prompt_tokens} prompt tokens restored; " if completion.restored else ""
    )
    note(f"[{completion.timings.tokens_per_s:.1f} tokens/s; {found}{completion.acceptance.summary()}]")
    return completion


def finish(completion: Any) -> int:
    """The exit code of an answer: 1 if decoding failed."""
    if completion.finish_reason != "error":
        return 0
    print("atlas-jax: the answer was broken off: the model's logits were not finite", file=sys.stderr)
    return 1


def draft_count(text: str) -> int | str:
    """Of --drafts."""
    if text != "auto" and not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer or auto, got {text[:20]!r}")
    return text if text == "auto" else int(text)


def read_ids(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise RequestError(f'{option} must be integers, as in "1 2 3"; got {text[:60]!r}') from None


def read_objects(option: str, path: str, key: str) -> list[dict[str, Any]]:
    """A JSON file that holds a list of objects, each with `key`."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else pathlib.Path(path).read_bytes()
        value = json.loads(encodable(option, data.decode()))
    except OSError as error:
        raise RequestError(f"{option} {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"{option} {path} is not JSON: {error}") from None
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) and key in item for item in value):
        raise RequestError(f"{option} {path} must hold a JSON list of objects that each have {key!r}")
    encodable(option, json.dumps(value, ensure_ascii=False))
    return value


def encodable(option: str, text: str) -> str:
    """`text` itself, unless half of a character is in it, which no tokenizer can take."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{option} must be text in UTF-8; it holds bytes or surrogates that are none") from None
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code: 2 for bad input, 130 after Ctrl-C, 1 if decoding failed."""
    if argv is None:  # this is the process's own program
        exit_on_interrupt()
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    try:
        args = parser().parse_args(argv)
        status = args.run(args)
        sys.stdout.flush()
        return status
    except AtlasError as error:
        print("atlas-jax:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        note("")
        return 130
    except BrokenPipeError:  # the reader has seen enough; nor must the interpreter complain as it flushes
        with contextlib.suppress(io.UnsupportedOperation):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
