"""`atlas-jax convert`."""

from __future__ import annotations

import argparse
from typing import Any

from atlas_jax.errors import ConfigError
from atlas_jax.terminal import Progress, note
from atlas_jax.weights.quantised.scheme import INT4_GROUPS, NVFP4, Scheme


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
        help='conversations to calibrate int4 with, {"messages": […]} a line: 8 of them, 2,048 tokens each where they have so many',
    )


def run(args: argparse.Namespace) -> int:
    scheme = scheme_of(args.weights, args.group)
    from atlas_jax.weights.convert import convert

    texts = calibration_texts(args.model, args.calibrate) if args.calibrate else []
    with Progress() as progress:
        convert(args.model, args.out, scheme, head=args.head, search=args.search, texts=texts, progress=progress)
    note(f"{args.out}: {args.model} in {scheme.name}")
    return 0


def calibration_texts(model: str, path: str, count: int = 8, tokens: int = 2048) -> list[Any]:
    """Token ids of conversations, the last `tokens` of each.

    Raises:
        ConfigError: the model has no tokenizer.
        RequestError: the file is not of this kind.
    """
    import numpy as np

    from atlas_jax.replay.transcripts import read_transcripts
    from atlas_jax.text.tokenizer import load_tokenizer
    from atlas_jax.weights.presets import resolve

    folder = resolve(model).directory
    tokenizer = load_tokenizer(folder) if folder else None
    if tokenizer is None:
        raise ConfigError(f"{model} has no tokenizer.json, so text cannot be read for it; leave out --calibrate")
    found = sorted(read_transcripts(path, tokenizer.encode), key=lambda each: len(each.tokens) < tokens)
    return [np.asarray(each.tokens[-tokens:], np.int32) for each in found[:count]]


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
