"""Shape aliases. Dimension letters, used in all annotations and docstrings:

B sequences · K rows of a verify · R rows (B x K) · T tokens · C channels of the convolution · W its width · D model ·
V vocabulary · H query heads · Hkv key/value heads · Dh their size · Hk, Hv linear key and value heads · Dk, Dv their sizes ·
S slots · P pages · N tokens of a page · L layers (Lg linear, La full attention) · M the most rows of a verify
"""

from jaxtyping import Array, Bool, Float, Int, UInt32

__all__ = ["Array", "Bool", "Float", "Int", "UInt32"]
