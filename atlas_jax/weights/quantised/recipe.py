"""What config.json (or hf_quant_config.json) says about a checkpoint's quantised weights: which layout each linear layer has."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

import regex

from atlas_jax.errors import CheckpointError
from atlas_jax.weights.quantised import awq, compressed_tensors, fp8, gptq, modelopt
from atlas_jax.weights.quantised.formats import Format, Unsupported

METHODS = "compressed-tensors, gptq, awq, fp8 and modelopt"
MATCH_S = 2.0  # for an expression to be tried on one name, which takes microseconds; some would take for ever
TRUNKS = ("model.language_model.", "language_model.model.", "model.")
CACHE_SCALES = ("k_scale", "v_scale", "kv_scale")  # of a quantised KV cache, which this runtime does not keep


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a checkpoint is quantised.

    Attributes:
        name: of the method and its layouts, for people.
        of: the layout of a linear layer by its module's name; None where the config says that it is not quantised.
    """

    name: str
    of: Callable[[str], Format | None]


def recipe_of(about: Any) -> Recipe:
    """The recipe that a `quantization_config` describes.

    Raises:
        Unsupported: naming the method or layout that this runtime does not read.
    """
    if not isinstance(about, Mapping):
        raise Unsupported(f"a description that is not an object: {about!r:.200}")
    inner = about.get("quantization")
    if isinstance(inner, Mapping):  # hf_quant_config.json
        about = {**about, **inner}
    method = about.get("quant_method") or ("modelopt" if about.get("quant_algo") else None)
    readers = {
        "compressed-tensors": _compressed_tensors,
        "gptq": _gptq,
        "awq": _awq,
        "fp8": _fp8,
        "modelopt": _modelopt,
        "modelopt_fp4": _modelopt,
    }
    if not isinstance(method, str) or method not in readers:
        details = [str(about[key]) for key in ("quant_algo", "format", "fmt") if about.get(key)]
        raise Unsupported(" ".join([str(method), *details]) + f"; {METHODS} can be read")
    try:
        return readers[method](about)
    except Unsupported:
        raise
    except (AttributeError, TypeError, ValueError, regex.error) as error:
        raise Unsupported(f"{method} with a damaged description ({error})") from error


def _compressed_tensors(about: Mapping[str, Any]) -> Recipe:
    sparsity = about.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise Unsupported(f"compressed-tensors with sparsity {sparsity.get('format')}")
    if (about.get("transform_config") or {}).get("config_groups"):
        raise Unsupported("compressed-tensors with a transform_config: its rotations are not applied here")
    kind = about.get("format") or ""
    found = about.get("config_groups") or {}
    if not isinstance(found, Mapping) or not found:
        raise Unsupported(f"compressed-tensors {kind} without config_groups")
    groups = [(patterns(group.get("targets")), compressed_tensors.format_of(group, kind)) for group in found.values()]
    ignore = patterns(about.get("ignore"))
    meant: dict[str, Format] = {}
    for targets, layout in groups:
        for target in targets:
            if meant.setdefault(target, layout) != layout:
                raise Unsupported(f"compressed-tensors with two settings for {target!r:.100}, of which one can hold")

    def of(module: str) -> Format | None:
        if any(matches(module, pattern) for pattern in ignore):
            return None
        for targets, layout in groups:
            if any(matches(module, target) for target in targets):
                return layout
        return next((layout for targets, layout in groups if "Linear" in targets), None)

    return Recipe(_name("compressed-tensors", [layout for _, layout in groups]), of)


def _gptq(about: Mapping[str, Any]) -> Recipe:
    plain = gptq.format_of(about, {})
    rules = []
    for pattern, changes in (about.get("dynamic") or {}).items():
        leave, pattern = pattern.startswith("-:"), pattern.removeprefix("-:").removeprefix("+:")
        rules.append((regex.compile(pattern), None if leave else gptq.format_of(about, changes or {})))

    def of(module: str) -> Format | None:
        return next((layout for pattern, layout in rules if begins(pattern, module)), plain)

    return Recipe(_name("gptq", [plain, *(layout for _, layout in rules if layout)]), of)


def _awq(about: Mapping[str, Any]) -> Recipe:
    layout = awq.format_of(about)
    return Recipe(_name("awq", [layout]), lambda module: layout)


def _fp8(about: Mapping[str, Any]) -> Recipe:
    layout = fp8.format_of(about)
    return Recipe(_name("fp8", [layout]), lambda module: layout)


def _modelopt(about: Mapping[str, Any]) -> Recipe:
    exclude = patterns(about.get("ignore") or about.get("exclude_modules"))
    if about.get("quant_algo") == "MIXED_PRECISION":
        layers = {
            _short(name): modelopt.format_of(layer) for name, layer in (about.get("quantized_layers") or {}).items()
        }
        return Recipe(_name("modelopt", list(layers.values())), lambda module: layers.get(_short(module)))
    layout = modelopt.format_of(about)
    left = lambda module: any(fnmatch.fnmatchcase(name, glob) for name in _names(module) for glob in exclude)  # noqa: E731
    return Recipe(_name("modelopt", [layout]), lambda module: None if left(module) else layout)


def patterns(names: Any) -> tuple[str, ...]:
    """A list of names and patterns, None for none of them.

    Raises:
        TypeError, regex.error: it is no such list, or has an expression that is none.
    """
    if names is not None and (not isinstance(names, list) or not all(isinstance(name, str) for name in names)):
        raise TypeError(f"a list of names is needed, found {names!r:.200}")
    for name in names or ():
        if name.startswith("re:"):
            regex.compile(name.removeprefix("re:"))
    return tuple(names or ())


def matches(module: str, pattern: str) -> bool:
    """Whether a name, or `re:` and a regular expression for its beginning, means `module`, whatever its trunk is called."""
    if pattern.startswith("re:"):
        expression = regex.compile(pattern.removeprefix("re:"))
        return any(begins(expression, name) for name in _names(module))
    return pattern in _names(module)


def begins(expression: regex.Pattern[str], name: str) -> bool:
    """Whether an expression matches a name's beginning.

    Raises:
        CheckpointError: it takes too long to say.
    """
    try:
        return expression.match(name, timeout=MATCH_S) is not None
    except TimeoutError:
        raise CheckpointError(
            f"config.json: the expression {expression.pattern!r:.200} of quantization_config takes for ever on {name}; "
            "write it without repeats of repeats"
        ) from None


def _short(module: str) -> str:
    return next((module.removeprefix(trunk) for trunk in TRUNKS if module.startswith(trunk)), module)


def _names(module: str) -> tuple[str, ...]:
    """The names that a config may call a module by: wrapped models have had several."""
    short = _short(module)
    return (module,) if short == module else (module, *(trunk + short for trunk in TRUNKS))


def _name(method: str, layouts: list[Format]) -> str:
    return f"{method} ({', '.join(sorted({layout.scheme.name for layout in layouts}))})"
