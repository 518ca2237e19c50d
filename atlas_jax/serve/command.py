"""`atlas-jax serve`: its options, and running it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import pathlib
import sys
import time
from typing import Any

from atlas_jax.config import WARM_UPS
from atlas_jax.errors import ConfigError
from atlas_jax.terminal import Progress as Bars

PROGRESS_S = 5.0
RUN_FIELDS = {  # of `RunConfig`, which has their defaults
    "max_drafts": ("N", "the most drafts that a request may ask for (default: 7, or --drafts)"),
    "prefill_chunk": ("N", "tokens of a prompt that are computed between two rounds of the others (default: 256)"),
    "kv_pages": ("N", "pages for keys and values (default: as many as all slots can fill)"),
    "host_snapshot_bytes": ("BYTES", "host memory for snapshots that the device has no room for (default: none)"),
}
EXTRA = "serving needs further packages: pip install 'atlas-jax[serve]'"


def add_options(command: argparse.ArgumentParser) -> None:
    listening = command.add_argument_group("where")
    listening.add_argument(
        "--http", metavar="ADDRESS", help="OpenAI-compatible HTTP at HOST:PORT, or :PORT on loopback"
    )
    listening.add_argument("--grpc", metavar="ADDRESS", help="gRPC at HOST:PORT, or :PORT on loopback")
    listening.add_argument("--name", metavar="NAME", help="of the model, for clients (default: MODEL's last part)")
    access = command.add_argument_group("who may ask")
    access.add_argument("--api-keys", metavar="FILE", help="keys, one a line; clients send one as a bearer token")
    access.add_argument("--anonymous", action="store_true", help="let everyone in, from other machines too")
    access.add_argument("--tls-cert", metavar="FILE", help="certificate chain in PEM, for both servers")
    access.add_argument("--tls-key", metavar="FILE", help="its private key")
    access.add_argument("--tls-client-ca", metavar="FILE", help="let in only clients with certificates signed by these")
    command.add_argument(
        "--weights", metavar="FORM", help="how the random weights of a shape are quantised: int4, nvfp4, …"
    )
    limits = command.add_argument_group("limits")
    limits.add_argument("--slots", type=int, default=16, metavar="N", help="sequences decoded together (default: 16)")
    limits.add_argument(
        "--max-waiting", type=int, default=256, metavar="N", help="requests that may wait (default: 256)"
    )
    limits.add_argument(
        "--max-prompt", type=int, metavar="N", help="tokens of a prompt (default: what a sequence holds)"
    )
    limits.add_argument("--max-body", type=int, default=8, metavar="MIB", help="of a request, in MiB (default: 8)")
    limits.add_argument("--request-timeout", type=float, metavar="S", help="seconds a request may take (default: any)")
    limits.add_argument(
        "--write-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="for a client to read on, or be given up (default: 30)",
    )
    limits.add_argument(
        "--drain-timeout", type=float, default=60.0, metavar="S", help="for answers to end after SIGTERM (default: 60)"
    )
    for name, (letter, text) in RUN_FIELDS.items():
        limits.add_argument(f"--{name.replace('_', '-')}", type=int, metavar=letter, help=text)
    starting = command.add_argument_group("what is compiled before the first request")
    starting.add_argument(
        "--warm-up",
        type=warm_ups,
        default=("answers",),
        metavar="KINDS",
        help=f"of requests with the default drafter: {', '.join(WARM_UPS)}, with commas between; all; none (default: answers)",
    )
    starting.add_argument(
        "--warm-up-limit",
        type=seconds,
        default=600.0,
        metavar="S",
        help="take requests after so many seconds at the latest, and compile the rest beside them (default: 600)",
    )
    command.add_argument(
        "--log-requests", action="store_true", help="log what users send and get (default: nothing of it)"
    )
    command.set_defaults(keep_executables=True)


def seconds(text: str) -> float:
    """Above 0."""
    if not float(text) > 0:
        raise argparse.ArgumentTypeError("it must be above 0")
    return float(text)


def warm_ups(text: str) -> tuple[str, ...]:
    """Of "KIND,KIND", "all" or "none"."""
    if text in ("all", "none"):
        return WARM_UPS if text == "all" else ()
    names = tuple(part.strip() for part in text.split(","))
    if unknown := [name for name in names if name not in WARM_UPS]:
        raise argparse.ArgumentTypeError(
            f"there is no {', '.join(map(repr, unknown))}; there are {', '.join(WARM_UPS)}, all, none"
        )
    return names


def run(args: argparse.Namespace) -> int:
    """Raises `AtlasError` for what is wrong in the arguments, the addresses or the model."""
    try:
        from atlas_jax.serve.config import Address, ServeConfig, read_keys
        from atlas_jax.serve.server import serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"{EXTRA} ({error.name} is missing)") from None
    config = ServeConfig(
        http=Address.parse(args.http) if args.http else None,
        grpc=Address.parse(args.grpc) if args.grpc else None,
        name=args.name or pathlib.PurePath(args.model.removeprefix("shape:")).name,
        keys=read_keys(args.api_keys) if args.api_keys else (),
        anonymous=args.anonymous,
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        tls_client_ca=args.tls_client_ca,
        max_body_bytes=args.max_body << 20,
        max_prompt_tokens=args.max_prompt,
        request_timeout_s=args.request_timeout,
        write_timeout_s=args.write_timeout,
        drain_timeout_s=args.drain_timeout,
        log_requests=args.log_requests,
    )
    logging.basicConfig(
        level=logging.INFO if args.log_requests else logging.WARNING, format="%(asctime)s %(name)s %(message)s"
    )
    logging.getLogger("atlas_jax.engine.warm_up").setLevel(logging.INFO)  # requests may wait minutes for what it does

    async def work() -> None:
        await serve(config, lambda: make_engine(args), _tell)
        # A thread that loads or compiles cannot be interrupted, and the interpreter would wait for it, for minutes perhaps.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    asyncio.run(work())
    return 0


def make_engine(args: argparse.Namespace) -> Any:
    """Loads the model that the arguments name."""
    from atlas_jax import cli
    from atlas_jax.engine.api import EngineConfig
    from atlas_jax.engine.engine import Engine

    progress = Progress()
    try:
        runtime = cli.load(args, progress)
    finally:
        progress.clear()
    _tell(runtime.in_force)
    config = EngineConfig(
        drafter=args.drafter,
        drafts=args.drafts,
        max_waiting=args.max_waiting,
        warm_up=args.warm_up,
        warm_up_s=args.warm_up_limit,
    )
    return Engine(runtime, config)


class Progress(Bars):
    """Bars while the model is loaded; then a line now and again on how far the compiling is, also where there is no terminal."""

    def __init__(self) -> None:
        super().__init__()
        self._told = 0.0

    def __call__(self, event: str | int, total: int | None = None) -> None:
        if not isinstance(event, str):
            super().__call__(event, total)
        elif event.endswith("ready") and time.monotonic() > self._told + PROGRESS_S:
            self._told = time.monotonic()
            _tell(event)


def _tell(text: str) -> None:
    print(f"atlas-jax: {text}", file=sys.stderr, flush=True)
