"""`atlas-jax demo`: tiny-agent, ten million parameters trained on an airline's tool-calling conversations, at work.

Three tasks, each answered with speculation (streaming) and without; both answers must be the same tokens.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from atlas_jax.metrics import Acceptance
from atlas_jax.terminal import Progress, say

MODEL = "tiny-agent"
DRAFTS = 3
MAX_TOKENS = 160
TOOLS = pathlib.Path(__file__).parent / "data" / "tiny_agent" / "airline_tools.json"
USED = ("cancel_reservation", "get_reservation_details", "get_user_details", "transfer_to_human_agents")

POLICY = """# Airline Agent Policy

The current time is 2024-05-15 15:00:00 EST.

As an airline agent, you can help users book, modify, or cancel flight reservations.

- Before taking any actions that update the booking database, you must list the action details and obtain explicit \
user confirmation (yes) to proceed.

- You should not provide any information, knowledge, or procedures not provided by the user or available tools.

- You should only make one tool call at a time, and if you make a tool call, you should not respond to the user \
simultaneously.

- You should deny user requests that are against this policy."""

RESERVATION = {
    "reservation_id": "Q7RW2K",
    "user_id": "clara_berg_4821",
    "origin": "BOS",
    "destination": "MSP",
    "flight_type": "one_way",
    "cabin": "business",
    "flights": [
        {"origin": "BOS", "destination": "MCO", "flight_number": "HAT235", "date": "2024-05-21", "price": 722},
        {"origin": "MCO", "destination": "MSP", "flight_number": "HAT298", "date": "2024-05-22", "price": 627},
    ],
    "passengers": [{"first_name": "Clara", "last_name": "Berg", "dob": "1984-03-17"}],
    "payment_history": [{"payment_id": "credit_card_6198952", "amount": 1349}],
    "created_at": "2024-05-04T11:36:20",
    "total_baggages": 2,
    "nonfree_baggages": 0,
    "insurance": "no",
}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def called(name: str, arguments: dict[str, Any], result: Any) -> list[dict[str, Any]]:
    """A tool call of the assistant and what the tool answered."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": json.dumps(result)}]


CONFIRMED = [
    user("Hello! I'd like to cancel my reservation Q7RW2K. My user ID is clara_berg_4821; it's a change of plan."),
    *called("get_reservation_details", {"reservation_id": "Q7RW2K"}, RESERVATION),
    assistant("Your reservation **Q7RW2K** is in business class and can be cancelled. Shall I cancel it? (yes/no)"),
    user("Yes, please."),
]
TASKS: dict[str, Sequence[dict[str, Any]]] = {
    "Look up a customer": [
        user("Hello! I'd like to make a change to one of my upcoming flights."),
        assistant("I can help with that. Could you please provide your user ID and the reservation ID?"),
        user("My user ID is clara_berg_4821. I don't have the reservation ID at hand."),
    ],
    "Cancel a reservation": CONFIRMED,
    "Tell the customer": [
        *CONFIRMED,
        *called("cancel_reservation", {"reservation_id": "Q7RW2K"}, RESERVATION | {"status": "cancelled"}),
    ],
}


def run(progress: Progress) -> int:
    """Runs the demo; 0 if speculation changed no token."""
    import atlas_jax

    # both ways shall read the prompt anew
    runtime = atlas_jax.load(MODEL, max_drafts=DRAFTS, prefix_cache=False, progress=progress)
    tools = [tool for tool in json.loads(TOOLS.read_text()) if tool["function"]["name"] in USED]
    options: dict[str, Any] = dict(tools=tools, max_tokens=MAX_TOKENS)
    fast, plain = [], []
    for title, task in TASKS.items():
        messages = [{"role": "system", "content": POLICY}, *task]
        progress.clear()
        said = task[-1]["content"]
        say(f"── {title}\n   {task[-1]['role']}: {said[:90]}{'…' * (len(said) > 90)}\n\n")
        for delta in runtime.stream(messages, drafter="mtp", drafts=DRAFTS, **options):
            progress.clear()
            say(delta.text)
            if delta.completion:
                fast.append(delta.completion)
        say("\n\n")
        plain.append(runtime.generate(messages, drafter="none", **options))
    progress.clear()
    report(fast, plain)
    if broken := [c for c in (*fast, *plain) if c.finish_reason == "error"]:
        print(f"atlas-jax: {len(broken)} answers were broken off: the logits were not finite", file=sys.stderr)
        return 1
    if [c.token_ids for c in fast] != [c.token_ids for c in plain]:
        print("atlas-jax: speculation changed the answers, which must not happen; please report it", file=sys.stderr)
        return 1
    return 0


def report(fast: Sequence[Any], plain: Sequence[Any]) -> None:
    """The acceptance table, and the speed with and without speculation."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(Acceptance.merge(c.acceptance for c in fast).table())
    compiled = sum(c.timings.compile_s for c in (*fast, *plain))
    speed = Table(title="Speed", box=box.SIMPLE, caption=f"Compiling took {compiled:.1f} s beside.")
    for name in ("", "tokens a step", "ms a token", "tokens/s", "first token"):
        speed.add_column(name, justify="right" if name else "left")
    for name, answers in ((f"mtp, {DRAFTS} drafts", fast), ("no speculation", plain)):
        mean = tpot(answers)
        speed.add_row(
            name,
            f"{Acceptance.merge(c.acceptance for c in answers).tokens_per_step:.2f}",
            f"{mean:.2f}",
            f"{1e3 / mean:.1f}" if mean else "–",
            f"{statistics.mean(c.timings.ttft_ms for c in answers):.0f} ms",
        )
    console.print(speed)
    if tpot(fast):
        same = "the same" if [c.token_ids for c in fast] == [c.token_ids for c in plain] else "DIFFERENT"
        console.print(f"Speculation: {tpot(plain) / tpot(fast):.2f} times as fast, {same} tokens.")


def tpot(answers: Sequence[Any]) -> float:
    """Mean milliseconds of a token after an answer's first, over all answers."""
    after = [(len(c.token_ids) - 1, c.timings.tpot_ms) for c in answers if len(c.token_ids) > 1]
    return sum(n * ms for n, ms in after) / sum(n for n, _ in after) if after else 0.0
