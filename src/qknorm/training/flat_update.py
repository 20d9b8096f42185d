# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Clipping and AdamW over all parameters at once: one pass for the norm of the gradients, one for everything else.

`clip_grad_norm_` and `torch.optim.AdamW` are the plain reference; the optimiser stays the owner of its moments.
"""

import math
import weakref
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qknorm.models.fused_run import FlatParameters
from qknorm.models.launches import LAUNCHES

PARTS = 1_024
"""Partial sums of the squared norm, of which a launch may use fewer."""


@triton.jit
def _offsets(BLOCK: tl.constexpr):
    """Places within a block; a thread takes four neighbours, so that float32 and half precision have one layout."""
    return tl.max_contiguous(tl.multiple_of(tl.arange(0, BLOCK), 4), 4)


@triton.jit
def _squares_kernel(
    gradient_ptr, parts_ptr, count, BLOCK: tl.constexpr, EVICT: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Each program's share of the squared norm."""
    at, found = _offsets(BLOCK), tl.zeros([BLOCK], dtype=tl.float32)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    for start in tl.range(begin, count, tl.num_programs(0) * BLOCK, num_stages=STAGES):
        real = at < tl.minimum(count - start, BLOCK).to(tl.int32)
        g = tl.load(gradient_ptr + start + at, mask=real, other=0.0, eviction_policy=EVICT)
        found += g * g
    tl.store(parts_ptr + tl.program_id(0), tl.sum(found, axis=0))


@triton.jit
def _decide_kernel(
    parts_ptr, decision_ptr, step_ptr, sums_ptr, clip, LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """What all entries share: by how much to clip, whether to step at all, and Adam's corrections of its start."""
    norm = tl.sqrt(tl.sum(tl.load(parts_ptr + tl.arange(0, PARTS)), axis=0))
    good = tl.where(norm < float("inf"), 1.0, 0.0)
    step = tl.load(step_ptr) + good
    taken = tl.maximum(step, 1.0).to(tl.float64)
    first = 1.0 - tl.exp(taken * LOG_BETA1)
    second = 1.0 - tl.exp(taken * LOG_BETA2)
    tl.store(step_ptr, step)
    tl.store(decision_ptr, good)
    tl.store(decision_ptr + 1, tl.minimum(clip / (norm + 1e-6), 1.0))
    tl.store(decision_ptr + 2, (1.0 / first).to(tl.float32))
    tl.store(decision_ptr + 3, (1.0 / tl.sqrt(second)).to(tl.float32))
    tl.store(sums_ptr + 3, tl.load(sums_ptr + 3) + 1.0)
    tl.store(sums_ptr + 4, tl.load(sums_ptr + 4) + (1.0 - good))


@triton.jit
def _adam_kernel(
    value_ptr, gradient_ptr, first_ptr, second_ptr, half_ptr, decision_ptr, rate_ptr, count, BETA1: tl.constexpr,
    REST1: tl.constexpr, BETA2: tl.constexpr, REST2: tl.constexpr, DECAY: tl.constexpr, EPS: tl.constexpr,
    HAS_HALF: tl.constexpr, BLOCK: tl.constexpr, EVICT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The step, where the decision is good; gradients are cleared in any case."""
    good, clip = tl.load(decision_ptr) != 0.0, tl.load(decision_ptr + 1)
    rate, up, size_up = tl.load(rate_ptr), tl.load(decision_ptr + 2), tl.load(decision_ptr + 3)
    at = _offsets(BLOCK)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    for start in tl.range(begin, count, tl.num_programs(0) * BLOCK, num_stages=STAGES):
        real = at < tl.minimum(count - start, BLOCK).to(tl.int32)
        # every load before the first use, so that all are under way while the decision comes
        g = tl.load(gradient_ptr + start + at, mask=real, other=0.0, eviction_policy=EVICT)
        value = tl.load(value_ptr + start + at, mask=real, other=0.0, eviction_policy=EVICT)
        first = tl.load(first_ptr + start + at, mask=real, other=0.0, eviction_policy=EVICT)
        second = tl.load(second_ptr + start + at, mask=real, other=0.0, eviction_policy=EVICT)
        tl.store(gradient_ptr + start + at, tl.zeros([BLOCK], dtype=tl.float32), mask=real, eviction_policy=EVICT)
        if good:
            g *= clip
            first = BETA1 * first + REST1 * g
            second = BETA2 * second + REST2 * g * g
            size = tl.sqrt(second) * size_up + EPS
            value = value * (1.0 - rate * DECAY) - rate * up * first / size
            tl.store(value_ptr + start + at, value, mask=real, eviction_policy=EVICT)
            tl.store(first_ptr + start + at, first, mask=real, eviction_policy=EVICT)
            tl.store(second_ptr + start + at, second, mask=real, eviction_policy=EVICT)
            if HAS_HALF:
                tl.store(half_ptr + start + at, value, mask=real)


class FlatUpdate:
    """Clips, steps, clears the gradients and renews the half-precision copy, without waiting for the device.

    A step whose gradients are not finite clears them and changes nothing but a count, as `sums` has it: its entry 3
    counts steps, its entry 4 bad ones. The optimiser has its moments already; its groups lie side by side in `flat` and
    differ in weight decay alone. The learning rate is read from `rate`.
    """

    def __init__(self, flat: FlatParameters, optimizer: torch.optim.Optimizer, clip: float, sums: Tensor) -> None:
        self._flat, self._optimizer, self._clip, self._sums = flat, optimizer, clip, sums
        device = flat.values.device
        self.rate = torch.zeros((), device=device)
        self._moments = {name: torch.zeros_like(flat.values) for name in ("exp_avg", "exp_avg_sq")}
        self._step = torch.zeros((), device=device)
        self._parts, self._decision = torch.zeros(PARTS, device=device), torch.zeros(4, device=device)
        self._adopt_moments()
        # weakly: an optimiser that held us would keep all these tensors on the device until Python looks for cycles
        adopt = weakref.WeakMethod(self._adopt_moments)
        optimizer.register_load_state_dict_post_hook(lambda _: None if (now := adopt()) is None else now())
        self._compile()

    def __call__(self) -> None:
        flat, count = self._flat, self._flat.values.numel()
        beta1, beta2 = self._optimizer.param_groups[0]["betas"]
        launch = LAUNCHES["squares"]
        _squares_kernel[(min(PARTS, launch.share(-(-count // launch.entries))),)](
            flat.gradients, self._parts, count, BLOCK=launch.entries, EVICT=launch.evict, STAGES=launch.stages,
            num_warps=launch.warps,
        )  # fmt: skip
        _decide_kernel[(1,)](
            self._parts, self._decision, self._step, self._sums, self._clip, LOG_BETA1=_log(beta1),
            LOG_BETA2=_log(beta2), PARTS=PARTS, num_warps=4,
        )  # fmt: skip
        for group in self._optimizer.param_groups:
            if group["params"]:
                self._adam(group, flat.span_of(group["params"]))

    def _adam(self, group: dict[str, Any], span: slice) -> None:
        """AdamW for the parameters of one group."""
        flat, (beta1, beta2), launch = self._flat, group["betas"], LAUNCHES["adam"]
        tensors = (
            flat.values,
            flat.gradients,
            *self._moments.values(),
            flat.values if flat.halves is None else flat.halves,
        )
        count = span.stop - span.start
        _adam_kernel[(launch.share(-(-count // launch.entries)),)](
            *(each[span] for each in tensors), self._decision, self.rate, count, BETA1=beta1, REST1=1 - beta1,
            BETA2=beta2, REST2=1 - beta2, DECAY=group["weight_decay"], EPS=group["eps"],
            HAS_HALF=flat.halves is not None, BLOCK=launch.entries, EVICT=launch.evict, STAGES=launch.stages,
            num_warps=launch.warps,
        )  # fmt: skip

    def _compile(self) -> None:
        """Runs every kernel once, in a step that changes nothing: none may be compiled while a step is recorded."""
        gradients, sums = self._flat.gradients.clone(), self._sums.clone()
        self._flat.gradients[0] = torch.nan
        self()
        self._flat.gradients.copy_(gradients)
        self._sums.copy_(sums)

    def _adopt_moments(self) -> None:
        """Makes the optimiser's moments views of ours, with the values it has; all parameters share one count."""
        state: dict[Any, dict[str, Tensor]] = self._optimizer.state
        for name, moments in self._moments.items():
            for parameter, view in zip(self._flat.parameters, self._flat.views_of(moments), strict=True):
                view.copy_(state[parameter][name])
                state[parameter][name] = view
        self._step.copy_(state[self._flat.parameters[0]]["step"])
        for parameter in self._flat.parameters:
            state[parameter]["step"] = self._step


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -1e4
