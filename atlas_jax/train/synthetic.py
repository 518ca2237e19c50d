"""Made-up tool dialogues over standard-library signatures: many tools, so that calls follow the declared schema."""

import importlib
import inspect
import json
import random
import string

MODULES = """base64 bisect calendar colorsys difflib fnmatch fractions functools glob heapq html itertools json keyword
locale math operator os.path pathlib posixpath random re secrets shlex shutil statistics string struct subprocess
tempfile textwrap time tokenize types unicodedata urllib.parse uuid zlib""".split()
VERBS = (
    "Please call",
    "Run",
    "Can you run",
    "I need you to use",
    "Could you call",
    "Use",
    "Try",
    "Now call",
    "Execute",
)
LEADS = ("", "", "", "Sure, I'll run that.", "Let me do that.", "I'll call {name} now.", "One moment, please.")
RESULTS = (
    "The result of {name} is {value}.",
    "{name} returned {value}.",
    "Done: {value}.",
    "Here is the result: {value}.",
)
SYSTEMS = (
    "",
    "You are a helpful assistant.",
    "You are a careful assistant that calls tools.",
    "Answer briefly. Call a tool when one fits.",
)
THANKS = (
    ("Thanks!", "You're welcome! Is there anything else I can help you with?"),
    ("Hello!", "Hello! How can I help you today?"),
    ("That's all, thank you.", "You're welcome! Have a great day!"),
    ("What can you do?", "I can call these tools for you: {tools}."),
)
SYLLABLES = "ba co di fu ga he ki lo ma ne po ra su ti vo wa xe yo za ler min tor ven sal dor".split()


def word(rng: random.Random) -> str:
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(1, 3)))


def kind(name: str, default) -> str:
    """A parameter's type: its default's, or one fixed by its name."""
    if isinstance(default, bool):
        return "boolean"
    if isinstance(default, int):
        return "integer"
    if isinstance(default, float):
        return "number"
    if isinstance(default, str):
        return "string"
    return ("string", "string", "string", "integer", "array")[sum(map(ord, name)) % 5]


def value(rng: random.Random, kind: str):
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "integer":
        return rng.randint(0, 10 ** rng.randint(1, 5))
    if kind == "number":
        return round(rng.random() * 100, 2)
    if kind == "array":
        return [value(rng, "integer" if rng.random() < 0.5 else "string") for _ in range(rng.randint(1, 4))]
    pick = rng.random()
    if pick < 0.4:
        return " ".join(word(rng) for _ in range(rng.randint(1, 4)))
    if pick < 0.6:
        return "/" + "/".join(word(rng) for _ in range(rng.randint(1, 3))) + rng.choice((".py", ".txt", ".json", ""))
    if pick < 0.8:
        return "".join(rng.choice(string.ascii_uppercase + string.digits) for _ in range(rng.randint(4, 8)))
    return f"{word(rng)}_{word(rng)}_{rng.randint(1000, 9999)}"


def declarations() -> list[dict]:
    """Tool declarations from the signatures and first docstring lines of plain library functions."""
    out = []
    for module in MODULES:
        for name, f in sorted(vars(importlib.import_module(module)).items()):
            if name.startswith("_") or not inspect.isroutine(f) or not inspect.getdoc(f):
                continue
            try:
                params = [p for p in inspect.signature(f).parameters.values() if p.kind in (1, 3) and p.name != "self"][
                    :4
                ]
            except (ValueError, TypeError):
                continue
            if params:
                out.append({"type": "function", "function": {
                    "name": f"{module.replace('.', '_')}_{name}",
                    "description": (inspect.getdoc(f) or "").split("\n")[0][:120],
                    "parameters": {"type": "object",
                                   "properties": {p.name: {"type": kind(p.name, p.default)} for p in params},
                                   "required": [p.name for p in params if p.default is p.empty]}}})  # fmt: skip
    return out


TOOLS = declarations()


def show(v) -> str:
    return v if isinstance(v, str) else json.dumps(v)


def tool_dialogue(rng: random.Random) -> tuple[list[dict], list[dict]]:
    """(messages, tools): a few requests, each answered by one or two calls and a sentence that repeats the result."""
    tools = rng.sample(TOOLS, rng.randint(1, 6))
    messages = []
    if system := rng.choice(SYSTEMS):
        messages.append({"role": "system", "content": system})

    def say(role, content, **more):
        messages.append({"role": role, "content": content, **more})

    def chat():
        ask, answer = rng.choice(THANKS)
        say("user", ask)
        say("assistant", answer.format(tools=", ".join(t["function"]["name"] for t in tools)))

    if rng.random() < 0.2:
        chat()
    for _ in range(rng.randint(1, 4)):
        if rng.random() < 0.15:
            f = rng.choice(tools)["function"]
            say("user", rng.choice(("What does {} do?", "Tell me about {}.", "Describe {}.")).format(f["name"]))
            say("assistant", f"{f['name']}: {f['description']} It takes {', '.join(f['parameters']['properties'])}.")
            continue
        chosen = [rng.choice(tools)["function"] for _ in range(2 if rng.random() < 0.15 else 1)]
        args = []
        for f in chosen:
            p = f["parameters"]
            args.append(
                {
                    k: value(rng, t["type"])
                    for k, t in p["properties"].items()
                    if k in p["required"] or rng.random() < 0.5
                }
            )
        parts = [
            f["name"] + (" with " + ", ".join(f"{k} = {show(v)}" for k, v in a.items()) if a else "")
            for f, a in zip(chosen, args, strict=True)
        ]
        hidden = rng.choice(list(args[0])) if len(chosen) == 1 and args[0] and rng.random() < 0.2 else None
        if hidden:
            rest = {k: v for k, v in args[0].items() if k != hidden}
            parts = [
                chosen[0]["name"] + (" with " + ", ".join(f"{k} = {show(v)}" for k, v in rest.items()) if rest else "")
            ]
        say("user", f"{rng.choice(VERBS)} {', then '.join(parts)}{rng.choice(('.', '', ' please.'))}")
        if hidden:
            if hidden not in chosen[0]["parameters"]["required"]:
                args[0].pop(hidden)
            else:
                say("assistant", f"Which value should I use for {hidden}?")
                say("user", rng.choice(("{}", "Use {}.", "{} please")).format(show(args[0][hidden])))
        lead = rng.choice(LEADS).format(name=chosen[0]["name"])
        calls = [
            {"type": "function", "function": {"name": f["name"], "arguments": a}}
            for f, a in zip(chosen, args, strict=True)
        ]
        say("assistant", lead, tool_calls=calls)
        answers = [
            value(rng, rng.choice(("string", "string", "integer", "number", "array", "boolean"))) for _ in chosen
        ]
        for v in answers:
            say("tool", show(v) if rng.random() < 0.4 else json.dumps({"result": v, "status": "ok"}))
        say(
            "assistant",
            " ".join(
                rng.choice(RESULTS).format(name=f["name"], value=show(v)) for f, v in zip(chosen, answers, strict=True)
            ),
        )
    if rng.random() < 0.3:
        chat()
    return messages, tools
