"""Batches drawn from the packed corpus: every row starts at a document; a conversation has its row to itself."""

import pathlib
import queue
import threading

import numpy as np

from atlas_jax.train import corpus

TOKEN = 0x3FFF
QUIET = 0.2  # weight of what others wrote in a conversation


class Source:
    """One packed file: flagged tokens and where its documents start."""

    def __init__(self, path: pathlib.Path, chat: bool):
        self.tokens = corpus.load(path)
        self.starts = np.flatnonzero(self.tokens & corpus.START)
        self.chat = chat

    def document(self, i: int) -> np.ndarray:
        end = self.starts[i + 1] if i + 1 < len(self.starts) else len(self.tokens)
        return self.tokens[self.starts[i] : end]

    def window(self, rng, length: int) -> np.ndarray:
        at = self.starts[rng.integers(len(self.starts))]
        at = min(at, max(0, len(self.tokens) - length))
        return self.tokens[at : at + length]

    def anywhere(self, rng, length: int) -> np.ndarray:
        at = rng.integers(max(1, len(self.tokens) - length))
        return self.tokens[at : at + length]

    def weights(self, flagged: np.ndarray) -> np.ndarray:
        """Loss weight of each token: 1 in plain text and replies, QUIET elsewhere, 0 where a document starts."""
        quiet = QUIET if self.chat else 1.0
        w = np.where(flagged & corpus.REPLY, 1.0, quiet)
        return np.where(flagged & corpus.START, 0.0, w).astype(np.float32)


def load(folder: pathlib.Path) -> dict[str, Source]:
    return {
        n: Source(folder / f"{n}.xz", n != "text")
        for n in ("text", "chat", "synthetic")
        if (folder / f"{n}.xz").exists()
    }


def draw(sources: dict[str, Source], mix: dict[str, float], rng, B: int, T: int, R: int, steps: int):
    """One batch: ids [B, T] int32, weights [B, T] float32, rows [B, R] int32 ascending, chosen by weight."""
    names = rng.choice(list(mix), size=B, p=np.array(list(mix.values())) / sum(mix.values()))
    ids, weights = np.zeros((B, T), np.int32), np.zeros((B, T), np.float32)
    for b, name in enumerate(names):
        source = sources[name]
        if name != "chat":
            parts = [(source, source.window(rng, T))]
        elif T < 4096:  # shorter than the tools and policy that open a conversation
            parts = [(source, source.anywhere(rng, T))]
        else:
            talk = source.document(rng.integers(len(source.starts)))[:T]
            parts = [(source, talk), (sources["text"], sources["text"].anywhere(rng, T - len(talk)))]
        row = np.concatenate([p for _, p in parts])
        ids[b, : len(row)] = row & TOKEN
        weights[b, : len(row)] = np.concatenate([s.weights(p) for s, p in parts])
    score = np.log(weights[:, 2 : T - steps] + 1e-6) + rng.gumbel(size=(B, T - steps - 2))
    rows = np.sort(np.argpartition(-score, R, 1)[:, :R], 1).astype(np.int32)
    return ids, weights, rows


def held_rows(path: pathlib.Path, T: int, steps: int, R: int):
    """Held-out conversations, one a row: ids and reply [n, T], rows [n, R] (two before reply tokens, the first R)."""
    source = Source(path, True)
    n = len(source.starts)
    ids, reply, rows = np.zeros((n, T), np.int32), np.zeros((n, T), np.float32), np.zeros((n, R), np.int32)
    for i in range(n):
        doc = source.document(i)[:T]
        ids[i, : len(doc)], reply[i, : len(doc)] = doc & TOKEN, (doc & corpus.REPLY) > 0
        at = np.flatnonzero(reply[i])
        at = at[(at >= 2) & (at < T - steps)][:R] - 2
        rows[i, : len(at)] = at  # the rest repeats row 0, which lies outside every reply
    return ids, reply, rows


def stream(make, depth: int = 6, threads: int = 4):
    """An endless iterator of make(rng), filled by background threads."""
    ready: queue.Queue = queue.Queue(depth)

    def fill(seed):
        rng = np.random.default_rng(seed)
        while True:
            ready.put(make(rng))

    for i in range(threads):
        threading.Thread(target=fill, args=(i,), daemon=True).start()
    while True:
        yield ready.get()
