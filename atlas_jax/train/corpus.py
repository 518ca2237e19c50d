"""The packed text that tiny-agent learns from: conversations, made-up tool dialogues, and permissively licensed text.

    python -m atlas_jax.train.corpus --conversations tau_airline.jsonl --out .train/corpus --docs SITE_PACKAGES...

writes packed token files (not committed) and a manifest that names every source and its licence. All trials of a
held-out task stay out together, because trials share the user's request.
"""

import argparse
import itertools
import json
import lzma
import pathlib
import random
import sys

import numpy as np
import tokenizers

from atlas_jax.text.chat import render_chat
from atlas_jax.text.tokenizer import Tokenizer
from atlas_jax.train.conversations import held_out, load_conversations, vary
from atlas_jax.train.sources import docstrings, packages, service_docs, stdlib
from atlas_jax.train.synthetic import tool_dialogue

ASSETS = pathlib.Path(__file__).parent.parent / "data" / "tiny_agent"
REPLY, START = 0x8000, 0x4000  # flags above the 13 token bits: loss-weighted reply token, first token of a document


class Packer:
    """Encodes documents to flagged uint16 tokens: reply tokens carry REPLY, the first token of a document START."""

    def __init__(self, assets: pathlib.Path = ASSETS) -> None:
        self.chat = Tokenizer(assets)
        self.bpe = tokenizers.Tokenizer.from_file(str(assets / "tokenizer.json"))
        self.end, self.open, self.close = map(self.bpe.token_to_id, ("<|endoftext|>", "</think>", "<|im_end|>"))

    def render(self, messages: list[dict], tools: list[dict]) -> str:
        return render_chat(self.chat, messages, tools=tools, add_generation_prompt=False)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Flagged tokens of each text and <|endoftext|>; a reply runs from the end of its think block to <|im_end|>."""
        out = []
        for encoding in self.bpe.encode_batch(texts, add_special_tokens=False):
            ids = np.array([*encoding.ids, self.end], np.uint16)
            at = np.arange(len(ids))
            opened = np.maximum.accumulate(np.where(ids == self.open, at, -1))
            closed = np.maximum.accumulate(np.where(ids == self.close, at, -1))
            reply = (opened > np.concatenate([[-1], closed[:-1]])) & (opened < at - 1)
            ids |= np.where(reply, REPLY, 0).astype(np.uint16)
            ids[0] |= START
            out.append(ids)
        return out


def save(path: pathlib.Path, docs: list[np.ndarray]) -> int:
    """Writes documents one after another; returns their tokens."""
    flat = np.concatenate(docs)
    path.write_bytes(lzma.compress(flat.tobytes(), preset=6))
    return len(flat)


def load(path: pathlib.Path) -> np.ndarray:
    """Flagged uint16 tokens written by `save`."""
    return np.frombuffer(lzma.decompress(path.read_bytes()), np.uint16)


def chats(conversations: dict[str, list[dict]], variants: int, packer: Packer) -> tuple[list[str], list[str]]:
    """Training conversations with `variants` renamed copies each, shuffled, and held-out ones; all rendered."""
    tools = json.loads((ASSETS / "airline_tools.json").read_text())
    hold = held_out(conversations)
    rows = []
    for name, messages in conversations.items():
        if name not in hold:
            copies = [vary(messages, random.Random(f"{name}/{v}")) for v in range(variants)]
            rows += [packer.render(m, tools) for m in (messages, *copies)]
    random.Random(1).shuffle(rows)
    return rows, [packer.render(conversations[name], tools) for name in sorted(hold)]


def texts(sites: list[str], limit: int) -> tuple[list[str], dict[str, dict]]:
    """Shuffled documents of the standard library and of the packages in `sites`, and the packages with their licences.

    A package gives at most `limit` characters; botocore, the largest body of plain English, ten times that.
    """
    out, used = [text for _, text in stdlib()], {}
    for name, licence, roots in itertools.chain(*(packages(pathlib.Path(site)) for site in sites)):
        if name in used:
            continue
        read, most = (service_docs, 10 * limit) if name == "botocore" else (docstrings, limit)
        mine, size = [], 0
        for doc in itertools.chain(*map(read, roots)):
            if size < most:
                mine.append(doc)
                size += len(doc)
        if size > 10_000:
            out += mine
            used[name] = {"licence": licence, "chars": size}
    random.Random(3).shuffle(out)
    return out, used


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--conversations", required=True)
    p.add_argument("--docs", nargs="*", default=[], help="site-packages folders whose permissive packages are read")
    p.add_argument("--out", required=True)
    p.add_argument("--variants", type=int, default=24, help="renamed copies of each training conversation")
    p.add_argument("--synthetic", type=int, default=24_000, help="made-up tool dialogues")
    p.add_argument("--package-chars", type=int, default=4_000_000, help="most characters taken of one package")
    a = p.parse_args()
    out, packer, rng = pathlib.Path(a.out), Packer(), random.Random(2)
    out.mkdir(parents=True, exist_ok=True)
    conversations = load_conversations(a.conversations)
    train, held = chats(conversations, a.variants, packer)
    made = [packer.render(*tool_dialogue(rng)) for _ in range(a.synthetic)]
    plain, used = texts(a.docs, a.package_chars)
    docs = packer.encode(plain)
    apart = set(range(0, len(docs), max(1, len(docs) // 40)))  # about 40 documents, to watch the loss on
    parts = {
        "chat": packer.encode(train),
        "held": packer.encode(held),
        "synthetic": packer.encode(made),
        "text": [d for i, d in enumerate(docs) if i not in apart],
        "text_held": [d for i, d in enumerate(docs) if i in apart],
    }
    tokens = {name: save(out / f"{name}.xz", docs) for name, docs in parts.items()}
    manifest = {
        "tokens": tokens,
        "held_out": held_out(conversations),
        "python": sys.version.split()[0],
        "packages": used,
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1))
    print(tokens)


if __name__ == "__main__":
    main()
