"""Train tiny-agent, or its MTP head alone, for a given number of seconds on one device.

    python -m atlas_jax.train.run target --corpus .train/corpus --out OUT --seconds 540
    python -m atlas_jax.train.run mtp --corpus .train/corpus --init CHECKPOINT --out OUT --seconds 300

Learning rate and phases follow the share of the time that is used up, so a run always ends with a finished schedule.
Writes `log.jsonl` (the loss curve) and the newest bfloat16 checkpoint.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from atlas_jax.train import batches, checkpoint, losses
from atlas_jax.train.corpus import ASSETS
from atlas_jax.train.forward import Shape
from atlas_jax.train.recipe import RECIPES, Phase, optimizer, rate


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


class Log:
    """One JSON object a line, on the screen and in a file."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.path.write_text("")

    def __call__(self, **row) -> None:
        line = json.dumps(row)
        with self.path.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)


class Evaluation:
    """Loss, accuracy and unconditional acceptance of chained drafts on held-out replies (see `losses.held_out`)."""

    def __init__(self, held, shape: Shape, dtype, width: int = 4) -> None:
        def fill(x):
            return np.concatenate([x, np.zeros((width - len(x), *x.shape[1:]), x.dtype)])

        self.parts = [tuple(fill(x[i : i + width]) for x in held) for i in range(0, len(held[0]), width)]
        self.jitted = jax.jit(
            lambda p, ids, reply, rows: losses.held_out(checkpoint.cast(p, dtype), ids, reply, rows, shape)
        )
        self.measure = self.jitted

    def compile(self, params) -> "Evaluation":
        self.measure = self.jitted.lower(params, *self.parts[0]).compile()
        return self

    def __call__(self, params) -> dict:
        """Figures over all held-out rows: loss and accuracy of replies, acceptance of drafts 1, 2, …"""
        sums = [self.measure(params, *part) for part in self.parts]
        total = jax.tree.map(lambda *x: sum(x), *sums)
        count = max(float(total["count"]), 1.0)
        return {
            "held_loss": round(float(total["loss"]) / count, 4),
            "held_top1": round(float(total["right"]) / count, 4),
            "held_p": [round(float(a / (r + 1e-6)), 4) for a, r in zip(total["accepted"], total["rows"], strict=True)],
        }


def main() -> None:
    a = arguments()
    begin = time.time()
    folder, out = pathlib.Path(a.corpus), pathlib.Path(a.out)
    out.mkdir(parents=True, exist_ok=True)
    config = json.loads((ASSETS / "config.json").read_text()) | json.loads(a.config)
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
    size = sum(v.size for v in params.values())
    print(f"{size} parameters; tokens", {n: len(s.tokens) for n, s in sources.items()}, flush=True)

    avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, state, frozen))

    def compiled(phase: Phase):
        """The step for a phase, and the phase: with fewer rows than asked where memory is short."""
        B, T, R = phase.rows, phase.tokens, phase.drafts
        batch = (((B, T), jnp.int32), ((B, T), jnp.float32), ((B, R), jnp.int32))
        batch = tuple(jax.ShapeDtypeStruct(*x) for x in batch)
        run = step.lower(*avals, batch, jax.ShapeDtypeStruct((), jnp.float32), jax.random.key(0)).compile()
        memory = run.memory_analysis()
        size = memory.temp_size_in_bytes / 1e9 if memory else 0.0
        print(f"{B} rows of {T}: {size:.1f} GB, at {time.time() - begin:.1f} s", flush=True)
        return (run, phase) if size < a.memory else compiled(dataclasses.replace(phase, rows=B // 2))

    evaluation = Evaluation(batches.held_rows(folder / "held.xz", a.held_tokens, 4, a.held_rows), shape, dtype)
    pool = concurrent.futures.ThreadPoolExecutor(1)  # later phases compile while the first one trains
    ready = [pool.submit(compiled, phase) for phase in phases]
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), frozen | params)
    evaluate = pool.submit(evaluation.compile, plain)
    ready[0].result()
    note, n, seen = Log(out / "log.jsonl"), 0, 0
    start = last = saved = time.time()
    budget = max(1.0, a.seconds - (start - begin) - a.reserve)
    print(f"compiled in {start - begin:.1f} s, training for {budget:.1f} s", flush=True)

    def full() -> dict:
        return {k: v.astype(jnp.float32) for k, v in (frozen | params).items()}

    for future in ready:
        run, phase = future.result()
        shapes = (phase.rows, phase.tokens, phase.drafts)
        for batch in batches.stream(lambda rng, s=shapes, mix=phase.mix: batches.draw(sources, mix, rng, *s, steps=4)):
            progress = (time.time() - start) / budget
            if progress >= phase.until:
                break
            lr = rate(progress, a.rate)
            params, state, metrics = run(params, state, frozen, batch, jnp.float32(lr), jax.random.key(n))
            n, seen = n + 1, seen + phase.rows * phase.tokens
            if n % a.every == 0 or n == 3:
                metrics = jax.tree.map(lambda x: np.round(np.asarray(x, np.float64), 4).tolist(), metrics)
                now = time.time()
                spent = {"seconds": round(now - start, 1), "step_ms": round((now - last) * 1e3 / min(n, a.every), 1)}
                note(step=n, tokens=seen, lr=round(lr, 6), **spent, **metrics)
                last = now
            if time.time() - saved > a.save_every:
                note(step=n, **evaluate.result()(full()))
                checkpoint.save(out / "model", full(), shards=2)
                saved = last = time.time()
    checkpoint.save(out / "model", full(), shards=2)
    note(step=n, tokens=seen, seconds=round(time.time() - start, 1), final=True, **evaluate.result()(full()))
    bf16 = {k: v.astype(jnp.bfloat16).astype(jnp.float32) for k, v in full().items()}
    note(step=n, stored="bfloat16", **evaluate.result()(bf16))


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
    p.add_argument("--dropout", type=float, default=0.15)
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--every", type=int, default=20)
    p.add_argument("--save-every", type=float, default=90)
    p.add_argument("--held-tokens", type=int, default=8192)
    p.add_argument("--held-rows", type=int, default=2048)
    p.add_argument("--config", default="{}", help="JSON that overrides the model's config (small runs)")
    return p.parse_args()


if __name__ == "__main__":
    main()
