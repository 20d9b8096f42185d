"""What training minimises: cross-entropy, for translators with label smoothing over the types that may be produced."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from qknorm.specials import PAD


class Losses(NamedTuple):
    """Sums over the real target tokens of a batch, in float32."""

    smoothed: Tensor
    plain: Tensor
    tokens: Tensor


def label_smoothed_loss(logits: Tensor, targets: Tensor, allowed: Tensor, smoothing: float) -> Losses:
    """(1 − ε) · −log p(target) + ε · mean of −log p over the allowed types, summed over tokens.

    `logits` (…, vocabulary) are −∞ where a type is not allowed. Padding does not count, nor does a target that may
    not be produced (dev text can hold such types).
    """
    logits, targets = logits.flatten(0, -2).float(), targets.flatten()
    counted = (targets != PAD) & allowed[targets]
    in_few_passes = logits.device.type == "cpu" and not torch.compiler.is_compiling()
    make: Callable[..., tuple[Tensor, Tensor]] = _TokenLosses.apply if in_few_passes else token_losses
    plain, spread = (loss.masked_fill(~counted, 0.0) for loss in make(logits, targets, allowed))
    smoothed = (1 - smoothing) * plain + smoothing * spread
    return Losses(smoothed.sum(), plain.sum(), counted.sum())


def token_losses(logits: Tensor, targets: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """−log p of every target, and the mean of −log p over the allowed types: the reference."""
    log_p = torch.log_softmax(logits, dim=-1)
    plain = -log_p.gather(1, targets.unsqueeze(1)).squeeze(1)
    return plain, -log_p.masked_fill(~allowed, 0.0).sum(dim=-1) / allowed.sum()


class _TokenLosses(torch.autograd.Function):
    """`token_losses` with one exponential an entry, and a gradient written in two passes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        p, number = torch.softmax(logits, dim=-1), allowed.sum()
        log_mass = logits.amax(dim=-1) - p.amax(dim=-1).log()
        finite = logits.clamp(min=torch.finfo(logits.dtype).min)  # since −∞ · 0 is no number
        with torch.autocast(logits.device.type, enabled=False):  # in half precision the lowest number would be −∞
            spread = log_mass - finite @ allowed.to(logits.dtype) / number
        ctx.save_for_backward(p, targets, allowed, number)
        return log_mass - logits.gather(1, targets.unsqueeze(1)).squeeze(1), spread

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_plain: Tensor, to_spread: Tensor) -> tuple[Tensor, None, None]:
        p, targets, allowed, number = ctx.saved_tensors
        slope = p * (to_plain + to_spread).unsqueeze(1)
        slope.addcmul_((to_spread / number).unsqueeze(1), allowed.to(p.dtype), value=-1)
        return slope.scatter_add_(1, targets.unsqueeze(1), -to_plain.unsqueeze(1)), None, None


def next_token_loss(logits: Tensor, targets: Tensor) -> Losses:
    """Cross-entropy in nats, summed over all tokens."""
    plain = F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction="sum")
    return Losses(plain, plain, torch.full((), targets.numel(), device=targets.device))
