"""Choosing the next token: small pure functions over logits (…, vocabulary)."""

import torch
from torch import Tensor


def divide_by_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Logits of a sharper (below 1) or flatter (above 1) distribution; 0 is for `choose`, which takes the largest."""
    if not temperature > 0:
        raise ValueError(f"a temperature to divide by is above 0, got {temperature}")
    # counted from the largest, a small temperature makes −∞ of the others, and never NaN of two infinities
    # and one that the logits' type rounds to 0 would make NaN of the largest
    return (logits - logits.amax(dim=-1, keepdim=True)) / max(temperature, torch.finfo(logits.dtype).tiny)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """−∞ for all but the k largest."""
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    if k >= logits.shape[-1]:
        return logits
    kept = logits.topk(k, dim=-1).indices
    return torch.full_like(logits, -torch.inf).scatter(-1, kept, logits.gather(-1, kept))


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """−∞ for all but the likeliest that together have at least probability p, and no more of them than it takes."""
    if not 0 < p <= 1:
        raise ValueError(f"p must be above 0 and at most 1, got {p}")
    if p == 1:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    chances = torch.softmax(ordered.double(), dim=-1)
    enough_before = chances.cumsum(dim=-1) - chances >= p
    return torch.empty_like(logits).scatter(-1, order, ordered.masked_fill(enough_before, -torch.inf))


def choose(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """A token (…) drawn from the logits; the likeliest, with no draw, at temperature 0.

    The draw happens on the CPU, so that a seed means the same everywhere.
    """
    if not logits.amax(dim=-1).isfinite().all():  # of a NaN among them, too
        raise FloatingPointError("the logits are no numbers, so that no token can be chosen")
    if temperature == 0:
        return logits.argmax(dim=-1)
    narrowed = divide_by_temperature(logits.float(), temperature)
    if top_k is not None:
        narrowed = keep_top_k(narrowed, top_k)
    if top_p is not None:
        narrowed = keep_top_p(narrowed, top_p)
    chances = torch.softmax(narrowed, dim=-1).cpu()
    drawn = torch.multinomial(chances.reshape(-1, chances.shape[-1]), 1, generator=generator)
    return drawn.view(logits.shape[:-1]).to(logits.device)
