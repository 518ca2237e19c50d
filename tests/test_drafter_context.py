"""What the drafter sees is a setting that changes speed and nothing else: rows hidden from it do not exist, whatever they hold."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import CONFIGS, params_of

from atlas_jax.config import DRAFTER_CONTEXTS, FULL, LINEAR, RunConfig
from atlas_jax.decode.drafters import DraftContext, HybridDrafter, MtpChain, Proposal
from atlas_jax.errors import ConfigError, RequestError
from atlas_jax.runtime import Runtime
from pallas_kernels.paged_attention import Pages, attend

CONFIG = dataclasses.replace(CONFIGS["dense"], layer_types=(LINEAR, FULL))
RUN = RunConfig(
    slots=1, max_length=96, max_drafts=3, row_group=4, page_size=16, prefill_chunk=16, rounds_per_dispatch=4
)  # fmt: skip
TOKENS = np.random.default_rng(3).integers(0, 96, 90).tolist()
ASKED: dict[str, Any] = dict(max_tokens=30, drafter="mtp", drafts=3)
SETTINGS = [*(dict(drafter_context=name) for name in DRAFTER_CONTEXTS), dict(refeed=False)]


@functools.cache
def params():
    """Random ones."""
    return params_of(CONFIG, RUN)


@functools.cache
def runtime(**changes: Any) -> Runtime:
    r = Runtime(CONFIG, dataclasses.replace(RUN, **changes), params())
    if changes.get("drafter_context") == "prefill_only":  # the same executables
        r.loop.executables._compiled = runtime().loop.executables._compiled
    return r


def asked(r: Runtime, prompt: list[int], **options: Any) -> Any:
    r.loop.cache.reset()
    return r.generate(prompt, **ASKED | options)


def test_no_setting_changes_the_output():
    for length in (1, 2, 20, 50):
        want = asked(runtime(), TOKENS[:length])
        for name in DRAFTER_CONTEXTS[1:]:
            r = runtime(drafter_context=name)
            assert asked(r, TOKENS[:length]).token_ids == want.token_ids
            assert r.generate(TOKENS[:length], **ASKED).token_ids == want.token_ids  # warm


def first_row(r: Runtime) -> int:
    assert r.loop._state is not None
    return int(r.loop._state.target.drafter_start[1])


@pytest.mark.long
def test_where_the_drafter_begins():
    """Cold, and warm with 32 of 40 tokens restored."""
    begins = {}
    for name in DRAFTER_CONTEXTS:
        r = runtime(drafter_context=name)
        asked(r, TOKENS[:40], max_tokens=1)
        cold = first_row(r)
        assert r.generate(TOKENS[:40], **ASKED | dict(max_tokens=1)).restored == 32
        begins[name] = cold, first_row(r)
    assert begins == dict(full=(1, 1), prefill_only=(1, 32), blind=(39, 39))
    asked(runtime(drafter_context="blind"), TOKENS[:1], max_tokens=1)
    assert first_row(runtime(drafter_context="blind")) == 1


@pytest.mark.long
def test_blind_sees_no_row_of_the_prompt_and_full_sees_them_all():
    """A blind drafter drafts as one whose rows before the last token are something else, and that never had them written."""
    blind, full = runtime(drafter_context="blind"), runtime()
    want = asked(blind, TOKENS[:40]).acceptance.to_dict()
    state = blind.loop._state
    assert state is not None
    spoilt = jax.tree.map(lambda x: x.at[-1].set(jnp.nan), state.target.pages)
    blind.loop._state = dataclasses.replace(state, target=dataclasses.replace(state.target, pages=spoilt))
    assert asked(blind, TOKENS[:40]).acceptance.to_dict() == want
    state = full.loop._state
    if state is None:
        asked(full, TOKENS[:5])
        state = full.loop._state
    assert state is not None
    asked(full, TOKENS[:40])
    layer = np.asarray(full.loop._state.target.pages.values[-1])  # pyright: ignore[reportOptionalMemberAccess]
    table = np.asarray(full.loop._state.target.page_table[1])  # pyright: ignore[reportOptionalMemberAccess]
    rows = np.moveaxis(layer[table[:3]], 2, 1).reshape(48, -1)
    assert (np.abs(rows[1:40]).sum(1) > 0).all()


@pytest.mark.long
def test_without_refeeding_accepted_drafts_keep_the_rows_of_drafting():
    """Rows of a fully accepted round of three: those of the first two drafts stay, the third's, which nobody wrote, is fed."""
    rows = {}
    for refeed in (True, False):
        r = runtime(refeed=refeed)
        want = asked(runtime(), TOKENS[:20]).token_ids
        got = asked(r, TOKENS[:20], drafter=Told(answer=tuple(want)))
        assert got.token_ids == want
        state = r.loop._state
        assert state is not None
        table = np.asarray(state.target.page_table[1])
        layer = np.asarray(state.target.pages.values[-1])[table]
        rows[refeed] = np.moveaxis(layer, 2, 1).reshape(-1, layer.shape[1] * layer.shape[3])
    # rounds begin at 19, 23, 27 …: row 19 is fed, 20 and 21 are drafting's, 22 and 23 are fed
    differ = (rows[True] != rows[False]).any(1)[19:39]
    assert differ.reshape(5, 4).tolist() == [[False, True, True, False]] * 5


@dataclasses.dataclass(frozen=True)
class Told(MtpChain):
    """Takes the MTP chain's steps, and proposes the known answer all the same."""

    answer: tuple[int, ...] = ()

    def propose(self, context: DraftContext, target: Any, state: Any, drafts: int) -> Proposal:
        made = super().propose(context, target, state, drafts)
        script = jnp.asarray((*TOKENS[:20], *self.answer, *[0] * drafts), jnp.int32)
        return dataclasses.replace(made, tokens=script[context.length[:, None] + 1 + jnp.arange(drafts)])


@pytest.mark.parametrize("first", [0, 1, 5, 15, 16, 17, 30])
def test_attention_begins_at_first(first):
    """Against plain attention over the rows from `first` on; what is before may be anything. Tolerance: another order of sums."""
    rng = np.random.default_rng(first)
    H, Hkv, Dh, page, length = 4, 2, 8, 16, 31
    keys, values = rng.normal(size=(2, length, Hkv, Dh)).astype(np.float32)
    q = rng.normal(size=(1, 1, H, Dh)).astype(np.float32)
    table = jnp.array([[3, 1]])

    def paged(fill: float) -> np.ndarray:
        k, v = (np.full((4 * page, Hkv, Dh), np.nan, np.float32) for _ in range(2))
        at = np.r_[3 * page : 4 * page, page : page + length - page]
        k[at], v[at] = keys, values
        k[at[:first]] = v[at[:first]] = fill
        shape = (1, 4, page, Hkv, Dh)
        pages = Pages(
            jnp.asarray(k.reshape(shape).transpose(0, 1, 3, 4, 2)),
            jnp.asarray(v.reshape(shape).transpose(0, 1, 3, 2, 4)),
        )
        start = jnp.array([length - 1])
        out = attend(
            jnp.asarray(q)[0], pages, 0, table, start, jnp.array([1]), 1, first=jnp.array([first]), row_group=1
        )
        return np.asarray(out)[0]

    scores = np.einsum("hd,thd->ht", q[0, 0], np.repeat(keys, 2, 1)) / Dh**0.5
    weights = np.exp(scores[:, first:] - scores[:, first:].max(1, keepdims=True))
    want = np.einsum("ht,thd->hd", weights / weights.sum(1, keepdims=True), np.repeat(values, 2, 1)[first:])
    np.testing.assert_allclose(paged(7.0), want, atol=1e-5)
    np.testing.assert_array_equal(paged(np.nan), paged(7.0))


def test_what_makes_no_sense_is_refused():
    headless = dataclasses.replace(CONFIG, mtp_num_hidden_layers=0)
    for changes in SETTINGS[1:]:
        with pytest.raises(ConfigError, match=r"this model has no mtp\.\* tensors"):
            Runtime(headless, dataclasses.replace(RUN, **changes), params())
    assert "drafter" not in Runtime(headless, RUN, params()).in_force


def test_refeed_is_one_setting():
    """What a drafter does with accepted rows is what `in_force` says, or it is refused."""
    with pytest.raises(RequestError, match="the hybrid refeeds"):
        runtime(refeed=False).drafting(dict(drafter="hybrid"))
    with pytest.raises(RequestError, match="loaded with refeed=False"):
        runtime().drafting(dict(drafter=MtpChain(refeed=False)))
    assert runtime(refeed=False).drafting(dict(drafter="mtp"))[0] == MtpChain(refeed=False)


def test_a_number_of_drafts_is_what_runs_or_is_refused():
    r = runtime()
    for drafts in (1, r.run.max_drafts):
        with pytest.raises(RequestError, match="'none' drafts nothing"):
            r.drafting(dict(drafter="none", drafts=drafts))
        assert r.drafting(dict(drafter="hybrid", drafts=drafts))[1] == drafts
    assert r.drafting(dict(drafter="none", drafts=0))[1] == r.drafting(dict(drafter="none"))[1] == 0
    for name, value in (("least", 2.0), ("chain", 0), ("min_match", 0)):
        bad: dict[str, Any] = {name: value}
        with pytest.raises(RequestError, match=name):
            HybridDrafter(**bad)


def test_every_prompt_is_checked_before_the_first_is_decoded():
    """Also where there are more prompts than slots."""
    r, before = runtime(), runtime().loop.dispatches
    for bad in ([], [1 << 20], "text"):
        with pytest.raises(RequestError):
            r.generate([[1]] * (2 * r.run.slots) + [bad], max_tokens=2)
    assert r.loop.dispatches == before


def test_what_is_in_force_is_said():
    assert "drafter context blind, accepted rows refed" in runtime(drafter_context="blind").in_force
    assert "accepted rows left as drafted" in runtime(refeed=False).in_force
