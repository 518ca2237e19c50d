from pallas_kernels.paged_attention.api import attend, write

__all__ = ["attend", "write"]
