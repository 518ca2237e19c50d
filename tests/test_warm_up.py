"""After a warm-up nothing is compiled any more; it leaves no trace in caches and figures."""

import collections
import contextlib
import dataclasses
import threading

import jax
import numpy as np
import pytest
from models import CONFIGS, RUN, params_of

from atlas_jax.decode.warm_up import begin, compile_all, finish
from atlas_jax.errors import RequestError
from atlas_jax.runtime import Runtime

RUN = dataclasses.replace(RUN, slots=1, max_length=96, max_drafts=2, page_size=16, prefill_chunk=16)
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_counts: collections.Counter[str] = collections.Counter()


def _on_event(event: str, duration_secs: float, **about) -> None:
    _counts[event] += 1


jax.monitoring.register_event_duration_secs_listener(_on_event)


@contextlib.contextmanager
def compiles():
    """What is compiled within, or looked up in the persistent cache."""
    before, seen = _counts[COMPILE_EVENT], []
    yield seen
    seen.append(_counts[COMPILE_EVENT] - before)


def test_nothing_is_compiled_after_a_warm_up():
    said = []
    r = Runtime(CONFIGS["dense"], RUN, params_of(CONFIGS["dense"], RUN), progress=lambda text: said.append(text))
    with compiles() as seen:
        report = r.warm_up(drafter="mtp", drafts=2)
    made = len(r.loop.executables)
    assert report.executables == made > 5 and seen[0] >= made and report.run_s > 0
    assert f"compiled {made} executables in " in str(report)
    assert any(text.startswith("decode rows=3") for text in said) and said[-1].endswith("executables are ready")
    assert r.cache_stats().to_dict() == Runtime(CONFIGS["dense"], RUN, r.params).cache_stats().to_dict()
    assert r.acceptance.total().steps == 0
    prompt = np.random.default_rng(0).integers(0, 96, 70).tolist()
    with compiles() as seen:
        first = r.generate(prompt, drafter="mtp", drafts=2, max_tokens=8)
        again = r.generate(prompt[:40], drafter="mtp", drafts=2, max_tokens=3, temperature=0.7, seed=1)
        third = r.generate([*prompt, *first.token_ids, 5], drafter="mtp", drafts=2, max_tokens=5)
    assert seen == [0] and len(r.loop.executables) == made
    assert (first.restored, again.restored, third.restored > 0) == (0, 32, True)
    assert first.timings.compile_s == 0
    with compiles() as seen:
        assert r.warm_up(drafter="mtp", drafts=2).executables == 0
    assert seen == [0] and r.cache_stats().requests == 3  # nor does a second one run anything


def test_what_is_refused():
    r = Runtime(CONFIGS["dense"], RUN, params_of(CONFIGS["dense"], RUN))
    with pytest.raises(RequestError, match="warm_up knows no temperature"):
        r.warm_up(temperature=1.0)
    with pytest.raises(RequestError, match=r"'auto' or an integer in 0 … 2, got 9; .* --max-drafts N"):
        r.warm_up(drafts=9)


def test_jobs_run_side_by_side_and_the_first_failure_is_told():
    both = threading.Barrier(2, timeout=20)
    assert compile_all([both.wait] * 2) < 20

    def fail():
        raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        compile_all([fail, fail])


def test_waiting_has_a_limit_and_the_jobs_go_on():
    go, said = threading.Event(), []
    jobs = begin([go.wait] * 3, said.append)
    assert not finish(jobs, 0.05)
    go.set()
    assert finish(jobs) and sorted(said) == [f"{i} of 3 executables are ready" for i in (1, 2, 3)]
