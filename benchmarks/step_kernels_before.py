# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The memory-bound kernels of a training step as they were first written, for `step_kernels.py --tune` to compare with.

Nothing else uses them.
"""

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)
"""Of Philox: the fewest that pass every test of randomness known to its authors (Salmon et al. 2011)."""


@triton.jit
def _kept(seed, site, rows, groups_a_row, first_group, dropped, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Which of BLOCK neighbours in each row stay; one draw of 128 bits decides on eight of them."""
    groups = first_group + tl.arange(0, BLOCK // 8)
    place = (rows[:, None] * groups_a_row + groups[None, :]).to(tl.uint32)
    zero = place * 0
    a, b, c, d = tl.philox(seed, place, zero + site, zero, zero, ROUNDS)
    words = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), (ROWS, BLOCK // 2))
    bits = tl.reshape(tl.join(words & 0xFFFF, words >> 16), (ROWS, BLOCK))
    return bits.to(tl.int32) >= dropped


@triton.jit
def _unit(w):
    """Rows over their length, and one over that length; zeros for rows of zeros."""
    largest = tl.max(tl.abs(w), axis=1)
    largest = tl.where(largest <= 1.1754943508222875e-38, float("inf"), largest)
    w = w / largest[:, None]
    length = tl.sqrt(tl.sum(w * w, axis=1))
    length = tl.where(length < 1.0, 1.0, length)
    return w / length[:, None], 1.0 / (largest * length)


@triton.jit
def _through_norm(to_unit, unit, inverse, d, KIND: tl.constexpr):
    """Gradients of rows before a norm, from those of what it makes of them."""
    along = tl.sum(to_unit * unit, axis=1)[:, None]
    if KIND == 1:
        to_x = (to_unit - unit * along) * inverse
    else:
        to_x = (to_unit - unit * (along / d)) * inverse
        if KIND == 0:
            to_x -= (tl.sum(to_unit, axis=1) / d)[:, None] * inverse
    return to_x


@triton.jit(do_not_specialize=["site"])
def add_norm_forward(
    x_ptr, y_ptr, y_bias_ptr, sum_ptr, out_ptr, mean_ptr, inverse_ptr, weight_ptr, bias_ptr, seed_ptr, site, dropped,
    scale_up, count, d, eps, HAS_Y: tl.constexpr, HAS_Y_BIAS: tl.constexpr, DROPS: tl.constexpr, KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = columns < d
    real = (rows < count)[:, None] & inside[None, :]
    at = rows[:, None] * d + columns[None, :]
    x = tl.load(x_ptr + at, mask=real, other=0.0).to(tl.float32)
    if HAS_Y:
        y = tl.load(y_ptr + at, mask=real, other=0.0).to(tl.float32)
        if HAS_Y_BIAS:
            y += tl.load(y_bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        if DROPS:
            kept = _kept(tl.load(seed_ptr), site, rows, BLOCK // 8, 0, dropped, ROWS, BLOCK)
            y = tl.where(kept, y * scale_up, 0.0)
        x += y
        tl.store(sum_ptr + at, x, mask=real)
    if KIND == 1:
        unit, inverse = _unit(x)
        out = unit * tl.load(weight_ptr).to(tl.float32)
    else:
        if KIND == 0:
            mean = tl.sum(x, axis=1) / d
            tl.store(mean_ptr + rows, mean, mask=rows < count)
            x = tl.where(inside[None, :], x - mean[:, None], 0.0)
        inverse = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / d + eps)
        out = x * inverse[:, None] * tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        if HAS_BIAS:
            out += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(inverse_ptr + rows, inverse, mask=rows < count)
    tl.store(out_ptr + at, out, mask=real)


@triton.jit(do_not_specialize=["site"])
def add_norm_backward(
    sum_ptr, to_sum_ptr, to_out_ptr, mean_ptr, inverse_ptr, weight_ptr, to_x_ptr, to_y_ptr, to_y_bias_ptr,
    to_weight_ptr, to_bias_ptr, seed_ptr, site, dropped, scale_up, count, d, HAS_Y: tl.constexpr,
    HAS_Y_BIAS: tl.constexpr, DROPS: tl.constexpr, HAS_SUM: tl.constexpr, KIND: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    inside = columns < d
    if KIND == 1:
        weight = tl.load(weight_ptr).to(tl.float32)
    else:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    to_weight = tl.zeros([BLOCK], dtype=tl.float32)
    to_bias = tl.zeros([BLOCK], dtype=tl.float32)
    to_y_bias = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        real = (rows < count)[:, None] & inside[None, :]
        at = rows[:, None] * d + columns[None, :]
        x = tl.load(sum_ptr + at, mask=real, other=0.0).to(tl.float32)
        to_out = tl.load(to_out_ptr + at, mask=real, other=0.0).to(tl.float32)
        inverse = tl.load(inverse_ptr + rows, mask=rows < count, other=0.0)[:, None]
        if KIND == 0:
            x -= tl.load(mean_ptr + rows, mask=rows < count, other=0.0)[:, None]
        unit = tl.where(real, x * inverse, 0.0)
        to_x = _through_norm(to_out * weight, unit, inverse, d, KIND)
        to_weight += tl.sum(to_out * unit, axis=0)
        to_bias += tl.sum(to_out, axis=0)
        if HAS_SUM:
            to_x += tl.load(to_sum_ptr + at, mask=real, other=0.0).to(tl.float32)
        tl.store(to_x_ptr + at, to_x, mask=real)
        if HAS_Y:
            if DROPS:
                kept = _kept(tl.load(seed_ptr), site, rows, BLOCK // 8, 0, dropped, ROWS, BLOCK)
                to_x = tl.where(kept, to_x * scale_up, 0.0)
            tl.store(to_y_ptr + at, to_x, mask=real)
            if HAS_Y_BIAS:
                to_y_bias += tl.sum(to_x, axis=0)
    if HAS_Y_BIAS:
        tl.atomic_add(to_y_bias_ptr + columns, to_y_bias, mask=inside, sem="relaxed")
    if KIND == 1:
        tl.atomic_add(to_weight_ptr, tl.sum(to_weight, axis=0), sem="relaxed")
    else:
        tl.atomic_add(to_weight_ptr + columns, to_weight, mask=inside, sem="relaxed")
        if HAS_BIAS:
            tl.atomic_add(to_bias_ptr + columns, to_bias, mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=["site"])
def relu_forward(
    z_ptr, bias_ptr, out_ptr, seed_ptr, site, dropped, scale_up, count, d, HAS_BIAS: tl.constexpr, DROPS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = (rows < count)[:, None] & (columns < d)[None, :]
    at = rows[:, None] * d + columns[None, :]
    z = tl.load(z_ptr + at, mask=real, other=0.0).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias_ptr + columns, mask=columns < d, other=0.0).to(tl.float32)[None, :]
    out = tl.where(z <= 0.0, 0.0, z * scale_up)  # NaN stays NaN
    if DROPS:
        first = tl.program_id(1) * (BLOCK // 8)
        kept = _kept(tl.load(seed_ptr), site, rows, tl.num_programs(1) * (BLOCK // 8), first, dropped, ROWS, BLOCK)
        out = tl.where(kept, out, 0.0)
    tl.store(out_ptr + at, out, mask=real)


@triton.jit
def relu_backward(
    out_ptr, to_out_ptr, to_z_ptr, to_bias_ptr, scale_up, count, d, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = (rows < count)[:, None] & (columns < d)[None, :]
    at = rows[:, None] * d + columns[None, :]
    out = tl.load(out_ptr + at, mask=real, other=0.0).to(tl.float32)
    to_out = tl.load(to_out_ptr + at, mask=real, other=0.0).to(tl.float32)
    # what came out as zero was negative or dropped: nothing has to be drawn again
    to_z = tl.where(out == 0.0, 0.0, to_out * scale_up)
    tl.store(to_z_ptr + at, to_z, mask=real)
    if HAS_BIAS:
        tl.atomic_add(to_bias_ptr + columns, tl.sum(to_z, axis=0), mask=columns < d, sem="relaxed")


@triton.jit
def column_sum(x_ptr, sum_ptr, count, d, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = (rows < count)[:, None] & (columns < d)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride + columns[None, :], mask=real, other=0.0).to(tl.float32)
    tl.atomic_add(sum_ptr + columns, tl.sum(x, axis=0), mask=columns < d, sem="relaxed")


@triton.jit
def squares(gradient_ptr, parts_ptr, count, BLOCK: tl.constexpr):
    """Each program's share of the squared norm."""
    found = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK).to(tl.int64)
        g = tl.load(gradient_ptr + at, mask=at < count, other=0.0)
        found += g * g
    tl.store(parts_ptr + tl.program_id(0), tl.sum(found, axis=0))


@triton.jit
def adam(
    value_ptr, gradient_ptr, first_ptr, second_ptr, half_ptr, decision_ptr, rate_ptr, count, BETA1: tl.constexpr,
    REST1: tl.constexpr, BETA2: tl.constexpr, REST2: tl.constexpr, DECAY: tl.constexpr, EPS: tl.constexpr,
    HAS_HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < count
    good = tl.load(decision_ptr) != 0.0
    g = tl.load(gradient_ptr + at, mask=real, other=0.0)
    tl.store(gradient_ptr + at, tl.zeros([BLOCK], dtype=tl.float32), mask=real)
    if good:
        rate = tl.load(rate_ptr)
        g *= tl.load(decision_ptr + 1)
        value = tl.load(value_ptr + at, mask=real, other=0.0) * (1.0 - rate * DECAY)
        first = BETA1 * tl.load(first_ptr + at, mask=real, other=0.0) + REST1 * g
        second = BETA2 * tl.load(second_ptr + at, mask=real, other=0.0) + REST2 * g * g
        size = tl.sqrt(second) * tl.load(decision_ptr + 3) + EPS
        value -= rate * tl.load(decision_ptr + 2) * first / size
        tl.store(value_ptr + at, value, mask=real)
        tl.store(first_ptr + at, first, mask=real)
        tl.store(second_ptr + at, second, mask=real)
        if HAS_HALF:
            tl.store(half_ptr + at, value, mask=real)
