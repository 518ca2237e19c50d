"""Servers in a thread of the test's own process, and certificates for them."""

import asyncio
import contextlib
import pathlib
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import httpx

from atlas_jax.serve.config import Address, ServeConfig
from atlas_jax.serve.server import Servers

ANYWHERE = Address("127.0.0.1", 0)
KEY = "a-key-for-the-tests-0123456789"
MODEL = "tiny-agent"


@contextlib.contextmanager
def running(engine: Any, **options: Any) -> Iterator[Servers]:
    """Both servers in front of `engine`, on free ports of this machine; None leaves them without an engine."""
    given: dict[str, Any] = dict(http=ANYWHERE, grpc=ANYWHERE, name=MODEL, drain_timeout_s=5.0) | options
    config = ServeConfig(**given)
    loop, up, over, box = asyncio.new_event_loop(), threading.Event(), asyncio.Event(), dict[str, Any]()

    async def main() -> None:
        servers = box["servers"] = Servers(config)
        await servers.start()
        if engine is not None:
            await servers.load(lambda: engine)
        up.set()
        await over.wait()
        await servers.stop()

    def work() -> None:
        try:
            loop.run_until_complete(main())
        except BaseException as error:
            box["error"] = error
        finally:
            up.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    up.wait(600)
    if "error" in box:
        raise box["error"]
    box["servers"].loop = loop
    try:
        yield box["servers"]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(30)
        assert not thread.is_alive(), "the servers did not stop"
        loop.close()
        if "error" in box:
            raise box["error"]


def certificate(folder: pathlib.Path) -> tuple[str, str]:
    """A self-signed certificate for this machine, and its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    command += ["-subj", "/CN=localhost", "-addext", names, "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return str(cert), str(key)


@contextlib.contextmanager
def web_of(server: Servers, scheme: str = "http", **options: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{scheme}://localhost:{server.http_port}", timeout=30, **options) as web:
        yield web
