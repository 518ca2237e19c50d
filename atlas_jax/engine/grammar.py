"""Grammars: which tokens may come next, by llguidance."""

from __future__ import annotations

import functools
import json
import logging
from typing import Any

import numpy as np

from atlas_jax.engine.api import Grammar
from atlas_jax.engine.tool_grammar import lark
from atlas_jax.errors import RequestError
from atlas_jax.runtime import Runtime

KINDS = ("json_schema", "json_object", "regex", "tool_call")
MAX_SOURCE = 1 << 18  # characters
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
            RequestError: the grammar is none, or asks too much, or this runtime cannot do it.
        """
        if grammar.kind not in KINDS:
            raise RequestError(f"a grammar's kind is one of {', '.join(KINDS)}, got {grammar.kind!r}")
        if len(grammar.source) > MAX_SOURCE:
            raise RequestError(
                f"a grammar may have {MAX_SOURCE} characters at most, this one has {len(grammar.source)}"
            )
        from llguidance import LLMatcher

        tokenizer = self._tokenizer
        try:
            if grammar.kind == "regex":
                compiled = LLMatcher.grammar_from_regex(grammar.source)
            elif grammar.kind == "tool_call":
                compiled = LLMatcher.grammar_from_lark(lark(grammar.source, self._special, WHITESPACE))
            else:
                schema = dict(type="object") if grammar.kind == "json_object" else json.loads(grammar.source)
                compiled = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=WHITESPACE)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{grammar.kind}: {error}") from error
        matcher = LLMatcher(tokenizer, compiled, log_level=0)
        if matcher.is_error():
            raise RequestError(f"{grammar.kind}: {matcher.get_error().strip()}")
        return GrammarGuide(matcher, frozenset(self.runtime.config.eos_token_ids))

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
        return self._error or (self._matcher.get_error() if self._matcher.is_error() else "")

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
