"""Attention written down naively in float64, sharing nothing with the package, for tests to compare with."""

import math

import torch
from torch import Tensor


def normalize(x: Tensor, p: float | Tensor) -> Tensor:
    """x / ‖x‖ₚ along the last dimension, term by term."""
    if isinstance(p, float) and math.isinf(p):
        return x / x.abs().max(dim=-1, keepdim=True).values
    return x / ((x.abs() ** p).sum(dim=-1, keepdim=True) ** (1 / p))


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, p: float | None, scale: Tensor | float, visible: Tensor | None = None
) -> Tensor:
    """One head and one query at a time; `visible` is boolean (b, h, t, s); queries that see nothing get zeros."""
    group = q.shape[1] // k.shape[1]
    outputs = []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            keys, values = k[b, h // group], v[b, h // group]
            g = scale[h] if isinstance(scale, Tensor) and scale.dim() else scale
            for t in range(q.shape[2]):
                rows = range(len(keys)) if visible is None else visible[b, h, t].nonzero().flatten().tolist()
                if not rows:
                    outputs.append(torch.zeros_like(values[0]))
                    continue
                query, seen = (
                    (q[b, h, t], keys[rows]) if p is None else (normalize(q[b, h, t], p), normalize(keys[rows], p))
                )
                exponents = torch.exp(g * (seen @ query) - (g * (seen @ query)).max().detach())
                outputs.append((exponents / exponents.sum()) @ values[rows])
    return torch.stack(outputs).view(*q.shape[:3], v.shape[-1])
