"""What `attend` makes of its arguments before it computes: shapes that fit, p by head, masks in the type it works in.

Letters in names of tensors as in `attend.py`.
"""

import torch
from torch import Tensor

from qknorm.attention.masks import Visibility, check_mask, plain_mask


def check_shapes(q_bhtd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: Tensor | Visibility | None) -> None:
    """Refuses queries, keys, values and a mask that do not go together."""
    if not q_bhtd.dim() == k_bhsd.dim() == v_bhsd.dim() == 4:
        raise ValueError(
            f"q, k and v must be (batch, heads, time, head_dim), got {tuple(q_bhtd.shape)}, {tuple(k_bhsd.shape)}, "
            f"{tuple(v_bhsd.shape)}"
        )
    if k_bhsd.shape[:3] != v_bhsd.shape[:3]:
        raise ValueError(
            f"k and v must agree in batch, heads and time, got {tuple(k_bhsd.shape)}, {tuple(v_bhsd.shape)}"
        )
    if q_bhtd.shape[-1] != k_bhsd.shape[-1]:
        raise ValueError(f"q and k must have one head_dim, got {q_bhtd.shape[-1]} and {k_bhsd.shape[-1]}")
    if q_bhtd.shape[1] % k_bhsd.shape[1]:
        raise ValueError(f"{q_bhtd.shape[1]} query heads cannot share {k_bhsd.shape[1]} key heads evenly")
    if mask is not None:
        b, h, t, _ = q_bhtd.shape
        check_mask(mask.mask if isinstance(mask, Visibility) else mask, b, h, t, k_bhsd.shape[2])


def by_head(p: float | Tensor | None, heads: int) -> float | Tensor | None:
    """A p given as one number a head, as a scale may be, in the shape (h, 1, 1) that broadcasts over heads."""
    if not isinstance(p, Tensor) or p.dim() != 1:
        return p
    if p.shape[0] not in (1, heads):
        raise ValueError(f"p has {p.shape[0]} numbers for {heads} heads; give one, or one a head")
    return p.view(-1, 1, 1)


def by_key_head(p: float | Tensor, kv_heads: int) -> float | Tensor:
    """p for the keys where it was given for every query head: the one of each group's first head."""
    if isinstance(p, Tensor) and p.dim() >= 3 and p.shape[-3] > kv_heads:
        return p[..., :: p.shape[-3] // kv_heads, :, :]
    return p


def hidden_in(mask: Tensor, q_bhtd: Tensor) -> Tensor:
    """The mask with −∞ for what is lower than any number of the type that attention on q computes in.

    PyTorch's kernels are given the mask in that type: what hides is then the same whoever computes.
    """
    if not _reaches_lower(mask, q_bhtd):
        return mask
    return mask.masked_fill(mask.to(computed_in(q_bhtd)) == -torch.inf, -torch.inf)


def ready(mask: Tensor | Visibility, q_bhtd: Tensor) -> Visibility:
    """The mask made ready for kernels, if it is not, so that rows which `hidden_in` hides are known."""
    if isinstance(mask, Visibility):
        if not _reaches_lower(mask.mask, q_bhtd):
            return mask
        plain = plain_mask(mask)
        assert plain is not None
        mask = plain
    return Visibility.of(hidden_in(mask, q_bhtd))


def _reaches_lower(mask: Tensor, q_bhtd: Tensor) -> bool:
    return mask.dtype != torch.bool and torch.finfo(mask.dtype).min < torch.finfo(computed_in(q_bhtd)).min


def computed_in(x: Tensor) -> torch.dtype:
    """The type that PyTorch's attention on this tensor computes in, under autocast too."""
    device = x.device.type
    if x.dtype == torch.float64 or device == "meta" or not torch.is_autocast_enabled(device):  # it knows no meta
        return x.dtype
    return torch.get_autocast_dtype(device)
