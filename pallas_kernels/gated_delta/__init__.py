from pallas_kernels.gated_delta.api import fold, prefill, step, verify
from pallas_kernels.gated_delta.forms import Journal, Mixer, Recurrent
from pallas_kernels.gated_delta.reference import convolve, gates, sliding, window

__all__ = [
    "Journal",
    "Mixer",
    "Recurrent",
    "convolve",
    "fold",
    "gates",
    "prefill",
    "sliding",
    "step",
    "verify",
    "window",
]
