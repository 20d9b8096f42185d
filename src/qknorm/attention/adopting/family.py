"""What every family of attention modules tells `adopt`: what it is, how to watch it, how to change it."""

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from qknorm.attention.norm import QKNorm

See = Callable[[Tensor, Tensor, float, Tensor | None, Tensor | None], None]
"""Told of one attention: q (b, h, t, d), k (b, kv, s, d), the scale of their logits, which keys are visible, and which
queries (b, t) are no padding, None if all or if nobody knows."""

HIDES_BELOW = -9_000.0
"""An additive mask hides at this and below: −∞, a dtype's lowest number, or −10,000 (also as bfloat16 rounds it)."""


class Shape(NamedTuple):
    """An attention module that can be changed: what to call it, and its heads."""

    kind: str
    heads: int
    kv_heads: int
    head_dim: int


class Family(Protocol):
    """A kind of attention module that can be given QKNorm."""

    norm_name: str
    """What the QKNorm is called inside the module, and so in a state dict."""

    def examine(self, module: nn.Module) -> Shape | str | None:
        """The shape of a module that can be changed, a reason why it cannot be, or None: it is of another family."""

    def watch(self, module: nn.Module, see: See) -> AbstractContextManager[None]:
        """Calls `see` at every attention of the module, as it is before it is changed."""

    def install(self, module: nn.Module, norm: QKNorm) -> None:
        """Changes the module, in place."""


_NORM_NAMES = re.compile(r"(q|k|qk|query|key)_?(layer_?)?norms?|norm_(q|k|query|key)")


def own_norm(module: nn.Module) -> str | None:
    """The name of a norm the module has for its queries or keys, as Qwen3 and Gemma 3 do; None if it has none."""
    for name, child in module.named_children():
        if _NORM_NAMES.fullmatch(name) and not isinstance(child, nn.Identity):
            return name
    return None


def visible_keys(mask: Tensor) -> Tensor:
    """A boolean mask, True = may attend, of one that is boolean, with that meaning, or additive."""
    return mask if mask.dtype == torch.bool else mask > HIDES_BELOW


def real_queries(mask: Tensor | None, batch: int, queries: int, keys: int) -> Tensor | None:
    """In self-attention, the queries (b, t) at positions that are no padding: at which someone may see the key.

    None where the mask does not tell: there is none, it is the same for all sentences, or a cache made keys more than
    queries.
    """
    if mask is None or queries != keys or mask.dim() != 4 or mask.shape[-1] != keys:
        return None
    return visible_keys(mask).any(dim=-2).any(dim=1).expand(batch, -1)


def attends_to_itself(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a module makes keys of what it makes queries of: it has one input of three dimensions, however often."""
    inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    return len({id(x) for x in inputs if x.dim() == 3 and x.is_floating_point()}) == 1
