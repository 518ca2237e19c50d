"""Chat messages to text, with the template that a model ships: the same text as transformers' `apply_chat_template`."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from atlas_jax.errors import CheckpointError, RequestError
from atlas_jax.text.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = (
    "reasoning_content",
    "thinking",
    "reasoning",
)  # names that templates and clients give it, the standard first


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Any],
    *,
    tools: Sequence[Any] | None = None,
    enable_thinking: bool | None = None,
    add_generation_prompt: bool = True,
    chat_template: str | None = None,
    **variables: Any,
) -> str:
    """The prompt that `messages` make.

    Args:
        messages: objects with `role` and `content` (text, or a list of text parts), as in the OpenAI API. Tool calls of
            the assistant may have their arguments as an object or as JSON text.
        tools: JSON schemas of functions.
        enable_thinking: None leaves it to the template.
        add_generation_prompt: whether the text ends where the assistant's answer begins.
        chat_template: name of one of the model's templates, where it has several.
        **variables: further variables of the template.

    Raises:
        RequestError: a message or tool is malformed, or the template refuses them.
        CheckpointError: the template itself is broken.
    """
    chosen = _choose(tokenizer, chat_template, tools is not None)
    values = tokenizer.special_tokens | {name: plain(value, name) for name, value in variables.items()}
    if enable_thinking is not None:
        if not isinstance(enable_thinking, bool):
            raise RequestError(f"enable_thinking must be True, False or None, got {enable_thinking!r}")
        values["enable_thinking"] = enable_thinking
    values["messages"] = validated(messages)
    values["tools"] = None if tools is None else validated_tools(tools)
    values["add_generation_prompt"] = add_generation_prompt
    values.setdefault("documents", None)
    try:
        template = _compile(tokenizer.templates[chosen])
    except jinja2.TemplateError as error:
        raise CheckpointError(f"{tokenizer.directory}: chat template {chosen!r} is broken: {error}") from error
    try:
        return template.render(values)
    except Exception as error:  # a template is foreign code and may fail in any way
        raise RequestError(f"the model's chat template refused the messages: {error}") from error


def validated(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages as plain JSON values: keys that are null left out, text parts joined, arguments parsed, reasoning under
    its standard name.

    Raises:
        RequestError: naming the message and what it should be.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages must be a list of at least one message")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def validated_tools(tools: Any) -> list[dict[str, Any]]:
    """Schemas of functions as plain JSON values. Raises RequestError naming what is none."""
    if isinstance(tools, (str, bytes)) or not isinstance(tools, Sequence):
        raise RequestError(f"tools must be a list of JSON schemas of functions, got {type(tools).__name__}")
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def plain(value: Any, where: str) -> Any:
    """`value` rebuilt of JSON types, so that a template gets hold of no object's methods."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return value if type(value) is kind else kind(value)
    if isinstance(value, Mapping):
        return {_key(key, where): plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise RequestError(f"{where}: a JSON value is needed, got {type(value).__name__}")


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise RequestError(f"{where}: keys must be text, got {key!r:.100}")
    return str(key)


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where}: an object with role and content is needed, got {type(message).__name__}")
    out = {key: value for key, value in plain(message, where).items() if value is not None}
    role = out.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}, got {role!r:.100}")
    reasoning = next((out[key] for key in REASONING if key in out), None)
    if reasoning is not None:
        out = {"thinking": reasoning, **out, "reasoning_content": reasoning}
    if "tool_calls" in out:
        if role != "assistant" or not isinstance(out["tool_calls"], list):
            raise RequestError(f"{where}.tool_calls must be a list, in a message of the assistant")
        out["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(out["tool_calls"])]
    if "content" in out:
        out["content"] = _text(out["content"], f"{where}.content")
    elif role != "assistant" or not (out.get("tool_calls") or reasoning is not None):
        raise RequestError(f"{where}.content is missing; only an assistant's message with tool_calls can do without it")
    return out


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be text or a list of text parts, got {type(content).__name__}")
    pieces = []
    for i, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(f"{where}[{i}]: this model reads text parts only, got {kind!r:.100}")
        pieces.append(text)
    return "".join(pieces)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} must have a function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where}: arguments are not valid JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise RequestError(f"{where}: arguments must be a JSON object, got {type(arguments).__name__}")
    function = function | {"arguments": arguments}
    return call | {"function": function} if "function" in call else function


def _tool(tool: Any, where: str) -> dict[str, Any]:
    out = plain(tool, where)
    function = out.get("function", out) if isinstance(out, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} must be an object with a function that has a name")
    return out


def _choose(tokenizer: Tokenizer, name: str | None, tools: bool) -> str:
    known = tokenizer.templates
    if not known:
        raise RequestError("this model has no chat template; give the prompt as text or token ids")
    if name is None:
        name = "tool_use" if tools and "tool_use" in known else "default"
    if name not in known:
        raise RequestError(f"no chat template is called {name!r:.100}; there are: {', '.join(known)}")
    return name


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
    }
    return environment.from_string(source)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
):
    """Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part, for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)
