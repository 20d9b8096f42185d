"""timm's Attention, the one of its vision transformers: its places for a norm of q and k are taken by QKNorm."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from qknorm.attention.adopting.family import See, Shape, own_norm, real_queries, visible_keys
from qknorm.attention.masks import causal_mask
from qknorm.attention.norm import QKNorm

_HOMES = ("timm.layers.attention", "timm.models.vision_transformer")


class TimmVit:
    """Both of timm's ways, fused and not, then compute cosines times g, masks, gates and dropout as before."""

    norm_name = "qk_norm"

    def examine(self, module: nn.Module) -> Shape | str | None:
        kind = type(module)
        if not kind.__module__.startswith("timm.") or "Attention" not in kind.__name__:
            return None
        if isinstance(getattr(module, "qk_norm", None), QKNorm):
            return "has QKNorm already"
        if (norm := own_norm(module)) is not None:
            return f"normalises queries and keys already ({norm})"
        if kind.__name__ != "Attention" or kind.__module__ not in _HOMES:
            return f"timm's {kind.__name__} is not the plain attention of its vision transformers"
        attention: Any = module
        return Shape("timm Attention", attention.num_heads, attention.num_heads, attention.head_dim)

    @contextmanager
    def watch(self, module: nn.Module, see: See) -> Iterator[None]:
        attention: Any = module
        forward = inspect.signature(attention.forward)
        masks: list[Tensor | None] = []
        queries: list[Tensor] = []

        def before_forward(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            masks[:] = [_visible(**forward.bind(*args, **kwargs).arguments)]

        def on_query(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            queries.append(args[0])

        def on_key(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            q, k, visible = queries.pop(), args[0], masks.pop()
            see(q, k, attention.scale, visible, real_queries(visible, len(q), q.shape[2], k.shape[2]))

        handles = [
            attention.register_forward_pre_hook(before_forward, with_kwargs=True),
            attention.q_norm.register_forward_pre_hook(on_query),
            attention.k_norm.register_forward_pre_hook(on_key),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def install(self, module: nn.Module, norm: QKNorm) -> None:
        attention: Any = module
        module.register_module("qk_norm", norm)
        attention.q_norm = _Queries(norm, 1 / attention.scale)
        attention.k_norm = _Keys(norm)


def _visible(x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, **_: object) -> Tensor | None:
    """timm's mask, in which True shows, or −∞ hides; to be causal goes before it."""
    if is_causal:
        return causal_mask(x.shape[1], x.shape[1], x.device)
    return None if attn_mask is None else visible_keys(attn_mask)


class _Keys(nn.Module):
    """Stands where timm looks for a norm of the keys. The QKNorm is the attention's own, so it is not a child here."""

    def __init__(self, norm: QKNorm) -> None:
        super().__init__()
        self._shared = (norm,)

    def forward(self, k_bhsd: Tensor) -> Tensor:
        return self._shared[0].key(k_bhsd)


class _Queries(_Keys):
    """The same for queries, times g, and times what undoes the 1/√d that timm multiplies by afterwards."""

    def __init__(self, norm: QKNorm, undo: float) -> None:
        super().__init__(norm)
        self._undo = undo

    def forward(self, q_bhtd: Tensor) -> Tensor:
        return self._shared[0].scaled_query(q_bhtd) * self._undo
