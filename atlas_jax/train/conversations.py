"""Tool-calling conversations: reading them, which are held out, the tools they call, and renamed copies of them."""

import json
import pathlib
import random
import re
from collections.abc import Iterable

EVERY = 10  # every 10th task is held out: 5 of 50 tasks, all their trials


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


def held_out(ids: Iterable[str]) -> list[str]:
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


FIRST = """Ada Alan Aisha Boris Carmen Chidi Dana Elif Farid Grace Hana Igor Ivy Jonas Keiko Lars Mateo Nadia Oskar
Priya Quinn Rosa Samir Tessa Ugo Vera Wei Ximena Yara Zane Bruno Clara Diego Esther Felix Gita Hugo Ines Jamal
Kira""".split()
LAST = """Abara Bauer Costa Dubois Eklund Fischer Gupta Haas Ito Jansen Keller Lopes Mori Novak Okafor Park Quist Reyes
Sato Tanaka Umar Vega Weber Xu Yilmaz Zhang Berg Chen Diaz Ford Green Hill Jain Kaur Lund Marsh Nash Owens Price
Ross""".split()


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

    for kind, pool in (("first_name", FIRST), ("last_name", LAST)):
        for name in sorted(set(re.findall(rf'"{kind}": ?"(\w+)"', flat))):
            table[name] = rng.choice(pool)
            table[name.lower()] = table[name].lower()
    for name in sorted(set(re.findall(r"\b([a-z]+)_[a-z]+_\d{4}\b", flat)) - table.keys()):
        table[name] = rng.choice(FIRST).lower()
        table[name.capitalize()] = table[name].capitalize()
    for last in sorted(set(re.findall(r"\b[a-z]+_([a-z]+)_\d{4}\b", flat)) - table.keys()):
        table[last] = rng.choice(LAST).lower()
        table[last.capitalize()] = table[last].capitalize()
    for four in sorted(set(re.findall(r'"last_four": ?"(\d{4})"', flat))):
        table[four] = digits(four)
    for account in sorted(set(re.findall(r"\b(?:[a-z]+_[a-z]+|certificate)_(\d{4,7})\b", flat))):
        table[account] = digits(account)
    for code in sorted(set(re.findall(r"\b[A-Z0-9]{6}\b", flat))):
        table[code] = letters(code) if re.search("[A-Z]", code) else code
    for flight in sorted(set(re.findall(r"\bHAT\d{3}\b", flat))):
        table[flight] = "HAT" + digits(flight[3:])
    table = {
        k: v for k, v in table.items() if k not in ("and", "the", "card", "credit", "gift", "Card", "Credit", "Gift")
    }
    if table:
        words = "|".join(sorted(map(re.escape, table), key=len, reverse=True))
        body = re.sub(rf"(?<![A-Za-z0-9])({words})(?![A-Za-z0-9])", lambda m: table[m[1]], body)
    return messages[:1] + json.loads(body)
