# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""What the attention kernels are built of: blocks of rows, unit rows, masks, and the choice of which weights stay.

Letters in names: t queries and s keys in time, d head dimension. Logits are in powers of two, since cards have exp2.
"""

import triton
import triton.language as tl

from qknorm.attention import availability

LOG2_E = tl.constexpr(1.4426950408889634)
TINY = tl.constexpr(1.1754943508222875e-38)
INTERPRETED = tl.constexpr(availability.INTERPRETED)


@triton.jit
def product(a, b, plus):
    """a b + plus, summed in float32; float32 operands go as three tf32 products, all but their last bits kept."""
    if INTERPRETED:  # which multiplies the bits of bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, plus, input_precision="tf32x3")


@triton.jit
def load_rows(ptr, rows, stride, count, D: tl.constexpr, BLOCK_D: tl.constexpr, FITS: tl.constexpr):
    """Rows of d numbers, with zeros beyond the last row and column; FITS promises that no row is beyond."""
    columns = tl.arange(0, BLOCK_D)
    address = ptr + rows[:, None] * stride + columns[None, :]
    if FITS and D == BLOCK_D:
        block = tl.load(address)
    elif FITS:
        block = tl.load(address, mask=(columns < D)[None, :], other=0.0)
    else:
        block = tl.load(address, mask=(rows < count)[:, None] & (columns < D)[None, :], other=0.0)
    return block


@triton.jit
def store_rows(ptr, rows, stride, count, block, D: tl.constexpr, BLOCK_D: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)
    inside = (rows < count)[:, None] & (columns < D)[None, :]
    tl.store(ptr + rows[:, None] * stride + columns[None, :], block.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def unit_rows(x):
    """x/‖x‖₂ and ‖x‖₂ in float32, with what `norm.lp_normalize` promises: zeros for padding, any size, NaN stays."""
    x = x.to(tl.float32)
    largest = tl.max(tl.abs(x), axis=1)
    bad = tl.sum(x * 0.0, axis=1)  # NaN where the row has NaN or infinity, which a maximum may hide
    largest = tl.where(largest <= TINY, float("inf"), largest) + bad
    unit = x / largest[:, None]
    length = tl.sqrt(tl.sum(unit * unit, axis=1))
    length = tl.where(length < 1.0, 1.0, length)
    return unit / length[:, None], largest * length


@triton.jit
def load_units(
    ptr, rows, stride, count, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, NORMALISE: tl.constexpr
):
    """Rows made unit vectors in their own dtype, and their lengths; without NORMALISE the rows as they are."""
    block = load_rows(ptr, rows, stride, count, D, BLOCK_D, False)
    length = tl.zeros([ROWS], tl.float32)
    if NORMALISE:
        unit, length = unit_rows(block)
        block = unit.to(block.dtype)
    return block, length


@triton.jit
def through_unit(to_unit, unit, along, length):
    """The gradient of x from that of x/‖x‖₂, of which `along` is the part along x, that no change of length makes."""
    return (to_unit - unit * along[:, None]) / length[:, None]


@triton.jit
def hide(
    logits, rows, keys, s, offset, mask_ptr, mask_s, CAUSAL: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr
):
    """Logits (queries, keys) with −∞ where a query may not see; only blocks at an EDGE need look at positions."""
    if EDGE:
        logits = tl.where((keys < s)[None, :], logits, float("-inf"))
        if CAUSAL:
            logits = tl.where(keys[None, :] <= rows[:, None] + offset, logits, float("-inf"))
    if MASKED:
        seen = tl.load(mask_ptr + keys * mask_s, mask=keys < s, other=0) != 0
        logits = tl.where(seen[None, :], logits, float("-inf"))
    return logits


@triton.jit
def staying(row_draws, key_draws, dropped):
    """Which weights dropout leaves, from one random number for each query and one for each key: 24 bits decide.

    Philox for every weight would take longer than attention itself, so that Philox, in torch's generator, draws only
    t + s numbers; two multiplications mix each pair of them.
    """
    x = row_draws.to(tl.uint32, bitcast=True) ^ key_draws.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x9E3779B1
    x = (x ^ (x >> 15)) * 0x85EBCA77
    return (x >> 8).to(tl.int32) >= dropped
