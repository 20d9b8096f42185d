"""Attention whose logits cannot saturate the softmax, from the formula to a deployed translator."""

from qknorm.attention import (
    KeyValueCache,
    MultiheadAttention,
    QKNorm,
    attend,
    attend_with_weights,
    initial_scale,
    lp_normalize,
    matched_scale,
)
from qknorm.version import __version__

__all__ = [
    "KeyValueCache",
    "MultiheadAttention",
    "QKNorm",
    "__version__",
    "attend",
    "attend_with_weights",
    "initial_scale",
    "lp_normalize",
    "matched_scale",
]
