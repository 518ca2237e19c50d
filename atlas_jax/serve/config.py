"""How the servers are run."""

from __future__ import annotations

import dataclasses
import ipaddress
import pathlib

from atlas_jax.errors import ConfigError

MIN_KEY = 16  # characters of an API key


@dataclasses.dataclass(frozen=True)
class Address:
    """Where a server listens; port 0 takes a free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Of "HOST:PORT"; ":PORT" is this machine alone. Raises ConfigError."""
        host, colon, port = text.rpartition(":")
        if not colon or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(f"an address is HOST:PORT or :PORT, as in 127.0.0.1:8000; got {text[:60]!r}")
        return cls(host.strip("[]") or "127.0.0.1", int(port))

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def with_port(self, port: int) -> Address:
        """The same host, and the port that was found."""
        return Address(self.host, port)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """Addresses, who may ask, and limits.

    Attributes:
        http, grpc: None leaves that server out.
        name: of the model, for clients.
        keys: API keys of HTTP, tokens of gRPC; empty lets everyone in.
        anonymous: lets everyone in from other machines too; without it an address that others can reach needs keys.
        tls_cert, tls_key: PEM files, for both servers. `tls_client_ca` asks clients for certificates signed by it.
        max_body_bytes: of a request, as it arrives.
        max_prompt_tokens: of a prompt; None: what a sequence holds.
        max_choices: of `n`, and times prompts of one completions request.
        max_batch: requests of one GenerateBatch.
        write_timeout_s: a client that takes nothing for so long is given up.
        request_timeout_s: the longest a request may take, waiting included; None: no limit.
        drain_timeout_s: how long answers may go on after SIGTERM.
        log_requests: logs what users send and get. Nothing of it is logged otherwise.
    """

    http: Address | None = None
    grpc: Address | None = None
    name: str = "model"
    keys: tuple[str, ...] = ()
    anonymous: bool = False
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    max_body_bytes: int = 8 << 20
    max_prompt_tokens: int | None = None
    max_choices: int = 16
    max_batch: int = 256
    write_timeout_s: float = 30.0
    request_timeout_s: float | None = None
    drain_timeout_s: float = 60.0
    log_requests: bool = False

    def __post_init__(self) -> None:
        if self.http is None and self.grpc is None:
            raise ConfigError("nothing to serve: give --http ADDRESS, --grpc ADDRESS or both")
        for address in (self.http, self.grpc):
            if address and not address.loopback and not (self.keys or self.tls_client_ca or self.anonymous):
                raise ConfigError(
                    f"{address} can be reached from other machines: give --api-keys FILE, or --anonymous to let everyone in, "
                    f"or listen on 127.0.0.1:{address.port}"
                )
        for key in self.keys:
            if len(key) < MIN_KEY or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError(f"an API key is at least {MIN_KEY} printable ASCII characters without spaces")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key belong together; give both")
        if self.tls_client_ca and not self.tls_cert:
            raise ConfigError("--tls-client-ca needs --tls-cert and --tls-key")
        for path in (self.tls_cert, self.tls_key, self.tls_client_ca):
            if path and not pathlib.Path(path).is_file():
                raise ConfigError(f"{path}: no such file")
        for name in "max_body_bytes max_choices max_batch".split():
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in "write_timeout_s request_timeout_s drain_timeout_s max_prompt_tokens".split():
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")


def read_keys(path: str) -> tuple[str, ...]:
    """API keys, one a line; empty lines and those that begin with # are skipped. Raises ConfigError."""
    try:
        lines = pathlib.Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or 'no text'})") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{path} holds no key; write one a line")
    return keys
