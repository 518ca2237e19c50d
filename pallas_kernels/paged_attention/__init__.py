"""Causal attention over a paged cache.

api             what the models call
pages           how keys and values lie in the cache
reference       the plain-JAX twin, which CPUs run
triton          GPU: a few rows a sequence, and the write before them
triton_prefill  GPU: many rows a sequence
softmax         the running softmax of both
arg_specs       named shapes and arguments; tests/test_kernels.py uses them
bench           `python -m pallas_kernels.paged_attention.bench`: times on a GPU, with the floor and the bar beside each
bench_prefill   the same of chunks of prompts, beside cuDNN's attention
"""

from pallas_kernels.paged_attention.api import attend, attend_ragged, write, write_ragged
from pallas_kernels.paged_attention.pages import Pages, page_shapes

__all__ = ["Pages", "attend", "attend_ragged", "page_shapes", "write", "write_ragged"]
