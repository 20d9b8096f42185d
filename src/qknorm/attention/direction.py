"""A row's direction and length for any p, with derivatives of every order, both ways."""

import math
from typing import Any

import torch
from torch import Tensor

from qknorm.attention.values import derives_forward, is_exporting, may_look_at

SQUARES_FROM, SQUARES_TO = 1e-15, 1e15
"""Lengths whose squares, and those of entries that count beside them, float32 holds in full."""


def direction_of(x: Tensor, p: float | Tensor, dim: int, eps: float) -> Tensor:
    """x/‖x‖ₚ along `dim`; a row whose largest entry is at most `eps` comes out as zeros."""
    if derives_forward():  # a `jvp` of our own would be too much for torch.compile, and is not derived again
        return _direction_by_parts(x, p, dim, eps)
    if not torch.is_grad_enabled() or is_exporting():
        # spares decoding the bookkeeping; before PyTorch 2.10 no function of our own is exported with free shapes
        return _Direction.forward(x, p, dim, eps)[0]
    found: Tensor = _Direction.apply(x, p, dim, eps)[0]  # type: ignore[no-untyped-call]
    return found


class _Direction(torch.autograd.Function):
    """x ↦ (x/‖x‖ₚ, ‖x‖ₚ), with a backward that needs only these two, so that it is cheap and can itself be derived.

    Dividing by the largest entry first keeps |x|ᵖ in range for every p and every size of x; the direction does not
    depend on that entry, so no gradient flows through it.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, p: float | Tensor, dim: int, eps: float) -> tuple[Tensor, Tensor]:
        if not isinstance(p, Tensor) and p == 2 and (found := _plain_direction(x, dim, eps)) is not None:
            return found
        largest = x.abs().amax(dim, keepdim=True)  # on the CPU 15 times as fast as vector_norm with p = ∞
        largest = largest.masked_fill(largest <= eps, math.inf)  # what is divided by infinity is zero, both ways
        unit = x / largest
        if isinstance(p, Tensor):
            length = unit.abs().pow(p).sum(dim, keepdim=True).clamp(min=1.0).pow(1 / p)
        elif p == 2:
            length = torch.linalg.vector_norm(unit, 2, dim, keepdim=True).clamp(min=1.0)
        elif p == math.inf:
            length = unit.abs().amax(dim, keepdim=True).clamp(min=1.0)
        elif p == 1:
            length = unit.abs().sum(dim, keepdim=True).clamp(min=1.0)
        else:
            length = unit.abs().pow(p).sum(dim, keepdim=True).clamp(min=1.0).pow(1 / p)
        return unit / length, largest * length

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, p, ctx.dim, _ = inputs
        ctx.set_materialize_grads(False)  # the length is there for second derivatives; most often nothing flows to it
        ctx.p = None if isinstance(p, Tensor) else p
        ctx.save_for_backward(*output, *([p] if isinstance(p, Tensor) else []))

    @staticmethod
    def backward(ctx: Any, to_direction: Tensor | None, to_length: Tensor | None) -> tuple[Tensor | None, ...]:
        direction, length, *learned = ctx.saved_tensors
        p = learned[0] if learned else ctx.p
        if torch.is_grad_enabled():
            # to be derived again: where all is zero, powers have no slope, and any direction over ∞ is as good
            direction = direction.masked_fill(length.isinf(), 1.0)
        to_direction = torch.zeros_like(direction) if to_direction is None else to_direction
        along = (to_direction * direction).sum(ctx.dim, keepdim=True)
        slope = _slope_of_length(direction, p, ctx.dim)
        to_x = torch.addcmul(to_direction, slope, along, value=-1) / length  # a pass less than written out
        to_log_length = -along
        if to_length is not None:
            to_x = to_x + slope * to_length
            to_log_length = to_log_length + to_length * length.masked_fill(length.isinf(), 0.0)
        if not learned or not ctx.needs_input_grad[1]:
            return to_x, None, None, None
        return to_x, _gradient_of_p(direction, p, to_log_length, ctx.dim), None, None


def _direction_by_parts(x: Tensor, p: float | Tensor, dim: int, eps: float) -> Tensor:
    """The direction in operations that PyTorch derives both ways and in every order: slower, and holding more."""
    largest = x.detach().abs().amax(dim, keepdim=True)
    nothing = largest <= eps
    size = (unit := (x / largest.masked_fill(nothing, 1.0)).masked_fill(nothing, 1.0)).abs()
    if not isinstance(p, Tensor) and p == math.inf:
        length = size.amax(dim, keepdim=True)
    else:
        length = size.pow(p).sum(dim, keepdim=True).pow(1 / p)
    return (unit / length).masked_fill(nothing, 0.0)


def _plain_direction(x: Tensor, dim: int, eps: float) -> tuple[Tensor, Tensor] | None:
    """(x/‖x‖₂, ‖x‖₂) with squares as they are, if they are in range: twice to ten times as fast on the CPU.

    There a look at the lengths costs nothing; a GPU would have to be waited for.
    """
    if x.device.type != "cpu" or not may_look_at(x) or not x.numel():  # a compiler would hold on to the number
        return None
    length = torch.linalg.vector_norm(x, 2, dim, keepdim=True)
    low, high = length.aminmax()
    in_range = max(SQUARES_FROM, eps * math.sqrt(x.shape[dim])) < low and high < SQUARES_TO
    return (x / length, length) if in_range else None


def _slope_of_length(direction: Tensor, p: float | Tensor, dim: int) -> Tensor:
    """∂‖x‖ₚ/∂x, which depends on the direction of x alone."""
    if isinstance(p, Tensor):
        return direction.sign() * direction.abs().pow(p - 1)
    if p == 2:
        return direction
    if p == 1:
        return direction.sign()
    if p == math.inf:
        size = direction.abs()
        at_top = (size == size.amax(dim, keepdim=True)).to(direction.dtype)
        return direction.sign() * at_top / at_top.sum(dim, keepdim=True)
    return direction.sign() * direction.abs().pow(p - 1)


def _gradient_of_p(direction: Tensor, p: Tensor, to_log_length: Tensor, dim: int) -> Tensor:
    """Chains ∂log‖x‖ₚ/∂p = Σ|d|ᵖ log|d| / p, of the direction d alone, and sums it to the shape of p."""
    size = direction.abs()
    # not xlogy, whose slope at zero is no number
    entropy = (size.pow(p) * size.masked_fill(size == 0, 1.0).log()).sum(dim, keepdim=True) / p
    to_p: Tensor = (to_log_length * entropy).sum_to_size(p.shape)
    return to_p
