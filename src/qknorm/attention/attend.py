"""softmax(scale · q kᵀ) v, with q and k normalised first where p is given: one meaning, several back ends.

Letters in names of tensors: b batch, h heads, t queries in time, s keys in time (source), d head dimension.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qknorm.attention.arguments import by_head, by_key_head, check_shapes, computed_in, hidden_in, ready
from qknorm.attention.availability import HAS_KERNELS, why_no_kernels
from qknorm.attention.dropout import dropout as drop_out
from qknorm.attention.masks import Visibility, all_see, plain_mask, with_causal
from qknorm.attention.norm import Backend, check_p, lp_normalize, normalize_and_scale, scale_by
from qknorm.attention.onlookers import shown
from qknorm.attention.values import derives_forward

SHORT_ON_CPU = 64
"""So many queries and keys at most are attended to by plain products in training on the CPU."""
FEW_ON_CPU = 16
"""So many queries at most are, over any number of keys, where nothing is learned."""


class Attended(NamedTuple):
    """What the reference computed on its way; masked logits are −∞."""

    output: Tensor
    weights: Tensor
    logits: Tensor


def attend(
    q_bhtd: Tensor,
    k_bhsd: Tensor,
    v_bhsd: Tensor,
    *,
    scale: float | Tensor,
    p: float | Tensor | None = None,
    mask: Tensor | Visibility | None = None,
    is_causal: bool = False,
    dropout: float = 0.0,
    backend: Backend = "auto",
) -> Tensor:
    """Attention output (b, h, t, d), the same from every back end.

    `scale` multiplies the logits: a number, or a tensor of one or of h numbers, which may learn. `p` normalises q and
    k to unit Lp length first: a number, or a tensor of one or of h; without it they are taken as they come (normalised
    already, or dot-product attention).
    `mask` is boolean (True = may attend) or additive, and broadcasts to (b, h, t, s); `Visibility.of` makes one ready
    for many calls. `is_causal` aligns the last query with the last key. k and v may have fewer heads, each shared by
    h/kv queries' heads. A query that may attend to nothing, since all its keys are False or −∞, gets zeros; so low a
    number that q's dtype (autocast's, under it) cannot hold it, as float16 cannot −1e9, counts as −∞. A row of finite
    ones hides nothing: softmax shares the weight out among its keys. `dropout` is applied to the weights whenever it is
    above 0.
    A kernel put in the place of F.scaled_dot_product_attention is sure to be called with `backend="sdpa"` alone: `auto`
    often computes by ways of its own.
    """
    if p is not None:
        check_p(p)
    return attend_valid(
        q_bhtd, k_bhsd, v_bhsd, scale=scale, p=p, mask=mask, is_causal=is_causal, dropout=dropout, backend=backend
    )


@shown()
def attend_valid(
    q_bhtd: Tensor,
    k_bhsd: Tensor,
    v_bhsd: Tensor,
    *,
    scale: float | Tensor,
    p: float | Tensor | None,
    mask: Tensor | Visibility | None,
    is_causal: bool,
    dropout: float,
    backend: Backend,
) -> Tensor:
    """`attend` for a p known to be valid: to look at a learned one would make the host wait for the device."""
    check_shapes(q_bhtd, k_bhsd, v_bhsd, mask)
    p = by_head(p, q_bhtd.shape[1])
    # PyTorch's kernels have no forward-mode derivatives
    plain = backend == "auto" and (derives_forward() or _slow_in_kernels(q_bhtd, k_bhsd, v_bhsd, dropout))
    if backend == "reference" or plain:
        return attend_with_weights(
            q_bhtd, k_bhsd, v_bhsd, scale=scale, p=p, mask=mask, is_causal=is_causal, dropout=dropout
        ).output
    if backend not in ("auto", "sdpa", "fused"):
        raise ValueError(f"backend must be auto, reference, sdpa or fused, got {backend!r}")
    if p is None:
        if backend == "fused":
            raise ValueError("backend='fused' cannot be used here: no p is given, so there is nothing to fuse")
        if backend == "auto" and _takes_few(q_bhtd, k_bhsd, v_bhsd, scale, mask, is_causal, dropout):
            return _attend_few(q_bhtd, k_bhsd, v_bhsd, scale, mask, normalise=False)
        return _attend_sdpa(scale_by(q_bhtd, scale), k_bhsd, v_bhsd, mask, is_causal, dropout)
    if backend == "fused" or (backend == "auto" and _worth_it(q_bhtd, k_bhsd)):
        refusal = fused_attention_refusal(q_bhtd, k_bhsd, v_bhsd, scale=scale, mask=mask, dropout=dropout)
        if refusal is None:
            return _attend_fused(q_bhtd, k_bhsd, v_bhsd, scale, p, mask, is_causal, dropout)
        if backend == "fused":
            raise ValueError(f"backend='fused' cannot be used here: {refusal}; backend='auto' takes another way")
    q_bhtd = normalize_and_scale(q_bhtd, p, scale, backend)
    k_bhsd = normalize_and_scale(k_bhsd, by_key_head(p, k_bhsd.shape[1]), 1.0, backend)
    return _attend_sdpa(q_bhtd, k_bhsd, v_bhsd, mask, is_causal, dropout)


@shown(unit_keys=True)
def attend_normalised_keys(
    q_bhtd: Tensor,
    k_bhsd: Tensor,
    v_bhsd: Tensor,
    *,
    scale: float | Tensor,
    p: float | Tensor,
    mask: Tensor | Visibility | None,
    is_causal: bool,
    dropout: float,
    backend: Backend,
) -> Tensor:
    """`attend_valid` where the keys, from a cache, have unit Lp length already and the queries not yet."""
    check_shapes(q_bhtd, k_bhsd, v_bhsd, mask)
    inside = backend == "auto" and not isinstance(p, Tensor) and p == 2
    if inside and _takes_few(q_bhtd, k_bhsd, v_bhsd, scale, mask, is_causal, dropout):
        return _attend_few(q_bhtd, k_bhsd, v_bhsd, scale, mask, normalise=True)
    q_bhtd = normalize_and_scale(q_bhtd, p, scale, backend)
    return attend_valid(
        q_bhtd, k_bhsd, v_bhsd, scale=1.0, p=None, mask=mask, is_causal=is_causal, dropout=dropout,
        backend="sdpa" if backend == "fused" else backend,
    )  # fmt: skip


def _slow_in_kernels(q_bhtd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, dropout: float) -> bool:
    """Whether the formula as it is written is faster than PyTorch's attention, as often on the CPU.

    With dropout PyTorch has no fused kernel there and draws its random numbers slowly; over short rows its backward
    takes thrice as long as plain products, and so does its forward for the few queries of a step of decoding.
    """
    if q_bhtd.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    if dropout > 0:
        return True
    if q_bhtd.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return False
    t, s = q_bhtd.shape[2], k_bhsd.shape[2]
    derives = torch.is_grad_enabled() and any(x.requires_grad for x in (q_bhtd, k_bhsd, v_bhsd))
    return max(t, s) <= SHORT_ON_CPU if derives else t <= FEW_ON_CPU


def _worth_it(q_bhtd: Tensor, k_bhsd: Tensor) -> bool:
    """Whether `auto` should take the attention kernels of `fused_attention` for this input, if they can have it.

    They are faster than normalising in one pass and PyTorch's attention where one program holds all queries and keys of
    a head (docs/results/attention.md). Asked for by name they are used wherever they can be.
    """
    if not may_fuse("auto", q_bhtd):
        return False
    from qknorm.attention.fused_tuning import is_short

    return is_short(q_bhtd.shape[2], k_bhsd.shape[2], q_bhtd.shape[3])


def may_fuse(backend: Backend, x: Tensor) -> bool:
    """Whether `attend` may take the attention kernels for tensors like this one, or what autocast makes of it.

    `auto` does so in half precision, on GPUs since Ampere: earlier ones have too little shared memory for the kernels.
    It leaves torch.compile to fuse by itself.
    """
    if backend != "auto" or not x.is_cuda or torch.compiler.is_compiling():
        return backend == "fused"
    autocast = torch.is_autocast_enabled("cuda") and x.dtype != torch.float64
    dtype = torch.get_autocast_dtype("cuda") if autocast else x.dtype
    return dtype.itemsize == 2 and torch.cuda.get_device_capability(x.device) >= (8, 0)


def fused_attention_refusal(
    q_bhtd: Tensor,
    k_bhsd: Tensor,
    v_bhsd: Tensor,
    *,
    scale: float | Tensor,
    mask: Tensor | Visibility | None = None,
    dropout: float = 0.0,
) -> str | None:
    """Why the attention kernels of `fused_attention` are not for this input; None if they are."""
    if (refusal := why_no_kernels(q_bhtd)) is not None:
        return refusal
    mask = mask.mask if isinstance(mask, Visibility) else mask
    if mask is not None and mask.dtype != torch.bool:
        return "the mask is added to the logits, not boolean"
    if mask is not None and (mask.dim() > 4 or any(n != 1 for n in mask.shape[-3:-1])):
        return f"a mask of shape {tuple(mask.shape)} does not hide the same keys from all queries, as (b, 1, 1, s) does"
    from qknorm.attention.fused_attention import why_not

    q_bhtd, k_bhsd, v_bhsd = _as_autocast(q_bhtd, k_bhsd, v_bhsd)
    return why_not(q_bhtd, k_bhsd, v_bhsd, scale, dropout)


def _attend_fused(
    q_bhtd: Tensor,
    k_bhsd: Tensor,
    v_bhsd: Tensor,
    scale: float | Tensor,
    p: float | Tensor,
    mask: Tensor | Visibility | None,
    is_causal: bool,
    dropout: float,
) -> Tensor:
    """The attention kernels, which normalise for p = 2; for any other p one pass over q and over k comes before."""
    from qknorm.attention.fused_attention import attend_fused

    q_bhtd, k_bhsd, v_bhsd = _as_autocast(q_bhtd, k_bhsd, v_bhsd)
    inside = not isinstance(p, Tensor) and p == 2
    if not inside:
        q_bhtd = normalize_and_scale(q_bhtd, p, 1.0, "auto")
        k_bhsd = normalize_and_scale(k_bhsd, by_key_head(p, k_bhsd.shape[1]), 1.0, "auto")
    # what a learned p is now only the device knows, so that it counts as infinite
    reach = q_bhtd.shape[-1] ** max(0.0, 1 - 2 / (math.inf if isinstance(p, Tensor) else p))
    blind = None
    if isinstance(mask, Visibility):
        mask, blind = mask
    b, s = k_bhsd.shape[0], k_bhsd.shape[2]
    return attend_fused(
        q_bhtd,
        k_bhsd,
        v_bhsd,
        scale,
        normalise=inside,
        reach=float(reach),
        mask=None if mask is None else mask.expand(b, 1, 1, s)[:, 0, 0],
        blind=None if blind is None else blind.expand(b, 1, 1, 1)[:, 0, 0, 0],
        is_causal=is_causal,
        dropout=dropout,
    )


def _takes_few(
    q_bhtd: Tensor,
    k_bhsd: Tensor,
    v_bhsd: Tensor,
    scale: float | Tensor,
    mask: Tensor | Visibility | None,
    is_causal: bool,
    dropout: float,
) -> bool:
    """Whether `auto` takes the kernel of `fused_decode` for this input."""
    if not HAS_KERNELS or not may_fuse("auto", q_bhtd):
        return False
    return few_refusal(q_bhtd, k_bhsd, v_bhsd, scale=scale, mask=mask, is_causal=is_causal, dropout=dropout) is None


def few_refusal(
    q_bhtd: Tensor,
    k_bhsd: Tensor,
    v_bhsd: Tensor,
    *,
    scale: float | Tensor,
    mask: Tensor | Visibility | None = None,
    is_causal: bool = False,
    dropout: float = 0.0,
) -> str | None:
    """Why the kernel of `fused_decode`, for few queries and no gradient, is not for this input; None if it is."""
    from qknorm.attention.fused_decode import MOST_QUERIES, why_not, why_not_values_alone

    mask, nothing = mask if isinstance(mask, Visibility) else (mask, None)
    refusal = why_not_values_alone([x for x in (q_bhtd, k_bhsd, v_bhsd, scale, mask, nothing) if isinstance(x, Tensor)])
    if refusal is not None:
        return refusal
    t = q_bhtd.shape[2]
    if t > MOST_QUERIES or (is_causal and t > 1):
        return f"{t} queries are over {MOST_QUERIES}, or later ones see more keys"
    if dropout > 0:
        return "it drops no weights"
    q_bhtd, k_bhsd, v_bhsd = _as_autocast(q_bhtd, k_bhsd, v_bhsd)
    return why_not(q_bhtd, k_bhsd, v_bhsd, scale, mask, nothing)


def _attend_few(
    q_bhtd: Tensor,
    k_bhsd: Tensor,
    v_bhsd: Tensor,
    scale: float | Tensor,
    mask: Tensor | Visibility | None,
    *,
    normalise: bool,
) -> Tensor:
    from qknorm.attention.fused_decode import attend_few

    if isinstance(mask, Visibility):
        mask, nothing = ready(mask, q_bhtd)
    else:
        mask, nothing = None if mask is None else hidden_in(mask, q_bhtd), None
    q_bhtd, k_bhsd, v_bhsd = _as_autocast(q_bhtd, k_bhsd, v_bhsd)
    return attend_few(q_bhtd, k_bhsd, v_bhsd, scale, normalise=normalise, mask=mask, nothing=nothing)


def _as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast what PyTorch's attention would be given, else the tensors as they are."""
    return tuple(x.to(computed_in(x)) for x in tensors)


@shown()
def attend_with_weights(
    q_bhtd: Tensor,
    k_bhsd: Tensor,
    v_bhsd: Tensor,
    *,
    scale: float | Tensor,
    p: float | Tensor | None = None,
    mask: Tensor | Visibility | None = None,
    is_causal: bool = False,
    dropout: float = 0.0,
) -> Attended:
    """The reference: the formula as it is written, in float32 or wider, with its weights and logits."""
    check_shapes(q_bhtd, k_bhsd, v_bhsd, mask)
    p = by_head(p, q_bhtd.shape[1])
    mask = ready(mask, q_bhtd) if isinstance(mask, Visibility) else None if mask is None else hidden_in(mask, q_bhtd)
    out_dtype, wide = v_bhsd.dtype, torch.promote_types(q_bhtd.dtype, torch.float32)
    device = q_bhtd.device.type
    with torch.autocast("cpu" if device == "meta" else device, enabled=False):  # it knows no meta
        q_bhtd, k_bhsd, v_bhsd = q_bhtd.to(wide), k_bhsd.to(wide), v_bhsd.to(wide)
        if p is not None:
            q_bhtd, k_bhsd = lp_normalize(q_bhtd, p), lp_normalize(k_bhsd, by_key_head(p, k_bhsd.shape[1]))
        if (group := q_bhtd.shape[1] // k_bhsd.shape[1]) > 1:
            k_bhsd, v_bhsd = k_bhsd.repeat_interleave(group, dim=1), v_bhsd.repeat_interleave(group, dim=1)

        logits = scale_by(q_bhtd @ k_bhsd.transpose(-2, -1), scale)
        t, s = logits.shape[-2:]
        everyone_sees = all_see(mask, is_causal, t, s)
        mask = with_causal(plain_mask(mask), is_causal, t, s, q_bhtd.device)
        if mask is not None:
            logits = torch.where(mask, logits, -torch.inf) if mask.dtype == torch.bool else logits + mask.to(wide)
        if everyone_sees:
            weights = logits.softmax(dim=-1)
        else:
            nothing_visible = (logits == -torch.inf).all(dim=-1, keepdim=True)
            weights = logits.masked_fill(nothing_visible, 0.0).softmax(dim=-1).masked_fill(nothing_visible, 0.0)
        weights = drop_out(weights, dropout)
        output = weights @ v_bhsd
    return Attended(output.to(out_dtype), weights.to(out_dtype), logits)


def _attend_sdpa(
    q_bhtd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: Tensor | Visibility | None, is_causal: bool, dropout: float
) -> Tensor:
    """PyTorch's kernels on a q that carries the scale already, so that flash and memory-efficient ones stay usable."""
    grouped = False
    if q_bhtd.shape[1] != k_bhsd.shape[1]:  # a tensor while torch.jit.trace looks on, and a symbol for torch.compile
        grouped = True
    t, s = q_bhtd.shape[-2], k_bhsd.shape[-2]
    if is_causal and t == 1:
        is_causal = False  # one query, at the end, sees every key
    if mask is None and (not is_causal or t == s):
        return F.scaled_dot_product_attention(
            q_bhtd, k_bhsd, v_bhsd, dropout_p=dropout, is_causal=is_causal, scale=1.0, enable_gqa=grouped
        )
    if is_causal or not isinstance(mask, Visibility):
        joined = with_causal(plain_mask(mask), is_causal, t, s, q_bhtd.device)
        assert joined is not None
        mask = joined
    mask = ready(mask, q_bhtd)
    visible = mask.mask if mask.mask.dtype == torch.bool else mask.mask.to(q_bhtd.dtype)
    if visible.dim() < 2:
        visible = visible.reshape(1, -1)  # PyTorch's kernels want a row for the queries
    output = F.scaled_dot_product_attention(
        q_bhtd, k_bhsd, v_bhsd, attn_mask=visible, dropout_p=dropout, scale=1.0, enable_gqa=grouped
    )
    return output if mask.nothing is None else output.masked_fill(mask.nothing, 0.0)
