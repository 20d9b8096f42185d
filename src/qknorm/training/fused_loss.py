# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The loss straight from the states: one product makes the logits, one kernel reads them and leaves their gradient.

`objective.label_smoothed_loss` on `Translator.score`, and `next_token_loss`, are the plain references.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from qknorm.models.fused_linear import add_column_sums, add_product
from qknorm.models.fused_run import FusedRun, compute_dtype, gradient_room, hand_back, in_dtype, whole
from qknorm.specials import PAD
from qknorm.training.objective import Losses

NO_PAD = -1
"""No id: where every target counts."""


class WeightedLosses(NamedTuple):
    """The sums, and what to derive: the smoothed one times the weight."""

    weighted: Tensor
    sums: Losses


@triton.jit
def _allowed(allowed_ptr, columns, types, padded, ALL_ALLOWED: tl.constexpr):
    """Which types may be produced."""
    if ALL_ALLOWED:
        return columns < types
    return tl.load(allowed_ptr + columns, mask=columns < padded, other=0) != 0


@triton.jit(do_not_specialize=["rows"])
def _loss_kernel(
    logits_ptr, targets_ptr, allowed_ptr, weight_ptr, losses_ptr, rows, types, padded, smoothing, PAD: tl.constexpr,
    ALL_ALLOWED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: its losses, and in place of its logits their gradient times the weight."""
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * padded
    target = tl.load(targets_ptr + row)
    largest = -3.4e38
    mass, total, number, at_target = 0.0, 0.0, 0.0, 0.0
    for start in range(0, padded, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        allowed = _allowed(allowed_ptr, columns, types, padded, ALL_ALLOWED)
        x = tl.load(logits_ptr + columns, mask=columns < padded, other=0.0).to(tl.float32)
        newly_largest = tl.maximum(largest, tl.max(tl.where(allowed, x, -3.4e38), axis=0))
        powers = tl.where(allowed, tl.exp(x - newly_largest), 0.0)
        mass = mass * tl.exp(largest - newly_largest) + tl.sum(powers, axis=0)
        largest = newly_largest
        total += tl.sum(tl.where(allowed, x, 0.0), axis=0)
        number += tl.sum(allowed.to(tl.float32), axis=0)
        at_target += tl.sum(tl.where(allowed & (columns == target), x, 0.0), axis=0)
    log_mass = largest + tl.log(mass)
    counted = target != PAD
    if not ALL_ALLOWED:
        counted &= tl.load(allowed_ptr + target) != 0
    plain = log_mass - at_target
    smoothed = (1 - smoothing) * plain + smoothing * (log_mass - total / number)
    tl.store(losses_ptr + row, tl.where(counted, smoothed, 0.0))
    tl.store(losses_ptr + rows + row, tl.where(counted, plain, 0.0))
    tl.store(losses_ptr + 2 * rows + row, tl.where(counted, 1.0, 0.0))
    weight = tl.where(counted, tl.load(weight_ptr), 0.0)
    for start in range(0, padded, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        allowed = _allowed(allowed_ptr, columns, types, padded, ALL_ALLOWED)
        x = tl.load(logits_ptr + columns, mask=columns < padded, other=0.0).to(tl.float32)
        wanted = smoothing / number + tl.where(columns == target, 1 - smoothing, 0.0)
        slope = (tl.exp(x - log_mass) - wanted) * weight
        tl.store(logits_ptr + columns, tl.where(allowed & counted, slope, 0.0), mask=columns < padded)


class _ProjectedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        table: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        allowed: Tensor | None,
        smoothing: float,
        weight: Tensor,
        run: FusedRun,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dtype, types = compute_dtype(states), len(table) if allowed is None else len(allowed)
        rows, targets = states.reshape(-1, states.shape[-1]).to(dtype), targets.reshape(-1)
        padded = whole(types)
        half_table = in_dtype(table, dtype, run.flat)
        if len(half_table) < padded:
            half_table = F.pad(half_table, (0, 0, 0, padded - len(half_table)))
        half_bias = None if bias is None else F.pad(in_dtype(bias, dtype, run.flat), (0, padded - types))
        with torch.autocast(states.device.type, enabled=False):
            logits = F.linear(rows, half_table, half_bias)
        losses = torch.empty(3, len(rows), device=states.device)
        block = min(1_024, triton.next_power_of_2(padded))
        _loss_kernel[(len(rows),)](
            logits, targets, targets if allowed is None else F.pad(allowed, (0, padded - types)), weight, losses,
            len(rows), types, padded, smoothing, PAD=NO_PAD if allowed is None else PAD, ALL_ALLOWED=allowed is None,
            BLOCK=block, num_warps=max(1, block // 256),
        )  # fmt: skip
        smoothed, plain, tokens = losses.sum(dim=1)
        ctx.save_for_backward(logits, rows, half_table, table, bias)
        ctx.run, ctx.states_shape, ctx.states_dtype = run, states.shape, states.dtype
        ctx.mark_non_differentiable(smoothed, plain, tokens)
        ctx.set_materialize_grads(False)
        return smoothed * weight, smoothed, plain, tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        slopes, rows, half_table, table, bias = ctx.saved_tensors
        to_states, scales = slopes @ half_table, not _is_one(to_loss, ctx.run.one)
        if scales:
            factor = to_loss.to(rows.dtype)
            to_states, rows = to_states * factor, rows * factor
        to_states = to_states.view(ctx.states_shape).to(ctx.states_dtype)
        slopes = slopes[:, : len(table)]
        if table.dtype == torch.float32:
            room = gradient_room(table, ctx.run.flat)
            add_product(room[0], slopes.t(), rows)
            to_table = hand_back(table, room)
        else:
            to_table = slopes.t() @ rows
        to_bias = None
        if bias is not None:
            room = gradient_room(bias, None if scales else ctx.run.flat)
            add_column_sums(room[0], slopes[:, : len(bias)])
            to_bias = hand_back(bias, room)
            if scales and to_bias is not None:
                to_bias = to_bias * to_loss
        return to_states, to_table, to_bias, *[None] * 5


def _is_one(x: Tensor, one: Tensor | None) -> bool:
    """Whether this is the tensor known to be 1, so that nobody need look."""
    return one is not None and x.data_ptr() == one.data_ptr()


def projected_loss(
    run: FusedRun,
    states_btd: Tensor,
    table: Tensor,
    bias: Tensor | None,
    targets_bt: Tensor,
    allowed: Tensor | None,
    smoothing: float,
    weight: Tensor,
) -> WeightedLosses:
    """`label_smoothed_loss` of states · tableᵀ + bias over the allowed types, and its smoothed sum times `weight`.

    The table has a row for each type, and may have more at its end, whose gradient is zero. Where nothing is said of
    what is allowed, every row is, and every target counts: `next_token_loss`.
    """
    weighted, *sums = _ProjectedLoss.apply(states_btd, table, bias, targets_bt, allowed, smoothing, weight, run)
    return WeightedLosses(weighted, Losses(*sums))
