"""What rounding weights to four bits does to a model: perplexity, and how often the MTP head's first draft is right.

    python bench/quality.py --conversations tau_airline.jsonl [--model tiny-agent] [--tokens 3328] [--count 6]

Held-out conversations are read from their beginning up to --tokens, float32 activations; what they have in common (the policy and
the tools, which the model knows by heart) is not counted. The first draft is right where the head's likeliest token after (token
p + 1, hidden p) is the target's likeliest token after token p + 1; `p1` is the share of such positions, the unconditional
acceptance of draft 1 on this text.
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

from atlas_jax.models import HybridModel
from atlas_jax.models.attention import causal_attention
from atlas_jax.text.chat import render_chat
from atlas_jax.text.tokenizer import load_tokenizer
from atlas_jax.train.conversations import held_out, load_conversations
from atlas_jax.train.corpus import ASSETS
from atlas_jax.weights.convert import convert
from atlas_jax.weights.hf_config import recipe_in
from atlas_jax.weights.load import load_params
from atlas_jax.weights.presets import resolve
from atlas_jax.weights.quantised.scheme import NVFP4, Scheme

SCHEMES: dict[str, tuple[Scheme, bool] | None] = {
    "bfloat16": None,
    "int4, groups of 128": (Scheme("int4", 128), False),
    "int4, groups of 128, calibrated": (Scheme("int4", 128), True),
    "int4, groups of 32": (Scheme("int4", 32), False),
    "nvfp4": (NVFP4, False),
    "nvfp4, searched": (NVFP4, True),
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
    drafts = jnp.argmax(model.logits(drafted), axis=-1)
    return loss, jnp.sum((drafts == likely[1:])[first - 1 :]), likely[first:]


def main() -> None:
    parser = argparse.ArgumentParser(description="Perplexity and MTP acceptance of rounded weights.")
    parser.add_argument("--conversations", required=True)
    parser.add_argument("--model", default="tiny-agent")
    parser.add_argument("--tokens", type=int, default=3328)
    parser.add_argument("--count", type=int, default=6)
    args = parser.parse_args()
    source = resolve(args.model)
    assert source.directory is not None
    tokenizer = load_tokenizer(source.directory)
    if tokenizer is None:
        raise SystemExit(f"{args.model} has no tokenizer")
    talks = load_conversations(args.conversations)
    tools: Any = json.loads((ASSETS / "airline_tools.json").read_text())

    def texts_of(names: list[str]) -> list[np.ndarray]:
        chats = (render_chat(tokenizer, talks[name], tools=tools, add_generation_prompt=False) for name in names)
        ids = (np.asarray(tokenizer.encode(chat)[: args.tokens], np.int32) for chat in chats)
        return [x for x in ids if len(x) == args.tokens]

    known = sorted(set(talks) - set(held_out(talks)))  # to calibrate with
    texts = texts_of(held_out(talks)[: args.count])
    first = int(np.argmin((np.stack(texts) == texts[0]).all(0)))  # where they begin to differ
    print(f"{len(texts)} conversations, tokens {first} to {args.tokens}, {jax.devices()[0].device_kind}", flush=True)
    base: tuple[float, float, np.ndarray] | None = None
    for name, how in SCHEMES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = source.directory
            if how is not None:
                path = pathlib.Path(folder) / "model"
                calibration = texts_of(known[:: max(len(known) // 8, 1)][:8]) if "calibrated" in name else []
                convert(source.directory, path, how[0], search=how[1], texts=calibration)
            size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
            params = load_params(path, source.config, dtype="float32", layout="layers", recipe=recipe_in(path))
        model = HybridModel(source.config)
        run = jax.jit(functools.partial(model.apply, method=functools.partial(measure, first=first)))
        parts = [jax.device_get(run(params, jnp.asarray(text))) for text in texts]
        rows = len(texts) * (args.tokens - first)
        perplexity, p1 = np.exp(sum(part[0] for part in parts) / rows), sum(int(part[1]) for part in parts) / rows
        likely = np.concatenate([part[2] for part in parts])
        base = base or (perplexity, p1, likely)
        print(
            f"{name:30} {size / 1e6:6.2f} MB  perplexity {perplexity:.4f} ({100 * (perplexity / base[0] - 1):+.2f} %)  "
            f"p1 {p1:.4f} ({p1 - base[1]:+.4f})  same likeliest token {100 * np.mean(likely == base[2]):.2f} %",
            flush=True,
        )


if __name__ == "__main__":
    main()
