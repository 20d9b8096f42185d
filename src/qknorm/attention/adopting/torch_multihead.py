"""torch.nn.MultiheadAttention, alone or inside nn.Transformer and its layers, becomes qknorm.MultiheadAttention."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qknorm.attention.adopting.family import See, Shape, real_queries, visible_keys
from qknorm.attention.multihead import MultiheadAttention
from qknorm.attention.norm import QKNorm

_FORWARD = inspect.signature(nn.MultiheadAttention.forward)


class TorchMultihead:
    """The module turns into our class where it stands: its parameters, hooks and every reference to it stay."""

    norm_name = "norm"

    def examine(self, module: nn.Module) -> Shape | str | None:
        if isinstance(module, MultiheadAttention):
            if module.norm.kind == "lp":
                return "has QKNorm already"
            return f"is qknorm.MultiheadAttention with qk_norm={module.norm.kind!r}; ask for 'lp' where it is made"
        if type(module) is nn.MultiheadAttention:
            return Shape("torch.nn.MultiheadAttention", module.num_heads, module.num_heads, module.head_dim)
        if isinstance(module, nn.MultiheadAttention):
            return f"{type(module).__name__} derives from torch.nn.MultiheadAttention: its own code would be lost"
        return None

    @contextmanager
    def watch(self, module: nn.Module, see: See) -> Iterator[None]:
        assert isinstance(module, nn.MultiheadAttention)

        def before_forward(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            see(*_queries_and_keys(module, **_FORWARD.bind(module, *args, **kwargs).arguments))

        handle = module.register_forward_pre_hook(before_forward, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def install(self, module: nn.Module, norm: QKNorm) -> None:
        assert isinstance(module, nn.MultiheadAttention)
        ours = MultiheadAttention(
            module.embed_dim,
            module.num_heads,
            module.dropout,
            bias=module.in_proj_bias is not None,
            add_bias_kv=module.bias_k is not None,
            add_zero_attn=module.add_zero_attn,
            kdim=module.kdim,
            vdim=module.vdim,
            batch_first=module.batch_first,
            device="meta",
        )
        kept = {*vars(nn.Module()), *module._parameters, *module._modules}
        module.__class__ = MultiheadAttention  # type: ignore[assignment]
        vars(module).update({name: value for name, value in vars(ours).items() if name not in kept})
        module.register_module("norm", norm)


def _queries_and_keys(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, Tensor, float, Tensor | None, Tensor | None]:
    """What the module's softmax is made of, but for the keys that add_bias_kv and add_zero_attn put at the end."""
    itself = query is key
    if query.dim() == 2:
        query, key = query.unsqueeze(0), key.unsqueeze(0)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    elif not module.batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    if module.in_proj_weight is not None:
        weights: list[Tensor] = list(module.in_proj_weight.chunk(3))
    else:
        weights = [module.q_proj_weight, module.k_proj_weight]
    biases = [None, None] if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    q, k = (
        F.linear(x, weight, bias).view(*x.shape[:2], module.num_heads, module.head_dim).transpose(1, 2)
        for x, weight, bias in zip((query, key), weights, biases, strict=False)
    )
    padding = None if key_padding_mask is None else _shown(key_padding_mask)[:, None, None, :]
    real = real_queries(padding, len(q), q.shape[2], k.shape[2]) if itself else None
    return q, k, module.head_dim**-0.5, _visible(module, padding, attn_mask), real


def _visible(module: nn.MultiheadAttention, padding: Tensor | None, attn_mask: Tensor | None) -> Tensor | None:
    """Torch's two masks, in which True or −∞ hides, as one in which True shows."""
    shown = None
    if attn_mask is not None:
        shown = _shown(attn_mask)
        if shown.dim() == 3:  # (batch · heads, t, s)
            shown = shown.view(-1, module.num_heads, *shown.shape[1:])
    if padding is not None:
        shown = padding if shown is None else shown & padding
    return shown


def _shown(mask: Tensor) -> Tensor:
    return visible_keys(~mask if mask.dtype == torch.bool else mask)
