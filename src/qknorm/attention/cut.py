"""One projection cut into the heads of queries, keys and values, whose gradients need not be joined by a copy."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def cut_heads(joined_btw: Tensor, heads: Sequence[int], head_dim: int) -> tuple[Tensor, ...]:
    """Consecutive parts of the last dimension, each as (b, its heads, t, head_dim); views."""
    parts = torch.split(joined_btw, [count * head_dim for count in heads], dim=-1)
    return tuple(
        part.view(*part.shape[:2], count, head_dim).transpose(1, 2) for part, count in zip(parts, heads, strict=True)
    )


def cut_heads_with_room(joined_btw: Tensor, heads: Sequence[int], head_dim: int) -> tuple[Tensor, ...]:
    """`cut_heads`, for functions that ask `room_for` where to write: their gradients are one tensor from the start."""
    if torch.compiler.is_compiling():
        return cut_heads(joined_btw, heads, head_dim)
    parts: tuple[Tensor, ...] = _Cut.apply(joined_btw, tuple(heads), head_dim)  # type: ignore[no-untyped-call]
    return parts


def room_for(ctx: Any, number: int) -> Tensor | None:
    """Where a backward may write the gradient of its forward's so-manieth tensor.

    None where that is not a part of a cut tensor, or where another has the room already.
    """
    if torch.compiler.is_compiling():
        return None
    node, output = ctx.next_functions[number]
    room = getattr(node, "room", None)
    return room.take(output) if isinstance(room, _Room) else None


class _Room:
    """One tensor for the gradients of all parts, made when the first of them asks for its own."""

    def __init__(self, joined_btw: Tensor, heads: tuple[int, ...], head_dim: int) -> None:
        self._heads, self._head_dim = heads, head_dim
        self._kind = joined_btw.shape, joined_btw.dtype, joined_btw.device
        self._whole: Tensor | None = None
        self._free: dict[int, Tensor] = {}
        self._parts: tuple[Tensor, ...] = ()

    def take(self, number: int) -> Tensor | None:
        """The place of a part's gradient; only for the first who asks."""
        if self._whole is None:
            shape, dtype, device = self._kind
            self._whole = torch.empty(shape, dtype=dtype, device=device)
            self._parts = cut_heads(self._whole, self._heads, self._head_dim)
            self._free = dict(enumerate(self._parts))
        return self._free.pop(number, None)

    def join(self, gradients: Sequence[Tensor]) -> Tensor:
        """The gradients as one tensor: those in their places stay, others are brought to places that nobody had."""
        whole, parts, free = self._whole, self._parts, self._free
        self._whole, self._parts, self._free = None, (), {}
        derives_again = torch.is_grad_enabled()  # then what lies in the room is not known as made of the gradients
        elsewhere = [number for number, part in enumerate(parts) if not _same_place(gradients[number], part)]
        # whoever had a place and does not come with it may have given it to others, in a pass that ended before the cut
        if whole is None or derives_again or any(number not in free for number in elsewhere):
            return torch.cat([each.transpose(1, 2).flatten(2) for each in gradients], dim=-1)
        for number in elsewhere:
            free[number].copy_(gradients[number])
        return whole


def _same_place(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joined_btw: Tensor, heads: tuple[int, ...], head_dim: int) -> tuple[Tensor, ...]:
        ctx.room = _Room(joined_btw, heads, head_dim)
        return cut_heads(joined_btw, heads, head_dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.room.join(gradients), None, None
