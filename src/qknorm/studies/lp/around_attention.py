"""Layers compiled around their attention, so that one program serves every p, every arm and every layer.

To compile a layer takes a GPU's host about as long as to train a model of the study, and nothing in it depends on p but
normalising and attending, which have kernels of their own. So only what stands before and after them is compiled.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from qknorm.attention import MultiheadAttention
from qknorm.models.language_model import Layer

Forward = Callable[[Layer, Tensor], Tensor]


def compile_around_attention() -> Forward:
    """`Layer.forward` without a cache, in two compiled programs with attention between them as it is written."""
    before, after = torch.compile(_project, dynamic=False), torch.compile(_finish, dynamic=False)

    def forward(layer: Layer, x_btd: Tensor) -> Tensor:
        attended = _attend(layer.attention, before(layer, x_btd))
        out: Tensor = after(layer, x_btd, attended)
        return out

    return forward


def _project(layer: Layer, x_btd: Tensor) -> Tensor:
    """Queries, keys and values side by side: one tensor, since programs are slow to hand out views of one."""
    attention = layer.attention
    assert attention.in_proj_weight is not None  # one matrix, as keys and values come from where queries come from
    return F.linear(layer.around_attention.norm(x_btd), attention.in_proj_weight, attention.in_proj_bias)


def _attend(attention: MultiheadAttention, projected: Tensor) -> Tensor:
    """What `MultiheadAttention` does between its projections, for a causal layer; (batch, time, width)."""
    widths = [attention.num_heads, attention.num_kv_heads, attention.num_kv_heads]
    parts = torch.split(projected, [heads * attention.head_dim for heads in widths], dim=-1)
    q, k, v = (attention._heads(part, heads) for part, heads in zip(parts, widths, strict=True))
    if attention._leaves_norm_to_attend(projected):
        out = attention._attend_raw(q, k, v, None, True)
    else:
        q, k = attention._place(q, 0, keys=False), attention._place(k, 0, keys=True)
        out = attention._attend(q, k, attention.norm.value(v), None, True, False)[0]
    return out.transpose(1, 2).flatten(2)


def _finish(layer: Layer, x_btd: Tensor, attended: Tensor) -> Tensor:
    """All that comes after attention: its output joins the residual stream, and the feed-forward sublayer."""
    around = layer.around_attention
    x_btd = x_btd + around.dropout(layer.attention.out_proj(attended))
    out: Tensor = layer.around_feed_forward(x_btd, layer.feed_forward)
    return out
