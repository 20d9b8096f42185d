"""A projection cut into heads: one gradient without a copy where there is room, and the same gradient everywhere."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qknorm.attention.cut import cut_heads, cut_heads_with_room, room_for

HEADS, DIM = (4, 2, 2), 3


class _Product(torch.autograd.Function):
    """a · b summed over all, whose backward writes where there is room."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, with_room: bool) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.with_room = with_room
        return (q * 2).sum() + (k * v).sum()

    @staticmethod
    def backward(ctx: Any, to_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        rooms = [room_for(ctx, i) if ctx.with_room else None for i in range(3)]
        ctx.found = [room is not None for room in rooms]
        places = [torch.empty_like(x) if room is None else room for room, x in zip(rooms, (q, k, v), strict=True)]
        for place, gradient in zip(places, (torch.full_like(q, 2.0), v, k), strict=True):
            place.copy_(gradient * to_out)
        return *places, None


def product(parts: tuple[Tensor, ...], with_room: bool = True) -> Tensor:
    out: Tensor = _Product.apply(*parts, with_room)
    return out


class Joining(TorchDispatchMode):
    """Counts tensors joined by a copy."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.cat.default
        return func(*args, **(kwargs or {}))


def draw() -> Tensor:
    return torch.randn(2, 5, sum(HEADS) * DIM, requires_grad=True)


def plain_gradient(x: Tensor, weight: float = 1.0) -> Tensor:
    q, k, v = cut_heads(x, HEADS, DIM)
    return torch.autograd.grad(weight * ((q * 2).sum() + (k * v).sum()), x)[0]


def test_parts_are_the_same_views() -> None:
    x = draw()
    for mine, reference in zip(cut_heads_with_room(x, HEADS, DIM), cut_heads(x, HEADS, DIM), strict=True):
        assert torch.equal(mine, reference) and mine.stride() == reference.stride()
        assert mine.data_ptr() == reference.data_ptr() and mine.shape[1:] in {(4, 5, 3), (2, 5, 3)}


@pytest.mark.parametrize(("with_room", "copies"), [(True, 0), (False, 1)])
def test_one_gradient_without_a_copy_where_there_is_room(with_room: bool, copies: int) -> None:
    x = draw()
    out = product(cut_heads_with_room(x, HEADS, DIM), with_room)
    with Joining() as joining:
        (found,) = torch.autograd.grad(out, x)
    assert joining.count == copies and torch.equal(found, plain_gradient(x))


def test_several_functions_fill_one_room() -> None:
    x = draw()
    parts = cut_heads_with_room(x, (1,) * 6, 4)
    with Joining() as joining:
        (found,) = torch.autograd.grad(product(parts[:3]) + 3 * product(parts[3:]), x)
    q, k, v, *rest = cut_heads(x, (1,) * 6, 4)
    plain = 2 * q.sum() + (k * v).sum() + 3 * (2 * rest[0].sum() + (rest[1] * rest[2]).sum())
    assert joining.count == 0 and torch.allclose(found, torch.autograd.grad(plain, x)[0])


def test_parts_that_others_use_too_or_nobody_uses() -> None:
    x = draw()
    parts = cut_heads_with_room(x, HEADS, DIM)
    (found,) = torch.autograd.grad(product(parts) + 4 * product(parts), x)  # both write gradients of the same parts
    assert torch.allclose(found, plain_gradient(x, 5.0))
    q, k, v = cut_heads_with_room(x, HEADS, DIM)
    (found,) = torch.autograd.grad(product((q, k * 1.0, v)) + (k**2).sum(), x)
    (of_squares,) = torch.autograd.grad((cut_heads(x, HEADS, DIM)[1] ** 2).sum(), x)
    assert torch.allclose(found, plain_gradient(x) + of_squares)
    (found,) = torch.autograd.grad((cut_heads_with_room(x, HEADS, DIM)[1] ** 2).sum(), x)
    assert torch.equal(found, of_squares)


def test_a_second_pass_leaves_the_first_ones_gradients_alone() -> None:
    x = draw()
    parts = cut_heads_with_room(x, HEADS, DIM)
    out = product(parts)
    of_parts = torch.autograd.grad(out, parts, retain_graph=True)  # takes the room, and ends before the cut
    kept = [each.clone() for each in of_parts]
    (first,) = torch.autograd.grad(2 * out, x, retain_graph=True)
    (second,) = torch.autograd.grad(3 * out, x)
    assert all(map(torch.equal, of_parts, kept))
    assert torch.allclose(first, plain_gradient(x, 2.0)) and torch.allclose(second, plain_gradient(x, 3.0))


def test_a_part_without_room_of_its_own_is_brought_to_its_place() -> None:
    x = draw()
    q, k, v = cut_heads_with_room(x, HEADS, DIM)
    with Joining() as joining:
        (found,) = torch.autograd.grad(product((q, k, v * 1.0)), x)  # of the third a product comes between
    assert joining.count == 0 and torch.allclose(found, plain_gradient(x))


def test_a_second_pass_leaves_places_alone_that_a_first_one_gave_away() -> None:
    x = draw()
    parts = cut_heads_with_room(x, (1,) * 6, 4)
    one, other = product(parts[:3]), product(parts[3:])
    of_parts = torch.autograd.grad(one, parts[:3], retain_graph=True)  # half of the room is taken, and given away
    kept = [each.clone() for each in of_parts]
    (found,) = torch.autograd.grad(2 * one + other, x)
    q, k, v, *rest = cut_heads(x, (1,) * 6, 4)
    plain = 2 * (2 * q.sum() + (k * v).sum()) + 2 * rest[0].sum() + (rest[1] * rest[2]).sum()
    assert all(map(torch.equal, of_parts, kept)) and torch.allclose(found, torch.autograd.grad(plain, x)[0])


def test_a_second_derivative_goes_through() -> None:
    x, results = draw().double().detach().requires_grad_(), []
    for cut in (cut_heads, cut_heads_with_room):
        q, k, v = cut(x, HEADS, DIM)
        (first,) = torch.autograd.grad((q**3).sum() + (k**2 * v).sum(), x, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), x)[0])
    assert torch.allclose(*results) and results[0].any()
