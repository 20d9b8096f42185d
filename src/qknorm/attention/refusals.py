"""What `MultiheadAttention` refuses, by settings and shapes alone, which costs nothing and follows no numbers."""

from typing import get_args

import torch
from torch import Tensor

from qknorm.attention.cache import KeyValueCache
from qknorm.attention.norm import Backend, Kind


def check_settings(
    embed_dim: int, num_heads: int, num_kv_heads: int, rotary: str, backend: Backend, qk_norm: Kind
) -> None:
    for name, value in (("embed_dim", embed_dim), ("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if embed_dim % num_heads:
        raise ValueError(f"embed_dim {embed_dim} cannot be cut into {num_heads} heads evenly")
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} heads cannot share {num_kv_heads} key-value heads evenly")
    if rotary not in ("none", "before_norm", "after_norm"):
        raise ValueError(f"rotary must be none, before_norm or after_norm, got {rotary!r}")
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be auto, reference, sdpa or fused, got {backend!r}")
    if backend == "fused" and qk_norm != "lp":
        raise ValueError(f"backend='fused' is for qk_norm='lp'; with {qk_norm!r} there is nothing to fuse")


def check_inputs(
    query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, widths: tuple[int, int, int], batch: int
) -> None:
    """Refuses inputs that do not go together; `batch` is the dimension of the batch, where there is one.

    What a filled cache stands for is to be given as the query, since nobody reads it.
    """
    dims = query.dim()
    if dims not in (2, 3):
        raise ValueError(f"query must be (batch, time, width) in some order, or (time, width), got {_shape(query)}")
    if key_padding_mask is not None and key_padding_mask.dim() != dims - 1:
        raise ValueError(
            f"key_padding_mask must be {'(batch, keys)' if dims == 3 else '(keys,)'} for a query of {dims} dimensions,"
            f" got {_shape(key_padding_mask)}"
        )
    given = [("query", query, widths[0])]
    if key is not query or value is not query or not widths[0] == widths[1] == widths[2]:
        given += [("key", key, widths[1]), ("value", value, widths[2])]
    for name, x, width in given:
        if x.dim() != dims:
            raise ValueError(f"query has {dims} dimensions and {name} {x.dim()}: give all three a batch, or none")
        if x.shape[-1] != width:
            raise ValueError(f"{name} must have a last dimension of {width}, got {_shape(x)}")
        if dims == 3 and x.shape[batch] != query.shape[batch]:
            raise ValueError(
                f"query has a batch of {query.shape[batch]} and {name} one of {x.shape[batch]} (dimension {batch}, by"
                " batch_first): they must be equal; expand the smaller where one is for all"
            )
    if len(given) > 1 and key.shape[1 - batch if dims == 3 else 0] != value.shape[1 - batch if dims == 3 else 0]:
        raise ValueError(f"key and value must be of one length, got {_shape(key)} and {_shape(value)}")


def check_rotary_cache(rotary: str, cache: KeyValueCache | None) -> None:
    """A fixed cache cannot know which of many queries come in one call, so that it cannot say how far to turn them."""
    if rotary != "none" and cache is not None and cache.fixed:
        raise ValueError(
            f"rotary={rotary!r} cannot be used with a fixed cache, which does not know where in their sequence the"
            " queries of a call stand; make the cross-attention with rotary='none', or give no cache"
        )


def check_cached(q_bhtd: Tensor, k_bhsd: Tensor) -> None:
    """Refuses keys of a cache that are not for these queries."""
    if q_bhtd.shape[0] != k_bhsd.shape[0]:
        raise ValueError(
            f"the cache holds a batch of {k_bhsd.shape[0]} and the query is one of {q_bhtd.shape[0]}: use a cache of"
            " its own for every batch, or cache.reorder to drop or repeat rows"
        )
    if q_bhtd.dtype != k_bhsd.dtype and not torch.is_autocast_enabled(q_bhtd.device.type):
        raise ValueError(
            f"the cache holds {k_bhsd.dtype} and this call computes in {q_bhtd.dtype}: make all calls with one cache"
            " under the same autocast, or none of them"
        )


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
