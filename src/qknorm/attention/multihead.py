"""Multi-head attention with query-key normalisation, to stand where torch.nn.MultiheadAttention stood."""

import functools
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qknorm.attention.attend import Visibility, attend, attend_with_weights, causal_mask
from qknorm.attention.cache import KeyValueCache
from qknorm.attention.norm import Backend, Kind, QKNorm
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
        rotary: RotaryOrder = "none",
        rotary_base: float = 10_000.0,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        num_kv_heads = num_kv_heads or num_heads
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} cannot be cut into {num_heads} heads evenly")
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} heads cannot share {num_kv_heads} key-value heads evenly")
        if rotary not in ("none", "before_norm", "after_norm"):
            raise ValueError(f"rotary must be none, before_norm or after_norm, got {rotary!r}")
        if backend == "fused" and qk_norm != "lp":
            raise ValueError(f"backend='fused' is for qk_norm='lp'; with {qk_norm!r} there is nothing to fuse")
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self._extra_keys = int(add_bias_kv) + int(add_zero_attn)
        self.head_dim = embed_dim // num_heads
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.dropout, self.batch_first, self.add_zero_attn = dropout, batch_first, add_zero_attn
        self.rotary, self.rotary_base, self.backend = rotary, rotary_base, backend
        # torch's encoder layers read this name to learn whether they may skip our forward in eval mode. They may not.
        self._qkv_same_embed_dim = False

        kv_dim = self.head_dim * num_kv_heads
        self._split = [embed_dim, kv_dim, kv_dim]
        self.packed = self.kdim == self.vdim == embed_dim

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.in_proj_weight = weight(embed_dim + 2 * kv_dim, embed_dim) if self.packed else None
        self.q_proj_weight = None if self.packed else weight(embed_dim, embed_dim)
        self.k_proj_weight = None if self.packed else weight(kv_dim, self.kdim)
        self.v_proj_weight = None if self.packed else weight(kv_dim, self.vdim)
        self.in_proj_bias = weight(embed_dim + 2 * kv_dim) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.bias_k = weight(1, 1, kv_dim) if add_bias_kv else None
        self.bias_v = weight(1, 1, kv_dim) if add_bias_kv else None
        self.norm = QKNorm(
            self.head_dim,
            num_heads,
            kind=qk_norm,
            p=p,
            p_learned=p_learned,
            scale_init=scale_init,
            length=length,
            scale_learned=scale_learned,
            scale_per_head=scale_per_head,
            normalize_values=normalize_values,
            num_kv_heads=num_kv_heads,
            device=device,
            dtype=dtype,
        )
        self.reset_parameters()

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
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            if query is key and key is value:
                query = key = value = query.transpose(0, 1)  # one tensor, so that one product projects all three
            else:
                query, key, value = (x.transpose(0, 1) for x in (query, key, value))

        q, k, v = self._project(query, key, value, cache)
        if cache is not None and cache.visibility is not None:
            visibility, is_causal = cache.visibility, False
        if is_causal:
            attn_mask = None
            if self._extra_keys:  # these come after the last key and are for everyone
                attn_mask, is_causal = ~causal_mask(q.shape[2], k.shape[2] - self._extra_keys, q.device), False
        mask = visibility or self._merge_masks(key_padding_mask, attn_mask, k.shape[2])
        dropout = self.dropout if self.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            output, weights, _ = attend_with_weights(
                q, k, v, scale=1.0, mask=mask, is_causal=is_causal, dropout=dropout
            )
            weights = weights.mean(dim=1) if average_attn_weights else weights
        else:
            output = attend(
                q,
                k,
                v,
                scale=1.0,
                mask=mask,
                is_causal=is_causal,
                dropout=dropout,
                backend="sdpa" if self.backend == "fused" else self.backend,
            )
        output = self.out_proj(output.transpose(1, 2).flatten(2))
        if not batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights

    def _project(
        self, query: Tensor, key: Tensor, value: Tensor, cache: KeyValueCache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values by head, normalised and rotated, those of the cache included."""
        past = 0 if cache is None or cache.fixed else cache.length
        if cache is not None and cache.filled:
            weight, bias = self._projection(0)
            q = self._heads(F.linear(query, weight, bias), self.num_heads)
            return self._place(q, past, keys=False), *cache.read()
        if self.in_proj_weight is not None and query is key and key is value:
            projected = torch.split(F.linear(query, self.in_proj_weight, self.in_proj_bias), self._split, dim=-1)
        else:
            projected = tuple(F.linear(x, *self._projection(i)) for i, x in enumerate((query, key, value)))
        q, k, v = projected
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (torch.cat([x, b.expand(len(x), -1, -1)], dim=1) for x, b in ((k, self.bias_k), (v, self.bias_v)))
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        q = self._place(self._heads(q, self.num_heads), past, keys=False)
        k = self._place(self._heads(k, self.num_kv_heads), past, keys=True)
        v = self.norm.value(self._heads(v, self.num_kv_heads))
        if cache is not None:
            k, v = cache.append(k, v)
        return q, k, v

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
        positions = past + torch.arange(x_bhtd.shape[2], device=x_bhtd.device)
        angles = rotary_angles(positions, self.head_dim, self.rotary_base)
        return norm(rotate(x_bhtd, angles)) if self.rotary == "before_norm" else rotate(norm(x_bhtd), angles)

    def _merge_masks(self, key_padding_mask: Tensor | None, attn_mask: Tensor | None, keys: int) -> Tensor | None:
        """Torch's two masks as one for `attend`: boolean with True = may attend, or additive if either is."""
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
