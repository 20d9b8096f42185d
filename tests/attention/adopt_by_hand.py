"""QKNorm written out by hand, and what is needed to hold a model's own attention against it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def by_hand(q: Tensor, k: Tensor, v: Tensor, g: float | Tensor, added: Tensor | None = None, p: float = 2.0) -> Tensor:
    """softmax(g · q̂ k̂ᵀ + added) v over (b, h, t, d), heads shared where k has fewer, joined to (b, t, h·d)."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    q, k = (x / torch.linalg.vector_norm(x, ord=p, dim=-1, keepdim=True) for x in (q, k))
    if isinstance(g, Tensor) and g.dim():
        g = g[:, None, None]
    logits = g * torch.einsum("bhtd,bhsd->bhts", q, k)
    weights = (logits if added is None else logits + added).softmax(dim=-1)
    return torch.einsum("bhts,bhsd->bthd", weights, v).flatten(2)


def heads(x: Tensor, head_dim: int) -> Tensor:
    return x.view(*x.shape[:2], -1, head_dim).transpose(1, 2)


def causal(t: int) -> Tensor:
    return torch.full((t, t), -torch.inf, dtype=torch.float64).triu(1)


class Recorder:
    """Keeps what one module was called with and what it answered, last time."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.output: Any = None
        self._handle = module.register_forward_hook(self._keep, with_kwargs=True)

    def _keep(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.args, self.kwargs, self.output = args, kwargs, output

    def argument(self, name: str, place: int = 0) -> Any:
        return self.kwargs[name] if name in self.kwargs else self.args[place]


def linear(module: Any, x: Tensor) -> Tensor:
    """What nn.Linear or GPT-2's Conv1D, which keeps its weight the other way round, makes of x."""
    weight = module.weight if isinstance(module, nn.Linear) else module.weight.T
    return F.linear(x, weight, module.bias)
