"""`atlas-jax convert`."""

from __future__ import annotations

import argparse

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


def run(args: argparse.Namespace) -> int:
    scheme = scheme_of(args.weights, args.group)
    from atlas_jax.weights.convert import convert

    with Progress() as progress:
        convert(args.model, args.out, scheme, head=args.head, search=args.search, progress=progress)
    note(f"{args.out}: {args.model} in {scheme.name}")
    return 0


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
