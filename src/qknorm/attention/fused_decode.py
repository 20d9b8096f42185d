# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""One Triton kernel for a step of decoding: softmax(g · q kᵀ + mask) v for few queries over many keys, no gradient.

Keys and values are read once and nothing else counts: a program takes a key head with all queries that share it, and
walks its keys in blocks. `attend.attend_with_weights` is the plain reference. As there, a hidden value that is not a
number spoils all who do not see it, and so does a hidden key, unless a boolean mask hides it. Keys after the last one
that any query of the program sees are not read, whatever they are: so padding costs nothing.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import forward_ad

from qknorm.attention.availability import why_no_kernels
from qknorm.attention.fused import gpu_of
from qknorm.attention.fused_blocks import LOG2_E, load_rows, product, unit_rows
from qknorm.attention.values import someone_follows, stand_for_others

MOST_QUERIES = 16
"""What counts as few: products take 16 rows at least, so that these cost no more than one."""
MOST_ENTRIES = 8_192
"""Of the queries that share a key head, padded: a program holds them, and their outputs in float32, all the time."""
NARROWEST = 64
"""Fewer numbers than these count as so many: a program holds, for each query, the logits and mask of its keys too."""
MANY_HEADS, MANY_KEYS = 128, 1_024
"""With fewer key heads than the first, and more keys than the second, most of a GPU would watch a few programs walk."""
NO_MASK, ONE_ROW, BY_ROW = 0, 1, 2
"""Whether there is a mask, and whether it is the same for all queries of a sentence."""


@triton.jit
def _load_mask(address, keys, real, s, mask_s, MASK: tl.constexpr, FITS: tl.constexpr):
    """The mask over these keys, from the `address` of each row, or of all rows."""
    if MASK == 1:
        if FITS:
            found = tl.load(address + keys * mask_s)[None, :]
        else:
            found = tl.load(address + keys * mask_s, mask=keys < s, other=0)[None, :]
    else:
        inside = real[:, None]
        if not FITS:
            inside = inside & (keys < s)[None, :]
        found = tl.load(address[:, None] + (keys * mask_s)[None, :], mask=inside, other=0)
    return found


@triton.jit
def _seen_until(address, real, s, mask_s, MASK: tl.constexpr, BOOLEAN: tl.constexpr, KEYS: tl.constexpr):
    """How many keys there are up to the last one that a row may see: 0 where none sees any."""
    last = 0
    place = tl.cdiv(s, KEYS) * KEYS
    while (place > 0) & (last == 0):  # from the end, so that who sees all looks at one block
        place -= KEYS
        keys = place + tl.arange(0, KEYS)
        mask = _load_mask(address, keys, real, s, mask_s, MASK, False)
        if BOOLEAN:
            seen = mask != 0
        else:
            seen = mask.to(tl.float32) != float("-inf")  # of what is not a number too, which is to be told
        if MASK == 2:
            seen = seen & real[:, None]
        last = tl.max(tl.where(seen & (keys < s)[None, :], keys[None, :] + 1, 0))
    return last


@triton.jit
def _scales(g_ptr, head, real, scale, SCALES: tl.constexpr, ROWS: tl.constexpr):
    """What multiplies the logits of each row: `scale` (SCALES 0), the number at g (1), or that of its head (2)."""
    found = tl.zeros([ROWS], tl.float32) + scale
    if SCALES == 1:
        found += tl.load(g_ptr).to(tl.float32)
    elif SCALES == 2:
        found += tl.load(g_ptr + head, mask=real, other=0.0).to(tl.float32)
    return found


@triton.jit
def _add_block(logits, v, largest, total, out):
    """Largest logit, sum of weights and weighted sum of values, of a block of keys and those before it."""
    larger = tl.maximum(largest, tl.max(logits, axis=1))
    shift = tl.where(larger == float("-inf"), 0.0, larger)  # no key was seen yet
    weights = tl.exp2((logits - shift[:, None]) * LOG2_E)  # only differences: the lowest number would overflow
    kept = tl.exp2((largest - shift) * LOG2_E)
    return larger, total * kept + tl.sum(weights, axis=1), product(weights.to(v.dtype), v, out * kept[:, None])


@triton.jit
def _mean(out, total, told, real, BLIND: tl.constexpr):
    """Sums of weighted values over the weights'; zeros for rows that saw no key, or that are `told` to see none."""
    blind = total == 0
    out = out / tl.where(blind, 1.0, total)[:, None]
    if BLIND:
        blind = blind | (tl.load(told, mask=real, other=0) != 0)
    return tl.where(blind[:, None], 0.0, out)


@triton.jit(do_not_specialize=["key_heads", "t", "s"])
def decode_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, mask_ptr, nothing_ptr, out_ptr, key_heads, t, s, scale,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_t, mask_b, mask_h, mask_t, mask_s,
    nothing_b, nothing_h, nothing_t, D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    SCALES: tl.constexpr, MASK: tl.constexpr, BOOLEAN: tl.constexpr, BLIND: tl.constexpr, NORMALISE: tl.constexpr,
    FITS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """FITS promises whole blocks of keys."""
    which = tl.program_id(0)
    batch, key_head = (which // key_heads).to(tl.int64), (which % key_heads).to(tl.int64)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    head, time = key_head * GROUP + rows // t, (rows % t).to(tl.int64)
    real = rows < GROUP * t
    own = real[:, None] & (columns < D)[None, :]
    place = q_ptr + batch * q_b + head * q_h + time * q_t
    q = tl.load(place[:, None] + columns[None, :], mask=own, other=0.0)
    if NORMALISE:
        unit, _ = unit_rows(q)
        q = unit.to(q.dtype)
    slope = _scales(g_ptr, head, real, scale, SCALES, ROWS)[:, None]
    address = mask_ptr + batch * mask_b
    if MASK == 2:
        address += head * mask_h + time * mask_t
    k_ptr += batch * k_b + key_head * k_h
    v_ptr += batch * v_b + key_head * v_h

    largest, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, BLOCK_D], tl.float32)
    end = s
    if MASK != 0:  # and not in the loop: loads under a condition would wait until the block before is computed
        end = _seen_until(address, real, s, mask_s, MASK, BOOLEAN, 4 * KEYS if MASK == 1 else KEYS)
    for start in tl.range(0, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = load_rows(k_ptr, keys, k_s, end, D, BLOCK_D, FITS and MASK == 0)
        v = load_rows(v_ptr, keys, v_s, end, D, BLOCK_D, FITS and MASK == 0)
        if MASK != 0:
            mask = _load_mask(address, keys, real, s, mask_s, MASK, FITS)
        logits = product(q, tl.trans(k), None) * slope
        if MASK != 0 and BOOLEAN:
            logits = tl.where(mask != 0, logits, float("-inf"))
        elif MASK != 0:
            logits += mask.to(tl.float32)
        if not FITS:
            logits = tl.where((keys < s)[None, :], logits, float("-inf"))
        largest, total, out = _add_block(logits, v, largest, total, out)
    told = nothing_ptr + batch * nothing_b + head * nothing_h + time * nothing_t
    out = _mean(out, total, told, real, BLIND)
    place = out_ptr + batch * o_b + head * o_h + time * o_t
    tl.store(place[:, None] + columns[None, :], out.to(out_ptr.dtype.element_ty), mask=own)


class Launch(NamedTuple):
    """Keys that a program takes at a time, its warps, and how many blocks are on their way at once."""

    keys: int
    warps: int
    stages: int


def launch_for(rows: int, padded_dim: int, keys: int) -> Launch:
    """Blocks that the rooms of a search are whole numbers of, and programs so small that many share a multiprocessor.

    `python benchmarks/attention_gpu.py --decoding --tune` times others on the GPU at hand.
    """
    warps = max(1, min(4, rows * padded_dim // 512))
    return Launch(32 if keys <= 32 or padded_dim > 128 else 64, warps, 2)


def attend_few(
    q_bhtd: Tensor,
    k_bhsd: Tensor,
    v_bhsd: Tensor,
    scale: float | Tensor,
    *,
    normalise: bool = False,
    mask: Tensor | None = None,
    nothing: Tensor | None = None,
    launch: Launch | None = None,
) -> Tensor:
    """Attention for what `why_not` lets pass, with heads inside time in memory; no gradient flows through it.

    `normalise` takes the queries to unit length first; the keys are taken as they are. `mask` is boolean (True = may
    attend) or additive, and `nothing` marks the queries that get zeros whatever it says; so does one that sees no key.
    """
    q, k, v = (x.detach() if x.stride(-1) == 1 else x.detach().contiguous() for x in (q_bhtd, k_bhsd, v_bhsd))
    b, h, t, d = q.shape
    kv, s = k.shape[1:3]
    rows, block = (max(16, triton.next_power_of_2(n)) for n in (h // kv * t, d))
    out = q.new_empty(b, t, h, d).transpose(1, 2)
    g = scale.detach().contiguous() if isinstance(scale, Tensor) else None
    mask_strides = (0, 0, 0, 0) if mask is None else mask.expand(b, h, t, s).stride()
    nothing_strides = (0, 0, 0) if nothing is None else nothing.expand(b, h, t, 1).stride()[:3]
    by_row = any(n > 1 and stride for n, stride in zip((h, t), mask_strides[1:3], strict=True))
    kind = NO_MASK if mask is None else BY_ROW if by_row else ONE_ROW
    keys, warps, stages = launch or launch_for(rows, block, s)
    with gpu_of(q):
        decode_kernel[(b * kv,)](
            q, k, v, q if g is None else g, q if mask is None else mask.detach(), q if nothing is None else nothing,
            out, kv, t, s, float(scale) if g is None else 0.0,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *mask_strides, *nothing_strides,
            D=d, BLOCK_D=block, GROUP=h // kv, SCALES=0 if g is None else min(2, g.numel()),
            MASK=kind, BOOLEAN=mask is not None and mask.dtype == torch.bool, BLIND=nothing is not None,
            NORMALISE=normalise, FITS=s % keys == 0, ROWS=rows, KEYS=keys, num_warps=warps, num_stages=stages,
            enable_fp_fusion=True,
        )  # fmt: skip
    return out


def why_not(
    q_bhtd: Tensor,
    k_bhsd: Tensor,
    v_bhsd: Tensor,
    scale: float | Tensor,
    mask: Tensor | None,
    nothing: Tensor | None = None,
) -> str | None:
    """Why the kernel cannot take this input; None if it can. Whether a gradient is wanted is not looked at here."""
    b, h, t, d = q_bhtd.shape
    kv, s = k_bhsd.shape[1:3]
    if (refusal := why_no_kernels(q_bhtd)) is not None:
        return refusal
    if not q_bhtd.dtype == k_bhsd.dtype == v_bhsd.dtype or q_bhtd.dtype not in (torch.float16, torch.bfloat16):
        return f"q, k and v are not of one half precision: {q_bhtd.dtype}, {k_bhsd.dtype}, {v_bhsd.dtype}"
    if v_bhsd.shape[-1] != d or b != len(k_bhsd):
        return f"q and v differ in batch or head dimension: {tuple(q_bhtd.shape)}, {tuple(v_bhsd.shape)}"
    if 0 in q_bhtd.shape or 0 in k_bhsd.shape:
        return "a tensor is empty"
    rows, block = (max(16, triton.next_power_of_2(n)) for n in (h // kv * t, d))
    if d > 256 or rows * max(block, NARROWEST) > MOST_ENTRIES:
        return f"{h // kv} × {t} queries of {d} numbers for a key head are more than a program can hold"
    if b * kv < MANY_HEADS and s > MANY_KEYS:
        return f"{b * kv} programs would walk {s:,} keys"
    if any(x.shape[2] * max(x.stride(2), d) >= 2**31 for x in (k_bhsd, v_bhsd)):
        return "a head reaches over 2³¹ numbers in memory"
    if isinstance(scale, Tensor) and scale.numel() > 1 and tuple(scale.shape) not in ((h,), (h, 1, 1), (1, h, 1, 1)):
        return f"a scale of shape {tuple(scale.shape)} is neither one number nor one for each of {h} heads"
    aids = [x for x in (scale, mask, nothing) if isinstance(x, Tensor)]
    if any(x.device != q_bhtd.device for x in (k_bhsd, v_bhsd, *aids)):
        return "not all tensors are on one device"
    return _why_not_mask(mask, (b, h, t, s)) or _why_not_mask(nothing, (b, h, t, 1))


def why_not_values_alone(tensors: list[Tensor]) -> str | None:
    """Why more than values is wanted of a computation with these, or they have none; None if that is not so."""
    if stand_for_others(*tensors):
        return "the tensors stand for others"
    if someone_follows():
        return "someone follows every operation"
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "a gradient is wanted"
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        return "a tangent is wanted"
    return None


def _why_not_mask(mask: Tensor | None, shape: tuple[int, ...]) -> str | None:
    """Why this is not a mask that broadcasts to the shape."""
    if mask is None:
        return None
    if not (mask.dtype == torch.bool or mask.is_floating_point()):
        return f"a mask of {mask.dtype} is neither boolean nor to be added"
    if mask.dim() > 4 or any(m not in (1, n) for m, n in zip(mask.shape[::-1], shape[::-1], strict=False)):
        return f"a mask of shape {tuple(mask.shape)} does not broadcast to {shape}"
    if mask.dim() and mask.shape[-1] * mask.stride(-1) >= 2**31:
        return "a mask reaches over 2³¹ numbers in memory"
    return None
