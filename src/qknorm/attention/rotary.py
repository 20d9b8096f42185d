"""Rotary positions (Su et al. 2021): each pair of coordinates of a query or key is turned by its position.

Turning keeps the L2 length, so that for p = 2 it does not matter whether one normalises before or after it; for any
other p it does, and whoever uses both must choose.
"""

import torch
from torch import Tensor


def rotary_angles(positions: Tensor, head_dim: int, base: float = 10_000.0) -> Tensor:
    """Angles (time, head_dim / 2) by which `rotate` turns the pairs of coordinates at these positions."""
    if head_dim % 2:
        raise ValueError(f"rotary positions turn pairs of coordinates, so head_dim must be even, got {head_dim}")
    pairs = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    return positions.to(torch.float32).unsqueeze(-1) * base ** (-pairs / head_dim)


def rotate(x_bhtd: Tensor, angles: Tensor) -> Tensor:
    """Turns coordinate i together with coordinate i + head_dim/2, in float32 or wider, and returns x's own dtype."""
    wide = torch.promote_types(x_bhtd.dtype, torch.float32)
    angles = angles.to(wide)
    first, second = x_bhtd.to(wide).chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_bhtd.dtype)
