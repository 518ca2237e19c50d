from pallas_kernels.linear.api import linear

__all__ = ["linear"]
