"""Multi-head attention with query-key normalisation, to stand where torch.nn.MultiheadAttention stood."""

import copy
import functools
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qknorm.attention.attend import attend, attend_normalised_keys, attend_valid, attend_with_weights, may_fuse
from qknorm.attention.cache import KeyValueCache
from qknorm.attention.cut import cut_heads, cut_heads_with_room
from qknorm.attention.masks import Visibility
from qknorm.attention.nested import check_nested, to_nested, to_padded
from qknorm.attention.norm import Backend, Kind, QKNorm, Span
from qknorm.attention.refusals import check_cached, check_inputs, check_rotary_cache, check_settings
from qknorm.attention.rotary import rotary_angles, rotate
from qknorm.attention.torch_masks import Sizes, merge_masks

RotaryOrder = Literal["none", "before_norm", "after_norm"]


class MultiheadAttention(nn.Module):
    """Drop-in for `torch.nn.MultiheadAttention`: same arguments, masks, results and weights; only the scale is new.

    The QKNorm settings are those of `QKNorm`. `num_kv_heads` shares each key and value head among several query heads.
    `rotary` turns queries and keys by position, before or after normalising: keys from 0 on, or from the length of a
    cache on, and queries likewise, or where `is_causal` puts them. Unlike torch's module, a query whose keys are all
    masked gets zeros instead of NaN, and `is_causal` needs no mask beside it; README.md lists all that differs. A
    square mask beside it that turns out to be the causal one is put aside, so that kernels need not read it; to see
    that, a GPU is waited for once for each mask. torch.compile keeps it: for flash there give `is_causal` alone.
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
        check_settings(embed_dim, num_heads, num_kv_heads, rotary, backend, qk_norm)
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
        those of this one, and masks are for all of them; `is_causal` aligns to the end. A mask beside `is_causal` is
        used, and what comes later is hidden besides; with more queries than keys the mask alone decides.
        """
        if query.is_nested or key.is_nested or value.is_nested:
            others = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
            check_nested(query, key, value, others | {"visibility": visibility, "cache": cache})
            return self._forward_nested(query, need_weights, average_attn_weights, is_causal)
        batched = query.dim() == 3
        query, key, value = self._batch_leading(query, key, value, key_padding_mask, cache)
        if not batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        lag = key.shape[1] - query.shape[1] if is_causal and self.rotary != "none" else 0
        raw = cache is None and not need_weights and self._leaves_norm_to_attend(query)
        raw_query = cache is not None and not need_weights and self._leaves_query_to_attend()
        if raw:
            q, k, v = self._project_raw(query, key, value, cut_heads_with_room)
        else:
            project = functools.partial(self._project_by, self._place_raw) if raw_query else self._project
            q, k, v = project(query, key, value, cache, lag)
        if cache is not None:
            check_cached(q, k)
            if cache.visibility is not None:
                visibility, is_causal = cache.visibility, False
        mask, is_causal = self._merge_masks(q, k, key_padding_mask, attn_mask, is_causal, visibility)
        if raw:
            output, weights = self._attend_raw(q, k, v, mask, is_causal, lag), None
        else:
            output, weights = self._attend(q, k, v, mask, is_causal, need_weights, raw_query)
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        output = self.out_proj(output.transpose(1, 2).flatten(2))
        if not batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights

    def _merge_masks(
        self,
        q: Tensor,
        k: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        visibility: Visibility | None,
    ) -> tuple[Tensor | Visibility | None, bool]:
        """All that hides keys as one mask, and whether it is still to be made causal."""
        if visibility is None:
            sizes = Sizes(q.shape[0], self.num_heads, q.shape[2], k.shape[2] - self._extra_keys, self._extra_keys)
            return merge_masks(key_padding_mask, attn_mask, is_causal, sizes, q.device)
        if is_causal and self._extra_keys:
            raise ValueError("is_causal beside visibility does not know of the extra keys; make it part of visibility")
        return visibility, is_causal

    def _batch_leading(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, cache: KeyValueCache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The three, checked, as (batch, time, width); one given thrice stays one, so that one product projects all."""
        check_rotary_cache(self.rotary, cache)
        widths = (self.embed_dim, self.kdim, self.vdim)
        if cache is not None and cache.filled:  # nobody reads keys and values
            key, value, widths = query, query, (self.embed_dim,) * 3
        check_inputs(query, key, value, key_padding_mask, widths, 0 if self.batch_first else 1)
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

    def _attend_raw(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | Visibility | None, is_causal: bool, lag: int
    ) -> Tensor:
        """Attention on queries and keys that are not normalised yet."""
        if self.rotary == "before_norm":
            q, k = self._rotate(q, lag), self._rotate(k, 0, self._extra_keys)
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
        self, query: Tensor, key: Tensor, value: Tensor, cache: KeyValueCache | None, lag: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values by head, normalised and rotated, those of the cache included.

        The first query stands `lag` positions after the first of the new keys.
        """
        return self._project_by(functools.partial(self._place, keys=False), query, key, value, cache, lag)

    def _project_by(
        self,
        place: Callable[[Tensor, int | Tensor], Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: KeyValueCache | None,
        lag: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same, with queries as `place` makes them."""
        past = 0 if cache is None or cache.fixed else cache.length
        if cache is not None and cache.filled:
            weight, bias = self._projection(0)
            return place(self._heads(F.linear(query, weight, bias), self.num_heads), past + lag), *cache.read()
        q, k, v = self._project_raw(query, key, value)
        q, k, v = place(q, past + lag), self._place(k, past, keys=True), self.norm.value(v)
        if cache is None:
            return q, k, v
        if cache.fixed or not self._extra_keys:
            return q, *cache.append(k, v)
        # extra keys stay behind the last one, however many come before them in later calls
        own = k.shape[2] - self._extra_keys
        all_k, all_v = cache.append(k[:, :, :own], v[:, :, :own])
        return q, torch.cat([all_k, k[:, :, own:]], dim=2), torch.cat([all_v, v[:, :, own:]], dim=2)

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
            k, v = (
                torch.cat([x, b.expand(x.shape[0], -1, -1)], dim=1) for x, b in ((k, self.bias_k), (v, self.bias_v))
            )
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
        extra = self._extra_keys if keys else 0
        if self.rotary == "before_norm":
            return norm(self._rotate(x_bhtd, past, extra))
        return self._rotate(norm(x_bhtd), past, extra)

    def _place_raw(self, q_bhtd: Tensor, past: int | Tensor) -> Tensor:
        """Queries whose norm, which then comes last, is left to `attend`."""
        return q_bhtd if self.rotary == "none" else self._rotate(q_bhtd, past)

    def _rotate(self, x_bhtd: Tensor, past: int | Tensor, extra: int = 0) -> Tensor:
        """Turns by position, but for `extra` keys at the end, which have none."""
        positions = past + torch.arange(x_bhtd.shape[2] - extra, device=x_bhtd.device)
        if extra:
            positions = F.pad(positions, (0, extra))
        return rotate(x_bhtd, rotary_angles(positions, self.head_dim, self.rotary_base))

    def _forward_nested(
        self, query: Tensor, need_weights: bool, average_attn_weights: bool, is_causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Self-attention over a nested tensor, which torch's encoder makes of padded input in eval mode."""
        padded, hidden = to_padded(query)
        x = padded if self.batch_first else padded.transpose(0, 1)
        output, weights = self(
            x, x, x, key_padding_mask=hidden, need_weights=need_weights, average_attn_weights=average_attn_weights,
            is_causal=is_causal,
        )  # fmt: skip
        return to_nested(output if self.batch_first else output.transpose(0, 1), hidden, query), weights

    def extra_repr(self) -> str:
        shared = f", num_kv_heads={self.num_kv_heads}" if self.num_kv_heads != self.num_heads else ""
        turned = f", rotary={self.rotary}" if self.rotary != "none" else ""
        return f"{self.embed_dim}, num_heads={self.num_heads}{shared}{turned}, backend={self.backend}"

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: object) -> None:
        """A state dict of torch.nn.MultiheadAttention has no entry for the norm: ours keeps what it has.

        On meta it has nothing, and begins at its start.
        """
        loaded = state_dict.get(f"{prefix}out_proj.weight")
        if loaded is not None and not any(f"{prefix}norm.{name}" in state_dict for name in self.norm.state_dict()):
            norm = copy.deepcopy(self.norm).to_empty(device=loaded.device) if self.norm.scale.is_meta else self.norm
            own = {f"{prefix}norm.{name}": value.to(loaded.device) for name, value in norm.state_dict().items()}
            state_dict.update(own)
        super()._load_from_state_dict(state_dict, prefix, *rest)
