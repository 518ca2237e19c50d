"""Reads what XLA and ptxas write: thunk sequences, optimised HLO, PTX, resource reports."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Thunk:
    """One thing that an executable does: a kernel, a copy, a loop, …; `captured` where a command buffer holds it."""

    kind: str
    name: str
    depth: int  # how many loops, conditionals and command buffers it is in
    captured: bool
    shared_bytes: int  # dynamic shared memory of a kernel's launch


_THUNK = re.compile(r"^( *)\d+: (k\w+) *\[[^\]]*\] *(\S*)(?:.*shared_memory: (\d+))?")


def thunks(text: str) -> Iterator[Thunk]:
    """The thunks of a `thunk_sequence` dump, whose nesting is its indentation."""
    around: list[tuple[int, str]] = []
    for line in text.split("\n"):
        if (found := _THUNK.match(line)) is None:
            continue
        indent = len(found[1])
        while around and around[-1][0] >= indent:
            around.pop()
        captured = any(kind == "kCommandBuffer" for _, kind in around)
        yield Thunk(found[2], found[3], len(around), captured, int(found[4] or 0))
        around.append((indent, found[2]))


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One HLO instruction; of a fusion, `inside` are the opcodes of what it fuses and `scalar` says which of them make scalars."""

    name: str
    opcode: str
    bytes: int  # of the result
    origin: str  # where it comes from in the program, as JAX names it
    inside: tuple[str, ...] = ()  # opcodes fused into it whose results are arrays


_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_SHAPE = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")


def instructions(hlo: str) -> Iterator[Instruction]:
    """The instructions of an HLO module that are not themselves inside a fusion."""
    bodies: dict[str, list[tuple[str, str, str, str]]] = {}
    lines: list[tuple[str, str, str, str]] = []
    for line in hlo.split("\n"):
        if found := _COMPUTATION.match(line):
            lines = bodies.setdefault(found[1], [])
        elif found := _INSTRUCTION.match(line):
            lines.append((found[1], found[2], found[3], found[4]))
    called = lambda rest: match[1] if (match := re.search(r"calls=%?([\w.\-]+)", rest)) else ""  # noqa: E731
    fused = {called(rest) for body in bodies.values() for _, _, opcode, rest in body if opcode == "fusion"}
    applied = {x for body in bodies.values() for *_, rest in body for x in re.findall(r"to_apply=%?([\w.\-]+)", rest)}
    for computation, body in bodies.items():
        if computation in fused or computation in applied:
            continue
        for name, shape, opcode, rest in body:
            origin = match[1] if (match := re.search(r'op_name="([^"]*)"', rest)) else ""
            parts = bodies.get(called(rest), []) if opcode == "fusion" else []
            inside = tuple(part[2] for part in parts if _bytes(part[1]) > 16)
            yield Instruction(name, opcode, _bytes(shape), origin, inside)


def _bytes(shape: str) -> int:
    """Bytes of a shape as HLO writes it; of a tuple, of its largest part."""
    sizes = [
        math.prod(int(n) for n in dims.split(",") if n) * int(bits or 8) // 8 for _, bits, dims in _SHAPE.findall(shape)
    ]
    return max(sizes, default=0)


_MOVES = set(
    "copy copy-start dynamic-slice slice concatenate transpose pad reverse gather convert reshape "
    "bitcast bitcast-convert parameter constant tuple get-tuple-element broadcast iota".split()
)
_FREE = set("parameter constant tuple get-tuple-element bitcast reshape broadcast iota".split())


def only_moves(x: Instruction) -> bool:
    """Whether the instruction computes nothing and only puts data elsewhere."""
    opcodes = x.inside if x.opcode == "fusion" else (x.opcode,)
    return set(opcodes) <= _MOVES and not set(opcodes) <= _FREE


_ACCESS = re.compile(r"\b(ld|st)\.global([.\w:]*)")
_ASYNC = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[.\w:]* *\[[^\]]*\], *\[[^\]]*\], *(0x[0-9a-fA-F]+|\d+)")


def accesses(ptx: str, kind: str) -> Counter[int]:
    """Loads ("ld") or stores ("st") of global memory in a PTX text, counted by bytes a thread. Asynchronous copies are
    loads; bulk ones (TMA), whose size the code need not say, are not counted."""
    found: Counter[int] = Counter()
    for operation, modifiers in _ACCESS.findall(ptx):
        if operation == kind:
            vector = re.search(r"\.v(\d)", modifiers)
            bits = re.search(r"\.[bfsu](\d+)$", modifiers) or re.search(r"\.[bfsu](\d+)", modifiers)
            found[(int(vector[1]) if vector else 1) * (int(bits[1]) if bits else 32) // 8] += 1
    if kind == "ld":
        found.update(int(size, 0) for size in _ASYNC.findall(ptx))
    return found


_LABEL = re.compile(r"^(\$\w+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+);")
_FROM_REGISTERS = re.compile(r"\bwgmma\.mma_async[.\w]*\s+\{[^}]*\},\s*\{")


def unawaited(ptx: str) -> list[int]:
    """Lines of a PTX text on which a loop turns while Hopper's tensor cores may still read the registers of a product. ptxas 13.0
    gives these to the next turn's own numbers."""
    lines, labels, found = ptx.split("\n"), dict[str, int](), []
    for number, line in enumerate(lines):
        if label := _LABEL.match(line):
            labels[label[1]] = number
        elif (branch := _BRANCH.search(line)) and branch[1] in labels:
            reads = False
            for passed in lines[labels[branch[1]] : number]:
                reads = (
                    reads or bool(_FROM_REGISTERS.search(passed))
                ) and "wgmma.wait_group.sync.aligned 0;" not in passed
            if reads:
                found.append(number + 1)
    return found


def resources(report: str) -> dict[str, int]:
    """Registers, static shared memory, spills and stack in bytes from the report of `ptxas -v` on one kernel."""
    number = lambda pattern: int(match[1]) if (match := re.search(pattern, report)) else 0  # noqa: E731
    return dict(
        registers=number(r"Used (\d+) registers"),
        shared=number(r"(\d+) bytes smem"),
        spill_stores=number(r"(\d+) bytes spill stores"),
        spill_loads=number(r"(\d+) bytes spill loads"),
        stack=number(r"(\d+) bytes stack frame"),
    )
