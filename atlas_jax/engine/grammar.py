"""Grammars: which tokens may come next, by llguidance."""

from __future__ import annotations

import functools
import json
import logging
import re
from typing import Any

import numpy as np

from atlas_jax.engine.api import Grammar
from atlas_jax.engine.tool_grammar import lark
from atlas_jax.errors import GrammarError, RequestError
from atlas_jax.runtime import Runtime

KINDS = ("json_schema", "json_object", "regex", "tool_call")
MAX_SOURCE = 1 << 18  # characters
MAX_REPEATS = 10_000  # of an expression's part: each is a state of its own
# Below llguidance's own, for running answers wait while a mask is made. Repeats of repeats, up to 0.9 s by its own limits, are
# given up after 0.13 s in the first mask, which is made while the request is checked, and after 0.03 s in a later one. Its
# verbose messages would quote the grammar and the parser's state.
LIMITS: Any = dict(initial_lexer_fuel=200_000, step_lexer_fuel=50_000, step_max_items=20_000, verbose_errors=False)
PROBES = 4  # tokens of an answer that are tried before it begins: what asks too much mostly does so at once
# Between the parts of JSON: one space, or one line break with a little indentation, alike at every depth, since llguidance takes
# one pattern. JSON allows any number of them, and a model that is unsure what comes next writes them until its answer is full.
WHITESPACE: Any = {"whitespace_pattern": r"[ ]|\r?\n[ ]{0,8}|\n\t{1,4}"}
log = logging.getLogger(__name__)


class Grammars:
    """Makes guides for one runtime's vocabulary."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def guide(self, grammar: Grammar) -> GrammarGuide:
        """Takes the time that the grammar's compilation takes: milliseconds, for a large one a second.

        Raises:
            GrammarError: the grammar is none, nothing matches it, or it asks too much.
            RequestError: this runtime cannot do it.
        """
        if grammar.kind not in KINDS:
            raise GrammarError(f"a grammar's kind is one of {', '.join(KINDS)}, got {grammar.kind!r}")
        if len(grammar.source) > MAX_SOURCE:
            raise GrammarError(
                f"a grammar may have {MAX_SOURCE} characters at most, this one has {len(grammar.source)}"
            )
        tokenizer = self._tokenizer
        from llguidance import LLMatcher, LLParserLimits

        try:
            compiled = self._compiled(grammar)
            matcher = LLMatcher(tokenizer, compiled, log_level=0, limits=LLParserLimits(**LIMITS))
        except GrammarError:
            raise
        except Exception as error:  # whatever a user's grammar makes this or the library stumble over
            raise GrammarError(f"{grammar.kind}: {_line(str(error)) or type(error).__name__}") from error
        if matcher.is_error():
            raise GrammarError(f"{grammar.kind}: {_line(matcher.get_error())}")
        guide = GrammarGuide(matcher, frozenset(self.runtime.config.eos_token_ids))
        if wrong := guide.probe(-(-self.runtime.config.vocab_size // 32)):
            raise GrammarError(f"{grammar.kind}: {wrong}")
        return guide

    def _compiled(self, grammar: Grammar) -> str:
        """What llguidance makes its matcher of. Raises anything."""
        from llguidance import LLMatcher

        if grammar.kind == "regex":
            check_repeats(grammar.source)
            return LLMatcher.grammar_from_regex(grammar.source)
        if grammar.kind == "tool_call":
            return LLMatcher.grammar_from_lark(lark(grammar.source, self._special, WHITESPACE))
        schema = dict(type="object") if grammar.kind == "json_object" else json.loads(grammar.source)
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=WHITESPACE)

    def _special(self, text: str) -> bool:
        """Whether a text is a token of its own that llguidance takes for no text."""
        ids = self._tokenizer.tokenize_str(text)
        return len(ids) == 1 and self._tokenizer.is_special_token(ids[0])

    @functools.cached_property
    def _tokenizer(self) -> Any:
        runtime = self.runtime
        if runtime.tokenizer is None or not runtime.config.eos_token_ids:
            lacks = "tokenizer.json" if runtime.tokenizer is None else "end-of-text token"
            raise RequestError(f"a grammar needs a model with a tokenizer and an end-of-text token; it lacks: {lacks}")
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise RequestError("a grammar needs the package llguidance: pip install 'atlas-jax[serve]'") from error
        path = runtime.tokenizer.directory / "tokenizer.json"
        return LLTokenizer(str(path), runtime.config.vocab_size, list(runtime.config.eos_token_ids))


class GrammarGuide:
    """A `decode.live.Guide`: where one answer stands in its grammar."""

    def __init__(self, matcher: Any, ends: frozenset[int]) -> None:
        self._matcher, self._ends = matcher, ends
        self._error = ""

    @property
    def error(self) -> str:
        return self._error or (_told(self._matcher.get_error()) if self._matcher.is_error() else "")

    def probe(self, words: int) -> str:
        """Walks along the first answer that comes to hand and back; what went wrong, or "". `words`: of a mask."""
        row, walked = np.zeros(words, np.int32), 0
        while not self.error:
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            allowed = np.flatnonzero(row)
            if self.error or walked == PROBES or not allowed.size:
                break
            bits = int(row[allowed[0]]) & 0xFFFFFFFF
            token = int(allowed[0]) * 32 + (bits & -bits).bit_length() - 1
            if token in self._ends or not self._matcher.consume_token(token):
                break
            walked += 1
        if not self.error and walked and not self._matcher.rollback(walked):
            self._error = "the matcher could not be rolled back"
        return self.error

    def masks(self, drafts: list[int], n_rows: int, masks: np.ndarray) -> int:
        """See `Guide.masks`. The matcher walks along the drafts and back."""
        walked = 0
        for t in range(n_rows):
            row = masks[t]
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if self.error:
                return t + 1
            if t == n_rows - 1:
                break
            token = drafts[t]
            # What follows the end is nobody's; an end that is drafted is picked by the row before it all the same.
            if (
                token in self._ends
                or not row[token // 32] >> (token % 32) & 1
                or not self._matcher.consume_token(token)
            ):
                n_rows = t + 1
                break
            walked += 1
        if walked and not self._matcher.rollback(walked):
            self._error = "the matcher could not be rolled back"
        return n_rows

    def take(self, token_ids: list[int]) -> None:
        """See `Guide.take`."""
        if not self._matcher.consume_tokens(token_ids) and not self.error:
            self._error = f"tokens {token_ids} do not fit the grammar"


def check_repeats(expression: str) -> None:
    """Raises GrammarError for a part that is repeated too often, as in "a{1000000}"."""
    for found in re.finditer(r"\{(\d+)(?:,(\d*))?\}", expression):
        most = max(found[1], found[2] or "", key=lambda digits: (len(digits.lstrip("0")), digits.lstrip("0")))
        if len(most.lstrip("0")) > len(str(MAX_REPEATS)) or int(most) > MAX_REPEATS:
            raise GrammarError(f"regex: {found[0]:.40} repeats more than {MAX_REPEATS} times, which is the most here")


def _told(error: str) -> str:
    """One line for the client instead of llguidance's account of its state."""
    if error.startswith("NoExtensionBias"):
        return "no text matches it from here on"
    log.debug("a grammar: %s", _line(error))
    return "it asks too much for one token; make it simpler: fewer optional properties, choices or repeats"


def _line(error: str) -> str:
    """The first line, and the last where the first only announces it, as of a wrong regular expression."""
    lines = error.strip().splitlines() or [""]
    reasons = [line for line in lines[1:] if line.startswith("error: ")] if lines[0].endswith(":") else []
    return " ".join([lines[0][:300], *(reason.removeprefix("error: ")[:200] for reason in reasons[:1])])
