# mypy: disable-error-code="no-untyped-call"
"""softmax(g · q̂ k̂ᵀ) v by Triton kernels, forward and backward: how they are started, and how PyTorch derives them.

`attend.attend_with_weights` is the plain reference. No t × s matrix is kept or written: one logarithm for each query is
all that the backward pass needs to make the weights anew.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from qknorm.attention import fused_long, fused_small
from qknorm.attention.cut import room_for
from qknorm.attention.fused import gpu_of
from qknorm.attention.fused_tuning import blocks_for, is_small, small_warps
from qknorm.attention.sharing import TrainingPass, shared_pass

HALF_RANGE = 15.0, 28.0
FULL_RANGE = 0.0, 96.0
"""Headroom and limit, in powers of two: weights before division by their sum are 2^(headroom − 2·bound) … 2^headroom.

float16 holds 2^−14 … 2^15 in full. bfloat16 and float32 reach down to 2^−126; 30 of these powers are left to the values
that weights multiply. Where 2·bound is over the limit, that is from g = 9.7 or 33 on for p = 2, the kernels look for
each query's largest logit first.
"""


def attend_fused(
    q_bhtd: Tensor,
    k_bhsd: Tensor,
    v_bhsd: Tensor,
    scale: float | Tensor,
    *,
    normalise: bool,
    reach: float,
    mask: Tensor | None,
    blind: Tensor | None,
    is_causal: bool,
    dropout: float,
) -> Tensor:
    """Attention for what `why_not` lets pass; `normalise` takes q and k to unit length, or they have |q·k| ≤ reach.

    `mask` (b, s) says which keys may be seen, `blind` (b) where none may.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_bhtd, k_bhsd, v_bhsd))
    g = scale if isinstance(scale, Tensor) else torch.full((), scale, dtype=torch.float32, device=q.device)
    g = g.to(q.device, torch.float32).reshape(-1)
    shared = shared_pass()
    draw, site = _draw(q, k, shared) if dropout > 0 else (None, 0)
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, g))
    given = (q, k, v, g, mask, blind, draw, site, is_causal, dropout, reach, normalise)
    with gpu_of(q):
        if learns or _derived_forward(q, k, v, g):
            out: Tensor = _Attention.apply(*given, shared)
            return out
        return _forward(*given, keep=False)[0]


def _derived_forward(*tensors: Tensor) -> bool:
    """Whether a tensor carries a tangent, which the kernels would lose in silence and `_Attention` refuses."""
    if torch.compiler.is_compiling():
        return False
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def _draw(q: Tensor, k: Tensor, shared: TrainingPass | None) -> tuple[Tensor, int]:
    """What decides on dropout: where one program holds a head, a seed and a number that tells apart those who share it.

    Elsewhere a number for every key and every query, which many programs read. All of it is drawn by torch's generator
    on the device, which follows its seed and may be captured in a CUDA graph.
    """
    if not is_small(*_padded(q, k), q.element_size()):
        count = k.shape[2] + q.shape[0] * q.shape[1] * q.shape[2]
        return torch.randint(-(2**31), 2**31, (count,), dtype=torch.int32, device=q.device), 0
    if shared is not None:
        return shared.seed, shared.next_site()
    return torch.randint(2**62, (1,), dtype=torch.int64, device=q.device), 0


def why_not(q_bhtd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, scale: float | Tensor, dropout: float) -> str | None:
    """Why the kernels cannot take this input; None if they can. Masks and the device are not looked at here."""
    if not q_bhtd.dtype == k_bhsd.dtype == v_bhsd.dtype:
        return f"q, k and v differ in dtype: {q_bhtd.dtype}, {k_bhsd.dtype}, {v_bhsd.dtype}"
    if q_bhtd.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"{q_bhtd.dtype} is not computed in float32"
    d = q_bhtd.shape[-1]
    if v_bhsd.shape[-1] != d:
        return f"values of {v_bhsd.shape[-1]} numbers differ from the head dimension {d}"
    if q_bhtd.shape[0] != k_bhsd.shape[0]:
        return f"q and k differ in batch: {q_bhtd.shape[0]} and {k_bhsd.shape[0]}"
    if not 1 <= d <= 256:
        return f"the head dimension {d} is over 256"
    if 0 in q_bhtd.shape or 0 in k_bhsd.shape:
        return "a tensor is empty"
    if isinstance(scale, Tensor) and scale.numel() not in (1, q_bhtd.shape[1]):
        return f"a scale of {scale.numel()} numbers is neither one nor one for each of {q_bhtd.shape[1]} heads"
    if not 0 <= dropout < 1:
        return f"a dropout of {dropout} is not in [0, 1)"
    if any(x.shape[2] * max(x.stride(2), x.shape[-1]) >= 2**31 for x in (q_bhtd, k_bhsd, v_bhsd)):
        return "a head reaches over 2³¹ numbers in memory"
    if q_bhtd.shape[0] * q_bhtd.shape[1] >= 2**16 and not is_small(*_padded(q_bhtd, k_bhsd), q_bhtd.element_size()):
        return f"batch times heads is {q_bhtd.shape[0] * q_bhtd.shape[1]:,}, over the 65,535 that a launch can have"
    return None


class _Attention(torch.autograd.Function):
    """The kernels as one differentiable step; second derivatives and tangents are refused."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, mask: Tensor | None, blind: Tensor | None,
        draw: Tensor | None, site: int, causal: bool, dropout: float, reach: float, normalise: bool,
        shared: TrainingPass | None,
    ) -> Tensor:  # fmt: skip
        out, log, q_unit, k_unit, *lengths = _forward(
            q, k, v, g, mask, blind, draw, site, causal, dropout, reach, normalise, keep=True
        )
        kept = (q_unit, k_unit) if q_unit.numel() else (q, k)  # unit vectors stand for the raw ones where they exist
        ctx.save_for_backward(*kept, v, g, mask, draw, out, log, *lengths)
        ctx.settings, ctx.shared = (site, causal, dropout, normalise), shared
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_out: Tensor) -> tuple[Tensor | None, ...]:
        to_out = to_out if to_out.stride(-1) == 1 else to_out.contiguous()
        q, k, v, g, *_ = given = (*ctx.saved_tensors, to_out, *ctx.settings)
        if torch.compiler.is_compiling():
            return *_backward_op(*given), *[None] * 9
        room = [_like(x) if (own := room_for(ctx, i)) is None else own for i, x in enumerate((q, k, v))]
        place = ctx.shared.gradient_place(g) if ctx.shared is not None and ctx.needs_input_grad[3] else None
        to_g = torch.empty_like(g) if place is None else place
        _fill_gradients([*room, to_g], place is not None, *given)
        return *room, to_g if place is None else None, *[None] * 9


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, mask: Tensor | None, blind: Tensor | None, draw: Tensor | None,
    site: int, causal: bool, dropout: float, reach: float, normalise: bool, keep: bool,
) -> list[Tensor]:  # fmt: skip
    run = _forward_op if torch.compiler.is_compiling() else _start_forward  # an operator costs, compilers need it
    return run(q, k, v, g, mask, blind, draw, site, causal, dropout, reach, normalise, keep)


def _forward_room(q: Tensor, k: Tensor, normalise: bool, keep: bool) -> list[Tensor]:
    """Room for the output, the logarithms, and unit queries, unit keys and their lengths where they must be kept."""
    b, h, t = q.shape[:3]
    out, log = _like(q), q.new_empty((b, h, t), dtype=torch.float32)
    nothing = [q.new_empty(0) for _ in range(4)]
    if not normalise or is_small(*_padded(q, k), q.element_size()):
        return [out, log, *nothing]
    k_unit, k_length = _like(k), k.new_empty(k.shape[:3], dtype=torch.float32)
    if not keep:
        return [out, log, nothing[0], k_unit, nothing[1], k_length]
    return [out, log, _like(q), k_unit, q.new_empty((b, h, t), dtype=torch.float32), k_length]


def _start_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, mask: Tensor | None, blind: Tensor | None, draw: Tensor | None,
    site: int, causal: bool, dropout: float, reach: float, normalise: bool, keep: bool,
) -> list[Tensor]:  # fmt: skip
    """The output, the logarithm of each query's sum of weights, unit q and k, and the lengths of q and k."""
    room = _forward_room(q, k, normalise, keep)
    out, log, q_unit, k_unit, q_length, k_length = room
    b, h, t, d = q.shape
    s, kv = k.shape[2], k.shape[1]
    rows, keys, block = _padded(q, k)
    headroom, limit = HALF_RANGE if q.dtype == torch.float16 else FULL_RANGE
    fixed = _fixed(q, k, g, mask, draw, causal, normalise)
    fixed |= {"BLIND": blind is not None, "HEADROOM": headroom, "LIMIT": limit}
    masks = *_mask_strides(mask), 0 if blind is None else blind.stride(0)
    dropping = reach, *_dropping(dropout)
    aids = [g if x is None else x for x in (mask, blind, draw)]
    if is_small(rows, keys, block, q.element_size()):
        fused_small.small_forward_kernel[(b * h,)](
            q, k, v, g, *aids, site, out, log, h, t, s, *_strides(q, k, v, out), *masks, *dropping, **fixed,
            ROWS=rows, KEYS=keys, num_warps=small_warps(rows, keys),
        )  # fmt: skip
        return room
    if normalise:
        at_once = max(16, 4_096 // block)
        fused_long.unit_kernel[(triton.cdiv(s, at_once), b * kv)](
            k, k_unit, k_length, kv, s, *_strides(k, k_unit), D=d, BLOCK_D=block, ROWS=at_once
        )
        k = k_unit
    size = blocks_for("forward", block, q.element_size(), max(t, s))
    fused_long.forward_kernel[(triton.cdiv(t, size.rows), b * h)](
        q, k, v, g, *aids, out, log, q_unit, q_length, h, t, s, *_strides(q, k, v, out),
        *(q_unit.stride()[:3] if q_unit.numel() else (0, 0, 0)), *masks, *dropping, **fixed, KEEP=keep,
        ROWS=size.rows, KEYS=size.keys, num_warps=size.warps, num_stages=size.stages,
    )  # fmt: skip
    return room


def _backward_room(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> list[Tensor]:
    return [_like(q), _like(k), _like(v), torch.empty_like(g)]


def _start_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, mask: Tensor | None, draw: Tensor | None, out: Tensor, log: Tensor,
    q_length: Tensor, k_length: Tensor, to_out: Tensor, site: int, causal: bool, dropout: float, normalise: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v and g; q and k are unit vectors where their lengths are given."""
    room = _backward_room(q, k, v, g)
    _fill_gradients(
        room, False, q, k, v, g, mask, draw, out, log, q_length, k_length, to_out, site, causal, dropout, normalise
    )
    return room


def _fill_gradients(
    room: list[Tensor], adds_to_g: bool, q: Tensor, k: Tensor, v: Tensor, g: Tensor, mask: Tensor | None,
    draw: Tensor | None, out: Tensor, log: Tensor, q_length: Tensor, k_length: Tensor, to_out: Tensor, site: int,
    causal: bool, dropout: float, normalise: bool,
) -> None:  # fmt: skip
    """Writes the gradients of q, k, v and g to their room, of any strides; g's is added to what is there, if asked."""
    to_q, to_k, to_v, to_g = room
    b, h, t = q.shape[:3]
    s, kv = k.shape[2], k.shape[1]
    rows, keys, block = _padded(q, k)
    fixed = _fixed(q, k, g, mask, draw, causal, normalise)
    masks, dropping = _mask_strides(mask), _dropping(dropout)
    aids = [g if x is None else x for x in (mask, draw)]
    if is_small(rows, keys, block, q.element_size()):
        parts = to_g if adds_to_g else g.new_empty(b, h, 1)
        fused_small.small_backward_kernel[(b * kv,)](
            q, k, v, to_out, g, *aids, site, log, to_q, to_k, to_v, parts, h, t, s,
            *_strides(q, k, v, to_out, to_q, to_k, to_v), *masks, *dropping, **fixed, ADDS_TO_G=adds_to_g, ROWS=rows,
            KEYS=keys, num_warps=small_warps(rows, keys),
        )  # fmt: skip
        if adds_to_g:
            return
    else:
        size = blocks_for("queries", block, q.element_size(), max(t, s))
        grid = triton.cdiv(t, size.rows), b * h
        parts, delta = g.new_empty(b, h, grid[0]), torch.empty_like(log)
        fused_long.query_gradient_kernel[grid](
            q, k, v, out, to_out, g, *aids, log, q_length, to_q, delta, parts, h, t, s,
            *_strides(q, k, v, out, to_out, to_q), *masks, *dropping, **fixed,
            ROWS=size.rows, KEYS=size.keys, num_warps=size.warps, num_stages=size.stages,
        )  # fmt: skip
        size = blocks_for("keys", block, q.element_size(), max(t, s))
        fused_long.key_gradient_kernel[(triton.cdiv(s, size.keys), b * kv)](
            q, k, v, to_out, g, *aids, log, delta, k_length, to_k, to_v, h, t, s,
            *_strides(q, k, v, to_out, to_k, to_v), *masks, *dropping, **fixed, FITS=t % size.rows == 0,
            ROWS=size.rows, KEYS=size.keys, num_warps=size.warps, num_stages=size.stages,
        )  # fmt: skip
    over = (0, 1, 2) if g.numel() == 1 else (0, 2)
    if adds_to_g:
        to_g += parts.sum(dim=over)
    else:
        torch.sum(parts, dim=over, out=to_g.squeeze(0) if g.numel() == 1 else to_g)


_forward_op = torch.library.custom_op("qknorm::attention", _start_forward, mutates_args=())
_backward_op = torch.library.custom_op("qknorm::attention_gradients", _start_backward, mutates_args=())


@_forward_op.register_fake
def _(q: Tensor, k: Tensor, *rest: Any) -> list[Tensor]:
    return _forward_room(q, k, *rest[-2:])


@_backward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *rest: Any) -> list[Tensor]:
    return _backward_room(q, k, v, g)


def _like(x_bhtd: Tensor) -> Tensor:
    """Room as for x, packed, with heads inside time where x has them so: then joining heads afterwards is free."""
    b, h, t, d = x_bhtd.shape
    if x_bhtd.stride(1) < x_bhtd.stride(2):
        return x_bhtd.new_empty(b, t, h, d).transpose(1, 2)
    return x_bhtd.new_empty(b, h, t, d)


def _padded(q: Tensor, k: Tensor) -> tuple[int, int, int]:
    """Queries, keys and head dimension as powers of two that a product of matrices can have."""
    rows, keys, block = (max(16, triton.next_power_of_2(n)) for n in (q.shape[2], k.shape[2], q.shape[3]))
    return rows, keys, block


def _fixed(
    q: Tensor, k: Tensor, g: Tensor, mask: Tensor | None, draw: Tensor | None, causal: bool, normalise: bool
) -> dict[str, Any]:
    """What is compiled into every kernel."""
    return {
        "D": q.shape[3],
        "BLOCK_D": _padded(q, k)[2],
        "GROUP": q.shape[1] // k.shape[1],
        "G_PER_HEAD": int(g.numel() > 1),
        "CAUSAL": causal and q.shape[2] > 1,  # one query, at the end, sees every key
        "MASKED": mask is not None,
        "DROPOUT": draw is not None,
        "NORMALISE": normalise,
        "enable_fp_fusion": True,  # logit · slope − shift in one instruction
    }


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for x in tensors for stride in x.stride()[:3])


def _mask_strides(mask: Tensor | None) -> tuple[int, int]:
    return (0, 0) if mask is None else (mask.stride(0), mask.stride(1))


def _dropping(dropout: float) -> tuple[int, float]:
    """Of 2²⁴ draws, how many drop a weight; and what the others are multiplied by, so that the mean stays."""
    dropped = round(dropout * 2**24)
    return dropped, 2**24 / (2**24 - dropped)
