# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Triton kernels of attention over any length, with the normalisation of queries inside and that of keys before.

Every key is read once for each block of queries, so that it pays to write unit keys once (one pass over memory) instead
of making them anew in each block; a query is read once, and its block makes it a unit vector on the way.

Because |logit| ≤ bound the softmax is exp2(logit − bound) / Σ: no running maximum, no rescaling of what was summed.
Where the bound is so large that this could underflow, a first pass over the keys finds each query's own largest logit
instead; the scale lives on the device, so the kernel itself decides.

Gradients of queries and of keys come from two kernels that each make the weights anew. Adding the gradient of queries
up by atomics would save two of seven products, but needs a float32 buffer twice as large as the queries and adds in
another order every time; we keep the memory, and the same bits for the same input.
"""

import triton
import triton.language as tl

from qknorm.attention.fused_blocks import LOG2_E, hide, load_rows, product, staying, store_rows, through_unit, unit_rows


@triton.jit(do_not_specialize=["heads", "t"])
def unit_kernel(
    x_ptr, unit_ptr, length_ptr, heads, t, x_b, x_h, x_t, u_b, u_h, u_t, D: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """x/‖x‖₂ and ‖x‖₂ of every row."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    which = tl.program_id(1).to(tl.int64)
    batch, head = which // heads, which % heads
    x = load_rows(x_ptr + batch * x_b + head * x_h, rows, x_t, t, D, BLOCK_D, False)
    unit, length = unit_rows(x)
    store_rows(unit_ptr + batch * u_b + head * u_h, rows, u_t, t, unit, D, BLOCK_D)
    tl.store(length_ptr + which * t + rows, length, mask=rows < t)


@triton.jit
def _largest(
    q, rows, end, slope, k_ptr, k_s, s, offset, mask_ptr, mask_s,
    D: tl.constexpr, BLOCK_D: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Each query's largest logit, 0 where it sees nothing."""
    largest = tl.full(rows.shape, float("-inf"), tl.float32)
    for start in range(0, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = load_rows(k_ptr, keys, k_s, s, D, BLOCK_D, False)
        logits = product(q, tl.trans(k), None) * slope
        logits = hide(logits, rows, keys, s, offset, mask_ptr, mask_s, CAUSAL, MASKED, True)
        largest = tl.maximum(largest, tl.max(logits, axis=1))
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def _add_values(
    sums, total, q, shift, rows, row_draws, start, end, slope, k_ptr, v_ptr, k_s, v_s, s, offset, mask_ptr, mask_s,
    key_draw_ptr, dropped, D: tl.constexpr, BLOCK_D: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, DROPOUT: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Adds the keys from start to end: weights times values, and weights alone before dropout."""
    for first in range(start, end, KEYS):
        keys = first + tl.arange(0, KEYS)
        k = load_rows(k_ptr, keys, k_s, s, D, BLOCK_D, not EDGE)
        logits = product(q, tl.trans(k), None) * slope - shift[:, None]
        weights = tl.exp2(hide(logits, rows, keys, s, offset, mask_ptr, mask_s, CAUSAL, MASKED, EDGE))
        total += tl.sum(weights, axis=1)
        if DROPOUT:
            key_draws = tl.load(key_draw_ptr + keys, mask=keys < s, other=0)
            weights = tl.where(staying(row_draws[:, None], key_draws[None, :], dropped), weights, 0.0)
        v = load_rows(v_ptr, keys, v_s, s, D, BLOCK_D, not EDGE)
        sums = product(weights.to(v.dtype), v, sums)
    return sums, total


@triton.jit
def _visible_range(first_row, t, s, offset, ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr):
    """Keys up to `whole`, in whole blocks, are seen by all these queries; none is seen from `end` on."""
    whole, end = s, s
    if CAUSAL:
        whole = tl.maximum(tl.minimum(first_row + offset + 1, s), 0)
        end = tl.maximum(tl.minimum(tl.minimum(first_row + ROWS, t) + offset, s), 0)
    return whole // KEYS * KEYS, end


@triton.jit(do_not_specialize=["heads", "t", "s", "mask_b", "dropped"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, mask_ptr, blind_ptr, draw_ptr, out_ptr, log_ptr, unit_ptr, length_ptr,
    heads, t, s, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_t, u_b, u_h, u_t, mask_b, mask_s, blind_b,
    reach, dropped, boost, D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, G_PER_HEAD: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, BLIND: tl.constexpr, DROPOUT: tl.constexpr, NORMALISE: tl.constexpr,
    KEEP: tl.constexpr, HEADROOM: tl.constexpr, LIMIT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1).to(tl.int64)
    batch, head = which // heads, which % heads
    first_row = tl.program_id(0) * ROWS
    rows = first_row + tl.arange(0, ROWS)
    q = load_rows(q_ptr + batch * q_b + head * q_h, rows, q_t, t, D, BLOCK_D, False)
    if NORMALISE:
        unit, length = unit_rows(q)
        q = unit.to(q.dtype)
        if KEEP:
            store_rows(unit_ptr + batch * u_b + head * u_h, rows, u_t, t, q, D, BLOCK_D)
            tl.store(length_ptr + which * t + rows, length, mask=rows < t)
    k_ptr += batch * k_b + head // GROUP * k_h
    v_ptr += batch * v_b + head // GROUP * v_h
    mask_ptr += batch * mask_b
    offset = s - t
    whole, end = _visible_range(first_row, t, s, offset, ROWS, KEYS, CAUSAL)
    if BLIND:
        blind = tl.load(blind_ptr + batch * blind_b) != 0  # these queries have no key to see
        whole, end = tl.where(blind, 0, whole), tl.where(blind, 0, end)
    slope = tl.load(g_ptr + head * G_PER_HEAD) * LOG2_E
    bound = tl.abs(slope) * reach
    shift = tl.zeros([ROWS], tl.float32) + bound - HEADROOM
    if 2.0 * bound > LIMIT:
        shift = _largest(q, rows, end, slope, k_ptr, k_s, s, offset, mask_ptr, mask_s, D, BLOCK_D, KEYS, CAUSAL, MASKED)
        shift -= HEADROOM
    row_draws = rows
    if DROPOUT:
        row_draws = tl.load(draw_ptr + s + which * t + rows, mask=rows < t, other=0)
    sums, total = tl.zeros([ROWS, BLOCK_D], tl.float32), tl.zeros([ROWS], tl.float32)
    for edge in tl.static_range(2):  # whole blocks first, then those that need a look at positions
        sums, total = _add_values(
            sums, total, q, shift, rows, row_draws, whole * edge, end if edge else whole, slope, k_ptr, v_ptr, k_s, v_s,
            s, offset, mask_ptr, mask_s, draw_ptr, dropped, D, BLOCK_D, KEYS, CAUSAL, MASKED, DROPOUT, edge == 1,
        )  # fmt: skip
    nothing = total == 0
    out = sums * (boost / tl.where(nothing, 1.0, total))[:, None]
    store_rows(out_ptr + batch * o_b + head * o_h, rows, o_t, t, out, D, BLOCK_D)
    # +∞ makes every weight 0 in the backward pass
    log = tl.where(nothing, float("inf"), shift + tl.log2(tl.where(nothing, 1.0, total)))
    tl.store(log_ptr + which * t + rows, log, mask=rows < t)


@triton.jit
def _add_to_queries(
    to_q, q, to_out, log, delta, rows, row_draws, start, end, slope, k_ptr, v_ptr, k_s, v_s, s, offset, mask_ptr,
    mask_s, key_draw_ptr, dropped, boost, D: tl.constexpr, BLOCK_D: tl.constexpr, KEYS: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, DROPOUT: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Adds Σ (gradient of logit) · key over the keys from start to end."""
    for first in range(start, end, KEYS):
        keys = first + tl.arange(0, KEYS)
        k = load_rows(k_ptr, keys, k_s, s, D, BLOCK_D, not EDGE)
        v = load_rows(v_ptr, keys, v_s, s, D, BLOCK_D, not EDGE)
        logits = product(q, tl.trans(k), None) * slope - log[:, None]
        weights = tl.exp2(hide(logits, rows, keys, s, offset, mask_ptr, mask_s, CAUSAL, MASKED, EDGE))
        to_weights = product(to_out, tl.trans(v), None)
        if DROPOUT:
            key_draws = tl.load(key_draw_ptr + keys, mask=keys < s, other=0)
            stay = staying(row_draws[:, None], key_draws[None, :], dropped)
            to_weights = tl.where(stay, to_weights * boost, 0.0)
        to_logits = weights * (to_weights - delta[:, None])
        to_q = product(to_logits.to(k.dtype), k, to_q)
    return to_q


@triton.jit(do_not_specialize=["heads", "t", "s", "mask_b", "dropped"])
def query_gradient_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, to_out_ptr, g_ptr, mask_ptr, draw_ptr, log_ptr, length_ptr, to_q_ptr, delta_ptr,
    to_g_ptr, heads, t, s, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_t, do_b, do_h, do_t,
    dq_b, dq_h, dq_t, mask_b, mask_s, dropped, boost, D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    G_PER_HEAD: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, DROPOUT: tl.constexpr,
    NORMALISE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Gradients of queries and of the scale; leaves Σ out · (gradient of out) of each query for the keys' kernel."""
    which = tl.program_id(1).to(tl.int64)
    batch, head = which // heads, which % heads
    first_row = tl.program_id(0) * ROWS
    rows = first_row + tl.arange(0, ROWS)
    to_out = load_rows(to_out_ptr + batch * do_b + head * do_h, rows, do_t, t, D, BLOCK_D, False)
    out = load_rows(out_ptr + batch * o_b + head * o_h, rows, o_t, t, D, BLOCK_D, False)
    delta = tl.sum(out.to(tl.float32) * to_out.to(tl.float32), axis=1)
    tl.store(delta_ptr + which * t + rows, delta, mask=rows < t)
    q = load_rows(q_ptr + batch * q_b + head * q_h, rows, q_t, t, D, BLOCK_D, False)
    log = tl.load(log_ptr + which * t + rows, mask=rows < t, other=float("inf"))
    k_ptr += batch * k_b + head // GROUP * k_h
    v_ptr += batch * v_b + head // GROUP * v_h
    mask_ptr += batch * mask_b
    offset = s - t
    whole, end = _visible_range(first_row, t, s, offset, ROWS, KEYS, CAUSAL)
    g = tl.load(g_ptr + head * G_PER_HEAD)
    slope = g * LOG2_E
    row_draws = rows
    if DROPOUT:
        row_draws = tl.load(draw_ptr + s + which * t + rows, mask=rows < t, other=0)
    to_q = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for edge in tl.static_range(2):
        to_q = _add_to_queries(
            to_q, q, to_out, log, delta, rows, row_draws, whole * edge, end if edge else whole, slope, k_ptr, v_ptr,
            k_s, v_s, s, offset, mask_ptr, mask_s, draw_ptr, dropped, boost, D, BLOCK_D, KEYS, CAUSAL, MASKED, DROPOUT,
            edge == 1,
        )  # fmt: skip
    unit = q.to(tl.float32)
    along = tl.sum(to_q * unit, axis=1)
    tl.store(to_g_ptr + which * tl.num_programs(0) + tl.program_id(0), tl.sum(along, axis=0))
    if NORMALISE:
        length = tl.load(length_ptr + which * t + rows, mask=rows < t, other=float("inf"))
        to_q = through_unit(to_q, unit, along, length)
    store_rows(to_q_ptr + batch * dq_b + head * dq_h, rows, dq_t, t, to_q * g, D, BLOCK_D)


@triton.jit
def _add_to_keys(
    to_k, to_v, k, v, seen, keys, key_draws, start, end, g, q_ptr, to_out_ptr, log_ptr, delta_ptr, row_draw_ptr,
    q_t, do_t, t, offset, dropped, boost, D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, MASKED: tl.constexpr, DROPOUT: tl.constexpr, EDGE: tl.constexpr, FITS: tl.constexpr,
):  # fmt: skip
    """Adds what the queries from start to end say on these keys and values; everything is (keys, queries) here."""
    for first in range(start, end, ROWS):
        rows = first + tl.arange(0, ROWS)
        q = load_rows(q_ptr, rows, q_t, t, D, BLOCK_D, FITS)
        log = tl.load(log_ptr + rows, mask=rows < t, other=float("inf"))  # +∞: no weight beyond the last query
        logits = product(k, tl.trans(q), None) * (g * LOG2_E) - log[None, :]
        if EDGE:
            logits = tl.where(keys[:, None] <= rows[None, :] + offset, logits, float("-inf"))
        if MASKED:
            logits = tl.where(seen[:, None], logits, float("-inf"))
        weights = tl.exp2(logits)
        to_out = load_rows(to_out_ptr, rows, do_t, t, D, BLOCK_D, FITS)
        to_weights = product(v, tl.trans(to_out), None)
        left = weights
        if DROPOUT:
            row_draws = tl.load(row_draw_ptr + rows, mask=rows < t, other=0)
            stay = staying(row_draws[None, :], key_draws[:, None], dropped)
            left = tl.where(stay, weights * boost, 0.0)
            to_weights = tl.where(stay, to_weights * boost, 0.0)
        to_v = product(left.to(v.dtype), to_out, to_v)
        delta = tl.load(delta_ptr + rows, mask=rows < t, other=0.0)
        to_logits = weights * (to_weights - delta[None, :])
        if GROUP > 1:  # heads of a group may differ in their scale
            to_logits *= g
        to_k = product(to_logits.to(q.dtype), q, to_k)
    return to_k, to_v


@triton.jit(do_not_specialize=["heads", "t", "s", "mask_b", "dropped"])
def key_gradient_kernel(
    q_ptr, k_ptr, v_ptr, to_out_ptr, g_ptr, mask_ptr, draw_ptr, log_ptr, delta_ptr, length_ptr, to_k_ptr, to_v_ptr,
    heads, t, s, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, do_b, do_h, do_t, dk_b, dk_h, dk_s, dv_b, dv_h, dv_s,
    mask_b, mask_s, dropped, boost, D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    G_PER_HEAD: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, DROPOUT: tl.constexpr,
    NORMALISE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, FITS: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of keys and values, from all the queries of all the heads that share them."""
    which = tl.program_id(1).to(tl.int64)
    batch, key_head = which // (heads // GROUP), which % (heads // GROUP)
    first_key = tl.program_id(0) * KEYS
    keys = first_key + tl.arange(0, KEYS)
    k = load_rows(k_ptr + batch * k_b + key_head * k_h, keys, k_s, s, D, BLOCK_D, False)
    v = load_rows(v_ptr + batch * v_b + key_head * v_h, keys, v_s, s, D, BLOCK_D, False)
    seen, key_draws = keys < s, keys
    if MASKED:
        seen = tl.load(mask_ptr + batch * mask_b + keys * mask_s, mask=keys < s, other=0) != 0
    if DROPOUT:
        key_draws = tl.load(draw_ptr + keys, mask=keys < s, other=0)
    offset = s - t
    first, whole = 0, 0  # the first query that sees one of these keys, and the first of a block that sees them all
    if CAUSAL:
        first = tl.minimum(tl.maximum(first_key - offset, 0) // ROWS * ROWS, t)
        whole = tl.minimum(tl.cdiv(tl.maximum(first_key + KEYS - 1 - offset, 0), ROWS) * ROWS, t)
    to_k, to_v = tl.zeros([KEYS, BLOCK_D], tl.float32), tl.zeros([KEYS, BLOCK_D], tl.float32)
    g = 0.0
    for member in range(GROUP):
        head = key_head * GROUP + member
        row = (batch * heads + head) * t
        g = tl.load(g_ptr + head * G_PER_HEAD)
        q_head, to_head = q_ptr + batch * q_b + head * q_h, to_out_ptr + batch * do_b + head * do_h
        for inner in tl.static_range(0 if CAUSAL else 1, 2):  # queries that see some of these keys, then all of them
            to_k, to_v = _add_to_keys(
                to_k, to_v, k, v, seen, keys, key_draws, whole if inner else first, t if inner else whole, g, q_head,
                to_head, log_ptr + row, delta_ptr + row, draw_ptr + s + row, q_t, do_t, t, offset, dropped, boost,
                D, BLOCK_D, GROUP, ROWS, MASKED, DROPOUT, inner == 0, FITS,
            )  # fmt: skip
    if NORMALISE:
        unit = k.to(tl.float32)
        length = tl.load(length_ptr + which * s + keys, mask=keys < s, other=float("inf"))
        to_k = through_unit(to_k, unit, tl.sum(to_k * unit, axis=1), length)
    if GROUP == 1:
        to_k *= g
    store_rows(to_k_ptr + batch * dk_b + key_head * dk_h, keys, dk_s, s, to_k, D, BLOCK_D)
    store_rows(to_v_ptr + batch * dv_b + key_head * dv_h, keys, dv_s, s, to_v, D, BLOCK_D)
