"""The options about the head that drafts are chosen with, for every command that loads a model which drafts."""

from __future__ import annotations

import argparse
from typing import Any

from atlas_jax.errors import RequestError


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--draft-head",
        choices=("exact", "int4"),
        help="draft with an int4 copy of the head; answers stay the same (default: exact)",
    )
    command.add_argument(
        "--draft-vocabulary",
        type=int,
        metavar="N",
        help="draft only the first N token ids, the frequent ones; answers stay the same (default: all)",
    )


def given(args: argparse.Namespace) -> dict[str, Any]:
    """What `load` is to be told of them: those that were given.

    Raises:
        RequestError: the drafter that was asked for has no use for a head.
    """
    out = {name: value for name in ("draft_head", "draft_vocabulary") if (value := getattr(args, name)) is not None}
    if out and (drafter := getattr(args, "drafter", None)) in ("none", "lookup"):
        raise RequestError(
            f"--{next(iter(out)).replace('_', '-')} is about drafts of the MTP head, and drafter {drafter!r} makes none; "
            "leave one of them out"
        )
    return out
