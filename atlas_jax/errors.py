"""Typed errors. Each message says what was wrong and what would work; the command line prints it and exits with 2."""


class AtlasError(Exception):
    """Base of all errors that a caller can cause and mend."""


class ConfigError(AtlasError, ValueError):
    """A model or run configuration that cannot work."""


class CheckpointError(AtlasError, ValueError):
    """A checkpoint that is missing, damaged or of a form that is not supported."""


class RequestError(AtlasError, ValueError):
    """An argument of a request (prompt, sampling values, drafts …) that cannot work.

    Attributes:
        field: its name, where it is one alone.
    """

    def __init__(self, message: str = "", field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class GrammarError(RequestError):
    """A grammar that cannot be used: it is none, nothing matches it, or it asks too much."""


class StateError(AtlasError, ValueError):
    """A step that would leave the decoding state out of bounds: a dead slot, a bad row or accept count, a full sequence."""


class DecodeError(AtlasError, RuntimeError):
    """A request ended because its logits were not finite."""
