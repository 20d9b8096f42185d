"""The attention library: imports torch and nothing else of this package."""

from qknorm.attention.attend import Attended, attend, attend_with_weights
from qknorm.attention.cache import KeyValueCache
from qknorm.attention.masks import Visibility, causal_mask
from qknorm.attention.multihead import MultiheadAttention
from qknorm.attention.norm import QKNorm, initial_scale, lp_normalize, matched_scale
from qknorm.attention.rotary import rotary_angles, rotate

__all__ = [
    "Attended",
    "KeyValueCache",
    "MultiheadAttention",
    "QKNorm",
    "Visibility",
    "attend",
    "attend_with_weights",
    "causal_mask",
    "initial_scale",
    "lp_normalize",
    "matched_scale",
    "rotary_angles",
    "rotate",
]
