"""Multi-head attention with query-key normalisation, to stand where torch.nn.MultiheadAttention stood."""

import functools
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qknorm.attention.attend import attend, attend_normalised_keys, attend_valid, attend_with_weights, may_fuse
from qknorm.attention.cache import KeyValueCache
from qknorm.attention.cut import cut_heads, cut_heads_with_room
from qknorm.attention.masks import Visibility, causal_mask, check_dtype
from qknorm.attention.norm import Backend, Kind, QKNorm, Span
from qknorm.attention.rotary import rotary_angles, rotate

RotaryOrder = Literal["none", "before_norm", "after_norm"]


class MultiheadAttention(nn.Module):
    """Drop-in for `torch.nn.MultiheadAttention`: same arguments, masks, results and weights; only the scale is new.

    The QKNorm settings are those of `QKNorm`. `num_kv_heads` shares each key and value head among several query heads.
    `rotary` turns queries and keys by position, before or after normalising. Unlike torch's module, a query whose keys
    are all masked gets zeros instead of NaN, and `is_causal` needs no mask beside it.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        qk_norm: Kind = "lp",
        p: float = 2.0,
        p_learned: bool = False,
        scale_init: float | None = None,
        length: float | None = None,
        scale_learned: bool | None = None,
        scale_per_head: bool = False,
        normalize_values: bool = False,
        query_over: Span = "head",
        rotary: RotaryOrder = "none",
        rotary_base: float = 10_000.0,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        num_kv_heads = num_kv_heads or num_heads
        _check_settings(embed_dim, num_heads, num_kv_heads, rotary, backend, qk_norm)
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self._extra_keys = int(add_bias_kv) + int(add_zero_attn)
        self.head_dim = embed_dim // num_heads
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.dropout, self.batch_first, self.add_zero_attn = dropout, batch_first, add_zero_attn
        self.rotary, self.rotary_base, self.backend = rotary, rotary_base, backend
        # torch's encoder layers read this name to learn whether they may skip our forward in eval mode. They may not.
        self._qkv_same_embed_dim = False
        self._make_weights(bias, add_bias_kv, device, dtype)
        self.norm = QKNorm(
            self.head_dim, num_heads, kind=qk_norm, p=p, p_learned=p_learned, scale_init=scale_init, length=length,
            scale_learned=scale_learned, scale_per_head=scale_per_head, normalize_values=normalize_values,
            query_over=query_over, num_kv_heads=num_kv_heads, device=device, dtype=dtype,
        )  # fmt: skip
        self.reset_parameters()

    def _make_weights(
        self, bias: bool, add_bias_kv: bool, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        """Parameters under the names torch.nn.MultiheadAttention gives them, not yet drawn."""

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        width, kv_dim = self.embed_dim, self.head_dim * self.num_kv_heads
        self._split = [width, kv_dim, kv_dim]
        self.packed = self.kdim == self.vdim == width
        self.in_proj_weight = weight(width + 2 * kv_dim, width) if self.packed else None
        self.q_proj_weight = None if self.packed else weight(width, width)
        self.k_proj_weight = None if self.packed else weight(kv_dim, self.kdim)
        self.v_proj_weight = None if self.packed else weight(kv_dim, self.vdim)
        self.in_proj_bias = weight(width + 2 * kv_dim) if bias else None
        self.out_proj = nn.Linear(width, width, bias=bias, device=device, dtype=dtype)
        self.bias_k = weight(1, 1, kv_dim) if add_bias_kv else None
        self.bias_v = weight(1, 1, kv_dim) if add_bias_kv else None

    def reset_parameters(self) -> None:
        """Fresh weights, drawn as torch.nn.MultiheadAttention draws them, and the scale at its start."""
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            if (weight := getattr(self, name)) is not None:
                nn.init.xavier_uniform_(weight)
        self.out_proj.reset_parameters()
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for bias in (self.bias_k, self.bias_v):
            if bias is not None:
                nn.init.xavier_normal_(bias)
        self.norm.reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        visibility: Visibility | None = None,
        cache: KeyValueCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Output in the layout of `query`, and the weights (b, t, s) or, not averaged, (b, h, t, s) where needed.

        Masks mean what they mean in torch: True in a boolean mask hides a key, a float mask is added; `visibility` is
        one made ready for many calls, in place of both. With a `cache` the keys and values of earlier calls come before
        those of this one; `is_causal` aligns to the end.
        """
        if query.is_nested:
            return self._forward_nested(query, need_weights)
        batched = query.dim() == 3
        query, key, value = self._batch_leading(query, key, value)
        if not batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        raw = cache is None and not need_weights and self._leaves_norm_to_attend(query)
        if raw:
            q, k, v = self._project_raw(query, key, value, cut_heads_with_room)
        else:
            raw_query = cache is not None and not need_weights and self._leaves_query_to_attend()
            project = functools.partial(self._project_by, self._place_raw) if raw_query else self._project
            q, k, v = project(query, key, value, cache)
        if cache is not None and cache.visibility is not None:
            visibility, is_causal = cache.visibility, False
        if is_causal:
            attn_mask = None
            if self._extra_keys:  # these come after the last key and are for everyone
                attn_mask, is_causal = ~causal_mask(q.shape[2], k.shape[2] - self._extra_keys, q.device), False
        mask = visibility or self._merge_masks(key_padding_mask, attn_mask, k.shape[2])
        if raw:
            output, weights = self._attend_raw(q, k, v, mask, is_causal), None
        else:
            output, weights = self._attend(q, k, v, mask, is_causal, need_weights, raw_query)
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        output = self.out_proj(output.transpose(1, 2).flatten(2))
        if not batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights

    def _batch_leading(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three as (batch, time, width); one tensor given thrice stays one, so that one product projects all."""
        if self.batch_first and query.dim() == 3:
            return query, key, value

        def moved(x: Tensor) -> Tensor:
            return x.transpose(0, 1) if query.dim() == 3 else x.unsqueeze(0)

        if query is key and key is value:
            return (one := moved(query)), one, one
        return moved(query), moved(key), moved(value)

    def _leaves_norm_to_attend(self, query: Tensor) -> bool:
        """Whether `attend` gets queries and keys as they are, since it may have a kernel that normalises inside."""
        asked = may_fuse(self.backend, query)
        own_weights = self.in_proj_weight is not None or self.q_proj_weight is not None  # a subclass may have others
        per_head = self.norm.kind == "lp" and self.norm.query_over == "head"
        return asked and own_weights and per_head and self.rotary != "after_norm"

    def _leaves_query_to_attend(self) -> bool:
        """The same of queries alone, over keys of a cache; whoever has a `_place` of his own still gets them."""
        if torch.compiler.is_compiling() or getattr(self._place, "__func__", None) is not MultiheadAttention._place:
            return False
        own_weights = self.in_proj_weight is not None or self.q_proj_weight is not None
        per_head = self.norm.kind == "lp" and self.norm.query_over == "head"
        return own_weights and per_head and self.rotary != "after_norm"

    def _attend_raw(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | Visibility | None, is_causal: bool) -> Tensor:
        """Attention on queries and keys that are not normalised yet."""
        if self.rotary == "before_norm":
            q, k = self._rotate(q, 0), self._rotate(k, 0)
        return attend_valid(
            q, k, self.norm.value(v), scale=self.norm.scale, p=self.norm.p_for(self.num_heads), mask=mask,
            is_causal=is_causal, dropout=self.dropout if self.training else 0.0, backend=self.backend,
        )  # fmt: skip

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | Visibility | None,
        is_causal: bool,
        need_weights: bool,
        raw_query: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The output by head on queries and keys that carry norm and scale, and the weights where needed.

        With `raw_query` the queries carry neither yet, and no weights are needed.
        """
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            return attend_with_weights(q, k, v, scale=1.0, mask=mask, is_causal=is_causal, dropout=dropout)[:2]
        if raw_query:
            output = attend_normalised_keys(
                q, k, v, scale=self.norm.scale, p=self.norm.p_for(self.num_heads), mask=mask, is_causal=is_causal,
                dropout=dropout, backend=self.backend,
            )  # fmt: skip
            return output, None
        backend: Backend = "sdpa" if self.backend == "fused" else self.backend
        return attend(q, k, v, scale=1.0, mask=mask, is_causal=is_causal, dropout=dropout, backend=backend), None

    def _project(
        self, query: Tensor, key: Tensor, value: Tensor, cache: KeyValueCache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values by head, normalised and rotated, those of the cache included."""
        return self._project_by(functools.partial(self._place, keys=False), query, key, value, cache)

    def _project_by(
        self,
        place: Callable[[Tensor, int | Tensor], Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: KeyValueCache | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same, with queries as `place` makes them."""
        past = 0 if cache is None or cache.fixed else cache.length
        if cache is not None and cache.filled:
            weight, bias = self._projection(0)
            return place(self._heads(F.linear(query, weight, bias), self.num_heads), past), *cache.read()
        q, k, v = self._project_raw(query, key, value)
        q, k, v = place(q, past), self._place(k, past, keys=True), self.norm.value(v)
        if cache is not None:
            k, v = cache.append(k, v)
        return q, k, v

    def _project_raw(
        self, query: Tensor, key: Tensor, value: Tensor, cut: Callable[..., tuple[Tensor, ...]] = cut_heads
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values by head, as they come from the projections; `cut` makes heads of a joint one."""
        if self.in_proj_weight is not None and query is key and key is value:
            joined = F.linear(query, self.in_proj_weight, self.in_proj_bias)
            if not self._extra_keys:
                q, k, v = cut(joined, (self.num_heads, self.num_kv_heads, self.num_kv_heads), self.head_dim)
                return q, k, v
            projected = torch.split(joined, self._split, dim=-1)
        else:
            projected = tuple(F.linear(x, *self._projection(i)) for i, x in enumerate((query, key, value)))
        q, k, v = projected
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (torch.cat([x, b.expand(len(x), -1, -1)], dim=1) for x, b in ((k, self.bias_k), (v, self.bias_v)))
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        return self._heads(q, self.num_heads), self._heads(k, self.num_kv_heads), self._heads(v, self.num_kv_heads)

    def _projection(self, which: int) -> tuple[Tensor, Tensor | None]:
        """Weight and bias that make the queries (0), keys (1) or values (2)."""
        if self.in_proj_weight is not None:
            weight: Tensor | None = torch.split(self.in_proj_weight, self._split)[which]
        else:
            weight = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)[which]
        assert weight is not None
        return weight, None if self.in_proj_bias is None else torch.split(self.in_proj_bias, self._split)[which]

    def _heads(self, x_btd: Tensor, heads: int) -> Tensor:
        return x_btd.view(*x_btd.shape[:2], heads, self.head_dim).transpose(1, 2)

    def _place(self, x_bhtd: Tensor, past: int | Tensor, *, keys: bool) -> Tensor:
        """Normalises and, in the order asked for, rotates by position."""
        norm = functools.partial(self.norm.key if keys else self.norm.scaled_query, backend=self.backend)
        if self.rotary == "none":
            return norm(x_bhtd)
        if self.rotary == "before_norm":
            return norm(self._rotate(x_bhtd, past))
        return self._rotate(norm(x_bhtd), past)

    def _place_raw(self, q_bhtd: Tensor, past: int | Tensor) -> Tensor:
        """Queries whose norm, which then comes last, is left to `attend`."""
        return q_bhtd if self.rotary == "none" else self._rotate(q_bhtd, past)

    def _rotate(self, x_bhtd: Tensor, past: int | Tensor) -> Tensor:
        positions = past + torch.arange(x_bhtd.shape[2], device=x_bhtd.device)
        return rotate(x_bhtd, rotary_angles(positions, self.head_dim, self.rotary_base))

    def _merge_masks(self, key_padding_mask: Tensor | None, attn_mask: Tensor | None, keys: int) -> Tensor | None:
        """Torch's two masks as one for `attend`: boolean with True = may attend, or additive if either is."""
        for name, given in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if given is not None:
                check_dtype(given, name, "hidden")
        if attn_mask is not None and attn_mask.dim() == 3:  # (batch · heads, t, s), or heads alone when unbatched
            attn_mask = attn_mask.view(-1, self.num_heads, *attn_mask.shape[1:])
        masks = [
            self._with_extra_keys(mask, keys)
            for mask in (key_padding_mask[:, None, None, :] if key_padding_mask is not None else None, attn_mask)
            if mask is not None
        ]
        if all(mask.dtype == torch.bool for mask in masks):
            hidden = masks[0] | masks[1] if len(masks) == 2 else masks[0] if masks else None
            return None if hidden is None else ~hidden
        added = [
            torch.zeros_like(mask, dtype=torch.float32).masked_fill(mask, -torch.inf)
            if mask.dtype == torch.bool
            else mask
            for mask in masks
        ]
        return added[0] + added[1] if len(added) == 2 else added[0]

    def _with_extra_keys(self, mask: Tensor, keys: int) -> Tensor:
        """Lets everyone see the keys that add_bias_kv and add_zero_attn put at the end."""
        if mask.shape[-1] + self._extra_keys != keys and mask.shape[-1] != 1:
            raise ValueError(f"a mask over {mask.shape[-1]} keys does not fit {keys - self._extra_keys} keys")
        return F.pad(mask, (0, self._extra_keys)) if self._extra_keys else mask

    def _forward_nested(self, query: Tensor, need_weights: bool) -> tuple[Tensor, Tensor | None]:
        """Self-attention over a nested tensor, which torch's encoder makes of padded input in eval mode."""
        rows = query.unbind()
        lengths = torch.tensor([len(row) for row in rows], device=query.device)
        padded = torch.nested.to_padded_tensor(query, 0.0)
        hidden = torch.arange(padded.shape[1], device=query.device) >= lengths.unsqueeze(1)
        if not self.batch_first:
            padded = padded.transpose(0, 1)
        output, weights = self(padded, padded, padded, key_padding_mask=hidden, need_weights=need_weights)
        if not self.batch_first:
            output = output.transpose(0, 1)
        return torch.nested.nested_tensor([row[:n] for row, n in zip(output, lengths.tolist(), strict=True)]), weights

    def extra_repr(self) -> str:
        shared = f", num_kv_heads={self.num_kv_heads}" if self.num_kv_heads != self.num_heads else ""
        turned = f", rotary={self.rotary}" if self.rotary != "none" else ""
        return f"{self.embed_dim}, num_heads={self.num_heads}{shared}{turned}, backend={self.backend}"

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: object) -> None:
        """A state dict of torch.nn.MultiheadAttention has no entry for the norm: ours keeps what it has."""
        own_norm = {f"{prefix}norm.{name}": value for name, value in self.norm.state_dict().items()}
        if not any(name in state_dict for name in own_norm):
            state_dict.update(own_norm)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _check_settings(
    embed_dim: int, num_heads: int, num_kv_heads: int, rotary: str, backend: Backend, qk_norm: Kind
) -> None:
    if embed_dim % num_heads:
        raise ValueError(f"embed_dim {embed_dim} cannot be cut into {num_heads} heads evenly")
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} heads cannot share {num_kv_heads} key-value heads evenly")
    if rotary not in ("none", "before_norm", "after_norm"):
        raise ValueError(f"rotary must be none, before_norm or after_norm, got {rotary!r}")
    if backend == "fused" and qk_norm != "lp":
        raise ValueError(f"backend='fused' is for qk_norm='lp'; with {qk_norm!r} there is nothing to fuse")
