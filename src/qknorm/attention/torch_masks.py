"""The masks of torch.nn.MultiheadAttention, in which True hides: checked, and made one for `attend`."""

from collections.abc import MutableMapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from qknorm.attention.masks import causal_mask, check_dtype
from qknorm.attention.values import may_look_at

_SEEN: MutableMapping[Tensor, tuple[int, bool]] = WeakTensorKeyDictionary()
"""Of masks on a GPU that were looked at: in which version, and whether they are the causal one."""


class Sizes(NamedTuple):
    """What a mask is for; `extra` keys that everyone sees come after the s others."""

    b: int
    h: int
    t: int
    s: int
    extra: int = 0


def merge_masks(
    key_padding_mask: Tensor | None, attn_mask: Tensor | None, is_causal: bool, sizes: Sizes, device: torch.device
) -> tuple[Tensor | None, bool]:
    """One mask for `attend`: boolean with True = may attend, or additive if either is; and whether to be causal too.

    A mask beside `is_causal` holds as it is, and keys that come later, counted from the last query and key, are hidden
    besides. With more queries than keys the mask alone decides: counted so, first queries would see nothing, and a
    causal mask of torch's, which counts from the first, would not hold as it is.
    """
    b, h, t, s, extra = sizes
    if key_padding_mask is not None:
        check_dtype(key_padding_mask, "key_padding_mask", "hidden")
        _check_padding(key_padding_mask, sizes)
        key_padding_mask = _with_extra(key_padding_mask[:, None, None, :], extra)
    if attn_mask is not None:
        check_dtype(attn_mask, "attn_mask", "hidden")
        _check_attn_mask(attn_mask, sizes)
        if is_causal and _is_the_causal_one(attn_mask):
            attn_mask = None
    if is_causal and (attn_mask is not None or extra):
        attn_mask, is_causal = _with_later_hidden(attn_mask, t, s, device), False
    if attn_mask is not None:
        if attn_mask.dim() == 3:
            attn_mask = attn_mask.view(b, h, t, s)
        attn_mask = _with_extra(attn_mask, extra)
    return _joined([mask for mask in (key_padding_mask, attn_mask) if mask is not None]), is_causal


def _check_padding(mask: Tensor, sizes: Sizes) -> None:
    if mask.shape[0] != sizes.b or mask.shape[1] != sizes.s:
        raise ValueError(
            f"key_padding_mask has the shape {tuple(mask.shape)}, but should have {(sizes.b, sizes.s)}: a batch of"
            f" {sizes.b}, {sizes.s} keys (with a cache all of them, not the new ones alone)"
        )


def _check_attn_mask(mask: Tensor, sizes: Sizes) -> None:
    b, h, t, s, _ = sizes
    if mask.dim() == 4:
        fits = all(have in (1, want) for have, want in zip(mask.shape[:3], (b, h, t), strict=True))
        fits = fits and mask.shape[3] == s
    else:
        fits = mask.dim() in (2, 3) and mask.shape[-2] == t and mask.shape[-1] == s
        fits = fits and (mask.dim() == 2 or mask.shape[0] == b * h)
    if not fits:
        raise ValueError(
            f"attn_mask has the shape {tuple(mask.shape)}, but should have {(t, s)}, or {(b * h, t, s)} (batch · heads"
            f" first), for {t} queries and {s} keys (with a cache all of them, not the new ones alone)"
        )


def _is_the_causal_one(mask: Tensor) -> bool:
    """Whether a mask is known to say no more than `is_causal`, so that kernels need not read it.

    Never where what is done is recorded to be repeated with another mask (torch.compile, a CUDA graph), nor where the
    mask learns. On the CPU a look at every call; on a GPU, which has to be waited for, one for each mask and each
    change of it that torch counts: one written past that, as by `mask.data[…] =`, is taken for what it was.
    """
    if not may_look_at(mask) or mask.dim() != 2 or mask.shape[0] != mask.shape[1] or mask.requires_grad:
        return False
    waits = mask.device.type != "cpu"
    if waits and (mask.is_inference() or torch.cuda.is_current_stream_capturing()):  # of such no changes are counted
        return False
    version = mask._version if waits else None
    if version is not None and (seen := _SEEN.get(mask)) is not None and seen[0] == version:
        return seen[1]
    is_it = torch.equal(mask, torch.full_like(mask, True if mask.dtype == torch.bool else -torch.inf).triu_(1))
    if version is not None:
        _SEEN[mask] = version, is_it
    return is_it


def _with_later_hidden(mask: Tensor | None, t: int, s: int, device: torch.device) -> Tensor:
    if mask is None:
        return ~causal_mask(t, s, device)
    later = torch.arange(s, device=device) > torch.arange(t, device=device).unsqueeze(1) + (s - t)
    later = later & ~later[:1, :1]  # to the first query the first key is later where there are more queries than keys
    return mask | later if mask.dtype == torch.bool else mask.masked_fill(later, -torch.inf)


def _with_extra(mask: Tensor, extra: int) -> Tensor:
    return F.pad(mask, (0, extra)) if extra else mask


def _joined(masks: list[Tensor]) -> Tensor | None:
    if all(mask.dtype == torch.bool for mask in masks):
        hidden = masks[0] | masks[1] if len(masks) == 2 else masks[0] if masks else None
        return None if hidden is None else ~hidden
    added = [
        torch.zeros_like(mask, dtype=torch.float32).masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask
        for mask in masks
    ]
    return added[0] + added[1] if len(added) == 2 else added[0]
