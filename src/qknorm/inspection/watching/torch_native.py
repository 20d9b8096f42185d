"""torch.nn.MultiheadAttention, alone or in nn.Transformer, whose encoder layers may skip its forward in eval mode."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qknorm.attention.adopting.family import real_queries
from qknorm.inspection.watching.call import Call
from qknorm.inspection.watching.tape import Tape, replaced, wrapping

_FORWARD = inspect.signature(nn.MultiheadAttention.forward)
_LAYER_FORWARD = inspect.signature(nn.TransformerEncoderLayer.forward)


@contextmanager
def watch(model: nn.Module, tape: Tape) -> Iterator[None]:
    """Tells of every attention of torch's in the model, on its fast path too."""
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, nn.MultiheadAttention) and _runs(module, nn.MultiheadAttention):
                stack.enter_context(replaced(module, "forward", wrapping(module.forward, _attention(tape, module))))
            elif isinstance(module, nn.TransformerEncoderLayer) and _runs(module, nn.TransformerEncoderLayer):
                stack.enter_context(replaced(module, "forward", wrapping(module.forward, _layer(tape, module))))
        yield


def _runs(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether it computes as its base class does, in spite of what else a derived class may have."""
    return type(module).forward is kind.forward


def _attention(tape: Tape, module: nn.MultiheadAttention) -> Callable[..., Any]:
    def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not tape.is_claimed:
            _tell(tape, module, _FORWARD.bind(module, *args, **kwargs).arguments)
        with tape.claim():
            return original(*args, **kwargs)

    return forward


def _layer(tape: Tape, layer: nn.TransformerEncoderLayer) -> Callable[..., Any]:
    def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        frame = tape.frame_of(layer)
        before = 0 if frame is None else frame.calls
        output = original(*args, **kwargs)
        attention = layer.self_attn
        skipped = frame is not None and frame.calls == before and isinstance(attention, nn.MultiheadAttention)
        if skipped and not tape.is_claimed:
            given = _LAYER_FORWARD.bind(layer, *args, **kwargs).arguments
            x, mask, padding = given["src"], given.get("src_mask"), given.get("src_key_padding_mask")
            with torch.no_grad():
                norm = layer.norm1
                x = F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps) if layer.norm_first else x
            _tell(tape, attention, {"query": x, "key": x, "attn_mask": mask, "key_padding_mask": padding})
        return output

    return forward


def _tell(tape: Tape, module: nn.MultiheadAttention, given: dict[str, Any]) -> None:
    name = tape.names[module]
    tape.tell(
        name,
        lambda: _call(
            name,
            module,
            given["query"],
            given["key"],
            given["query"] is given["key"],
            given.get("key_padding_mask"),
            given.get("attn_mask"),
        ),
    )


def _call(
    name: str,
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    itself: bool,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
) -> Call:
    """The module's projections once more: its forward keeps them to itself."""
    if query.is_nested:
        lengths = torch.tensor([len(row) for row in query.unbind()], device=query.device)
        query = key = torch.nested.to_padded_tensor(query, 0.0)
        key_padding_mask = torch.arange(query.shape[1], device=query.device) >= lengths.unsqueeze(1)
    if query.dim() == 2:
        query, key = query.unsqueeze(0), key.unsqueeze(0)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    elif not module.batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    q, k = _project(module, query, 0), _project(module, key, 1)
    if module.bias_k is not None:
        k = torch.cat([k, module.bias_k.expand(len(k), -1, -1)], dim=1)
    if module.add_zero_attn:
        k = F.pad(k, (0, 0, 0, 1))
    q, k = (x.view(*x.shape[:2], module.num_heads, module.head_dim).transpose(1, 2) for x in (q, k))
    extra = k.shape[2] - key.shape[1]
    mask = _merge(module, key_padding_mask, attn_mask, extra)
    real = None
    if itself and key_padding_mask is not None:
        real = real_queries(_as_added(key_padding_mask)[:, None, None, :], len(q), q.shape[2], key.shape[1])
    return Call(name, q, k, None, module.head_dim**-0.5, mask, queries=real)


def _project(module: nn.MultiheadAttention, x: Tensor, which: int) -> Tensor:
    if module.in_proj_weight is not None:
        weight = module.in_proj_weight.chunk(3)[which]
    else:
        weight = (module.q_proj_weight, module.k_proj_weight)[which]
    bias = None if module.in_proj_bias is None else module.in_proj_bias.chunk(3)[which]
    return F.linear(x, weight, bias)


def _merge(
    module: nn.MultiheadAttention, key_padding_mask: Tensor | None, attn_mask: Tensor | None, extra: int
) -> Tensor | None:
    """Torch's two masks, in which True hides, as one that is added; what add_bias_kv and add_zero_attn add is seen."""
    if attn_mask is not None and attn_mask.dim() == 3:  # (batch · heads, t, s), or heads alone when unbatched
        attn_mask = attn_mask.view(-1, module.num_heads, *attn_mask.shape[1:])
    masks = [_as_added(mask) for mask in (attn_mask,) if mask is not None]
    masks = [mask.view((1,) * (4 - mask.dim()) + mask.shape) for mask in masks]
    if key_padding_mask is not None:
        masks.append(_as_added(key_padding_mask)[:, None, None, :])
    if not masks:
        return None
    merged = masks[0] + masks[1] if len(masks) == 2 else masks[0]
    return F.pad(merged, (0, extra)) if extra else merged


def _as_added(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=torch.float32).masked_fill(mask, -torch.inf)
    return mask
