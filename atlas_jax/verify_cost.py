"""What a verify costs by its rows: forces rounds of exactly K rows, times them, and sets the physical floor beside."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from atlas_jax.config import ModelConfig, RunConfig
from atlas_jax.costs import Cost
from atlas_jax.decode.loop import Request
from atlas_jax.decode.mtp import MtpChain
from atlas_jax.decode.protocol import DraftContext, Drafter, Proposal
from atlas_jax.decode.request import SamplingParams
from atlas_jax.decode.state import RUNNING, DecodeState
from atlas_jax.state import TargetState
from pallas_kernels.timing import copy_bandwidth

if TYPE_CHECKING:
    from atlas_jax.runtime import Runtime

REPEATS = 5
ROOM = 64  # tokens that a sequence needs beyond its context


@dataclasses.dataclass(frozen=True)
class RandomRows:
    """As many random drafts as there are rows for. Each of them is another token, as rows of a mixture of experts must be."""

    name: ClassVar[str] = "random-rows"
    feeds: ClassVar[bool] = False

    def init(self, config: ModelConfig, run: RunConfig) -> Any:
        return ()

    def propose(self, context: DraftContext, target: TargetState, state: Any, drafts: int) -> Proposal:
        key = jax.random.fold_in(jax.random.key(3), context.length[0])
        tokens = jax.random.randint(key, (context.slots.shape[0], drafts), 0, context.vocab_size, jnp.int32)
        return Proposal(tokens, jnp.full(tokens.shape[0], drafts, jnp.int32), target, state)


@dataclasses.dataclass(frozen=True)
class Measured:
    """One length of context and batch: the cost, and by rows the least time the memory allows, in ms."""

    cost: Cost
    floor_ms: dict[int, float]


def measure(
    runtime: Runtime,
    rows: Sequence[int],
    contexts: Sequence[int],
    batches: Sequence[int],
    progress: Callable[[str], None] | None = None,
) -> tuple[float, list[Measured]]:
    """Times rounds of each number of rows at each context and batch; contexts are prefilled with random tokens.

    Returns: bytes a second that a copy moves on this device, and what was measured.
    """
    speed = copy_bandwidth()
    out = []
    for context in contexts:
        for batch in batches:
            if progress:
                progress(f"measuring context {context}, batch {batch}")
            timer = _Timer(runtime, context, batch)
            step_ms = {k: timer.round_ms(RandomRows(), k) for k in rows}
            most, draft_ms = max(rows), None
            if runtime.config.has_mtp and most > 1:
                draft_ms = max(0.0, (timer.round_ms(MtpChain(), most) - step_ms[most]) / (most - 1))
            floor = {
                k: 1e3 * moved_bytes(runtime.config, runtime.run, runtime.params, k, context, batch) / speed
                for k in rows
            }
            out.append(Measured(Cost(context, batch, step_ms, draft_ms), floor))
            timer.close()
    return speed, out


class _Timer:
    """A batch of sequences at a given length, whose rounds are timed again and again from there."""

    def __init__(self, runtime: Runtime, context: int, batch: int) -> None:
        self.loop = runtime.loop
        self.rounds = runtime.run.rounds_per_dispatch
        rng = np.random.default_rng(context)
        params = SamplingParams(max_tokens=ROOM, ignore_eos=True)
        prompts = [rng.integers(0, runtime.config.vocab_size, context).astype(np.int32) for _ in range(batch)]
        self.slots = np.zeros(1 << (batch - 1).bit_length(), np.int32)
        self.slots[:batch] = 1 + np.arange(batch)
        requests = [Request(prompt, params) for prompt in prompts]
        self._lives = [self.loop.admit(request, RandomRows(), lambda *_: None) for request in requests]
        while left := [live for live in self._lives if not live.started]:
            self.loop.prefill(self.loop.together(left))
        self.state = self.loop.state
        self._start = jax.device_get((self.state.target.length, self.state.remaining, self.state.feed_count))

    def _rewound(self, state: DecodeState) -> DecodeState:
        """Back at the context's length. What the recurrent state has read since stays in it, which takes no other time."""
        length, remaining, feed_count = map(jnp.asarray, self._start)
        every, finish = jnp.arange(length.shape[0]), jnp.where(length > 0, RUNNING, state.finish)
        state = dataclasses.replace(state, target=state.target.put(every, base=length, pending=0))
        return state.put(every, remaining=remaining, feed_count=feed_count, finish=finish)

    def round_ms(self, drafter: Drafter, rows: int) -> float:
        slots = jnp.asarray(self.slots)
        run = self.loop.executables.dispatch(drafter, rows, None, self.loop.params, self.state, slots)
        times, whole = [], []
        for i in range(REPEATS + 1):
            spent = []
            for rounds in (0, self.rounds):  # what a dispatch takes by itself is not part of a round
                self.state = jax.block_until_ready(self._rewound(self.state))
                began = time.perf_counter()
                self.state, emitted, _ = run(self.loop.params, self.state, slots, jnp.int32(rounds))
                counts = np.asarray(emitted.counts)
                spent.append(time.perf_counter() - began)
            if i:
                ran = max(int((counts > 0).any(1).sum()), 1)
                times.append((spent[1] - spent[0]) / ran)
                whole.append(spent[1] / ran)
        step = statistics.median(times)
        # Rounds of a small model can take less than what dispatches differ by on a busy machine.
        return 1e3 * (step if step > 0 else statistics.median(whole))

    def close(self) -> None:
        self.loop.state = self.state
        for live in self._lives:
            self.loop.release(live)


def moved_bytes(config: ModelConfig, run: RunConfig, params: Any, rows: int, context: int, batch: int) -> int:
    """Bytes that a verify must move on each device: weights and KV read once, recurrent state read and written once. Of experts,
    those that so many rows are expected to choose."""
    total = rows * batch
    chosen = 1.0
    if config.num_experts:
        chosen = 1 - (1 - config.num_experts_per_tok / config.num_experts) ** total
    weights = 0.0
    for path, x in jax.tree.leaves_with_path(params["params"]):
        keys = [str(getattr(key, "key", key)) for key in path]
        if keys[0] in ("mtp", "draft_head") or (keys[0] == "embedding" and not config.tie_word_embeddings):
            continue
        experts = config.num_experts and keys[0] == "feed_forward" and keys[1] in ("gate_up", "down")
        weights += x.nbytes * (chosen if experts else 1.0)
    itemsize = jnp.dtype(run.page_dtype).itemsize
    kv = config.num_full_layers * context * 2 * config.num_key_value_heads * config.head_dim * itemsize
    head_state = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim * 4
    return int(weights + batch * (kv + 2 * config.num_linear_layers * head_state)) // run.tensor_parallel
