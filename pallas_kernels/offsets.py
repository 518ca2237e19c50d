"""Offsets into large arrays of one byte a number: codes of packed weights, keys and values in eight bits.

Pallas' Triton lowering counts elements in 32 bits unless the array has more than 2^32 *bytes*, and extends what it counts with its
sign. That suits wider numbers; of bytes, all past the 2^31st would be looked for before the array begins. A 27B model's largest
stack of four-bit codes has 2.9e9.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.pallas.triton import lowering


def count_bytes_in_64_bits() -> None:
    """Lets the lowering take bytes for pairs of bytes when it asks how large an array is: offsets have 64 bits from 2^31 bytes on.
    tests/test_compiled_kernels.py reads compiled kernels for it."""
    original: Any = lowering._compute_offsets_from_indices

    @functools.wraps(original)
    def offsets(block_info: Any, *args: Any) -> Any:
        array = block_info.full_shape_dtype
        if jnp.dtype(array.dtype).itemsize == 1:
            wide = jax.ShapeDtypeStruct(array.shape, jnp.int16)
            block_info = dataclasses.replace(block_info, full_shape_dtype=wide)
        return original(block_info, *args)

    lowering._compute_offsets_from_indices = offsets
