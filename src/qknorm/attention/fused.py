"""Triton kernels: queries or keys normalised and scaled in one pass over memory, forward and backward, for any p.

`norm.py` is the plain reference. Letters in names: n rows (batch × heads × time), d head dimension.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from qknorm.attention.cut import room_for

ROWS_AT_ONCE = 1_024
"""Entries, rows times padded head size, that one program holds."""
WARPS = 2


@triton.jit
def _place(rows, heads, times, stride_b, stride_h, stride_t):
    """Offsets of rows, and their heads, in a tensor (b, h, t, d) of any strides; 32 bits, whose divisions are fast."""
    time = rows % times
    head = (rows // times) % heads
    batch = rows // (times * heads)
    return batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + time.to(tl.int64) * stride_t, head


@triton.jit
def _half_power(size, HALVES: tl.constexpr):
    """size^(HALVES / 2)."""
    power = size * 0.0 + 1.0
    if HALVES % 2 == 1:
        power = tl.sqrt(size)
    for _ in tl.static_range(HALVES // 2):
        power *= size
    return power


@triton.jit
def _lp_length(unit, p, KIND: tl.constexpr, HALVES: tl.constexpr):
    """Lp length of rows whose largest entry is 1 or 0; 1 for rows of zeros."""
    if KIND == 2:
        length = tl.sqrt(tl.sum(unit * unit, axis=1))
    elif KIND == 1:
        length = tl.sum(tl.abs(unit), axis=1)
    elif KIND == 0:  # p = ∞: a row with NaN must stay NaN
        length = tl.sum(unit * 0.0, axis=1) + 1.0
    else:
        size = tl.abs(unit)
        if HALVES > 0:
            powers = _half_power(size, HALVES)
        else:
            powers = tl.where(size > 0, tl.exp2(p[:, None] * tl.log2(tl.where(size > 0, size, 1.0))), size)
        length = tl.exp2(tl.log2(tl.sum(powers, axis=1)) / p)
    return tl.where(length < 1.0, 1.0, length)


@triton.jit(do_not_specialize=["count", "heads", "times"])
def _forward_kernel(
    x_ptr, out_ptr, length_ptr, p_ptr, scale_ptr, count, heads, times, d,
    x_b, x_h, x_t, out_b, out_h, out_t, eps, P_PER_HEAD: tl.constexpr, SCALE_PER_HEAD: tl.constexpr,
    KIND: tl.constexpr, HALVES: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    real = (rows < count)[:, None] & (columns < d)[None, :]
    offset, head = _place(rows, heads, times, x_b, x_h, x_t)
    x = tl.load(x_ptr + offset[:, None] + columns[None, :], mask=real, other=0.0).to(tl.float32)
    p = tl.load(p_ptr + head * P_PER_HEAD, mask=rows < count, other=2.0)
    scale = tl.load(scale_ptr + head * SCALE_PER_HEAD, mask=rows < count, other=1.0)

    largest = tl.max(tl.abs(x), axis=1)
    bad = tl.sum(x * 0.0, axis=1)  # NaN where the row has NaN or infinity, which a maximum may hide
    largest = tl.where(largest <= eps, float("inf"), largest) + bad
    unit = x / largest[:, None]
    length = _lp_length(unit, p, KIND, HALVES)
    out = unit / length[:, None] * scale[:, None]
    offset, _ = _place(rows, heads, times, out_b, out_h, out_t)
    tl.store(out_ptr + offset[:, None] + columns[None, :], out, mask=real)
    tl.store(length_ptr + rows, largest * length, mask=rows < count)


@triton.jit(do_not_specialize=["count", "heads", "times"])
def _backward_kernel(
    x_ptr, to_out_ptr, length_ptr, p_ptr, scale_ptr, to_x_ptr, along_ptr, to_p_ptr, count, heads, times, d,
    x_b, x_h, x_t, to_b, to_h, to_t, dx_b, dx_h, dx_t, P_PER_HEAD: tl.constexpr, SCALE_PER_HEAD: tl.constexpr,
    KIND: tl.constexpr, HALVES: tl.constexpr, LEARN_P: tl.constexpr, SUMMED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradients of p and scale are left by row, or, where all heads share them, as one sum a program."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    real = (rows < count)[:, None] & (columns < d)[None, :]
    offset, head = _place(rows, heads, times, x_b, x_h, x_t)
    x = tl.load(x_ptr + offset[:, None] + columns[None, :], mask=real, other=0.0).to(tl.float32)
    offset, _ = _place(rows, heads, times, to_b, to_h, to_t)
    to_out = tl.load(to_out_ptr + offset[:, None] + columns[None, :], mask=real, other=0.0).to(tl.float32)
    length = tl.load(length_ptr + rows, mask=rows < count, other=float("inf"))
    p = tl.load(p_ptr + head * P_PER_HEAD, mask=rows < count, other=2.0)
    scale = tl.load(scale_ptr + head * SCALE_PER_HEAD, mask=rows < count, other=0.0)

    direction = x / length[:, None]
    size = tl.abs(direction)
    sign = tl.where(direction > 0, 1.0, tl.where(direction < 0, -1.0, 0.0))
    if KIND == 2:
        slope = direction
    elif KIND == 1:
        slope = sign
    elif KIND == 0:
        at_top = tl.where((size == tl.max(size, axis=1)[:, None]) & (size > 0), 1.0, 0.0)
        slope = sign * at_top / tl.maximum(tl.sum(at_top, axis=1), 1.0)[:, None]
    elif HALVES > 0:
        slope = sign * _half_power(size, HALVES - 2)
    else:
        log_size = tl.log2(tl.where(size > 0, size, 1.0))
        slope = tl.where(size > 0, sign * tl.exp2((p[:, None] - 1) * log_size), 0.0)
    along = tl.sum(to_out * direction, axis=1)
    to_x = (to_out - slope * along[:, None]) * (scale / length)[:, None]
    offset, _ = _place(rows, heads, times, dx_b, dx_h, dx_t)
    tl.store(to_x_ptr + offset[:, None] + columns[None, :], to_x, mask=real)
    if SUMMED:
        tl.store(along_ptr + tl.program_id(0), tl.sum(along, axis=0))
    else:
        tl.store(along_ptr + rows, along, mask=rows < count)
    if LEARN_P:
        log_size = tl.log2(tl.where(size > 0, size, 1.0))
        powers = tl.where(size > 0, tl.exp2(p[:, None] * log_size), 0.0)
        entropy = tl.sum(powers * log_size, axis=1) * 0.6931471805599453 / p
        to_p = tl.where(rows < count, -scale * along * entropy, 0.0)
        if SUMMED:
            tl.store(to_p_ptr + tl.program_id(0), tl.sum(to_p, axis=0))
        else:
            tl.store(to_p_ptr + rows, to_p, mask=rows < count)


class _FusedNormalize(torch.autograd.Function):
    """(x, p, scale) ↦ scale · x/‖x‖ₚ along the last dimension of (b, h, t, d)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float | Tensor, scale: float | Tensor, eps: float) -> Tensor:
        x = x if x.stride(-1) == 1 else x.contiguous()
        b, h, t, d = x.shape
        kind, p_numbers, scale_numbers = _kind_of(p), _numbers(p, x), _numbers(scale, x)
        out = torch.empty_like(x)
        length = torch.empty(b * h * t, dtype=torch.float32, device=x.device)
        grid, rows, block = _grid(b * h * t, d)
        _forward_kernel[grid](
            x, out, length, p_numbers, scale_numbers, b * h * t, h, t, d, *x.stride()[:3], *out.stride()[:3], eps,
            P_PER_HEAD=int(p_numbers.numel() > 1), SCALE_PER_HEAD=int(scale_numbers.numel() > 1),
            KIND=kind, HALVES=_halves_of(p), ROWS=rows, BLOCK_D=block, num_warps=WARPS,
        )  # fmt: skip
        ctx.save_for_backward(x, length, p_numbers, scale_numbers)
        ctx.kind, ctx.halves = kind, _halves_of(p)
        ctx.learns = [isinstance(each, Tensor) and each.requires_grad for each in (p, scale)]
        ctx.shapes = [each.shape if isinstance(each, Tensor) else None for each in (p, scale)]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_out: Tensor) -> tuple[Tensor | None, ...]:
        x, length, p, scale = ctx.saved_tensors
        b, h, t, d = x.shape
        to_out = to_out if to_out.stride(-1) == 1 else to_out.contiguous()
        room = room_for(ctx, 0)
        to_x = torch.empty_like(x) if room is None else room
        grid, rows, block = _grid(b * h * t, d)
        summed = all(shape is None or shape.numel() == 1 for shape in ctx.shapes)
        along = torch.empty(grid if summed else (b, h, t), dtype=torch.float32, device=x.device)
        to_p = torch.empty_like(along) if ctx.learns[0] else along
        _backward_kernel[grid](
            x, to_out, length, p, scale, to_x, along, to_p, b * h * t, h, t, d, *x.stride()[:3], *to_out.stride()[:3],
            *to_x.stride()[:3], P_PER_HEAD=int(p.numel() > 1), SCALE_PER_HEAD=int(scale.numel() > 1), KIND=ctx.kind,
            HALVES=ctx.halves, LEARN_P=ctx.learns[0], SUMMED=summed, ROWS=rows, BLOCK_D=block, num_warps=WARPS,
        )  # fmt: skip
        return (
            to_x,
            _summed(to_p, ctx.shapes[0]) if ctx.learns[0] else None,
            _summed(along, ctx.shapes[1]) if ctx.learns[1] else None,
            None,
        )


def normalize_scaled(x_bhtd: Tensor, p: float | Tensor, scale: float | Tensor) -> Tensor:
    """scale · lp_normalize(x, p) in one pass; p and scale are one number or one a head, and may learn.

    Half precision is computed in float32 and rounded once.
    """
    eps = torch.finfo(torch.float32).tiny
    with gpu_of(x_bhtd):
        out: Tensor = _FusedNormalize.apply(x_bhtd, p, scale, eps)
    return out


def gpu_of(x: Tensor) -> AbstractContextManager[object]:
    """Triton starts kernels on the current GPU, which need not be that of the tensors; a compiler sees to that."""
    return nullcontext() if torch.compiler.is_compiling() else torch.cuda.device_of(x)


def why_not(x_bhtd: Tensor, p: float | Tensor, scale: float | Tensor) -> str | None:
    """Why the kernels cannot take this input; None if they can. The device is not looked at here."""
    if x_bhtd.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"{x_bhtd.dtype} is not computed in float32"
    if not 1 <= x_bhtd.shape[-1] <= 256:
        return f"the head dimension {x_bhtd.shape[-1]} is over 256"
    if 0 in x_bhtd.shape:
        return "a tensor is empty"
    if x_bhtd.numel() // x_bhtd.shape[-1] >= 2**31 - ROWS_AT_ONCE:
        return "there are more than 2³¹ rows"
    heads = x_bhtd.shape[1]
    if isinstance(p, Tensor) and p.numel() > 1 and tuple(p.shape[-3:]) != (heads, 1, 1):
        return f"p of shape {tuple(p.shape)} is neither one number nor one for each of {heads} heads"
    if isinstance(scale, Tensor) and scale.numel() not in (1, heads):
        return f"a scale of {scale.numel()} numbers is neither one nor one for each of {heads} heads"
    return None


def _kind_of(p: float | Tensor) -> int:
    """Which formula: 2, 1, 0 for ∞, 3 for any other p."""
    if isinstance(p, Tensor):
        return 3
    return {2.0: 2, 1.0: 1, math.inf: 0}.get(float(p), 3)


def _halves_of(p: float | Tensor) -> int:
    """2p where powers are products and a square root, which takes no longer than p = 2; else 0."""
    twice = 0.0 if isinstance(p, Tensor) else 2 * float(p)
    return int(twice) if twice in range(3, 17) else 0


def _numbers(value: float | Tensor, x: Tensor) -> Tensor:
    """One number, or one a head, in float32 on x's device."""
    if isinstance(value, Tensor):
        return value.detach().to(x.device, torch.float32).contiguous().view(-1)
    return torch.full((1,), value, dtype=torch.float32, device=x.device)


def _summed(parts: Tensor, shape: torch.Size) -> Tensor:
    """Gradients of programs or of rows (b, h, t) added up to one number, or one a head, in the shape they came in."""
    total = parts.sum() if shape.numel() == 1 else parts.sum(dim=(0, 2))
    return total.view(shape)


def _grid(count: int, d: int) -> tuple[tuple[int], int, int]:
    block = triton.next_power_of_2(d)
    rows = max(1, ROWS_AT_ONCE // block)
    return (triton.cdiv(count, rows),), rows, block
