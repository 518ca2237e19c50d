from pallas_kernels.linear.api import by_expert, grouped, linear

__all__ = ["by_expert", "grouped", "linear"]
