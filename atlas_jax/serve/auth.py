"""Who may ask: bearer tokens, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable


class Keys:
    """API keys; without any, everyone is let in. Only digests are kept, so that neither a dump nor timing gives a key away."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def admit(self, authorization: str | bytes | None) -> bool:
        """Whether the value of an Authorization header ("Bearer KEY") names a key."""
        if not self._digests:
            return True
        value = authorization.encode("latin-1", "replace") if isinstance(authorization, str) else authorization or b""
        scheme, _, key = value.partition(b" ")
        given = _digest(key.strip())
        found = False
        for digest in self._digests:  # all of them, so that the time says nothing
            found |= hmac.compare_digest(given, digest)
        return found and scheme.lower() == b"bearer"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
