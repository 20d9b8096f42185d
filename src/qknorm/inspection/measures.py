"""What one attention does, in numbers per head: from its queries and keys, exactly, whatever the length.

One rule holds for all of them: only pairs of a real query and a key that it may see count. A query is left out where
it is padding (`queries`) or may see nothing. Letters in names of tensors are those of `attention.attend`: b batch,
h heads, t queries, s keys, d head dimension.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from qknorm.inspection.logits import Product, full_precision, sum_dtype, where_visible

NO_WEIGHT = -10_000.0
"""exp of it is 0 in every dtype, and it times 0 is 0, as −∞ times 0 is not."""


@dataclass(frozen=True)
class Measures:
    """One number per query head; a mean over the real queries of all sentences where nothing else is said.

    Queries with a single visible key have no choice: relative entropy and saturation leave them out.
    """

    largest_logit: Tensor
    """The largest |scale · q·k|, before any additive mask or position bias."""
    logit_std: Tensor
    """Standard deviation of these logits over all visible pairs."""
    qk_frobenius: Tensor
    """‖QKᵀ‖_F of a sentence, without the scale, over visible pairs; the root mean square over the sentences."""
    qk_frobenius_scaled: Tensor
    """‖QKᵀ‖_F / √d."""
    entropy: Tensor
    """Of the attention weights, in nats."""
    relative_entropy: Tensor
    """Entropy over log(visible keys): 1 where attention is uniform, 0 where one key takes all."""
    saturation: Tensor
    """Share of queries whose largest weight is above the threshold."""
    effective_keys: Tensor
    """exp(entropy): over how many keys a uniform attention would have this entropy; 0 where no query sees a key, which
    leaves all other measures NaN."""
    distance: Tensor
    """Σ weight · |position of the query − position of the key|."""
    first_share: Tensor
    """Weight on the first key of the sentence that is not padding (sinks)."""
    diagonal_share: Tensor
    """Weight on the key at the query's own position."""
    q_norm: Tensor
    """L2 length of the queries, before normalisation where there is one."""
    k_norm: Tensor
    """L2 length of the keys, before normalisation where there is one."""

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of the measures, in order."""
        return tuple(entry.name for entry in fields(cls))

    @classmethod
    def from_stack(cls, stacked: Tensor) -> Self:
        """The inverse of `stack`."""
        return cls(*stacked.unbind())

    def stack(self) -> Tensor:
        """All measures as one tensor (measures, heads)."""
        return torch.stack([getattr(self, name) for name in self.names()])

    @property
    def heads(self) -> int:
        """How many query heads there are."""
        return len(self.entropy)

    def cpu(self) -> Self:
        """The same on the CPU, by a single transfer."""
        return self.from_stack(self.stack().cpu())

    @functools.cached_property
    def numbers(self) -> dict[str, list[float]]:
        """A list of one number a head for every measure, as JSON holds them; worked out once."""
        return dict(zip(self.names(), self.stack().tolist(), strict=True))

    def as_dict(self) -> dict[str, list[float]]:
        """The same as a dictionary of its own."""
        return {name: list(column) for name, column in self.numbers.items()}

    @classmethod
    def from_dict(cls, numbers: Mapping[str, Any]) -> Self:
        """The inverse of `as_dict`; None, which strict JSON has for NaN, is NaN again."""
        return cls(
            *(torch.tensor([math.nan if x is None else float(x) for x in numbers[name]]) for name in cls.names())
        )

    def as_rows(self, name: str) -> list[dict[str, Any]]:
        """One dictionary a head: the attention's name, the number of the head from 0 on, and every measure."""
        columns = self.numbers
        return [
            {"name": name, "head": head, **{measure: column[head] for measure, column in columns.items()}}
            for head in range(self.heads)
        ]

    def mean(self) -> dict[str, float]:
        """Each measure over all heads: its mean, of the largest logit the maximum."""
        means = dict(zip(self.names(), self.stack().mean(dim=1).tolist(), strict=True))
        return means | {"largest_logit": float(self.largest_logit.amax())}


def measure(
    q_bhtd: Tensor,
    k_bhsd: Tensor,
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
) -> Measures:
    """Measures the attention whose logits are scale · q·kᵀ, q and k being as they enter this product.

    `scale` is a number or a tensor of one or of h; k may have fewer heads than q. `mask` is boolean (True = may attend)
    or additive, and broadcasts to (b, h, t, s); `is_causal` aligns the last query with the last key. `queries` (b, t)
    marks those that are no padding. `raw_q` and `raw_k` are the vectors before normalisation, for their lengths.
    Query i stands at key i + `offset`: s − t where causal, else 0, if not given. `softcap` c bounds logits to
    c · tanh(logit / c). Computes in float32 (float64 stays), in blocks that never hold all logits of a long sequence.
    """
    raw_q, raw_k = q_bhtd if raw_q is None else raw_q, k_bhsd if raw_k is None else raw_k
    with torch.no_grad(), full_precision(q_bhtd.device):
        product = Product.of(q_bhtd, k_bhsd, scale, mask, is_causal, queries, softcap)
        t, s = product.t, product.s
        offset = offset if offset is not None else s - t if is_causal else 0
        seen = product.seen_keys()
        first = seen.to(torch.int8).argmax(dim=-1)  # (b, h)
        sizes = _Sizes(product)
        rows = _Rows.of(product)
        for block in product.row_blocks():
            for whole, part in zip(rows, _read(product, block, offset, first, sizes), strict=True):
                whole[..., block] = part
        largest, spread, frobenius = sizes.finish()
        measured = [largest, spread, frobenius, frobenius / math.sqrt(q_bhtd.shape[-1])]
        measured += _mean_over_queries(rows, threshold)
        measured += [_mean_length(raw_q, rows.visible > 0), _mean_length(raw_k, seen)]
        return Measures.from_stack(torch.stack(measured).to(product.q.dtype))


def attention_weights(
    q_bhtd: Tensor,
    k_bhsd: Tensor,
    *,
    scale: float | Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    softcap: float | None = None,
) -> Tensor:
    """The weights (b, h, t, s) that `measure` speaks of; zeros for a query that may see nothing."""
    with torch.no_grad(), full_precision(q_bhtd.device):
        product = Product.of(q_bhtd, k_bhsd, scale, mask, is_causal, None, softcap)
        rows, keys = slice(0, product.t), slice(0, product.s)
        visible = product.visible(rows, keys)
        scores = product.scores(product.logits(product.products(rows, keys)), visible, rows, keys)
        weights = scores.softmax(dim=-1)
        return weights if visible is None else weights.masked_fill(~visible.any(dim=-1, keepdim=True), 0.0)


def count_visible_keys(
    q_bhtd: Tensor, k_bhsd: Tensor, *, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """How many keys each query may see (b, h, t), whatever weight it gives them."""
    product = Product.of(q_bhtd, k_bhsd, 1.0, mask, is_causal, None, None)
    visible = product.visible(slice(0, product.t), slice(0, product.s))
    if visible is None:
        return torch.full(q_bhtd.shape[:3], product.s, device=q_bhtd.device)
    return visible.sum(dim=-1).expand(q_bhtd.shape[:3])


# ------------------------------------------------------------------ over pairs: the size of logits


class _Sizes:
    """Gathers blocks of products into the size of logits per head; long sums are of rows first, then in float64.

    Nothing of a block outlives it: small tensors left between large ones would keep the memory of these in use.
    """

    def __init__(self, product: Product) -> None:
        self._product, self._exact = product, sum_dtype(product.q.device)
        self._largest = product.q.new_zeros(product.h)
        # by sentence and head: Σ(q·k)², pairs, the mean of their logits, squared deviations from it
        sums = torch.zeros(4, product.b, product.h, dtype=self._exact, device=product.q.device)
        self._squares, self._pairs, self._mean, self._deviations = sums

    def add(self, products: Tensor, logits: Tensor, visible: Tensor | None) -> None:
        seen = where_visible(visible, products, 0.0)
        torch.maximum(self._largest, seen.abs().amax(dim=(0, 2, 3)), out=self._largest)
        self._squares += self._sum(seen.square())
        pairs = self._sum(visible.to(logits.dtype).expand_as(logits)) if visible is not None else self._all(logits)
        # about the mean, so that squares lose nothing; what it is off by is put right
        near = self._product.logits((self._sum(seen) / pairs.clamp(min=1)).to(logits.dtype)[..., None, None])
        deviation = where_visible(visible, logits - near, 0.0)
        off = self._sum(deviation) / pairs.clamp(min=1)
        squared = self._sum(deviation.square()) - off.square() * pairs
        self._join(pairs, near[..., 0, 0] + off, squared)

    def _join(self, pairs: Tensor, mean: Tensor, squared: Tensor) -> None:
        """Adds the moments of a block to those of all before it (Chan et al. 1979)."""
        apart, before = mean - self._mean, self._pairs.clone()
        self._pairs += pairs
        share = pairs / self._pairs.clamp(min=1)
        self._mean += apart * share
        self._deviations += squared + apart.square() * before * share

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Largest logit, their standard deviation, and ‖QKᵀ‖_F, per head."""
        count = self._pairs.sum(dim=0)
        apart = (self._mean - (self._mean * self._pairs).sum(dim=0) / count).square() * self._pairs
        spread = ((self._deviations + apart).sum(dim=0) / count).clamp(min=0.0).sqrt()
        sentences = (self._pairs > 0).sum(dim=0)
        largest = self._product.logits(self._largest.view(-1, 1, 1)).abs().flatten().to(self._exact)
        return (
            torch.where(count > 0, largest, torch.nan),
            spread,
            (self._squares.sum(dim=0) / sentences).sqrt(),
        )

    def _sum(self, x_bhts: Tensor) -> Tensor:
        return x_bhts.sum(dim=-1).sum(dim=-1, dtype=self._exact)

    def _all(self, logits: Tensor) -> Tensor:
        return torch.full_like(self._squares, logits.shape[-2] * logits.shape[-1])


# ------------------------------------------------------------------ over queries: what softmax makes of them


class _Rows(NamedTuple):
    """What each query sees, (b, h, t)."""

    visible: Tensor
    entropy: Tensor
    top: Tensor
    distance: Tensor
    first: Tensor
    diagonal: Tensor

    @classmethod
    def of(cls, product: Product) -> Self:
        """Room for all queries."""
        shape = product.b, product.h, product.t
        count = torch.zeros(shape, dtype=torch.long, device=product.q.device)
        return cls(count, *product.q.new_zeros(len(cls._fields) - 1, *shape))


def _read(product: Product, rows: slice, offset: int, first: Tensor, sizes: _Sizes) -> _Rows:
    """Softmax over all keys, block after block, each sum held relative to the largest score so far."""
    q = product.q
    per_row = product.b, product.h, rows.stop - rows.start
    top_score = torch.full(per_row, -torch.inf, dtype=q.dtype, device=q.device)
    # relative to exp(top_score): Σ1, Σ score − top_score, Σ distance, and the two weights looked for
    sums = q.new_zeros(5, *per_row)
    count = torch.zeros(per_row, dtype=torch.long, device=q.device)
    own = torch.arange(rows.start, rows.stop, device=q.device) + offset
    for keys in product.key_blocks():
        visible = product.visible(rows, keys)
        products = product.products(rows, keys)
        logits = product.logits(products)
        sizes.add(products, logits, visible)
        count += keys.stop - keys.start if visible is None else visible.sum(dim=-1)

        scores = product.scores(logits, visible, rows, keys)
        higher = torch.maximum(top_score, scores.amax(dim=-1))
        base = higher.masked_fill(higher == -torch.inf, 0.0)
        below = scores - base.unsqueeze(-1)
        weights = below.exp()
        fall = torch.where(top_score == -torch.inf, 0.0, top_score - base)
        sums[1] += fall * sums[0]
        sums *= fall.exp()
        gaps = (own.unsqueeze(1) - torch.arange(keys.start, keys.stop, device=q.device)).abs().to(q.dtype)
        sums[0] += weights.sum(dim=-1)
        sums[1] += below.clamp_(min=NO_WEIGHT).mul_(weights).sum(dim=-1)
        sums[2] += torch.mul(weights, gaps, out=below).sum(dim=-1)
        sums[3] += _weight_at(weights, first.unsqueeze(-1) - keys.start)
        sums[4] += _weight_at(weights, (own - keys.start).expand(per_row))
        top_score = higher
    z, below_top, distance, at_first, at_own = sums
    entropy = (z.log() - below_top / z).clamp(min=0.0)
    return _Rows(count, entropy, 1 / z, distance / z, at_first / z, at_own / z)


def _weight_at(weights: Tensor, index_bht: Tensor) -> Tensor:
    """The weight on one key of each query; 0 where that key is not in this block."""
    size = weights.shape[-1]
    index_bht = index_bht.expand(weights.shape[:-1])
    found = weights.gather(-1, index_bht.clamp(0, size - 1).unsqueeze(-1)).squeeze(-1)
    return found.masked_fill((index_bht < 0) | (index_bht >= size), 0.0)


def _mean_over_queries(rows: _Rows, threshold: float) -> list[Tensor]:
    """Entropy, its share of the largest, saturation, effective keys, distance, first and diagonal share, per head."""
    valid, choosing = rows.visible > 0, rows.visible > 1
    relative = rows.entropy / rows.visible.clamp(min=2).to(rows.entropy.dtype).log()
    saturated = (rows.top > threshold).to(relative.dtype).masked_fill(rows.top.isnan(), torch.nan)
    return [
        _mean(rows.entropy, valid),
        _mean(relative, choosing),
        _mean(saturated, choosing),
        _mean(rows.entropy.exp(), valid).masked_fill(~valid.any(dim=2).any(dim=0), 0.0),
        _mean(rows.distance, valid),
        _mean(rows.first, valid),
        _mean(rows.diagonal, valid),
    ]


# ------------------------------------------------------------------ small parts


def _mean(x_bhn: Tensor, counted_bhn: Tensor) -> Tensor:
    """Mean per head of what counts; NaN where nothing does."""
    total = torch.where(counted_bhn, x_bhn, 0.0).sum(dim=(0, 2), dtype=sum_dtype(x_bhn.device))
    mean: Tensor = total / counted_bhn.sum(dim=(0, 2))
    return mean


def _mean_length(x: Tensor, counted_bhn: Tensor) -> Tensor:
    """Mean L2 length per head of the vectors that count; key heads are repeated for the query heads that share them."""
    wide = torch.promote_types(x.dtype, torch.float32)
    lengths = torch.linalg.vector_norm(x.detach().to(wide), dim=-1)
    return _mean(lengths.repeat_interleave(counted_bhn.shape[1] // x.shape[1], dim=1), counted_bhn)
