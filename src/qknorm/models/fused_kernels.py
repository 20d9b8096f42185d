# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Triton kernels of the layers: residual, dropout and norm in one pass; bias, activation, dropout; word vectors; sums.

Every kernel computes in float32. Dropout draws 16 bits for each entry by Philox from (seed, place in the model, place
in the tensor), so that a backward draws what its forward drew and nothing is stored. Letters: n rows, d columns.

Each thread holds four neighbours of a row, 16 bytes in float32 and 8 in half precision, so that all tensors of a tile
have one layout and nothing changes places between threads. As many warps as a row needs share it; then a thread has
the same columns of all rows of its tile, and sums over rows and dropout's draws are its own affair. Where a tile has
more warps, APART of its rows are held by different threads.
"""

import triton
import triton.language as tl

LAYER, SCALE, RMS = 0, 1, 2
"""Kinds of norm."""

ROUNDS = tl.constexpr(7)
"""Of Philox: the fewest that pass every test of randomness known to its authors (Salmon et al. 2011)."""


@triton.jit
def _columns(BLOCK: tl.constexpr):
    """Column numbers, of which a thread takes four neighbours."""
    return tl.max_contiguous(tl.multiple_of(tl.arange(0, BLOCK), 4), 4)


@triton.jit
def _of_thread(x, ROWS: tl.constexpr, BLOCK: tl.constexpr, APART: tl.constexpr):
    """Sums over those rows of a tile that a thread holds."""
    return tl.sum(tl.reshape(x, (ROWS // APART, APART, BLOCK)), axis=0)


@triton.jit
def _kept(seed, site, first_row, groups_a_row, first_group, dropped, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Which entries of a tile stay; a draw of 128 bits decides on four neighbours in each of two rows."""
    pairs = first_row // 2 + tl.arange(0, ROWS // 2)
    groups = first_group + tl.arange(0, BLOCK // 4)
    place = (pairs[:, None] * groups_a_row + groups[None, :]).to(tl.uint32)
    zero = place * 0
    a, b, c, d = tl.philox(seed, place, zero + site, zero, zero, ROUNDS)
    words = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), (ROWS // 2, BLOCK))
    bits = tl.permute(tl.join(words & 0xFFFF, words >> 16), (0, 2, 1))
    return tl.reshape(bits, (ROWS, BLOCK)).to(tl.int32) >= dropped


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
def _normal(z):
    """The share of a standard normal distribution below z, which is GELU's weight, and its density there.

    By formula 7.1.26 of Abramowitz & Stegun (1964), right to 1e-7; the library's own is so exact that it, and not
    memory, would bound the kernels.
    """
    bell = tl.exp(-0.5 * z * z)
    t = 1.0 / (1.0 + 0.2316418882 * tl.abs(z))  # 0.3275911 / √2
    beyond = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))) * bell
    return tl.where(z < 0, beyond, 1.0 - beyond), bell * 0.3989422804014327


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


@triton.jit(do_not_specialize=["site", "count"])
def add_norm_forward(
    x_ptr, y_ptr, y_bias_ptr, sum_ptr, out_ptr, mean_ptr, inverse_ptr, weight_ptr, bias_ptr, seed_ptr, site, dropped,
    scale_up, count, eps, d: tl.constexpr, HAS_Y: tl.constexpr, HAS_Y_BIAS: tl.constexpr, DROPS: tl.constexpr,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    rows, columns = first + tl.arange(0, ROWS), _columns(BLOCK)
    inside = columns < d
    real = (rows < count)[:, None] & inside[None, :]
    at = (rows * d)[:, None] + columns[None, :]
    x = tl.load(x_ptr + at, mask=real, other=0.0).to(tl.float32)
    if HAS_Y:
        y = tl.load(y_ptr + at, mask=real, other=0.0).to(tl.float32)
        if HAS_Y_BIAS:
            y += tl.load(y_bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        if DROPS:
            kept = _kept(tl.load(seed_ptr), site, first, BLOCK // 4, 0, dropped, ROWS, BLOCK)
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


@triton.jit(do_not_specialize=["site", "count"])
def add_norm_backward(
    sum_ptr, to_sum_ptr, to_out_ptr, mean_ptr, inverse_ptr, weight_ptr, to_x_ptr, to_y_ptr, to_y_bias_ptr,
    to_weight_ptr, to_bias_ptr, seed_ptr, site, dropped, scale_up, count, d: tl.constexpr, HAS_Y: tl.constexpr,
    HAS_Y_BIAS: tl.constexpr, DROPS: tl.constexpr, HAS_SUM: tl.constexpr, KIND: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, APART: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns = _columns(BLOCK)
    inside = columns < d
    if KIND == 1:
        weight = tl.load(weight_ptr).to(tl.float32)
    else:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    to_weight = tl.zeros([APART, BLOCK], dtype=tl.float32)
    to_bias = tl.zeros([APART, BLOCK], dtype=tl.float32)
    to_y_bias = tl.zeros([APART, BLOCK], dtype=tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        real = (rows < count)[:, None] & inside[None, :]
        at = (rows * d)[:, None] + columns[None, :]
        # every load before the first sum, so that all of them are under way at once
        x = tl.load(sum_ptr + at, mask=real, other=0.0).to(tl.float32)
        to_out = tl.load(to_out_ptr + at, mask=real, other=0.0).to(tl.float32)
        if HAS_SUM:
            to_sum = tl.load(to_sum_ptr + at, mask=real, other=0.0).to(tl.float32)
        inverse = tl.load(inverse_ptr + rows, mask=rows < count, other=0.0)[:, None]
        if KIND == 0:
            x -= tl.load(mean_ptr + rows, mask=rows < count, other=0.0)[:, None]
        unit = tl.where(real, x * inverse, 0.0)
        to_x = _through_norm(to_out * weight, unit, inverse, d, KIND)
        to_weight += _of_thread(to_out * unit, ROWS, BLOCK, APART)
        to_bias += _of_thread(to_out, ROWS, BLOCK, APART)
        if HAS_SUM:
            to_x += to_sum
        tl.store(to_x_ptr + at, to_x, mask=real)
        if HAS_Y:
            if DROPS:
                kept = _kept(tl.load(seed_ptr), site, start, BLOCK // 4, 0, dropped, ROWS, BLOCK)
                to_x = tl.where(kept, to_x * scale_up, 0.0)
            tl.store(to_y_ptr + at, to_x, mask=real)
            to_y_bias += _of_thread(tl.where(real, to_x, 0.0), ROWS, BLOCK, APART)
    if HAS_Y_BIAS:
        tl.atomic_add(to_y_bias_ptr + columns, tl.sum(to_y_bias, axis=0), mask=inside, sem="relaxed")
    if KIND == 1:
        tl.atomic_add(to_weight_ptr, tl.sum(to_weight), sem="relaxed")
    else:
        tl.atomic_add(to_weight_ptr + columns, tl.sum(to_weight, axis=0), mask=inside, sem="relaxed")
        if HAS_BIAS:
            tl.atomic_add(to_bias_ptr + columns, tl.sum(to_bias, axis=0), mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=["site", "count"])
def activation_forward(
    z_ptr, bias_ptr, out_ptr, seed_ptr, site, dropped, scale_up, count, d, GELU: tl.constexpr, HAS_BIAS: tl.constexpr,
    DROPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, APART: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """GELU, or else ReLU."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    rows, columns = first + tl.arange(0, ROWS), tl.program_id(1) * BLOCK + _columns(BLOCK)
    inside = columns < d
    real = (rows < count)[:, None] & inside[None, :]
    at = (rows * d)[:, None] + columns[None, :]
    z = tl.load(z_ptr + at, mask=real, other=0.0).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GELU:
        below, _ = _normal(z)
        out = z * below * scale_up
    else:
        out = tl.where(z <= 0.0, 0.0, z * scale_up)  # NaN stays NaN
    if DROPS:
        first_group, groups = tl.program_id(1) * (BLOCK // 4), (d + 3) // 4
        kept = _kept(tl.load(seed_ptr), site, first, groups, first_group, dropped, ROWS, BLOCK)
        out = tl.where(kept, out, 0.0)
    tl.store(out_ptr + at, out, mask=real)


@triton.jit(do_not_specialize=["count"])
def relu_backward(
    out_ptr, to_out_ptr, to_z_ptr, to_bias_ptr, scale_up, count, d, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, APART: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < d
    to_bias = tl.zeros([APART, BLOCK], dtype=tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        real = (rows < count)[:, None] & inside[None, :]
        at = (rows * d)[:, None] + columns[None, :]
        out = tl.load(out_ptr + at, mask=real, other=0.0).to(tl.float32)
        to_out = tl.load(to_out_ptr + at, mask=real, other=0.0).to(tl.float32)
        # what came out as zero was negative or dropped: nothing has to be drawn again
        to_z = tl.where(out == 0.0, 0.0, to_out * scale_up)
        tl.store(to_z_ptr + at, to_z, mask=real)
        to_bias += _of_thread(to_z, ROWS, BLOCK, APART)
    if HAS_BIAS:
        tl.atomic_add(to_bias_ptr + columns, tl.sum(to_bias, axis=0), mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=["site", "count"])
def gelu_backward(
    z_ptr, bias_ptr, to_out_ptr, to_z_ptr, to_bias_ptr, seed_ptr, site, dropped, scale_up, count, d,
    HAS_BIAS: tl.constexpr, DROPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, APART: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(1) * BLOCK + _columns(BLOCK)
    inside = columns < d
    to_bias = tl.zeros([APART, BLOCK], dtype=tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        real = (rows < count)[:, None] & inside[None, :]
        at = (rows * d)[:, None] + columns[None, :]
        z = tl.load(z_ptr + at, mask=real, other=0.0).to(tl.float32)
        to_out = tl.load(to_out_ptr + at, mask=real, other=0.0).to(tl.float32)
        if HAS_BIAS:
            z += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        below, density = _normal(z)
        to_z = to_out * (below + z * density) * scale_up
        if DROPS:
            first_group, groups = tl.program_id(1) * (BLOCK // 4), (d + 3) // 4
            kept = _kept(tl.load(seed_ptr), site, start, groups, first_group, dropped, ROWS, BLOCK)
            to_z = tl.where(kept, to_z, 0.0)
        tl.store(to_z_ptr + at, to_z, mask=real)
        to_bias += _of_thread(tl.where(real, to_z, 0.0), ROWS, BLOCK, APART)
    if HAS_BIAS:
        tl.atomic_add(to_bias_ptr + columns, tl.sum(to_bias, axis=0), mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=["count"])
def column_sum(
    x_ptr, sum_ptr, count, d, readable, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr, APART: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Sums of d columns; as many as are readable may be read."""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    found = tl.zeros([APART, BLOCK], dtype=tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        real = (rows < count)[:, None] & (columns < readable)[None, :]
        x = tl.load(x_ptr + (rows * stride)[:, None] + columns[None, :], mask=real, other=0.0).to(tl.float32)
        found += _of_thread(x, ROWS, BLOCK, APART)
    tl.atomic_add(sum_ptr + columns, tl.sum(found, axis=0), mask=columns < d, sem="relaxed")


@triton.jit(do_not_specialize=["site", "count", "length"])
def embed_forward(
    ids_ptr, table_ptr, language_ptr, positions_ptr, out_ptr, seed_ptr, site, dropped, scale_up, factor, count, length,
    d: tl.constexpr, FIXNORM: tl.constexpr, HAS_LANGUAGE: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    DROPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    rows, columns = first + tl.arange(0, ROWS), _columns(BLOCK)
    inside = columns < d
    real = (rows < count)[:, None] & inside[None, :]
    ids = tl.load(ids_ptr + rows, mask=rows < count, other=0)
    x = tl.load(table_ptr + (ids * d)[:, None] + columns[None, :], mask=real, other=0.0)
    if FIXNORM:
        x, _ = _unit(x)
    x *= factor
    if HAS_LANGUAGE:
        x += tl.load(language_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    if HAS_POSITIONS:
        x += tl.load(positions_ptr + (rows % length * d)[:, None] + columns[None, :], mask=real, other=0.0)
    if DROPS:
        kept = _kept(tl.load(seed_ptr), site, first, BLOCK // 4, 0, dropped, ROWS, BLOCK)
        x = tl.where(kept, x * scale_up, 0.0)
    tl.store(out_ptr + (rows * d)[:, None] + columns[None, :], x, mask=real)


@triton.jit(do_not_specialize=["site", "count", "length"])
def embed_backward(
    ids_ptr, table_ptr, to_out_ptr, to_table_ptr, to_language_ptr, to_positions_ptr, seed_ptr, site, dropped, scale_up,
    factor, count, length, d: tl.constexpr, FIXNORM: tl.constexpr, HAS_LANGUAGE: tl.constexpr,
    LEARNS_POSITIONS: tl.constexpr, DROPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    columns = _columns(BLOCK)
    inside = columns < d
    to_language = tl.zeros([APART, BLOCK], dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        real = (rows < count)[:, None] & inside[None, :]
        ids = tl.load(ids_ptr + rows, mask=rows < count, other=0)
        to_out = tl.load(to_out_ptr + (rows * d)[:, None] + columns[None, :], mask=real, other=0.0).to(tl.float32)
        if DROPS:
            kept = _kept(tl.load(seed_ptr), site, start, BLOCK // 4, 0, dropped, ROWS, BLOCK)
            to_out = tl.where(kept, to_out * scale_up, 0.0)
        to_language += _of_thread(to_out, ROWS, BLOCK, APART)
        if LEARNS_POSITIONS:
            place = (rows % length * d)[:, None] + columns[None, :]
            tl.atomic_add(to_positions_ptr + place, to_out, mask=real, sem="relaxed")
        to_row = to_out * factor
        at = (ids * d)[:, None] + columns[None, :]
        if FIXNORM:
            unit, inverse = _unit(tl.load(table_ptr + at, mask=real, other=0.0))
            to_row = (to_row - unit * tl.sum(to_row * unit, axis=1)[:, None]) * inverse[:, None]
        tl.atomic_add(to_table_ptr + at, to_row, mask=real, sem="relaxed")
    if HAS_LANGUAGE:
        tl.atomic_add(to_language_ptr + columns, tl.sum(to_language, axis=0), mask=inside, sem="relaxed")


@triton.jit
def unit_rows_forward(
    table_ptr, out_ptr, count, padded, d: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, APART: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = _columns(BLOCK)
    at = (rows * d)[:, None] + columns[None, :]
    unit, _ = _unit(tl.load(table_ptr + at, mask=(rows < count)[:, None] & (columns < d)[None, :], other=0.0))
    tl.store(out_ptr + at, unit, mask=(rows < padded)[:, None] & (columns < d)[None, :])


@triton.jit
def unit_rows_backward(
    table_ptr, to_out_ptr, to_table_ptr, count, d: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = _columns(BLOCK)
    real = (rows < count)[:, None] & (columns < d)[None, :]
    at = (rows * d)[:, None] + columns[None, :]
    before = tl.load(to_table_ptr + at, mask=real, other=0.0)
    to_out = tl.load(to_out_ptr + at, mask=real, other=0.0).to(tl.float32)
    unit, inverse = _unit(tl.load(table_ptr + at, mask=real, other=0.0))
    to_row = (to_out - unit * tl.sum(to_out * unit, axis=1)[:, None]) * inverse[:, None]
    tl.store(to_table_ptr + at, before + to_row, mask=real)
