"""How long a quantised checkpoint takes to load, and what memory it takes: packed the first time, from the cache the second.

    python bench/load.py [--shape qwen3.5-27b] [--group 128] [--layers N] [--vocabulary N] [--dtype bfloat16] [--keep DIR]

Writes a checkpoint of the shape with random int4 weights as compressed-tensors stores them (27B: 18 GB), loads it in a process
of its own, which packs it and keeps the packed weights (18 GB more), and in another one, which only reads them. Both then decode
a few tokens. Host memory is the most that a process had resident, pages of its files included.

--layers and --vocabulary make the model smaller, for machines without a GPU, and --tokens 0 leaves out the decoding, which has to
be compiled. With --keep DIR the files stay in DIR, and a checkpoint that is there already is taken as it is.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from atlas_jax.config import FULL, LINEAR, ModelConfig
from atlas_jax.weights.checkpoint import INDEX, has_weights
from atlas_jax.weights.convert import linear_weights, quantization_config
from atlas_jax.weights.names import plan
from atlas_jax.weights.presets import preset_config
from atlas_jax.weights.quantised.compressed_tensors import PackQuantized
from atlas_jax.weights.quantised.scheme import INT4_GROUPS, Scheme

SHARD, TILE = 2 << 30, 32 << 20  # bytes of a file; of random data, which is written again and again
BAR_S, BAR_MEMORY = 30.0, 1.08
DTYPES = {"I32": np.dtype(np.int32), "I64": np.dtype(np.int64), "BF16": np.dtype(ml_dtypes.bfloat16)}
Tensor = tuple[str, str, Sequence[int], Callable[[], Iterator[Any]]]  # name, dtype, shape, bytes


class Noise:
    """Bytes of tensors, from one block of random data of each kind."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.codes = rng.integers(0, 256, TILE, np.uint8)
        self.normal = rng.standard_normal(TILE // 8, np.float32)
        self.uniform = rng.uniform(0.5, 1.5, TILE // 32).astype(np.float32)

    def tiled(self, tile: np.ndarray, size: int) -> Iterator[Any]:
        data = memoryview(tile.view(np.uint8))
        for at in range(0, size, len(data)):
            yield data[: min(len(data), size - at)]

    def numbers(self, of: np.ndarray, scale: float, size: int) -> Iterator[Any]:
        return self.tiled((of * np.float32(scale)).astype(ml_dtypes.bfloat16), size)


def tensors(config: ModelConfig, scheme: Scheme, noise: Noise) -> Iterator[Tensor]:
    """All tensors of the checkpoint. Weights have about the deviation (inputs)^-½; norms, decays and biases are small."""
    leaves = plan(config, ())
    quantised = linear_weights(leaves, head=False)
    layout = PackQuantized(scheme)
    for leaf in leaves:
        for part in (part for weight in leaf.weights for part in weight.parts):
            for name in part.names:
                if name not in quantised:
                    scale = part.shape[-1] ** -0.5 if part.shape[1:] else 0.1
                    size = 2 * int(np.prod(part.shape))
                    yield name, "BF16", part.shape, functools.partial(noise.numbers, noise.normal, scale, size)
                    continue
                N, K = part.shape
                for key, want in layout.tensors(N, K).items():
                    shape, dtype = want.shapes[0], "BF16" if key == "weight_scale" else want.dtypes[0]
                    size = int(np.prod(shape)) * DTYPES[dtype].itemsize
                    data = {
                        "weight_packed": functools.partial(noise.tiled, noise.codes, size),
                        "weight_scale": functools.partial(noise.numbers, noise.uniform, K**-0.5 / 4.6, size),
                        "weight_shape": functools.partial(noise.tiled, np.array([N, K], np.int64), size),
                    }
                    yield f"{name.removesuffix('.weight')}.{key}", dtype, shape, data[key]


def write_checkpoint(folder: pathlib.Path, config: ModelConfig, scheme: Scheme) -> int:
    """A model's directory without a tokenizer; returns its bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[list[Tensor]] = [[]]
    size = total = 0
    for tensor in tensors(config, scheme, Noise()):
        nbytes = int(np.prod(tensor[2])) * DTYPES[tensor[1]].itemsize
        if shards[-1] and size + nbytes > SHARD:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size, total = size + nbytes, total + nbytes
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(write_shard, (folder / name for name in names), shards))
    where = {tensor[0]: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
    (folder / "config.json").write_text(json.dumps(hf_config(config) | quantization_config(scheme), indent=1))
    return total


def write_shard(path: pathlib.Path, shard: list[Tensor]) -> None:
    header, at = {}, 0
    for name, dtype, shape, _ in shard:
        stop = at + int(np.prod(shape)) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(header).encode()
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for *_, data in shard:
            for piece in data():
                done = 0
                while done < len(piece):  # a raw file may take less than it is given
                    done += file.write(piece[done:])


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """config.json."""
    fields = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(config).items()}
    rope = {"rope_type": "default", **{key: fields.pop(key) for key in ("rope_theta", "partial_rotary_factor")}}
    fields.pop("mtp_hidden")
    return fields | {
        "num_hidden_layers": config.num_layers,
        "rope_parameters": rope,
        "eos_token_id": fields.pop("eos_token_ids"),
        "dtype": "bfloat16",
    }


# ---- the measured processes ------------------------------------------------------------------------------------------


class Clock:
    """Seconds by name, of functions that are replaced by timed ones."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def watch(self, name: str, holder: Any, function: str) -> None:
        plain = getattr(holder, function)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return plain(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

        setattr(holder, function, timed)


def load_once(folder: str, dtype: str, tokens: int) -> None:
    """Loads, decodes, and prints one JSON object."""
    import jax

    import atlas_jax
    from atlas_jax.weights import build, cache, load

    device = jax.devices()[0]
    clock = Clock()
    clock.watch("read the files (waiting for them)", build.Prepared, "touch")  # beside the others, in threads
    clock.watch("repack", load, "_made")
    clock.watch("write the cache", cache, "write")
    clock.watch("identity of the files", cache, "identity")
    clock.watch("read the cache to the device", cache, "read")
    began = time.perf_counter()
    runtime = atlas_jax.load(folder, dtype=dtype, max_length=4096)
    jax.block_until_ready(runtime.params)
    loaded = time.perf_counter()
    memory = [peak(device)]
    prompt = np.arange(1, 65) % runtime.config.vocab_size
    ids = runtime.generate(prompt, max_tokens=tokens, ignore_eos=True).token_ids if tokens else []
    memory.append(peak(device))
    weights = sum(x.nbytes for x in jax.tree.leaves(runtime.params))
    every = sum(x.nbytes for x in jax.live_arrays())
    out = {
        "device": f"{device.device_kind}, jax {jax.__version__}",
        "load": loaded - began,
        "first answer": time.perf_counter() - loaded,
        "seconds": clock.seconds,
        "peak": memory,
        "weights": weights,
        "state": every - weights,
        "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "ids": list(ids),
    }
    print(json.dumps(out))


def peak(device: Any) -> int | None:
    stats = device.memory_stats()
    return None if not stats else stats.get("peak_bytes_in_use")


def in_a_process(folder: pathlib.Path, args: argparse.Namespace) -> dict[str, Any]:
    # The packed weights and what is compiled are this benchmark's own.
    env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"} | {"ATLAS_JAX_CACHE": str(folder)}
    how = ["--once", str(folder / "model"), "--tokens", str(args.tokens), "--dtype", args.dtype]
    began = time.perf_counter()
    done = subprocess.run([sys.executable, __file__, *how], env=env, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1]) | {"process": time.perf_counter() - began}


def report(name: str, got: dict[str, Any]) -> None:
    print(f"\n{name} ({got['device']})")
    print(f"  {got['load']:7.2f} s to load, of {got['process']:.1f} s in all")
    for what, seconds in got["seconds"].items():
        print(f"  {seconds:7.2f} s  {what}")
    print(f"  {got['first answer']:7.2f} s for {len(got['ids'])} tokens, most of it compiling")
    print(f"  {got['host'] / 1e9:7.2f} GB of host memory at most")
    print(f"  {got['weights'] / 1e9:7.2f} GB of weights, {got['state'] / 1e9:.2f} GB of state on the device")
    if None in got["peak"]:
        print("  this device does not say how much memory was in use")
        return
    whole = got["weights"] + got["state"]
    for when, most in zip(("loading", "decoding"), got["peak"], strict=True):
        print(
            f"  {most / 1e9:7.2f} GB at most after {when}, {most / whole:.3f} times weights and state (bar: {BAR_MEMORY})"
        )


def shape_of(args: argparse.Namespace) -> ModelConfig:
    config = preset_config(args.shape)
    if args.vocabulary:
        config = dataclasses.replace(config, vocab_size=args.vocabulary, eos_token_ids=(), pad_token_id=None)
    if args.layers:
        if args.layers < 2:
            raise SystemExit("--layers must be at least 2: a linear one and one of full attention")
        kinds = list(config.layer_types[: args.layers])
        kinds[-1] = kinds[-1] if {LINEAR, FULL} <= set(kinds) else FULL
        config = dataclasses.replace(config, layer_types=tuple(kinds))
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description="Loading of a quantised checkpoint: seconds and memory.")
    parser.add_argument("--shape", default="qwen3.5-27b")
    parser.add_argument("--group", type=int, choices=INT4_GROUPS, default=128)
    parser.add_argument("--layers", type=int, help="the first so many (default: all)")
    parser.add_argument("--vocabulary", type=int, help="rows of embedding and head (default: the shape's)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=16, help="decoded after loading (default: 16)")
    parser.add_argument("--keep", type=pathlib.Path, metavar="DIR", help="where the files stay")
    parser.add_argument("--once", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        return load_once(args.once, args.dtype, args.tokens)
    folder = args.keep or pathlib.Path(tempfile.mkdtemp(prefix="atlas-load-"))
    try:
        config, model = shape_of(args), folder / "model"
        if has_weights(model):
            print(f"{model} is there already")
        else:
            began = time.perf_counter()
            size = write_checkpoint(model, config, Scheme("int4", args.group))
            seconds = time.perf_counter() - began
            print(f"{args.shape}, {config.num_layers} layers: {size / 1e9:.2f} GB written in {seconds:.1f} s")
        shutil.rmtree(folder / "weights", ignore_errors=True)
        first = in_a_process(folder, args)
        report("first load: packs the weights and keeps them", first)
        second = in_a_process(folder, args)
        report("second load: from the cache", second)
        if "repack" in second["seconds"]:
            raise SystemExit("the second load did not use the cache")
        if first["ids"] != second["ids"]:
            raise SystemExit("the two loads decode different tokens")
        whole = not args.layers and not args.vocabulary
        bar = (
            f"bar of {BAR_S:.0f} s {'met' if second['load'] < BAR_S else 'missed'}" if whole else "a part of the model"
        )
        print(f"\nFrom the cache in {second['load']:.1f} s; {bar}.")
    finally:
        if args.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
