"""One attention as it ran: what entered its softmax."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from qknorm.inspection.measures import Measures, attention_weights, count_visible_keys, measure


@dataclass(frozen=True)
class Call:
    """Queries and keys as they entered the product: logits are `scale` · q·kᵀ, softmax is taken under the mask."""

    name: str
    """Of the module, as `named_modules` has it; in our translator encoder.0.self, decoder.0.cross, …"""
    q: Tensor
    """(b, h, t, d), normalised where the model does that, without the scale."""
    k: Tensor
    """(b, h or fewer, s, d), those from a cache included."""
    v: Tensor | None
    scale: float | Tensor
    mask: Tensor | None = None
    """Boolean (True = may attend) or additive; broadcasts to (b, h, t, s)."""
    is_causal: bool = False
    """The last query is aligned with the last key."""
    queries: Tensor | None = None
    """(b, t): which queries are no padding; None if all, or if nobody knows."""
    raw_q: Tensor | None = None
    """Before normalisation, where the model has one that could be seen; else None."""
    raw_k: Tensor | None = None
    offset: int | None = None
    """Query i stands at key i + offset; None: s − t where causal, else 0."""
    softcap: float | None = None
    bounded: bool = False
    """Whether an Lp norm of queries and keys bounds the logits, as far as that can be seen."""

    def weights(self) -> Tensor:
        """The attention weights (b, h, t, s) in float32 or wider, before dropout; zeros where nothing is seen."""
        return attention_weights(
            self.q, self.k, scale=self.scale, mask=self.mask, is_causal=self.is_causal, softcap=self.softcap
        )

    def count_visible_keys(self) -> Tensor:
        """How many keys each query may see (b, h, t)."""
        return count_visible_keys(self.q, self.k, mask=self.mask, is_causal=self.is_causal)

    def measure(self, threshold: float = 0.99) -> Measures:
        """Its measures; `threshold` is the weight above which a query counts as saturated."""
        return measure(
            self.q,
            self.k,
            scale=self.scale,
            mask=self.mask,
            is_causal=self.is_causal,
            queries=self.queries,
            threshold=threshold,
            raw_q=self.raw_q,
            raw_k=self.raw_k,
            offset=self.offset,
            softcap=self.softcap,
        )

    @property
    def logits(self) -> int:
        """How many logits it computes for one sentence."""
        return self.q.shape[1] * self.q.shape[2] * self.k.shape[2]

    def first(self, sentences: int) -> Self:
        """The same for the first sentences of the batch alone, without a copy."""
        if sentences >= len(self.q):
            return self
        by_sentence = ["q", "k", "v", "queries", "raw_q", "raw_k"]
        if self.mask is not None and self.mask.dim() == 4 and len(self.mask) == len(self.q):
            by_sentence.append("mask")
        return self._with_tensors({name: part[:sentences] for name, part in self._tensors() if name in by_sentence})

    def copied(self) -> Self:
        """The same with tensors of its own, which no cache overwrites, and without gradients."""
        return self._with_tensors({name: part.detach().clone() for name, part in self._tensors()})

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for entry in dataclasses.fields(self):
            if isinstance(part := getattr(self, entry.name), Tensor):
                yield entry.name, part

    def _with_tensors(self, parts: dict[str, Any]) -> Self:
        return dataclasses.replace(self, **parts)
