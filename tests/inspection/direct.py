"""The measures of attention as their definitions read, one query after another, in float64."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class _Gathered:
    logits: list[float] = field(default_factory=list)
    frobenius: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    relative: list[float] = field(default_factory=list)
    saturated: list[float] = field(default_factory=list)
    effective: list[float] = field(default_factory=list)
    distance: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    diagonal: list[float] = field(default_factory=list)
    q_norm: list[float] = field(default_factory=list)
    k_norm: list[float] = field(default_factory=list)


def direct(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    queries: Tensor | None = None,
    threshold: float = 0.99,
    raw_q: Tensor | None = None,
    raw_k: Tensor | None = None,
    offset: int | None = None,
    softcap: float | None = None,
) -> dict[str, list[float]]:
    """What `measure` promises, without any of its ways."""
    (b, h, t, d), s = q.shape, k.shape[2]
    group = h // k.shape[1]
    q, k = q.double(), k.double().repeat_interleave(group, dim=1)
    raw_q = q if raw_q is None else raw_q.double()
    raw_k = k if raw_k is None else raw_k.double().repeat_interleave(group, dim=1)
    offset = (s - t if is_causal else 0) if offset is None else offset
    scales = torch.as_tensor(scale, dtype=torch.float64).expand(h)
    visible, added = _mask(mask, (b, h, t, s))
    if is_causal:
        visible = visible & torch.tensor([[j <= i + s - t for j in range(s)] for i in range(t)])
    if queries is not None:
        visible = visible & queries[:, None, :, None]
    found = {name: [] for name in _NAMES}
    for head in range(h):
        gathered = _Gathered()
        for sentence in range(b):
            place = sentence, head
            if not visible[place].any():
                continue
            products = q[place] @ k[place].T
            logits = products * scales[head]
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            seen = visible[place].any(dim=0)
            first = int(seen.nonzero()[0])
            gathered.frobenius.append(float(products[visible[place]].square().sum()))
            gathered.k_norm += raw_k[place][seen].norm(dim=-1).tolist()
            for i in range(t):
                shown = visible[place][i]
                if shown.any():
                    weights = torch.zeros(s, dtype=torch.float64)
                    weights[shown] = (logits[i] + added[place][i])[shown].softmax(dim=0)
                    gathered.logits += logits[i][shown].tolist()
                    gathered.q_norm.append(float(raw_q[place][i].norm()))
                    _gather_query(gathered, weights, int(shown.sum()), i + offset, first, threshold)
        for name, value in zip(_NAMES, _summed(gathered, d), strict=True):
            found[name].append(value)
    return found


_NAMES = (
    "largest_logit", "logit_std", "qk_frobenius", "qk_frobenius_scaled", "entropy", "relative_entropy", "saturation",
    "effective_keys", "distance", "first_share", "diagonal_share", "q_norm", "k_norm",
)  # fmt: skip


def _mask(mask: Tensor | None, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    if mask is None:
        return torch.ones(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.float64)
    if mask.dtype == torch.bool:
        return mask.expand(shape), torch.zeros(shape, dtype=torch.float64)
    return (mask > -9_000).expand(shape), mask.double().expand(shape)


def _gather_query(gathered: _Gathered, weights: Tensor, visible: int, own: int, first: int, threshold: float) -> None:
    entropy = -sum(w * math.log(w) for w in weights.tolist() if w > 0)
    gathered.entropy.append(entropy)
    gathered.effective.append(math.exp(entropy))
    if visible > 1:
        gathered.relative.append(entropy / math.log(visible))
        gathered.saturated.append(float(weights.max() > threshold))
    gathered.distance.append(sum(w * abs(j - own) for j, w in enumerate(weights.tolist())))
    gathered.first.append(float(weights[first]))
    gathered.diagonal.append(float(weights[own]) if 0 <= own < len(weights) else 0.0)


def _summed(gathered: _Gathered, d: int) -> list[float]:
    def mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else math.nan

    logits = torch.tensor(gathered.logits, dtype=torch.float64)
    frobenius = math.sqrt(mean(gathered.frobenius)) if gathered.frobenius else math.nan
    return [
        float(logits.abs().max()) if len(logits) else math.nan,
        float(logits.std(correction=0)) if len(logits) else math.nan,
        frobenius,
        frobenius / math.sqrt(d),
        mean(gathered.entropy),
        mean(gathered.relative),
        mean(gathered.saturated),
        mean(gathered.effective) if gathered.effective else 0.0,
        mean(gathered.distance),
        mean(gathered.first),
        mean(gathered.diagonal),
        mean(gathered.q_norm),
        mean(gathered.k_norm),
    ]
