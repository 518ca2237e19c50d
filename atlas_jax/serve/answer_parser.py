"""A chat answer's text, as it arrives, into reasoning, content and tool calls.

Two forms of calls are read, whichever the model writes:

    <tool_call>                          <tool_call>
    <function=NAME>                      {"name": "NAME", "arguments": {…}}
    <parameter=KEY>                      </tool_call>
    VALUE
    </parameter>
    </function>
    </tool_call>

However the text is cut into pieces, the events join to the same ones. Nothing that looked like a call and is none gets lost: it is
content. A call that the answer breaks off within keeps arguments that are not closed, so that nobody takes them for complete.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from atlas_jax.serve.tool_values import argument_text, is_text

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
MAX_NAME = 256  # characters of a function's or a parameter's name


@dataclasses.dataclass(frozen=True)
class Reasoning:
    text: str


@dataclasses.dataclass(frozen=True)
class Content:
    text: str


@dataclasses.dataclass(frozen=True)
class CallBegin:
    index: int
    name: str


@dataclasses.dataclass(frozen=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclasses.dataclass(frozen=True)
class CallEnd:
    index: int


Event = Reasoning | Content | CallBegin | CallArguments | CallEnd


class AnswerParser:
    """Push pieces of text, then `finish`; both return the events that the text so far makes certain.

    Args:
        tools: parameter schemas by function name; None (no tools were offered) leaves calls as text. Functions that were not
            offered are reported all the same: the caller knows best what to tell the model.
        reasoning: whether the prompt ends within a thinking block, so that the answer begins there.

    Attributes:
        calls: complete calls so far.
        broken: whether a call was left off, by the end of the text or by something that is no JSON.
    """

    def __init__(self, tools: Mapping[str, Mapping[str, Any]] | None = None, *, reasoning: bool = False) -> None:
        self.tools = tools
        self.calls = 0
        self.broken = False
        self._state: Callable[[bool], bool] = self._reasoning if reasoning else self._start
        self._text = ""  # not yet consumed
        self._events: list[Event] = []
        self._space = ""  # whitespace that is shown only if more of its kind follows
        self._lead = True  # at the start of a part whose leading whitespace is dropped
        self._raw = ""  # of a call whose name is not known yet
        self._open = False  # within a call that was reported
        self._index = -1  # of the last call that was reported
        self._json: _JsonCall | None = None
        self._schema: Mapping[str, Any] = {}
        self._parameter_name = ""
        self._parameters_seen = 0
        self._value: list[str] = []
        self._newline = ""

    def push(self, text: str) -> list[Event]:
        return self._run(text, final=False)

    def finish(self) -> list[Event]:
        """The events of what was held back, once no more text will come."""
        events = self._run("", final=True)
        self.broken |= self._open
        return events

    def _run(self, text: str, final: bool) -> list[Event]:
        self._text += text
        while self._state(final):
            pass
        events, self._events = self._events, []
        return events

    # ---- states: each consumes what it can and says whether another state may go on ------------------------------------

    def _start(self, final: bool) -> bool:
        stripped = self._text.lstrip()
        if stripped.startswith(THINK):
            return self._enter(self._reasoning, stripped[len(THINK) :])
        if THINK.startswith(stripped) and not final:
            return False
        self._lead = False
        return self._enter(self._content, self._text)

    def _reasoning(self, final: bool) -> bool:
        markers = (END_THINK,) if self.tools is None else (END_THINK, CALL)
        text, marker = self._until(markers, final)
        self._show(Reasoning, text)
        if marker is None:
            return False
        self._space, self._lead = "", True
        if marker == CALL:  # a model that calls from within its thoughts has ended them
            self._raw = CALL
            return self._enter(self._call, self._text)
        return self._enter(self._content, self._text)

    def _content(self, final: bool) -> bool:
        text, marker = self._until(() if self.tools is None else (CALL,), final)
        self._show(Content, text)
        if marker:
            self._raw = CALL
            return self._enter(self._call, self._text)
        if final and self._index < 0 and self._space:
            self._events.append(Content(self._space))
            self._space = ""
        return False

    def _call(self, final: bool) -> bool:
        rest = self._text.lstrip()
        if rest.startswith("{"):
            self._raw += self._text[: len(self._text) - len(rest)]
            self._json = _JsonCall()
            return self._enter(self._json_call, rest)
        if rest.startswith(FUNCTION):
            self._raw += self._text[: len(self._text) - len(rest)] + FUNCTION
            return self._enter(self._function, rest[len(FUNCTION) :])
        return self._no_call() if final or not FUNCTION.startswith(rest) else False

    def _function(self, final: bool) -> bool:
        name, closed, rest = self._text.partition(">")
        if not _may_be_name(name, bool(closed)) or (final and not closed):
            return self._no_call()
        if not closed:
            return False
        self._begin(name.strip())
        self._arguments("{")
        self._parameters_seen = 0
        return self._enter(self._parameters, rest)

    def _parameters(self, final: bool) -> bool:
        _, marker = self._until((PARAMETER, END_FUNCTION, END_CALL), final)  # text between parameters means nothing
        if marker is None:
            return False
        if marker == PARAMETER:
            return self._enter(self._parameter, self._text)
        self._arguments("}")
        self._end()
        return self._enter(self._content if marker == END_CALL else self._after, self._text)

    def _parameter(self, final: bool) -> bool:
        name, closed, rest = self._text.partition(">")
        if closed or not _may_be_name(name, False):
            if not (closed and _may_be_name(name, True)):
                return self._enter(self._parameters, self._text)
            if rest == "" and not final:
                return False  # whether a newline follows decides what the value begins with
            self._parameter_name = name.strip()
            self._value, self._newline = [], ""
            lead = ", " if self._parameters_seen else ""
            self._parameters_seen += 1
            if is_text(self._schema, self._parameter_name):
                self._arguments(f'{lead}{_quoted(self._parameter_name)}: "')
                return self._enter(self._text_value, rest.removeprefix("\n"))
            self._arguments(f"{lead}{_quoted(self._parameter_name)}: ")
            return self._enter(self._json_value, rest.removeprefix("\n"))
        return False

    def _text_value(self, final: bool) -> bool:
        """Text goes out as it comes, but for a newline that may turn out to belong to the closing tag."""
        text, marker = self._until((END_PARAMETER,), final)
        text = self._newline + text
        self._newline = "\n" if text.endswith("\n") else ""
        text = text.removesuffix("\n")
        if marker is None:
            self._arguments(_quoted(text)[1:-1])
            return False
        self._arguments(_quoted(text)[1:-1] + '"')
        return self._enter(self._parameters, self._text)

    def _json_value(self, final: bool) -> bool:
        text, marker = self._until((END_PARAMETER,), final)
        self._value.append(text)
        if marker is None:
            return False
        value = "".join(self._value).removesuffix("\n")
        self._arguments(argument_text(self._schema, self._parameter_name, value))
        return self._enter(self._parameters, self._text)

    def _json_call(self, final: bool) -> bool:
        assert self._json is not None
        call, read = self._json, self._json.feed(self._text)
        self._raw += self._text[:read] if not self._open else ""
        self._text = self._text[read:]
        if call.name is not None and not self._open:
            self._begin(call.name)
        if self._open:
            self._arguments(call.take())
        if call.over:
            self._end()
            return self._enter(self._after, self._text)
        if call.failed and self._open:
            self.broken, self._open = True, False
            return self._enter(self._after, self._text)
        return self._no_call() if (final and not self._open) or call.failed else False

    def _after(self, final: bool) -> bool:
        """Behind a call's own end, where its block ends or, in some models' answers, another call follows."""
        rest = self._text = self._text.lstrip()
        if rest.startswith(END_CALL):
            return self._enter(self._content, rest[len(END_CALL) :])
        if rest.startswith(FUNCTION):
            self._raw = FUNCTION
            return self._enter(self._function, rest[len(FUNCTION) :])
        if not final and (END_CALL.startswith(rest) or FUNCTION.startswith(rest)):
            return False
        return self._enter(self._content, rest)

    # ---- pieces --------------------------------------------------------------------------------------------------------

    def _enter(self, state: Callable[[bool], bool], text: str) -> bool:
        self._state, self._text = state, text
        return True

    def _until(self, markers: Sequence[str], final: bool) -> tuple[str, str | None]:
        """Consumes text up to and with the first of the markers; without one, all that can belong to none."""
        found = [(at, marker) for marker in markers if (at := self._text.find(marker)) >= 0]
        if found:
            at, marker = min(found)
            text, self._text = self._text[:at], self._text[at + len(marker) :]
            return text, marker
        keep = 0 if final else _overlap(self._text, markers)
        cut = len(self._text) - keep
        text, self._text = self._text[:cut], self._text[cut:]
        return text, None

    def _show(self, kind: type[Reasoning] | type[Content], text: str) -> None:
        text = self._space + text
        text = text.lstrip() if self._lead else text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._lead = False
            self._events.append(kind(shown))

    def _no_call(self) -> bool:
        """What looked like a call is content."""
        raw, self._raw, self._json = self._raw, "", None
        self._show(Content, raw)
        return self._enter(self._content, self._text)

    def _begin(self, name: str) -> None:
        self._open, self._raw = True, ""
        self._lead = self._lead or not self._space  # text behind a call begins anew
        self._schema = (self.tools or {}).get(name) or {}
        self._index += 1
        self._events.append(CallBegin(self._index, name))

    def _arguments(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(self._index, text))

    def _end(self) -> None:
        self._events.append(CallEnd(self._index))
        self.calls += 1
        self._open = False


class _JsonCall:
    """Reads {"name": …, "arguments": …} character by character; other keys are skipped.

    Attributes:
        name: once it is known.
        over: whether the object is closed.
        failed: whether this is no call.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.over = self.failed = False
        self._depth = 0
        self._string = self._escaped = False
        self._key: str | None = None  # None: a key is being read
        self._piece: list[str] = []  # of the key, or of a value other than the arguments
        self._arguments: list[str] = []
        self._quoted = self._begun = False  # arguments given as a string; given at all
        self._space = ""

    def feed(self, text: str) -> int:
        """Reads on; returns how many characters belong to the object."""
        for at, char in enumerate(text):
            if self.over or self.failed:
                return at
            if not self._string and char == "<":  # in no JSON: the model has left off
                self.failed = True
                return at
            self._read(char)
        return len(text)

    def take(self) -> str:
        """The arguments' text that arrived since the last call."""
        if self._quoted and not self.over:
            return ""
        text, self._arguments = "".join(self._arguments), []
        if self._quoted:
            try:
                inner = json.loads(text)
                text = inner if isinstance(inner, str) and inner.strip() else "{}"
            except ValueError:
                pass
            return text
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if self.over and not self._begun:
            self._begun = True
            return "{}"
        return shown

    def _read(self, char: str) -> None:
        if self._string:
            self._keep(char)
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._string = False
            return
        if char in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._value_over()
                self.over = not self.failed and self.name is not None
                self.failed = not self.over
                return
        elif char in "{[":
            self._depth += 1
            if self._depth == 1:
                return
        elif self._depth == 1 and char == ":" and self._key is None:
            self._key = _loaded("".join(self._piece))
            self.failed = not isinstance(self._key, str)
            self._piece = []
            return
        elif self._depth == 1 and char == ",":
            self._value_over()
            return
        self._string = char == '"'
        self._keep(char)

    def _keep(self, char: str) -> None:
        if self._key != "arguments":
            self._piece.append(char)
            return
        if not self._begun:
            if char.isspace():
                return
            self._begun, self._quoted = True, char == '"'
        self._arguments.append(char)

    def _value_over(self) -> None:
        if self._key == "name" and self.name is None:
            name = _loaded("".join(self._piece))
            self.failed = not (isinstance(name, str) and _may_be_name(name, True))
            self.name = None if self.failed else name
        self._key, self._piece = None, []


def joined(events: Iterable[Event]) -> list[Event]:
    """Pieces of the same part put together."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, (Reasoning, Content, CallArguments)) and type(last) is type(event):
            assert isinstance(last, (Reasoning, Content, CallArguments))
            if getattr(last, "index", None) == getattr(event, "index", None):
                out[-1] = dataclasses.replace(last, text=last.text + event.text)
                continue
        out.append(event)
    return out


def _overlap(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that a marker begins with."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


def _may_be_name(text: str, complete: bool) -> bool:
    fits = len(text) <= MAX_NAME and not any(char in "<>\n" for char in text)
    return fits and (bool(text.strip()) or not complete)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
