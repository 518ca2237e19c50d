"""Products of activation rows with weights of four or eight bits, decoded on the way.

`forms` says how weights are packed, `pack` packs them, `reference` is the plain-JAX twin of the GPU kernels.
"""

from pallas_kernels.w4a16.api import dequantise, expert_product, grouped_product, product
from pallas_kernels.w4a16.forms import FORMS, ByLayer, Fp8, Int4, Nvfp4, Packed, SideBySide

__all__ = [
    "FORMS",
    "ByLayer",
    "Fp8",
    "Int4",
    "Nvfp4",
    "Packed",
    "SideBySide",
    "dequantise",
    "expert_product",
    "grouped_product",
    "product",
]
