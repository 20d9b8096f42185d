"""Starting a scale where the model's logits were: the spread of dot products over that of cosines, on one batch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qknorm.attention.norm import QKNorm, lp_normalize

LOGITS_AT_ONCE = 1 << 22
"""So many are held at a time, about: they are worked on in float64, and a long sentence has far more."""


class Spread:
    """Gathers, head by head, how far logits lie from the mean of their row, with dot products and with cosines.

    Softmax sees no more of a row than that: what all its logits share falls out. Keys that are masked do not count, nor
    queries of padding: they see keys as others do, but nobody uses what comes of it.
    """

    def __init__(self, norm: QKNorm) -> None:
        self._p = norm.p_init
        self.dot: Tensor | None = None
        self.cosine: Tensor | None = None

    def see(self, q_bhtd: Tensor, k_bhsd: Tensor, scaling: float, visible: Tensor | None, real: Tensor | None) -> None:
        """Adds one attention, a sentence and some of its queries at a time."""
        q_bhtd, k_bhsd = q_bhtd.float(), k_bhsd.float().repeat_interleave(q_bhtd.shape[1] // k_bhsd.shape[1], dim=1)
        b, h, t, s = *q_bhtd.shape[:3], k_bhsd.shape[2]
        shown = torch.ones((), dtype=torch.bool, device=q_bhtd.device) if visible is None else visible
        shown = (shown if real is None else shown & real[:, None, :, None]).expand(b, h, t, s)
        rows = max(1, LOGITS_AT_ONCE // max(1, h * s))
        for q_htd, k, seen_hts in zip(q_bhtd, k_bhsd, shown, strict=True):
            unit_k = lp_normalize(k, self._p)
            for q, seen in zip(q_htd.split(rows, dim=1), seen_hts.split(rows, dim=1), strict=True):
                dot = _sums_of_squares(q @ k.transpose(-2, -1) * scaling, seen)
                cosine = _sums_of_squares(lp_normalize(q, self._p) @ unit_k.transpose(-2, -1), seen)
                self.dot = dot if self.dot is None else self.dot + dot
                self.cosine = cosine if self.cosine is None else self.cosine + cosine

    def matching_scale(self, name: str, per_head: bool) -> Tensor:
        """The scale, or one for every head, that gives cosines the spread the dot products had."""
        if self.dot is None or self.cosine is None:
            raise ValueError(f"the calibration batch never reached {name}; leave it out with only=, or give scale_init")
        dot, cosine = (self.dot, self.cosine) if per_head else (self.dot.sum(), self.cosine.sum())
        scale = (dot / cosine).sqrt()
        if not bool((torch.isfinite(scale) & (scale > 0)).all()):
            raise ValueError(
                f"the logits of {name} do not vary on the calibration batch, or are not finite, so that no scale can be"
                " matched; calibrate with a batch of more than one token a row, or give scale_init"
            )
        return scale


def _sums_of_squares(logits_hts: Tensor, visible_hts: Tensor) -> Tensor:
    """Σ (logit − mean of its row)² over the visible keys, for every head, in float64."""
    logits = logits_hts.double().masked_fill(~visible_hts, 0.0)
    count = visible_hts.sum(dim=-1, keepdim=True).clamp(min=1)
    centred = (logits - logits.sum(dim=-1, keepdim=True) / count).masked_fill(~visible_hts, 0.0)
    return centred.square().sum(dim=(-2, -1))


def loss_on(model: nn.Module, batch: Any, loss: Callable[[Any], Any] | None) -> float | None:
    """Runs the model on the batch without leaving a trace in it; what `loss` makes of its output, or its own loss."""
    with _undisturbed(model):
        if isinstance(batch, Mapping):
            output = model(**batch)
        elif isinstance(batch, (tuple, list)):
            output = model(*batch)
        else:
            output = model(batch)
        if loss is not None:
            return float(loss(output))
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        return None if own is None else float(own)


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation without gradients; mode, random numbers and torch's fast path are afterwards as they were."""
    training = {module: module.training for module in model.modules()}
    fast_path = torch.backends.mha.get_fastpath_enabled()
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    try:
        model.eval()
        torch.backends.mha.set_fastpath_enabled(False)  # it would go past the attention modules that are watched
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for module, mode in training.items():
            module.training = mode
