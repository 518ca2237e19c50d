from pallas_kernels.gated_delta.api import Journal, fold, prefill, verify

__all__ = ["Journal", "fold", "prefill", "verify"]
