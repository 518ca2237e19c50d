"""Products of activation rows with weights of any form.

api        what the models call; packed weights and experts go to `w4a16`
reference  the plain-JAX twins, which CPUs run
triton     GPU: up to 64 rows with narrow plain weights; the library has all others
bench      `python -m pallas_kernels.linear.bench`: times on a GPU, with the library's and the floor beside each
"""

from pallas_kernels.linear.api import by_expert, grouped, linear

__all__ = ["by_expert", "grouped", "linear"]
