"""Greedy replies of tiny-agent in held-out conversations: are they valid chat turns, and how many drafts are accepted?

    python -m atlas_jax.train.evaluate --conversations tau_airline.jsonl --turns 10

A reply is valid if it ends its turn in time, holds no marker that belongs to others' turns, and all its tool calls
parse and fit the declared tools: known functions, every required parameter, no unknown one, values of the right type.
"""

import argparse
import json
import re

import numpy as np

from atlas_jax.train.conversations import held_out, load_conversations
from atlas_jax.train.corpus import ASSETS

CALL = re.compile(
    r"<tool_call>\n<function=([^\n>]+)>\n((?:<parameter=[^\n>]+>\n.*?\n</parameter>\n)*)</function>\n</tool_call>", re.S
)
PARAMETER = re.compile(r"<parameter=([^\n>]+)>\n(.*?)\n</parameter>\n", re.S)
FOREIGN = ("<|im_start|>", "<|endoftext|>", "<tool_response>", "</tool_response>", "<think>", "</think>")
TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict}


def calls(text: str, tools: list[dict]) -> list[dict]:
    """The tool calls of a reply.

    Raises:
        ValueError: a call does not parse or does not fit the tools.
    """
    known = {t["function"]["name"]: t["function"]["parameters"] for t in tools}
    out = []
    for name, body in CALL.findall(text):
        if name not in known:
            raise ValueError(f"unknown function {name}")
        declared, arguments = known[name]["properties"], {}
        for key, value in PARAMETER.findall(body):
            if key not in declared:
                raise ValueError(f"{name} has no parameter {key}")
            kind = declared[key].get("type", "string")
            arguments[key] = value if kind == "string" else json.loads(value)
            if not isinstance(arguments[key], TYPES[kind]):
                raise ValueError(f"{name}.{key} should be of type {kind}: {value}")
        if missing := set(known[name]["required"]) - arguments.keys():
            raise ValueError(f"{name} lacks {', '.join(sorted(missing))}")
        out.append({"name": name, "arguments": arguments})
    if left := re.search(r"</?(tool_call|function|parameter)\b", CALL.sub("", text)):
        raise ValueError(f"stray {left[0]}")
    return out


def check(text: str, finished: bool, tools: list[dict]) -> tuple[bool, str]:
    """Whether a reply is a valid turn, and what it is or what is wrong with it."""
    if not finished:
        return False, "did not end"
    if found := [m for m in FOREIGN if m in text]:
        return False, f"holds {found[0]}"
    try:
        made = calls(text, tools)
    except ValueError as error:
        return False, str(error)
    return bool(text.strip()), f"calls {', '.join(c['name'] for c in made)}" if made else "text"


def turns(conversations: dict[str, list[dict]], count: int) -> list[tuple[str, int, list[dict]]]:
    """(id, index, messages before) of `count` held-out replies, spread over conversations and over their lengths."""
    ids = sorted(held_out(conversations))
    every = [(i, n) for i in ids for n, m in enumerate(conversations[i]) if m["role"] == "assistant"]
    chosen = [every[(2 * j + 1) * len(every) // (2 * count)] for j in range(min(count, len(every)))]
    return [(i, n, conversations[i][:n]) for i, n in chosen]


def main() -> None:
    import atlas_jax

    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--conversations", required=True)
    p.add_argument("--model", default="tiny-agent")
    p.add_argument("--turns", type=int, default=10)
    p.add_argument("--drafts", type=int, default=4)
    p.add_argument("--max-tokens", type=int, default=400)
    a = p.parse_args()
    tools = json.loads((ASSETS / "airline_tools.json").read_text())
    runtime = atlas_jax.load(a.model, max_length=16384)
    valid, parts = 0, []
    for name, index, messages in turns(load_conversations(a.conversations), a.turns):
        reply = runtime.generate(
            messages, tools=tools, temperature=0, max_tokens=a.max_tokens, drafter="mtp", drafts=a.drafts
        )
        good, what = check(reply.text, reply.finish_reason == "stop", tools)
        valid, parts = valid + good, [*parts, reply.acceptance]
        row = dict(id=name, message=index, prompt=reply.prompt_tokens, valid=good, what=what, text=reply.text)
        print(json.dumps(row), flush=True)
    total = atlas_jax.Acceptance.merge(parts)
    accepted = (total.accepted / np.maximum(total.offered, 1)).round(4)[: a.drafts]
    row = dict(valid=valid, turns=len(parts), steps=total.steps, accepted_of_offered=accepted.tolist())
    print(json.dumps(row | {"tokens_per_step": round(total.tokens_per_step, 3)}))


if __name__ == "__main__":
    main()
