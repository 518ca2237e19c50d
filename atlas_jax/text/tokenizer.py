"""Text to token ids and back, from a model directory's `tokenizer.json`."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import tokenizers

from atlas_jax.errors import CheckpointError, RequestError
from atlas_jax.weights.checkpoint import read_json

SPECIAL_TOKENS = "bos_token eos_token unk_token sep_token pad_token cls_token mask_token".split()
REPLACEMENT = "\ufffd"  # what bytes that are no UTF-8 are decoded to


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level vocabularies write bytes with: printable ones stand for themselves, others from U+0100 on."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTES = _byte_alphabet()


class Tokenizer:
    """The tokenizer of a model, and what its chat template needs to know.

    Attributes:
        templates: chat templates by name, "default" among them; empty if the model has none.
        special_tokens: text of the tokens that tokenizer_config.json gives a role (`eos_token` …).

    Raises:
        CheckpointError: the files are missing or damaged.
    """

    def __init__(self, directory: str | pathlib.Path) -> None:
        self.directory = pathlib.Path(directory)
        path = self.directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: not there; add it, or give prompts as token ids")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more precise
            raise CheckpointError(f"{path}: cannot be read ({error}); download the file again") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._added = self._tokenizer.get_added_tokens_decoder()
        config_path = self.directory / "tokenizer_config.json"
        config = read_json(config_path) if config_path.exists() else {}
        self.special_tokens = {name: _content(config[name]) for name in SPECIAL_TOKENS if config.get(name)}
        self.templates = _templates(self.directory, config.get("chat_template"))

    @property
    def vocab_size(self) -> int:
        """One more than the highest id; a model may have more ids than that, which stand for nothing."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    @functools.cached_property
    def max_token_bytes(self) -> int:
        """What the longest token stands for, in bytes, or a little more."""
        return max(map(self._size, self._tokenizer.get_vocab(with_added_tokens=True).items()), default=1)

    def _size(self, entry: tuple[str, int]) -> int:
        token, token_id = entry
        written_as_bytes = token_id not in self._added and _BYTES.keys() >= set(token)
        return len(token) if written_as_bytes else len(token.encode())

    def token_id(self, token: str) -> int | None:
        """The id of a token's exact text, special tokens included."""
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """Token ids. Special tokens written in the text become their ids; none is added.

        Raises:
            RequestError: half of a surrogate pair, which is no text.
        """
        try:
            # A batch, since the library lets other threads run only while it encodes one; a long text takes seconds.
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError("the text cannot be encoded: it has half of a surrogate pair") from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids; ids without a token give nothing, bytes that are no UTF-8 give U+FFFD."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, which need not be whole characters; empty for ids without a token."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id not in self._added and all(char in _BYTES for char in token):
            return bytes(_BYTES[char] for char in token)
        return self.decode([token_id], skip_special_tokens=False).encode()

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        """A decoder for ids that arrive one by one."""
        return TextStream(lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens))


class TextStream:
    """Incremental `decode`: the pieces join to the text of all ids, and none ends within a character."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []  # a few whole characters that were sent, then what is not sent entirely
        self._context = ""  # the text of the former: what a token decodes to may depend on the one before it
        self._whole = 0  # how many ids they are
        self._sent = 0  # characters sent of the rest

    def push(self, token_id: int) -> str:
        """The text that the id makes certain; empty while a character is incomplete."""
        self._ids.append(int(token_id))
        text = self._decode(self._ids)[len(self._context) :]
        # At most one replacement character at the end can be the beginning of a character.
        complete = not text.endswith(REPLACEMENT)
        piece = text[self._sent : len(text) if complete else -1]
        self._sent += len(piece)
        if complete and piece:
            self._ids, self._context = self._ids[self._whole :], ""
            self._whole, self._context, self._sent = len(self._ids), self._decode(self._ids), 0
        return piece

    def flush(self) -> str:
        """What is left at the end of the ids: U+FFFD for a character that was not completed."""
        piece = self._decode(self._ids)[len(self._context) + self._sent :]
        self._sent += len(piece)
        return piece


def load_tokenizer(directory: str | pathlib.Path) -> Tokenizer | None:
    """The tokenizer of a model directory, or None if it has none: such a model takes and gives token ids only.

    Raises:
        CheckpointError: the files are damaged.
    """
    return Tokenizer(directory) if (pathlib.Path(directory) / "tokenizer.json").exists() else None


def _content(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)


def _templates(directory: pathlib.Path, configured: Any) -> dict[str, str]:
    """Files go before the key of tokenizer_config.json, which is one template or a list of named ones."""
    try:
        named = {path.stem: path.read_text() for path in sorted(directory.glob("additional_chat_templates/*.jinja"))}
        if (directory / "chat_template.jinja").exists():
            return {"default": (directory / "chat_template.jinja").read_text()} | named
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{directory}: a chat template cannot be read ({error}); download it again") from error
    if configured is None:
        return named
    if isinstance(configured, str):
        return {"default": configured}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in configured}
    except (TypeError, KeyError) as error:
        path = directory / "tokenizer_config.json"
        raise CheckpointError(f"{path}: chat_template must be text or a list of named templates") from error
