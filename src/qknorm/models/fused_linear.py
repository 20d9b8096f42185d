"""Linear maps with as few passes as they can have: weights cast once an update, gradients added in float32 in place.

`torch.nn.functional.linear` under autocast is the plain reference.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from qknorm.models.beside import Beside
from qknorm.models.fused_run import FlatParameters, FusedRun, compute_dtype, gradient_room, hand_back, in_dtype
from qknorm.models.launches import LAUNCHES


class _Linear(torch.autograd.Function):
    """x ↦ x Wᵀ + b, for several W and b that read the same x: one product, its results side by side."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dtype: torch.dtype, flat: FlatParameters | None, *weights_and_biases: Tensor | None
    ) -> Tensor:
        half = len(weights_and_biases) // 2
        weights, biases = weights_and_biases[:half], weights_and_biases[half:]
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        weight = _joined([in_dtype(each, dtype, flat) for each in weights if each is not None])
        bias = _joined([in_dtype(each, dtype, flat) for each in biases if each is not None])
        assert weight is not None
        with torch.autocast(x.device.type, enabled=False):
            out = F.linear(rows, weight, bias)
        ctx.save_for_backward(rows, weight, *weights_and_biases)
        ctx.flat, ctx.x_dtype, ctx.shape = flat, x.dtype, x.shape
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_out: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, *parameters = ctx.saved_tensors
        half = len(parameters) // 2
        to_rows = to_out.reshape(-1, to_out.shape[-1])
        to_x = (to_rows @ weight).to(ctx.x_dtype).view(ctx.shape) if ctx.needs_input_grad[0] else None
        to_parts = torch.split(to_rows, [each.shape[0] for each in parameters[:half]], dim=1)
        beside = _beside(ctx.flat, parameters)
        rooms = [
            None if each is None else gradient_room(each, ctx.flat, beside=beside is not None) for each in parameters
        ]

        def add_gradients() -> None:
            for number, room in enumerate(rooms):
                if room is not None and number < half:
                    add_product(room[0], to_parts[number].t(), rows)
                elif room is not None:
                    add_column_sums(room[0], to_parts[number - half])

        if beside is None:
            add_gradients()
        else:
            beside.start(add_gradients, [rows, to_rows], [room[0] for room in rooms if room is not None])
        found = [None if room is None else hand_back(each, room) for each, room in zip(parameters, rooms, strict=True)]
        return to_x, None, None, *found


def _beside(flat: FlatParameters | None, parameters: Sequence[Tensor | None]) -> Beside | None:
    """Where gradients of these may be added: only if all have their final place, which autograd does not look at."""
    if flat is None or flat.beside is None:
        return None
    final = all(flat.gradient_of(each) is not None for each in parameters if each is not None)
    return flat.beside if final else None


def linear(run: FusedRun, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, as `torch.nn.functional.linear` under autocast."""
    return linear_side_by_side(run, x, [weight], [bias])


def linear_side_by_side(run: FusedRun, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """What each of several linear maps makes of the same x, one after another in the last dimension.

    Either all of them have a bias or none.
    """
    out: Tensor = _Linear.apply(x, compute_dtype(x), run.flat, *weights, *biases)  # type: ignore[no-untyped-call]
    return out


def add_product(room: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds a @ b to a float32 tensor; on a GPU added up in float32 whatever the dtype of a and b."""
    if a.dtype == torch.float32:
        room.addmm_(a, b)
    elif not a.is_cuda:
        room.addmm_(a.float(), b.float())
    elif room.is_contiguous() and _adds_in_place(a.dtype, a.device):
        torch.ops.aten.addmm.dtype_out(room, a, b, torch.float32, out=room)
    else:
        room.add_(a @ b)


@functools.cache
def _adds_in_place(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this PyTorch adds a product of half-precision matrices to a float32 one in place; early ones refuse."""
    room = torch.full((16, 16), 2.0**-12, device=device)
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(room, ones, ones, torch.float32, out=room)
    except (AttributeError, RuntimeError):
        return False
    return bool((room == 16 + 2.0**-12).all())


def add_column_sums(room: Tensor, x: Tensor) -> None:
    """Adds the sum of x's rows to a float32 vector, in one pass over x."""
    from qknorm.models.fused_kernels import column_sum

    x = x if x.stride(1) == 1 else x.contiguous()
    count, d = x.shape
    whole = -(-d // 16) * 16  # columns that may be read: loads are wide only where none is cut in two
    end = x.storage_offset() + (count - 1) * x.stride(0) + whole
    readable = whole if end * x.element_size() <= x.untyped_storage().nbytes() else d
    grid, tile = LAUNCHES["column_sum"].over_columns(count, d)
    column_sum[grid](x, room, count, d, readable, x.stride(0), **tile)


@contextmanager
def fused_linears(run: FusedRun) -> Iterator[None]:
    """Within it every `torch.nn.functional.linear` of floating-point tensors is `linear`.

    So the attention library uses it too, which must know nothing of models.
    """
    with _FusedLinears(run):
        yield


class _FusedLinears(TorchFunctionMode):
    def __init__(self, run: FusedRun) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            x, weight, bias = (*args, *kwargs.values(), None)[:3]
            suits = x.dim() >= 2 and x.numel() and weight.dim() == 2 and x.is_floating_point()
            if suits and kwargs.keys() <= {"bias"}:
                if bias is not None and bias is self._run.bias_to_leave:
                    self._run.bias_to_leave = bias = None
                return linear(self._run, x, weight, bias)
        return func(*args, **kwargs)


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
