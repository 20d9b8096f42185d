# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""A step of beam search from logits to reordered hypotheses as one kernel; `search.advance` is the plain reference.

One program has one sentence. It works out the best candidates of all its hypotheses, of equals those with the lowest
index, fills the open slots, stops the sentence where it is settled, and puts tokens and mask in their new order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qknorm.decoding.search import Rules, Slots
from qknorm.specials import END

LARGEST_BLOCK = 4_096


@triton.jit
def _log_mass(logits_ptr, types, BLOCK: tl.constexpr):
    """The largest logit of a row, and the log of the sum of all powers over that of the largest, NaN if none is."""
    largest, mass = -3.4e38, 0.0
    for start in range(0, types, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + columns, mask=columns < types, other=float("-inf")).to(tl.float32)
        newly_largest = tl.maximum(largest, tl.max(x, axis=0))
        mass = mass * tl.exp(largest - newly_largest) + tl.sum(tl.exp(x - newly_largest), axis=0)
        largest = newly_largest
    return largest, tl.where(mass > 0, tl.log(mass), float("nan"))


@triton.jit
def _put_in(best, flat, real, value, index):
    """Takes a candidate into the list in place of the worst, of equals the one with the highest index, if better."""
    worst = tl.min(tl.where(real, best, float("inf")), axis=0)
    last = tl.max(tl.where(real & (best == worst), flat, -1), axis=0)
    leaves = flat == last
    return tl.where(leaves, tl.maximum(value, worst), best), tl.where(
        leaves, tl.where(value > worst, index, last), flat
    )


@triton.jit
def _reorder(rows_ptr, stride, slot, origin, real, columns_end, new_at, new, BLOCK: tl.constexpr):
    """Row j becomes what row origin[j] was, up to `columns_end`; column `new_at`, if there, gets what is new."""
    for start in range(0, columns_end, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = real[:, None] & (columns < columns_end)[None, :]
        old = tl.load(rows_ptr + origin[:, None] * stride + columns[None, :], mask=inside, other=0)
        old = tl.where((columns == new_at)[None, :], new[:, None].to(old.dtype), old)
        tl.debug_barrier()  # all is read before anything is written
        tl.store(rows_ptr + slot[:, None] * stride + columns[None, :], old, mask=inside)


@triton.jit
def _best_candidates(
    logits_ptr, stride, log_p_ptr, finished_ptr, types, slot, real, now, END: tl.constexpr,
    BEAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best continuations of a sentence's hypotheses in any order, their indices, and whether one is no number."""
    best = tl.full(slot.shape, float("-inf"), tl.float32)
    flat = (types * BEAM + slot).to(tl.int32)
    spoiled = 0
    for k in range(BEAM):
        before = tl.load(log_p_ptr + k)
        open_slot = tl.load(finished_ptr + k) == 0
        if open_slot & (before > float("-inf")):
            row_ptr = logits_ptr + k * stride
            largest, log_mass = _log_mass(row_ptr, types, BLOCK)
            spoiled = tl.where(log_mass == log_mass, spoiled, 1)
            for start in range(0, types, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                x = tl.load(row_ptr + columns, mask=columns < types, other=float("-inf")).to(tl.float32)
                x = (x - largest) - log_mass + before
                x = tl.where((columns == END) & (now <= 1), float("-inf"), x)  # no translation is empty
                for _ in tl.static_range(BEAM):
                    top = tl.max(x, axis=0)
                    at = tl.min(tl.where(x == top, columns, types), axis=0)
                    best, flat = _put_in(best, flat, real, top, k * types + at)
                    x = tl.where(columns == at, float("-inf"), x)
    return best, flat, spoiled


@triton.jit
def _fill(best, flat, finished, real, BEAM: tl.constexpr):
    """To the first open slot the best candidate, to the next the second best, and so on."""
    rank = tl.cumsum(tl.where(finished, 0, 1), axis=0) - 1
    value = tl.full(best.shape, float("-inf"), tl.float32)
    index = tl.zeros(flat.shape, tl.int32)
    for r in tl.static_range(BEAM):
        top = tl.max(tl.where(real, best, float("-inf")), axis=0)
        at = tl.min(tl.where(real & (best == top), flat, 2_147_483_647), axis=0)
        mine = (rank == r) & (finished == 0)
        value, index = tl.where(mine, top, value), tl.where(mine, at, index)
        best = tl.where(flat == at, float("-inf"), best)
    return value, index


@triton.jit
def _advance_kernel(
    logits_ptr, log_p_ptr, length_ptr, finished_ptr, limit_ptr, last_ptr, running_ptr, tokens_ptr, mask_ptr,
    penalty_ptr, now_ptr, types, logits_stride, tokens_stride, mask_stride, NBEST: tl.constexpr, END: tl.constexpr,
    BEAM: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, ALONG: tl.constexpr,
):  # fmt: skip
    sentence = tl.program_id(0)
    first = sentence.to(tl.int64) * BEAM
    slot = tl.arange(0, SLOTS)
    real = slot < BEAM
    now, limit = tl.load(now_ptr), tl.load(limit_ptr + sentence)
    best, flat, spoiled = _best_candidates(
        logits_ptr + first * logits_stride, logits_stride, log_p_ptr + first, finished_ptr + first, types, slot, real,
        now, END, BEAM, BLOCK,
    )  # fmt: skip
    log_p = tl.load(log_p_ptr + first + slot, mask=real, other=float("-inf"))
    finished = tl.load(finished_ptr + first + slot, mask=real, other=1) != 0
    length = tl.load(length_ptr + first + slot, mask=real, other=0)

    value, index = _fill(best, flat, finished, real, BEAM)
    value = tl.where(spoiled != 0, float("nan"), value)
    grows = real & (finished == 0) & (value > float("-inf"))
    origin = tl.where(grows, index // types, slot)
    token = tl.where(grows, index % types, END)
    log_p, length = tl.where(finished, log_p, value), tl.where(grows, now, length)
    finished = finished | (grows & ((token == END) | (limit == now)))

    penalty = tl.load(penalty_ptr + length, mask=real, other=1.0)
    scores = tl.where(finished & real, tl.div_rn(log_p, penalty), float("-inf"))
    is_open = real & (finished == 0)
    hope = tl.div_rn(tl.max(tl.where(is_open, log_p, float("-inf")), axis=0), tl.load(penalty_ptr + limit))
    running = (tl.sum(tl.where(real & (scores >= hope), 1, 0), axis=0) < NBEST) & (spoiled == 0)
    alive = is_open & (log_p > float("-inf"))
    log_p = tl.where(alive & (running == 0), float("-inf"), log_p)
    stays = tl.where(alive & running, origin, slot)

    tl.debug_barrier()  # all is read before anything is written
    tl.store(log_p_ptr + first + slot, log_p, mask=real)
    tl.store(length_ptr + first + slot, length, mask=real)
    tl.store(finished_ptr + first + slot, finished.to(tl.uint8), mask=real)
    tl.store(last_ptr + first + slot, token, mask=real)
    tl.store(running_ptr + sentence, running.to(tl.uint8))
    _reorder(tokens_ptr + first * tokens_stride, tokens_stride, slot, origin, real, now, now - 1, token, ALONG)
    _reorder(mask_ptr + first * mask_stride, mask_stride, slot, stays, real, now * BEAM, -1, token, ALONG)


def advance_fused(
    slots: Slots,
    logits_bkv: Tensor,
    length: Tensor,
    rules: Rules,
    *,
    last_bk: Tensor,
    running_b: Tensor,
    mask_bkp: Tensor,
) -> None:
    """One step, in place: `slots`, the last tokens, the sentences that go on, and the mask follow their hypotheses.

    Of the mask only the places of tokens up to `length` move, position · k + slot; the others are alike for all.
    """
    sentences, beam, types = logits_bkv.shape
    if rules.no_repeat_ngram:
        raise ValueError("the kernel forbids no n-grams")
    small = (slots.log_p_bk, slots.length_bk, slots.finished_bk, slots.limit_b, rules.penalty_t, last_bk, running_b)
    assert all(each.is_contiguous() for each in small)
    block = min(LARGEST_BLOCK, triton.next_power_of_2(types))
    _advance_kernel[(sentences,)](
        logits_bkv, slots.log_p_bk, slots.length_bk, _bytes(slots.finished_bk), slots.limit_b, last_bk,
        _bytes(running_b), slots.tokens_bkt, mask_bkp, rules.penalty_t, length, types, _rows(logits_bkv),
        _rows(slots.tokens_bkt), _rows(mask_bkp), NBEST=rules.nbest, END=END,
        BEAM=beam, SLOTS=max(2, triton.next_power_of_2(beam)), BLOCK=block, ALONG=128,
        num_warps=8 if block > 2_048 else 4,
    )  # fmt: skip


def _rows(x_bkn: Tensor) -> int:
    """How far apart the rows of all hypotheses lie; fails where not all lie equally far."""
    rows = x_bkn.view(-1, x_bkn.shape[2])
    assert rows.stride(1) == 1
    return rows.stride(0)


def _bytes(flags: Tensor) -> Tensor:
    return flags.view(torch.uint8)
