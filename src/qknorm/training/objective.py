"""What training minimises: cross-entropy with label smoothing over the types that may be produced."""

from typing import NamedTuple

import torch
from torch import Tensor

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
    log_p = torch.log_softmax(logits, dim=-1)
    plain = -log_p.gather(1, targets.unsqueeze(1)).squeeze(1).masked_fill(~counted, 0.0)
    spread = -log_p.masked_fill(~allowed, 0.0).sum(dim=-1).masked_fill(~counted, 0.0) / allowed.sum()
    smoothed = (1 - smoothing) * plain + smoothing * spread
    return Losses(smoothed.sum(), plain.sum(), counted.sum())
