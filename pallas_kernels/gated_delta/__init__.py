"""The gated delta rule.

api             what the models call, and the mathematics
forms           its arguments
reference       the plain-JAX twin, which CPUs run
triton          GPU: a step (verify of a few rows), and the fold of its journal by itself
triton_tile     its part of a state in registers
triton_rows     what its rows need besides the state
triton_prefill  GPU: prompts, in chunks
arg_specs       named shapes and arguments; tests/test_kernels.py and tests/test_compiled_kernels.py use them
bench           `python -m pallas_kernels.gated_delta.bench`: times on a GPU, with the floor, the bar and the peer beside each
"""

from pallas_kernels.gated_delta.api import fold, prefill, step, verify
from pallas_kernels.gated_delta.forms import Journal, Mixer, Recurrent
from pallas_kernels.gated_delta.reference import convolve, gates, last, sliding, whole, window, windows

__all__ = [
    "Journal",
    "Mixer",
    "Recurrent",
    "convolve",
    "fold",
    "gates",
    "last",
    "prefill",
    "sliding",
    "step",
    "verify",
    "whole",
    "window",
    "windows",
]
