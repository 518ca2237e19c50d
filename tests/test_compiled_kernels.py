"""The step's kernel, compiled for an H200 and a GB10: what it spills, needs and moves, and what stays in place."""

from __future__ import annotations

import functools

import deviceless
import pytest
from deviceless import CAPTURE, assert_fits, assert_in_place, compile_for

from pallas_kernels.gated_delta import arg_specs as gated
from pallas_kernels.gated_delta import triton as step_kernel

pytestmark = pytest.mark.skipif(deviceless.packages() is None, reason=deviceless.MISSING)
MORE = [("h200", "27b", 1), ("h200", "27b", 17), ("gb10", "27b", 1), ("gb10", "27b", 4)]
MORE += [("h200", "35b-a3b", 4), ("gb10", "tiny-agent", 17)]
CASES = pytest.mark.parametrize(
    ("target", "name", "K"),
    [("h200", "27b", 4), ("gb10", "27b", 17)] + [pytest.param(*case, marks=pytest.mark.long) for case in MORE],
)


def step(K, mixer, state, *rest):
    return step_kernel.step(mixer, state, 1, *rest, K)


@CASES
def test_the_step_fits_and_moves_its_state_sixteen_bytes_at_a_time_in_place(target, name, K):
    args = gated.step_specs(gated.SHAPES[name], 1, K)
    compiled = compile_for(target, functools.partial(step, K), *args, donate=(1,), compiler_options=CAPTURE)
    assert_fits(compiled)
    assert_in_place(compiled)
    # By instructions most loads are of short vectors, a number a thread; by bytes nearly all is a program's tile of the state.
    (kernel,) = compiled.kernels("gated_delta_step*")
    tile, threads = 4 * 16 * gated.SHAPES[name].Dk, 4 * 32
    assert kernel.loads[16] * 16 * threads == tile == kernel.stores[16] * 16 * threads
