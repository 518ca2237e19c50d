"""What rounding weights to four bits does to a model: perplexity, and how often the MTP head's first draft is right.

    python bench/quality.py [--conversations FILE.jsonl] [--model tiny-agent] [--tokens N] [--count N] [--only TEXT] [--heads]

Conversations that tiny-agent was not trained on (those of the packaged file, also where FILE has others beside them; all of a
FILE that has none of them) are read from their beginning up to --tokens, float32 activations; what they have in common (the
policy and the tools, which the model knows by heart) is not counted. The first draft is right where the head's likeliest
token after (token p + 1, hidden p) is the target's likeliest token after token p + 1; `p1` is the share of such positions,
the unconditional acceptance of draft 1 on this text. Calibration goes by eight of FILE's other conversations, as `atlas-jax
convert` takes them (left out where there are none), or by what the model itself writes.

--heads leaves the weights alone and compares the heads that drafts can be chosen with (`draft_head`, `draft_vocabulary`).
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax.config import RunConfig
from atlas_jax.convert_command import calibration_texts, own_texts
from atlas_jax.errors import AtlasError, RequestError
from atlas_jax.experiment.conversations import HELD_OUT, HELD_OUT_TOOLS, read_conversations
from atlas_jax.models import HybridModel
from atlas_jax.models.attention import causal_attention
from atlas_jax.models.draft_head import with_draft_head
from atlas_jax.text.chat import render_chat
from atlas_jax.text.tokenizer import load_tokenizer
from atlas_jax.weights.convert import convert
from atlas_jax.weights.hf_config import recipe_in
from atlas_jax.weights.load import load_params
from atlas_jax.weights.presets import resolve
from atlas_jax.weights.quantised.scheme import NVFP4, Scheme

INT4 = Scheme("int4", 128)
SCHEMES: dict[str, tuple[Scheme, str]] = {
    "bfloat16": (INT4, ""),
    "int4, groups of 128": (INT4, "plain"),
    "int4, groups of 128, searched": (INT4, "searched"),
    "int4, groups of 128, calibrated": (INT4, "calibrated"),
    "int4, groups of 128, own text": (INT4, "own text"),
    "int4, groups of 32": (Scheme("int4", 32), "plain"),
    "nvfp4": (NVFP4, "plain"),
    "nvfp4, searched": (NVFP4, "searched"),
}


def measure(model: HybridModel, tokens: jax.Array, first: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of one text [T], from token `first` on: the sum of negative log-likelihoods, first drafts that are right, and the target's
    likeliest tokens."""
    hidden = jax.tree.map(lambda x: x[0], model.forward(tokens[None]))
    logits = model.logits(hidden.post_norm)
    likely = jnp.argmax(logits, axis=-1)
    loss = -jnp.take_along_axis(jax.nn.log_softmax(logits[:-1]), tokens[1:, None], axis=1)[first - 1 :].sum()
    x, p = model.mtp.enter(
        model.drafter_norms, model.embed(tokens[1:]), model.drafter_hidden(hidden)[:-1], jnp.arange(1, len(tokens))
    )
    out = causal_attention(p.q[None], p.k[None], p.v[None])[0]
    drafted = model.mtp.leave(model.drafter_norms, x, out, p.gate, few_rows=False)
    drafts = jnp.argmax(model.draft_logits(drafted), axis=-1)
    return loss, jnp.sum((drafts == likely[1:])[first - 1 :]), likely[first:]


class Text:
    """Conversations to measure on, and those to calibrate with.

    Raises:
        RequestError: the file cannot be read, or fewer than two of its conversations are long enough.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.source = args, resolve(args.model)
        if self.source.directory is None or (tokenizer := load_tokenizer(self.source.directory)) is None:
            raise RequestError(f"{args.model} has no tokenizer")
        talks = read_conversations(args.conversations, json.loads(HELD_OUT_TOOLS.read_text()))
        tasks = {_task(talk.name) for talk in read_conversations(HELD_OUT)}
        held_out = [talk for talk in talks if _task(talk.name) in tasks] or talks
        self.others = [talk for talk in talks if talk not in held_out]
        self.texts: list[np.ndarray] = []
        for talk in held_out[: args.count]:
            messages = [*talk.messages]
            while messages and messages[-1]["role"] == "user":  # which nobody answers
                messages.pop()
            chat = render_chat(tokenizer, messages, tools=talk.tools, add_generation_prompt=False)
            ids = np.asarray(tokenizer.encode(chat)[: args.tokens], np.int32)
            self.texts += [ids] if len(ids) == args.tokens else []
        if len(self.texts) < 2:
            raise RequestError(
                f"{args.conversations}: {len(self.texts)} of the first {args.count} conversations have {args.tokens} "
                "tokens, and two are needed; lower --tokens or raise --count"
            )
        self.first = int(np.argmin((np.stack(self.texts) == self.texts[0]).all(0)))  # where they begin to differ

    def to_calibrate(self, folder: pathlib.Path) -> list[np.ndarray]:
        path = folder / "known.jsonl"
        path.write_text("\n".join(json.dumps(dict(messages=talk.messages, tools=talk.tools)) for talk in self.others))
        return calibration_texts(self.args.model, str(path))


def _task(name: str) -> str:
    """Of a conversation called `airline-<task>-<trial>`: all trials of a task were held out together."""
    return name.rpartition("-")[0]


class Report:
    """Measures one model after another, and compares each with the first."""

    def __init__(self, text: Text) -> None:
        self.text = text
        model = HybridModel(text.source.config)
        self.run = jax.jit(functools.partial(model.apply, method=functools.partial(measure, first=text.first)))
        self.base: tuple[float, float, np.ndarray] | None = None

    def __call__(self, name: str, params: Any) -> None:
        parts = [jax.device_get(self.run(params, jnp.asarray(text))) for text in self.text.texts]
        rows = len(parts) * (self.text.args.tokens - self.text.first)
        perplexity, p1 = np.exp(sum(part[0] for part in parts) / rows), sum(int(part[1]) for part in parts) / rows
        likely = np.concatenate([part[2] for part in parts])
        base = self.base = self.base or (perplexity, p1, likely)
        print(
            f"{name:32} perplexity {perplexity:.4f} ({100 * (perplexity / base[0] - 1):+.2f} %)  "
            f"p1 {p1:.4f} ({p1 - base[1]:+.4f})  same likeliest token {100 * np.mean(likely == base[2]):.2f} %",
            flush=True,
        )


def compare_weights(text: Text, report: Report) -> None:
    assert text.source.directory is not None
    for name, (scheme, how) in SCHEMES.items():
        if how and text.args.only not in name:
            continue
        if how == "calibrated" and not text.others:
            print(f"{name:32} left out: there are no conversations beside those measured on", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = text.source.directory
            if how:
                path = pathlib.Path(folder) / "model"
                texts = {
                    "calibrated": lambda: text.to_calibrate(pathlib.Path(folder)),
                    "own text": lambda: own_texts(text.args.model),
                }.get(how)
                convert(text.source.directory, path, scheme, search=how == "searched", texts=texts)
            size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
            params = load_params(path, text.source.config, dtype="float32", layout="layers", recipe=recipe_in(path))
        report(f"{name}, {size / 1e6:.2f} MB", params)


def compare_heads(text: Text, report: Report) -> None:
    assert text.source.directory is not None
    config = text.source.config
    params = load_params(text.source.directory, config, dtype="float32", layout="layers")
    half, quarter = config.vocab_size // 2, config.vocab_size // 4
    report("the exact head", params)
    for name, how in {
        "int4": dict(draft_head="int4"),
        f"the first {half} tokens": dict(draft_vocabulary=half),
        f"the first {quarter} tokens": dict(draft_vocabulary=quarter),
        f"int4, the first {half} tokens": dict(draft_head="int4", draft_vocabulary=half),
    }.items():
        report(name, with_draft_head(config, RunConfig(**how), params))  # pyright: ignore[reportArgumentType]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Perplexity and MTP acceptance of rounded weights and of cheaper heads."
    )
    parser.add_argument("--conversations", default=str(HELD_OUT), metavar="FILE.jsonl", help='{"messages": […]} a line')
    parser.add_argument("--model", default="tiny-agent")
    parser.add_argument("--tokens", type=int, default=3328)
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows with TEXT in their names")
    parser.add_argument("--heads", action="store_true", help="compare heads to draft with instead of weights")
    args = parser.parse_args()
    try:
        text = Text(args)
    except AtlasError as error:
        raise SystemExit(f"quality: {error}") from None
    device = jax.devices()[0].device_kind
    print(f"{len(text.texts)} conversations, tokens {text.first} to {args.tokens}, {device}", flush=True)
    (compare_heads if args.heads else compare_weights)(text, Report(text))


if __name__ == "__main__":
    main()
