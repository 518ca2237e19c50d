"""The checks of `deviceless` pass what is right and find what is wrong, on kernels made for it."""

from __future__ import annotations

import deviceless
import deviceless_toys as toys
import jax
import jax.numpy as jnp
import pytest
from deviceless import CAPTURE, TARGETS, assert_fits, assert_in_place, assert_one_command_buffer, assert_wide_loads
from deviceless_text import accesses, instructions, only_moves, thunks

needs_plugin = pytest.mark.skipif(deviceless.packages() is None, reason=deviceless.MISSING)
BOTH = pytest.mark.parametrize("target", ["h200", "gb10"])
LOOP = (toys.loop, toys.STATE, toys.ROWS, toys.ROWS, toys.COUNT)
STEP = (toys.STATE, toys.ROWS, toys.ROWS)


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


@needs_plugin
@BOTH
def test_a_loop_over_state_in_place_passes_every_check(target):
    compiled = deviceless.compile_for(target, *LOOP, donate=(0,), compiler_options=CAPTURE)
    assert_one_command_buffer(compiled)
    assert_in_place(compiled)
    assert_wide_loads(compiled, "update*")
    assert_fits(compiled)
    assert compiled.donated_bytes == toys.STATE.size * 4
    assert (compiled.arguments, len(compiled.pallas_kernels())) == (4, toys.L)
    assert compiled.temp_bytes < 10_000
    assert f".target {deviceless.ARCHITECTURES[target]}" in compiled.kernels("update*")[0].ptx


@needs_plugin
@pytest.mark.parametrize("function", [toys.loop, toys.fixed_loop])
def test_a_loop_without_the_options_is_not_captured(function):
    args = (*STEP, toys.COUNT)[: 4 if function is toys.loop else 3]
    compiled = deviceless.compile_for("h200", function, *args, donate=(0,))
    assert "kWhile" in {thunk.kind for thunk in compiled.not_captured}
    with pytest.raises(AssertionError, match="outside of them"):
        assert_one_command_buffer(compiled)


@needs_plugin
@pytest.mark.parametrize(("function", "donate"), [(toys.step, ()), (toys.kept, (0,))])
def test_copied_state_is_found(function, donate):
    compiled = deviceless.compile_for("gb10", function, *STEP, donate=donate)
    assert {copy.bytes for copy in compiled.copies()} == {toys.STATE.size * 4}
    with pytest.raises(AssertionError, match="copies of more than"):
        assert_in_place(compiled)
    assert_in_place(compiled, more_than=toys.STATE.size * 4)


@needs_plugin
def test_state_that_is_donated_in_vain_is_found():
    compiled = deviceless.compile_for("gb10", toys.backend_of, toys.STATE, donate=(0,))
    with pytest.raises(AssertionError, match="1048576 bytes are donated, 0 of them"):
        assert_in_place(compiled)


@needs_plugin
def test_spills_are_found():
    compiled = deviceless.compile_for("h200", toys.product, bf16(128, 64), bf16(64, 512))
    (kernel,) = compiled.kernels("product")
    assert kernel.registers == 255
    with pytest.raises(AssertionError, match=f"product spills {kernel.spill_bytes} bytes"):
        assert_fits(compiled, "product")


@needs_plugin
def test_shared_memory_that_the_gb10_lacks_is_found():
    shapes = bf16(128, 512), bf16(512, 64)
    compiled = deviceless.compile_for("h200", toys.product, *shapes)
    assert_fits(compiled, "product")
    with pytest.raises(AssertionError, match="bytes of shared memory"):
        assert_fits(compiled, "product", shared_bytes=deviceless.SHARED_BYTES["gb10"])
    with pytest.raises(RuntimeError, match=r"(?i)shared memory"):
        deviceless.compile_for("gb10", toys.product, *shapes)


@needs_plugin
def test_narrow_loads_are_found():
    compiled = deviceless.compile_for("gb10", toys.every_other, jax.ShapeDtypeStruct((4096,), jnp.float32))
    with pytest.raises(AssertionError, match=r"every_other: loads by bytes a thread \{4: "):
        assert_wide_loads(compiled, "every_other")
    with pytest.raises(LookupError, match="no kernel is called 'other'; there are every_other"):
        compiled.kernels("other")


@needs_plugin
def test_the_compiling_process_says_what_went_wrong():
    with pytest.raises(RuntimeError, match="contract"):
        deviceless.compile_for("h200", toys.product, bf16(2, 3), bf16(4, 5))
    with pytest.raises(ValueError, match=r"h100.*there are gb10, h200"):
        deviceless.compile_for("h100", toys.twice, toys.ROWS)
    with pytest.raises(ValueError, match="top of a module"):
        deviceless.compile_for("h200", lambda x: x, toys.ROWS)


def test_the_targets_say_where_they_come_from():
    for path in TARGETS.glob("*.txtpb"):
        assert "OpenXLA" in path.read_text().partition("gpu_device_info")[0]


# ---- texts -----------------------------------------------------------------------------------------------------------


def test_thunks_are_nested_by_indentation():
    text = """\
000: kCopy         [source       | next=001 (1)] kCopy
001: kWhile        [prev=000 (1) | sink        ]
condition:
    002: kCustomKernel [source | sink] less grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
  body:
    003: kCommandBuffer [source | sink]
        004: kCustomKernel [source       | next=005 (1)] work grid: [8, 1, 1] threads: [128, 1, 1]  shared_memory: 512 bytes
    005: kCopy         [prev=003 (1) | sink        ] kCopy
"""
    assert [(x.kind, x.name, x.depth, x.captured, x.shared_bytes) for x in thunks(text)] == [
        ("kCopy", "kCopy", 0, False, 0),
        ("kWhile", "", 0, False, 0),
        ("kCustomKernel", "less", 1, False, 0),
        ("kCommandBuffer", "", 1, False, 0),
        ("kCustomKernel", "work", 2, True, 512),
        ("kCopy", "kCopy", 1, False, 0),
    ]


def test_only_what_computes_nothing_is_a_copy():
    text = """\
%moved (p: f32[4,8]) -> bf16[8] {
  %p = f32[4,8]{1,0} parameter(0)
  %s = f32[1,8]{1,0} slice(%p), slice={[0:1], [0:8]}
  ROOT %c = bf16[1,8]{1,0} convert(%s)
}

%added (p: f32[4,8]) -> f32[4,8] {
  %p = f32[4,8]{1,0} parameter(0)
  ROOT %a = f32[4,8]{1,0} add(%p, %p)
}

ENTRY %main (x: f32[4,8]) -> (f32[4,8], bf16[1,8]) {
  %x = f32[4,8]{1,0} parameter(0)
  %copy.1 = f32[4,8]{0,1} copy(%x), metadata={op_name="jit(f)/copy"}
  %f.1 = bf16[1,8]{1,0} fusion(%x), kind=kLoop, calls=%moved
  %f.2 = f32[4,8]{1,0} fusion(%x), kind=kLoop, calls=%added
  %c.1 = ((f32[4,8]{1,0}, bf16[1,8]{1,0}), /*index=1*/s32[]) custom-call(%x), custom_call_target="f"
  ROOT %t = (f32[4,8]{1,0}, bf16[1,8]{1,0}) tuple(%f.2, %f.1)
}
"""
    found = {x.name: (x.bytes, only_moves(x)) for x in instructions(text)}
    assert found == {
        "x": (128, False),
        "copy.1": (128, True),
        "f.1": (16, True),
        "f.2": (128, False),
        "c.1": (128, False),
        "t": (128, False),
    }


LOADS = {
    "ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];": {16: 1},
    "@%p1 ld.global.nc.L1::evict_first.v2.f32 {%f1, %f2}, [%rd1];": {8: 1},
    "ld.global.nc.b16 %rs1, [%rd1];": {2: 1},
    "ld.global.v8.b32 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, [%rd1];": {32: 1},
    "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;": {16: 1},
    "cp.async.ca.shared.global [%r1], [%rd1], 4;": {4: 1},
    "ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r5];": {},
    "ld.param.b64 %rd1, [p];": {},
    "st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };": {},
}


def test_loads_are_counted_by_width():
    assert {line: accesses(line, "ld") for line in LOADS} == LOADS
    assert [accesses(line, "st") for line in LOADS][-1] == {16: 1}
