"""What is measured along the way: the loss on the whole held-out block, the scales, entropy and saturation."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from qknorm.models.language_model import LanguageModel
from qknorm.studies.lp.design import LpStudy
from qknorm.studies.lp.folds import HeldOut
from qknorm.studies.lp.stack import autocast

TOKENS_AT_ONCE = {"cuda": 1 << 17, "cpu": 1 << 14}
PROBED_WINDOWS = 4
SATURATED_ABOVE = 0.99
"""A query is saturated where one key gets more than this share of its attention."""


class Evaluator:
    """Runs any weights of one form of model, without dropout."""

    def __init__(self, study: LpStudy, form: LanguageModel, held_out: HeldOut, device: torch.device) -> None:
        self._study, self._device = study, device
        self._form = form.to(device).eval()
        self._held_out = HeldOut(*(each.to(device) for each in (held_out.inputs, held_out.targets, held_out.counted)))
        self._total = held_out.total
        self._at_once = max(1, TOKENS_AT_ONCE.get(device.type, 1 << 14) // held_out.inputs.shape[1])

    @torch.no_grad()
    def validation_loss(self, state: Mapping[str, Tensor]) -> float:
        """Mean cross-entropy in nats of every character of the block but its first; the same windows for every run."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        held_out = self._held_out
        for first in range(0, len(held_out.inputs), self._at_once):
            part = slice(first, first + self._at_once)
            with autocast(self._study, self._device):
                logits = functional_call(self._form, dict(state), (held_out.inputs[part],))
            losses = F.cross_entropy(logits.float().transpose(1, 2), held_out.targets[part], reduction="none")
            total += (losses * held_out.counted[part]).sum()
        return float(total) / self._total

    @torch.no_grad()
    def attention(self, state: Mapping[str, Tensor]) -> dict[str, list[float]]:
        """By layer: the scale, relative entropy and saturation over some windows, and p where it is learned."""
        measured: dict[str, list[float]] = {"scales": [], "entropy": [], "saturation": [], "p": []}

        def measure(module: Any, inputs: tuple[Tensor, ...]) -> None:
            """Within the call, so that the module has the weights that were given, and not the form's."""
            x = inputs[0]
            weights = module.forward(x, x, x, need_weights=True, average_attn_weights=False, is_causal=True)[1]
            entropy, saturation = entropy_and_saturation(weights)
            measured["scales"].append(float(module.norm.scale.float().mean()))
            measured["entropy"].append(entropy)
            measured["saturation"].append(saturation)
            if isinstance(module.norm.p, Tensor):
                measured["p"].append(float(module.norm.p.mean()))

        hooks = [module.register_forward_pre_hook(measure) for module in self._form.attentions().values()]
        try:
            with autocast(self._study, self._device):
                functional_call(self._form, dict(state), (self._held_out.inputs[:PROBED_WINDOWS],))
        finally:
            for hook in hooks:
                hook.remove()
        return {name: values for name, values in measured.items() if values}


def entropy_and_saturation(weights_bhts: Tensor) -> tuple[float, float]:
    """Means over causal queries with a choice: entropy over its largest value, log of the keys seen; saturated share.

    Entropy is 1 where attention is uniform, 0 where one key has it all.
    """
    weights = weights_bhts[..., 1:, :].float()  # the first query sees one key
    if not weights.numel():
        return math.nan, math.nan
    keys = torch.arange(2, weights.shape[-2] + 2, device=weights.device)
    entropy = torch.special.entr(weights).sum(dim=-1) / keys.log()
    saturated = weights.amax(dim=-1) > SATURATED_ABOVE
    return float(entropy.mean()), float(saturated.float().mean())
