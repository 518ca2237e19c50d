"""The text tiny-agent learns from: tool-calling conversations, Python's standard library, and docstrings of installed packages.

    python -m atlas_jax.train.corpus --conversations tau_airline.jsonl --out .train/corpus --docs SITE_PACKAGES...

writes packed token files (not committed) and a manifest that names every source and its licence. The conversations of
`HELD_OUT` tasks are never written: all trials of a task are held out together, because trials share the user's request.
"""

import argparse
import ast
import gzip
import html
import importlib.metadata
import itertools
import json
import lzma
import pathlib
import random
import re
import sys

import numpy as np

ASSETS = pathlib.Path(__file__).parent.parent / "data" / "tiny_agent"
EVERY = 10  # every 10th task is held out: 5 of 50 tasks, 3 trials each
REPLY, START = 0x8000, 0x4000  # flags above the 13 token bits: loss-weighted reply token, first token of a document
PERMISSIVE = re.compile(r"MIT|BSD|Apache|PSF|Python Software Foundation|ISC|HPND|MIT-CMU|Unlicense", re.I)
COPYLEFT = re.compile(r"GPL|MPL|Mozilla|EPL|CDDL", re.I)


def load_conversations(path: str | pathlib.Path) -> dict[str, list[dict]]:
    """id -> messages in the form chat templates expect; a closing user message that nobody answers is dropped."""
    out = {}
    for line in pathlib.Path(path).read_text().splitlines():
        row = json.loads(line)
        messages = []
        for m in row["messages"]:
            m = {k: m[k] for k in ("role", "content", "tool_calls") if m.get(k) is not None}
            if calls := m.pop("tool_calls", None):
                m["tool_calls"] = [
                    {"type": "function", "function": {"name": c["name"], "arguments": json.loads(c["arguments"])}}
                    for c in calls
                ]
            messages.append(m)
        while messages and messages[-1]["role"] == "user":
            messages.pop()
        out[row["id"]] = messages
    return out


def held_out(ids) -> list[str]:
    """The ids kept out of training, whole tasks at a time (`airline-<task>-<trial>`)."""
    tasks = sorted({int(i.split("-")[1]) for i in ids})[::EVERY]
    return [i for i in ids if int(i.split("-")[1]) in tasks]


def schema(values: list) -> dict:
    """A JSON schema that all `values` satisfy: types, and for objects and arrays the same of their parts."""
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    names = sorted({kinds[type(v)] for v in values})
    names = ["number"] if names == ["integer", "number"] else names
    out: dict = {"type": names[0] if len(names) == 1 else names}
    if objects := [v for v in values if isinstance(v, dict)]:
        keys = list(dict.fromkeys(k for o in objects for k in o))
        out["properties"] = {k: schema([o[k] for o in objects if k in o]) for k in keys}
        out["required"] = [k for k in keys if all(k in o for o in objects)]
    if items := [x for v in values if isinstance(v, list) for x in v]:
        out["items"] = schema(items)
    return out


def derive_tools(conversations: dict[str, list[dict]]) -> list[dict]:
    """Tool declarations from the calls the conversations make: the source has none of its own."""
    calls: dict[str, list[dict]] = {}
    for messages in conversations.values():
        for m in messages:
            for c in m.get("tool_calls", ()):
                calls.setdefault(c["function"]["name"], []).append(c["function"]["arguments"])
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": name.replace("_", " ").capitalize() + ".",
                "parameters": {"type": "object", "properties": {}, "required": []} | schema(calls[name]),
            },
        }
        for name in sorted(calls)
    ]


FIRST = "Ada Alan Aisha Boris Carmen Chidi Dana Elif Farid Grace Hana Igor Ivy Jonas Keiko Lars Mateo Nadia Oskar Priya Quinn Rosa Samir Tessa Ugo Vera Wei Ximena Yara Zane Bruno Clara Diego Esther Felix Gita Hugo Ines Jamal Kira"
LAST = "Abara Bauer Costa Dubois Eklund Fischer Gupta Haas Ito Jansen Keller Lopes Mori Novak Okafor Park Quist Reyes Sato Tanaka Umar Vega Weber Xu Yilmaz Zhang Berg Chen Diaz Ford Green Hill Jain Kaur Lund Marsh Nash Owens Price Ross"


def vary(messages: list[dict], rng: random.Random) -> list[dict]:
    """The same conversation about other people: names, account, card, flight and booking ids renamed consistently.

    Digits keep their count and bookings their letter/digit pattern, so the model must copy what it reads.
    """
    body = json.dumps(messages[1:], ensure_ascii=False)
    flat = body.replace('\\"', '"')
    table: dict[str, str] = {}

    def digits(s):
        return re.sub(r"\d", lambda _: rng.choice("0123456789"), s)

    def letters(s):
        return re.sub(r"[A-Z]", lambda _: rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), digits(s))

    for kind, pool in (("first_name", FIRST.split()), ("last_name", LAST.split())):
        for name in sorted(set(re.findall(rf'"{kind}": ?"(\w+)"', flat))):
            table[name] = rng.choice(pool)
            table[name.lower()] = table[name].lower()
    for name in sorted(set(re.findall(r"\b([a-z]+)_[a-z]+_\d{4}\b", flat)) - table.keys()):
        table[name] = rng.choice(FIRST.split()).lower()
        table[name.capitalize()] = table[name].capitalize()
    for last in sorted(set(re.findall(r"\b[a-z]+_([a-z]+)_\d{4}\b", flat)) - table.keys()):
        table[last] = rng.choice(LAST.split()).lower()
        table[last.capitalize()] = table[last].capitalize()
    for four in sorted(set(re.findall(r'"last_four": ?"(\d{4})"', flat))):
        table[four] = digits(four)
    for account in sorted(set(re.findall(r"\b(?:[a-z]+_[a-z]+|certificate)_(\d{4,7})\b", flat))):
        table[account] = digits(account)
    for code in sorted(set(re.findall(r"\b[A-Z0-9]{6}\b", flat))):
        table[code] = letters(code) if re.search("[A-Z]", code) else code
    for flight in sorted(set(re.findall(r"\bHAT\d{3}\b", flat))):
        table[flight] = "HAT" + digits(flight[3:])
    table = {k: v for k, v in table.items() if k not in ("and", "the", "card", "credit", "gift", "Card", "Credit", "Gift")}
    if table:
        words = "|".join(sorted(map(re.escape, table), key=len, reverse=True))
        body = re.sub(rf"(?<![A-Za-z0-9])({words})(?![A-Za-z0-9])", lambda m: table[m[1]], body)
    return messages[:1] + json.loads(body)


def docstrings(root: pathlib.Path):
    """Documents of one package: each module's docstrings under their qualified names and signatures."""
    for path in sorted(root.rglob("*.py")):
        if {"tests", "test", "testing", "_vendor", "vendored"} & set(path.parts):
            continue
        try:
            tree = ast.parse(path.read_text(errors="strict"))
        except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError):
            continue
        module = ".".join((root.name, *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
        parts = []
        for node in ast.walk(tree):
            if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                continue
            text = ast.get_docstring(node)
            if text and len(text) > 60:
                name = getattr(node, "name", "")
                args = f"({ast.unparse(node.args)})" if isinstance(node, ast.FunctionDef) else ""
                parts.append(f"## {module}{'.' + name if name else ''}{args[:200]}\n\n{text}\n")
        if parts:
            yield "\n".join(parts)


def service_docs(root: pathlib.Path):
    """Documents of botocore's service models: what each operation and each of its parameters does."""
    newest = {path.parent.parent: path for path in sorted(root.glob("data/*/*/service-2.json.gz"))}
    for path in newest.values():
        model = json.loads(gzip.decompress(path.read_bytes()))
        parts, size = [], 0
        for name, operation in model["operations"].items():
            members = model["shapes"].get(operation.get("input", {}).get("shape"), {}).get("members", {})
            lines = [f"- {k}: {m['documentation']}" for k, m in members.items() if m.get("documentation")]
            text = "\n".join([f"## {path.parent.parent.name}.{name}\n", operation.get("documentation", ""), *lines])
            text = html.unescape(re.sub(r"<[^>]+>", "", re.sub(r"</?p>\s*", "\n", text)))
            text = re.sub(r"[ \t]+", " ", re.sub(r"\s*\n\s*", "\n", text)).strip()
            parts, size = [*parts, text], size + len(text)
            if size > 8_000:
                yield "\n\n".join(parts)
                parts, size = [], 0
        if parts:
            yield "\n\n".join(parts)


def packages(site: pathlib.Path):
    """(name, licence, import roots) of the distributions in `site` whose metadata states a permissive licence."""
    for dist in sorted(importlib.metadata.distributions(path=[str(site)]), key=lambda d: d.metadata["Name"].lower()):
        meta = dist.metadata
        licence = meta.get("License-Expression") or "; ".join(
            c.split(" :: ")[-1] for c in meta.get_all("Classifier", []) if c.startswith("License")
        ) or (meta.get("License") or "").split("\n")[0]
        if not PERMISSIVE.search(licence) or COPYLEFT.search(licence):
            continue
        tops = sorted({f.parts[0] for f in dist.files or () if len(f.parts) > 1 and f.suffix == ".py"})
        yield meta["Name"], licence, [site / t for t in tops if (site / t).is_dir() and t[0] not in ".."]


def stdlib():
    """(path, source) of the standard library of the running Python, tests left out."""
    root = pathlib.Path(ast.__file__).parent
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not {"site-packages", "test", "tests", "idle_test", "lib2to3", "__phello__", "encodings"} & set(parts):
            text = path.read_text(errors="replace")
            if len(text) > 200:
                yield "/".join(parts), text


class Packer:
    """Encodes documents to flagged uint16 tokens: reply tokens carry REPLY, the first token of a document START."""

    def __init__(self, assets: pathlib.Path = ASSETS):
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(assets)
        ids = self.tokenizer.convert_tokens_to_ids
        self.end, self.open, self.close = ids("<|endoftext|>"), ids("</think>"), ids("<|im_end|>")

    def render(self, messages, tools) -> str:
        return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Flagged tokens of each text, each closed by <|endoftext|>; what follows the closed think block up to <|im_end|> is reply."""
        out = []
        for enc in self.tokenizer._tokenizer.encode_batch(texts, add_special_tokens=False):
            ids = np.array([*enc.ids, self.end], np.uint16)
            at = np.arange(len(ids))
            opened = np.maximum.accumulate(np.where(ids == self.open, at, -1))
            closed = np.maximum.accumulate(np.where(ids == self.close, at, -1))
            reply = (opened > np.concatenate([[-1], closed[:-1]])) & (opened < at - 1)
            ids = ids | np.where(reply, np.uint16(REPLY), np.uint16(0))
            ids[0] |= START
            out.append(ids)
        return out


def save(path: pathlib.Path, docs: list[np.ndarray]) -> int:
    flat = np.concatenate(docs)
    path.write_bytes(lzma.compress(flat.tobytes(), preset=6))
    return len(flat)


def load(path: pathlib.Path) -> np.ndarray:
    """Flagged uint16 tokens written by `save`."""
    return np.frombuffer(lzma.decompress(path.read_bytes()), np.uint16)


def main() -> None:
    from atlas_jax.train.synthetic import tool_dialogue

    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--conversations", required=True)
    p.add_argument("--docs", nargs="*", default=[], help="site-packages folders whose permissive packages are read")
    p.add_argument("--out", required=True)
    p.add_argument("--variants", type=int, default=24, help="renamed copies of each training conversation")
    p.add_argument("--synthetic", type=int, default=8000)
    p.add_argument("--max-package-chars", type=int, default=4_000_000)
    a = p.parse_args()
    out = pathlib.Path(a.out)
    out.mkdir(parents=True, exist_ok=True)
    packer, manifest = Packer(), {"python": sys.version.split()[0], "packages": {}}
    conversations = load_conversations(a.conversations)
    hold = set(held_out(conversations))
    tools = json.loads((ASSETS / "airline_tools.json").read_text())

    chats = {}
    for i, messages in conversations.items():
        n = 0 if i in hold else a.variants
        chats[i] = [messages, *(vary(messages, random.Random(f"{i}/{v}")) for v in range(n))]
    rows = [packer.render(m, tools) for i, c in chats.items() if i not in hold for m in c]
    random.Random(1).shuffle(rows)
    manifest["chat_tokens"] = save(out / "chat.xz", packer.encode(rows))
    manifest["held_tokens"] = save(out / "held.xz", packer.encode([packer.render(chats[i][0], tools) for i in sorted(hold)]))
    rng = random.Random(2)
    rows = [packer.render(*tool_dialogue(rng)) for _ in range(a.synthetic)]
    manifest["synthetic_tokens"] = save(out / "synthetic.xz", packer.encode(rows))

    texts, seen = [text for _, text in stdlib()], set()
    manifest["stdlib_chars"] = sum(map(len, texts))
    for site in map(pathlib.Path, a.docs):
        for name, licence, roots in packages(site):
            if name in seen:
                continue
            seen.add(name)
            mine, size = [], 0
            sources = [docstrings(r) for r in roots]
            if name == "botocore":
                sources = [service_docs(r) for r in roots]
            for doc in itertools.chain(*sources):
                if size < a.max_package_chars * (10 if name == "botocore" else 1):
                    mine.append(doc)
                    size += len(doc)
            if size > 10_000:
                texts += mine
                manifest["packages"][name] = {"licence": licence, "chars": size}
    random.Random(3).shuffle(texts)
    docs = packer.encode(texts)
    held = docs[:: len(docs) // 40][:40]
    manifest["text_held_tokens"] = save(out / "text_held.xz", held)
    manifest["text_tokens"] = save(out / "text.xz", [d for i, d in enumerate(docs) if i % (len(docs) // 40) or i // (len(docs) // 40) >= 40])
    manifest["held_out"] = sorted(hold)
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1))
    print(json.dumps({k: v for k, v in manifest.items() if k != "packages"}, indent=1))


if __name__ == "__main__":
    main()
