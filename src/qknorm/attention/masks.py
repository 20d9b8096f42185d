"""Which queries see which keys: masks made ready once for many calls, and the causal one.

Letters in names of tensors as in `attend.py`.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Visibility(NamedTuple):
    """A mask made ready once for many calls: `nothing` marks the queries that see no key, None if there are none."""

    mask: Tensor
    nothing: Tensor | None

    @classmethod
    def of(cls, mask: Tensor) -> "Visibility":
        """Kernels differ on queries without any visible key (NaN in some): let these see all, to be zeroed after.

        Give an additive mask in the type that attention computes in, or narrower: a wider one (float32 for bfloat16)
        may hold numbers too low for it, which hide, so that it is made ready again at every call. Boolean ones never.
        """
        if mask.dtype == torch.bool:
            nothing = ~mask.any(dim=-1, keepdim=True)
            return cls(mask | nothing, nothing)
        nothing = (mask == -torch.inf).all(dim=-1, keepdim=True)
        return cls(mask.masked_fill(nothing, 0.0), nothing)


def check_mask(mask: Tensor, b: int, h: int, t: int, s: int) -> None:
    """Refuses a mask of whole numbers, which would be added where yes and no was meant, and one that does not fit.

    Its last dimensions are to be 1, or those of (b, h, t, s).
    """
    check_dtype(mask, "the mask", "may attend")
    fits = mask.dim() <= 4
    # a loop, since compilers before PyTorch 2.10 read neither all() of a generator nor zip() of two lengths
    for have, want in zip(mask.shape[-4:], (b, h, t, s)[max(0, 4 - mask.dim()) :], strict=True):
        fits = fits and (have == 1 or have == want)
    if not fits:
        raise ValueError(f"the mask's shape {tuple(mask.shape)} does not fit (batch, heads, t, s) = {(b, h, t, s)}")


def check_dtype(mask: Tensor, name: str, true: str) -> None:
    """Refuses a mask, called `name`, that is neither yes and no, of which True means `true`, nor to be added."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"{name} is {mask.dtype}; give bool (True = {true}), or floating point to be added")


def plain_mask(mask: Tensor | Visibility | None) -> Tensor | None:
    """A mask as it was before it was made ready."""
    if not isinstance(mask, Visibility):
        return mask
    if mask.nothing is None:
        return mask.mask
    hidden = False if mask.mask.dtype == torch.bool else -torch.inf
    return mask.mask.masked_fill(mask.nothing, hidden)


def all_see(mask: Tensor | Visibility | None, is_causal: bool, t: int, s: int) -> bool:
    """Whether it is known, without a look at the mask, that every query sees a key."""
    if mask is None:
        return s > 0 and (not is_causal or t <= s)
    return isinstance(mask, Visibility) and mask.nothing is None and not is_causal


def causal_mask(t: int, s: int, device: torch.device | str | None = None) -> Tensor:
    """Boolean (t, s): query i sees key j if j ≤ i + (s − t), so that the last query sees all."""
    return torch.ones(t, s, dtype=torch.bool, device=device).tril(diagonal=s - t)


def with_causal(mask: Tensor | None, is_causal: bool, t: int, s: int, device: torch.device) -> Tensor | None:
    if not is_causal:
        return mask
    causal = causal_mask(t, s, device)
    if mask is None:
        return causal
    return mask & causal if mask.dtype == torch.bool else mask.masked_fill(~causal, -torch.inf)
