"""The command `atlas-jax serve`: what it refuses, and how its process ends."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import httpx
import pytest
from serving import KEY

from atlas_jax import cli
from atlas_jax.errors import ConfigError
from atlas_jax.serve.auth import Keys
from atlas_jax.serve.config import Address, ServeConfig

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = """
import asyncio, sys
from fake_engine import FakeEngine
from atlas_jax.serve.config import Address, ServeConfig
from atlas_jax.serve.server import serve
config = ServeConfig(http=Address("127.0.0.1", 0), grpc=Address("127.0.0.1", 0), name="m", drain_timeout_s=float(sys.argv[1]))
engine = lambda: FakeEngine("word " * 100, pause_s=0.02)
asyncio.run(serve(config, engine, lambda text: print(text, flush=True)))
"""


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "nothing to serve"),
        (["--http", "0.0.0.0:8000"], "other machines"),
        (["--grpc", "[::]:1"], "other machines"),
        (["--grpc", "192.0.2.1:1"], "other machines"),
        (["--http", "8000"], "HOST:PORT"),
        (["--http", ":99999"], "HOST:PORT"),
        (["--http", ":1", "--api-keys", "missing.txt"], "cannot be read"),
        (["--http", ":1", "--tls-cert", "x.pem"], "belong together"),
        (["--http", ":1", "--tls-cert", "x.pem", "--tls-key", "y.pem"], "no such file"),
        (["--http", ":1", "--tls-client-ca", "x.pem"], "needs --tls-cert"),
        (["--http", ":1", "--max-body", "0"], "max_body_bytes"),
        (["--http", ":1", "--write-timeout", "-1"], "write_timeout_s"),
        (["--http", ":1", "--drafts", "many"], "auto"),
        (["--http", ":1", "--warm-up", "answers,all"], "there are answers, logprobs, grammars, scores, all, none"),
        (["--http", ":1", "--warm-up-limit", "0"], "above 0"),
        (["--http", ":1", "--nothing"], "unrecognized"),
    ],
)
def test_what_cannot_work_is_refused_before_the_model_is_loaded(options, says, capsys):
    assert cli.main(["serve", "no-such-model", *options]) == 2
    assert says in capsys.readouterr().err


def test_a_taken_address_is_refused_in_one_line(capsys):
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        for option in ("--http", "--grpc"):
            assert cli.main(["serve", "no-such-model", option, address]) == 2
            assert f"cannot listen at {address}" in capsys.readouterr().err


def test_keys_files(tmp_path, capsys):
    path = tmp_path / "keys"
    for text, says in (("# nothing\n\n", "holds no key"), ("short\n", "at least 16"), (KEY + " x\n", "without spaces")):
        path.write_text(text)
        assert cli.main(["serve", "no-such-model", "--http", ":0", "--api-keys", str(path)]) == 2
        assert says in capsys.readouterr().err


def test_addresses():
    assert Address.parse(":5") == Address("127.0.0.1", 5) and str(Address.parse("[::1]:5")) == "[::1]:5"
    for host in ("127.0.0.1", "127.9.9.9", "localhost", "[::1]"):
        assert Address.parse(f"{host}:1").loopback
    for host in ("0.0.0.0", "[::]", "10.0.0.1", "example.com", "localhost.evil.example", "127.0.0.1.evil.example"):
        assert not Address.parse(f"{host}:1").loopback
        with pytest.raises(ConfigError):
            ServeConfig(http=Address.parse(f"{host}:1"))
        assert ServeConfig(http=Address.parse(f"{host}:1"), keys=(KEY,)).keys


def test_keys():
    keys = Keys([KEY, KEY + "2"])
    assert keys.admit(f"Bearer {KEY}") and keys.admit(f"bearer {KEY}2".encode())
    for value in (
        None,
        "",
        KEY,
        "Bearer",
        "Bearer ",
        f"Basic {KEY}",
        f"Bearer {KEY}é",
        f"Bearer {KEY}\0",
        b"Bearer \xff\xfe",
    ):
        assert not keys.admit(value), value
    assert Keys([]).admit(None)
    assert KEY not in repr(vars(keys))


class Server:
    def __init__(self, drain_s: float) -> None:
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        command = [sys.executable, "-c", PROGRAM, str(drain_s)]
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self.process.stdout
        self.url = self.process.stdout.readline().split("listening: ")[1].split(",")[0]
        assert self.process.stdout.readline() == "ready\n"

    def stream(self, web: httpx.Client):
        body = dict(model="m", prompt="a", max_tokens=300, stream=True)
        return web.stream("POST", self.url + "/v1/completions", json=body, timeout=30)

    def rest(self) -> str:
        with self.process:
            return self.process.communicate(timeout=30)[0]


def test_a_server_that_is_told_to_end_lets_answers_end():
    server = Server(drain_s=30)
    with httpx.Client() as web, server.stream(web) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        with httpx.Client() as other:
            assert other.get(server.url + "/ready").status_code == 503
            refused = other.post(server.url + "/v1/completions", json=dict(model="m", prompt="a"))
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        assert "data: [DONE]" in list(lines)
    assert server.rest() == "draining\nstopped\n" and server.process.returncode == 0


def test_a_server_can_be_ended_while_it_loads():
    command = [sys.executable, "-m", "atlas_jax.cli", "serve", "tiny-agent", "--http", ":0", "--grpc", ":0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr and "loading the model" in process.stderr.readline()
        time.sleep(1)  # into the middle of it
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0, "it waited for the loading to end"
        assert process.stderr.read().splitlines()[-1] == "atlas-jax: stopped"


@pytest.mark.long
def test_draining_has_an_end_and_a_killed_server_ends_its_streams():
    server = Server(drain_s=0.2)
    with httpx.Client() as web, server.stream(web) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        left = [line for line in lines if line]
        assert '"cancelled"' in left[-1] and "data: [DONE]" not in left
    assert "broken off" in server.rest() and server.process.returncode == 0
    server = Server(drain_s=1)
    with httpx.Client() as web, server.stream(web) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.kill()
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    server.rest()
