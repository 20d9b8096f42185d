# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Triton kernels of attention over sequences so short that one program holds all queries and keys of a head.

What costs here is starting kernels and moving memory. So there is one kernel forward and one backward, which normalise
queries and keys as they read them; nothing is kept for the backward pass but one logarithm for each query.
"""

import triton
import triton.language as tl

from qknorm.attention.fused_blocks import (
    LOG2_E,
    hide,
    load_rows,
    load_units,
    product,
    staying,
    store_rows,
    through_unit,
)

ROUNDS = tl.constexpr(7)
"""Of Philox: the fewest that pass every test of randomness known to its authors (Salmon et al. 2011)."""


@triton.jit
def _draws(seed_ptr, site, at, KIND: tl.constexpr):
    """A random number for each query (KIND 1) or key (KIND 2): no other draw from this seed has the same counter."""
    place = at.to(tl.uint32)
    zero = place * 0
    found, _, _, _ = tl.philox(tl.load(seed_ptr), place, zero + site, zero + KIND, zero, ROUNDS)
    return found


@triton.jit(do_not_specialize=["site", "heads", "t", "s", "mask_b", "dropped"])
def small_forward_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, mask_ptr, blind_ptr, seed_ptr, site, out_ptr, log_ptr,
    heads, t, s, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_t, mask_b, mask_s, blind_b,
    reach, dropped, boost, D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, G_PER_HEAD: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, BLIND: tl.constexpr, DROPOUT: tl.constexpr, NORMALISE: tl.constexpr,
    HEADROOM: tl.constexpr, LIMIT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(0).to(tl.int64)
    batch, head = which // heads, which % heads
    rows, keys = tl.arange(0, ROWS), tl.arange(0, KEYS)
    q, _ = load_units(q_ptr + batch * q_b + head * q_h, rows, q_t, t, D, BLOCK_D, ROWS, NORMALISE)
    k, _ = load_units(k_ptr + batch * k_b + head // GROUP * k_h, keys, k_s, s, D, BLOCK_D, KEYS, NORMALISE)
    v = load_rows(v_ptr + batch * v_b + head // GROUP * v_h, keys, v_s, s, D, BLOCK_D, False)
    slope = tl.load(g_ptr + head * G_PER_HEAD) * LOG2_E
    visible = s
    if BLIND:
        visible = tl.where(tl.load(blind_ptr + batch * blind_b) != 0, 0, s)
    logits = product(q, tl.trans(k), None) * slope
    logits = hide(logits, rows, keys, visible, s - t, mask_ptr + batch * mask_b, mask_s, CAUSAL, MASKED, True)
    bound = tl.abs(slope) * reach
    shift = tl.zeros([ROWS], tl.float32) + bound - HEADROOM
    if 2.0 * bound > LIMIT:
        largest = tl.max(logits, axis=1)
        shift = tl.where(largest == float("-inf"), 0.0, largest) - HEADROOM
    weights = tl.exp2(logits - shift[:, None])
    total = tl.sum(weights, axis=1)
    nothing = total == 0
    if DROPOUT:
        row_draws, key_draws = _draws(seed_ptr, site, which * t + rows, 1), _draws(seed_ptr, site, keys, 2)
        weights = tl.where(staying(row_draws[:, None], key_draws[None, :], dropped), weights, 0.0)
    out = product(weights.to(v.dtype), v, None) * (boost / tl.where(nothing, 1.0, total))[:, None]
    store_rows(out_ptr + batch * o_b + head * o_h, rows, o_t, t, out, D, BLOCK_D)
    # +∞ makes every weight 0 in the backward pass
    log = tl.where(nothing, float("inf"), shift + tl.log2(tl.where(nothing, 1.0, total)))
    tl.store(log_ptr + which * t + rows, log, mask=rows < t)


@triton.jit
def _of_one_head(
    q, k, v, to_out, log, row_draws, key_draws, rows, keys, t, s, slope, mask_ptr, mask_s, dropped, boost,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Weights after dropout and the gradient of logits, (queries, keys)."""
    logits = product(q, tl.trans(k), None) * slope - log[:, None]
    weights = tl.exp2(hide(logits, rows, keys, s, s - t, mask_ptr, mask_s, CAUSAL, MASKED, True))
    to_weights = product(to_out, tl.trans(v), None)
    left = weights
    if DROPOUT:
        stay = staying(row_draws[:, None], key_draws[None, :], dropped)
        left = tl.where(stay, weights * boost, 0.0)
        to_weights = tl.where(stay, to_weights * boost, 0.0)
    # all keys are here, so that Σ weight · (its gradient) needs no output kept from the forward pass; and their sum is
    # 1 but for the rounding of the logarithm, which must not come between terms that cancel
    total = tl.sum(weights, axis=1)
    mean = tl.sum(weights * to_weights, axis=1) / tl.where(total == 0, 1.0, total)
    return left, weights * (to_weights - mean[:, None])


@triton.jit(do_not_specialize=["site", "heads", "t", "s", "mask_b", "dropped"])
def small_backward_kernel(
    q_ptr, k_ptr, v_ptr, to_out_ptr, g_ptr, mask_ptr, seed_ptr, site, log_ptr, to_q_ptr, to_k_ptr, to_v_ptr, to_g_ptr,
    heads, t, s, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, do_b, do_h, do_t, dq_b, dq_h, dq_t, dk_b, dk_h, dk_s,
    dv_b, dv_h, dv_s, mask_b, mask_s, dropped, boost, D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    G_PER_HEAD: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, DROPOUT: tl.constexpr,
    NORMALISE: tl.constexpr, ADDS_TO_G: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """All gradients of a key head and of the query heads that share it; g's by head, or added to where it belongs."""
    which = tl.program_id(0).to(tl.int64)
    batch, key_head = which // (heads // GROUP), which % (heads // GROUP)
    rows, keys = tl.arange(0, ROWS), tl.arange(0, KEYS)
    k, key_length = load_units(k_ptr + batch * k_b + key_head * k_h, keys, k_s, s, D, BLOCK_D, KEYS, NORMALISE)
    v = load_rows(v_ptr + batch * v_b + key_head * v_h, keys, v_s, s, D, BLOCK_D, False)
    key_draws = keys
    if DROPOUT:
        key_draws = _draws(seed_ptr, site, keys, 2)
    to_k, to_v = tl.zeros([KEYS, BLOCK_D], tl.float32), tl.zeros([KEYS, BLOCK_D], tl.float32)
    for member in tl.range(0, GROUP, num_stages=1):  # loads ahead would take more shared memory than small cards have
        head = key_head * GROUP + member
        row = (batch * heads + head) * t
        g = tl.load(g_ptr + head * G_PER_HEAD)
        q, length = load_units(q_ptr + batch * q_b + head * q_h, rows, q_t, t, D, BLOCK_D, ROWS, NORMALISE)
        to_out = load_rows(to_out_ptr + batch * do_b + head * do_h, rows, do_t, t, D, BLOCK_D, False)
        log = tl.load(log_ptr + row + rows, mask=rows < t, other=float("inf"))
        row_draws = rows
        if DROPOUT:
            row_draws = _draws(seed_ptr, site, row + rows, 1)
        weights, to_logits = _of_one_head(
            q, k, v, to_out, log, row_draws, key_draws, rows, keys, t, s, g * LOG2_E, mask_ptr + batch * mask_b, mask_s,
            dropped, boost, CAUSAL, MASKED, DROPOUT,
        )  # fmt: skip
        to_v = product(tl.trans(weights.to(v.dtype)), to_out, to_v)
        to_k = product(tl.trans((to_logits * g).to(q.dtype)), q, to_k)
        to_q = product(to_logits.to(k.dtype), k, None)
        unit = q.to(tl.float32)  # rounded, but a float32 copy kept since the start would take registers
        along = tl.sum(to_q * unit, axis=1)
        if ADDS_TO_G:
            tl.atomic_add(to_g_ptr + head * G_PER_HEAD, tl.sum(along, axis=0), sem="relaxed")
        else:
            tl.store(to_g_ptr + batch * heads + head, tl.sum(along, axis=0))
        if NORMALISE:
            to_q = through_unit(to_q, unit, along, length)
        store_rows(to_q_ptr + batch * dq_b + head * dq_h, rows, dq_t, t, to_q * g, D, BLOCK_D)
    if NORMALISE:
        unit = k.to(tl.float32)
        to_k = through_unit(to_k, unit, tl.sum(to_k * unit, axis=1), key_length)
    store_rows(to_k_ptr + batch * dk_b + key_head * dk_h, keys, dk_s, s, to_k, D, BLOCK_D)
    store_rows(to_v_ptr + batch * dv_b + key_head * dv_h, keys, dv_s, s, to_v, D, BLOCK_D)
