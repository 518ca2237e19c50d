"""Products of activation rows with weights of four or eight bits, decoded on the way.

api             what the models call
forms           how weights are packed; `pack` packs them
reference       the plain-JAX twins, which CPUs run
triton          GPU: products of up to 64 rows
triton_experts  GPU: the same with the experts that each row chose
triton_prefill  GPU: products of more rows, and of rows sorted by expert
decode          what the kernels share: loads, and the arithmetic that makes numbers of codes
bench           `python -m pallas_kernels.w4a16.bench`: times on a GPU, with floors and peers; `bench_prefill` of many rows

tests/test_w4a16.py tests the kernels and their twins, tests/test_compiled_kernels.py what GPUs' compilers make of them.
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
