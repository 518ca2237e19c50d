from pallas_kernels.paged_attention.api import Pages, attend, write

__all__ = ["Pages", "attend", "write"]
