"""Train tiny-agent, or its MTP head alone, for a given number of seconds on one device.

    python -m atlas_jax.train.run target --corpus .train/corpus --out OUT --seconds 540
    python -m atlas_jax.train.run mtp --corpus .train/corpus --init CHECKPOINT --out OUT --seconds 300

Learning rate and phases follow the share of the time that is used up, so a run always ends with a finished schedule.
Writes `log.jsonl` (the loss curve) and the newest bfloat16 checkpoint.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import math
import pathlib
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from atlas_jax.train import batches, checkpoint, losses
from atlas_jax.train.forward import Shape


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of the run with one batch shape: it lasts until `until` (share of the time)."""

    until: float
    rows: int
    tokens: int
    drafts: int  # positions a row that the drafts are trained on
    mix: dict[str, float]


RECIPES = {
    "target": (
        Phase(0.45, 128, 2048, 256, {"text": 0.7, "chat": 0.1, "synthetic": 0.2}),
        Phase(1.0, 32, 8192, 1024, {"text": 0.4, "chat": 0.35, "synthetic": 0.25}),
    ),
    "more": (Phase(1.0, 32, 8192, 1024, {"text": 0.4, "chat": 0.35, "synthetic": 0.25}),),
    "mtp": (Phase(1.0, 16, 8192, 2048, {"text": 0.15, "chat": 0.6, "synthetic": 0.25}),),
    "smoke": (
        Phase(0.5, 2, 256, 32, {"text": 0.6, "chat": 0.2, "synthetic": 0.2}),
        Phase(1.0, 2, 512, 64, {"text": 0.2, "chat": 0.6, "synthetic": 0.2}),
    ),
}


def groups(params: dict) -> dict[str, list[str]]:
    """Names of like tensors of all layers, under one name each: they are stacked for the optimizer."""
    out: dict[str, list[str]] = {}
    for name in params:
        out.setdefault(re.sub(r"^(model\.layers)\.\d+\.", r"\1.*.", name), []).append(name)
    return out


def optimizer(params: dict, weight_decay: float) -> optax.GradientTransformation:
    """Muon for matrices, Adam for the embedding and vectors, on like tensors stacked [n, …]; unit learning rate."""
    spec = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    named = groups(params)
    kinds = {g: spec if params[names[0]].ndim == 2 and "embed" not in g else None for g, names in named.items()}
    muon = optax.contrib.muon(
        1.0, weight_decay=weight_decay, adam_b2=0.98, consistent_rms=0.2, muon_weight_dimension_numbers=kinds
    )
    inner = optax.chain(optax.clip_by_global_norm(1.0), muon)

    def stack(tree):
        return {g: jnp.stack([tree[n] for n in names]) for g, names in named.items()}

    def update(grads, state, params):
        updates, state = inner.update(stack(grads), state, stack(params))
        return {n: updates[g][i] for g, names in named.items() for i, n in enumerate(names)}, state

    return optax.GradientTransformation(lambda params: inner.init(stack(params)), update)


def rate(progress: float, peak: float, warm: float = 0.02, floor: float = 0.02) -> float:
    """Linear warm-up, then a cosine down to `floor` of the peak."""
    if progress < warm:
        return peak * (progress + 1e-3) / warm
    at = min(1.0, (progress - warm) / (1 - warm))
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * at)))


def make_step(kind: str, shape: Shape, opt, drop_rate: float, dtype):
    """step(params, state, frozen, batch, lr, key) -> (params, state, metrics); `frozen` is the target of an MTP run."""

    def loss(params, frozen, batch, key):
        p = checkpoint.cast(params, dtype)
        if kind == "mtp":
            return losses.mtp_loss(p, frozen, batch, shape)
        return losses.target_loss(p, batch, shape, key if drop_rate else None)

    def step(params, state, frozen, batch, lr, key):
        (_, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params, frozen, batch, key)
        updates, state = opt.update(grads, state, params)
        params = jax.tree.map(lambda p, u: p + lr * u, params, updates)
        return params, state, metrics | {"norm": optax.global_norm(grads)}

    return jax.jit(step, donate_argnums=(0, 1))


class Evaluation:
    """Loss, accuracy and unconditional acceptance of chained drafts on held-out replies (see `losses.held_out`)."""

    def __init__(self, held, shape: Shape, dtype, width: int = 4):
        self.parts = [tuple(self.fill(x[i : i + width], width) for x in held) for i in range(0, len(held[0]), width)]
        self.measure = jax.jit(lambda p, *held: losses.held_out(checkpoint.cast(p, dtype), *held, shape))

    @staticmethod
    def fill(x, width):
        return np.concatenate([x, np.zeros((width - len(x), *x.shape[1:]), x.dtype)])

    def compile(self, params):
        self.measure = self.measure.lower(params, *self.parts[0]).compile()
        return self

    def __call__(self, params) -> dict:
        total = functools.reduce(functools.partial(jax.tree.map, jnp.add), [self.measure(params, *x) for x in self.parts])
        count = max(float(total["count"]), 1.0)
        return {
            "held_loss": round(float(total["loss"]) / count, 4),
            "held_top1": round(float(total["right"]) / count, 4),
            "held_p": [round(float(a / (r + 1e-6)), 4) for a, r in zip(total["accepted"], total["rows"])],
        }


def main() -> None:
    a = arguments()
    begin = time.time()
    folder, out = pathlib.Path(a.corpus), pathlib.Path(a.out)
    out.mkdir(parents=True, exist_ok=True)
    config = json.loads((checkpoint_dir() / "config.json").read_text()) | json.loads(a.config)
    shape, dtype = Shape.read(config), jnp.dtype(a.dtype)
    params = checkpoint.load(pathlib.Path(a.init)) if a.init else checkpoint.initial(config)
    frozen = {}
    if a.kind == "mtp":
        frozen = checkpoint.cast({k: v for k, v in params.items() if not k.startswith("mtp.")}, dtype)
        params = {k: v for k, v in params.items() if k.startswith("mtp.")}
    opt = optimizer(params, a.weight_decay)
    state = opt.init(params)
    step = make_step(a.kind, shape, opt, a.dropout, dtype)
    sources = batches.load(folder)
    phases = RECIPES[a.recipe or a.kind]
    print({n: len(s.tokens) for n, s in sources.items()}, "parameters", sum(v.size for v in params.values()), flush=True)

    avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, state, frozen))

    def compiled(phase: Phase):
        """The step for a phase, and the phase: with fewer rows than asked where memory is short."""
        B, T, R = phase.rows, phase.tokens, phase.drafts
        batch = (((B, T), jnp.int32), ((B, T), jnp.float32), ((B, R), jnp.int32))
        batch = tuple(jax.ShapeDtypeStruct(*x) for x in batch)
        run = step.lower(*avals, batch, jax.ShapeDtypeStruct((), jnp.float32), jax.random.key(0)).compile()
        size = run.memory_analysis().temp_size_in_bytes / 1e9
        print(f"{B} rows of {T}: {size:.1f} GB, at {time.time() - begin:.1f} s", flush=True)
        return (run, phase) if size < a.memory else compiled(dataclasses.replace(phase, rows=B // 2))

    evaluation = Evaluation(batches.held_rows(folder / "held.xz", a.held_tokens, 4, a.held_rows), shape, dtype)
    pool = concurrent.futures.ThreadPoolExecutor(1)  # later phases compile while the first one trains
    ready = [pool.submit(compiled, phase) for phase in phases]
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), frozen | params)
    evaluate = pool.submit(evaluation.compile, plain)
    ready[0].result()
    start, log, n, seen, last, saved = time.time(), open(out / "log.jsonl", "a"), 0, 0, time.time(), time.time()
    budget = a.seconds - (start - begin) - a.reserve
    print(f"compiled in {start - begin:.1f} s, training for {budget:.1f} s", flush=True)

    def note(**row):
        line = json.dumps(row)
        log.write(line + "\n")
        log.flush()
        print(line, flush=True)

    def full():
        return {k: v.astype(jnp.float32) for k, v in (frozen | params).items()}

    progress = 0.0
    for future in ready:
        run, phase = future.result()
        draw = functools.partial(draw_batch, sources, phase)
        for batch in batches.stream(draw):
            progress = (time.time() - start) / budget
            if progress >= phase.until:
                break
            lr = rate(progress, a.rate)
            params, state, metrics = run(params, state, frozen, batch, jnp.float32(lr), jax.random.key(n))
            n, seen = n + 1, seen + phase.rows * phase.tokens
            if n % a.every == 0 or n == 3:
                metrics = jax.tree.map(lambda x: np.round(np.asarray(x, np.float64), 4).tolist(), metrics)
                now = time.time()
                note(step=n, tokens=seen, seconds=round(now - start, 1), lr=round(lr, 6), step_ms=round((now - last) * 1e3 / (a.every if n > 3 else 3), 1), **metrics)
                last = now
            if time.time() - saved > a.save_every:
                note(step=n, **evaluate.result()(full()))
                checkpoint.save(out / "model", full(), shards=2)
                saved = last = time.time()
    checkpoint.save(out / "model", full(), shards=2)
    note(step=n, tokens=seen, seconds=round(time.time() - start, 1), final=True, **evaluate.result()(full()))
    bf16 = {k: v.astype(jnp.bfloat16).astype(jnp.float32) for k, v in full().items()}
    note(step=n, stored="bfloat16", **evaluate.result()(bf16))


def checkpoint_dir() -> pathlib.Path:
    from atlas_jax.train.corpus import ASSETS

    return ASSETS


def draw_batch(sources, phase: Phase, rng):
    return batches.draw(sources, phase.mix, rng, phase.rows, phase.tokens, phase.drafts, steps=4)


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("kind", choices=["target", "mtp"])
    p.add_argument("--recipe", choices=list(RECIPES))
    p.add_argument("--corpus", required=True)
    p.add_argument("--out", required=True)
    p.add_argument("--init", help="folder of a checkpoint to go on from")
    p.add_argument("--seconds", type=float, default=540, help="the whole run, compilation included")
    p.add_argument("--reserve", type=float, default=30, help="seconds kept for the last evaluation and checkpoint")
    p.add_argument("--memory", type=float, default=115, help="gigabytes a step may take")
    p.add_argument("--rate", type=float, default=3e-3)
    p.add_argument("--weight-decay", type=float, default=0.1)
    p.add_argument("--dropout", type=float, default=0.1)
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--every", type=int, default=20)
    p.add_argument("--save-every", type=float, default=90)
    p.add_argument("--held-tokens", type=int, default=8192)
    p.add_argument("--held-rows", type=int, default=2048)
    p.add_argument("--config", default="{}", help="JSON that overrides the model's config (small runs)")
    return p.parse_args()


if __name__ == "__main__":
    main()
