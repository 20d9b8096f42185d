"""The logits of one attention, block by block, and which of them count."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from qknorm.attention.adopting.family import visible_keys

LOGITS_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 24}
"""About so many logits are in memory at a time, by the kind of device: what a cache holds, or what keeps a GPU busy."""


@dataclass(frozen=True)
class Product:
    """Queries against keys, of which any block of logits can be had."""

    q: Tensor
    k_grouped: Tensor  # (b, key heads, 1, s, d)
    scale: float | Tensor
    mask: Tensor | None
    is_causal: bool
    queries: Tensor | None
    softcap: float | None

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        scale: float | Tensor,
        mask: Tensor | None,
        is_causal: bool,
        queries: Tensor | None,
        softcap: float | None,
    ) -> Self:
        _check(q, k, mask, queries)
        wide = torch.promote_types(torch.promote_types(q.dtype, k.dtype), torch.float32)
        if isinstance(scale, Tensor):
            scale = scale.detach().to(q.device, wide)
            scale = scale.view(-1, 1, 1) if scale.numel() > 1 else scale.view(())
        if mask is not None:
            mask = mask.detach().view((1,) * (4 - mask.dim()) + mask.shape)
        return cls(q.detach().to(wide), k.detach().to(wide).unsqueeze(2), scale, mask, is_causal, queries, softcap)

    @property
    def b(self) -> int:
        return self.q.shape[0]

    @property
    def h(self) -> int:
        return self.q.shape[1]

    @property
    def t(self) -> int:
        return self.q.shape[2]

    @property
    def s(self) -> int:
        return self.k_grouped.shape[-2]

    def row_blocks(self) -> Iterator[slice]:
        columns = min(self.s, self._columns)
        rows = max(1, _at_once(self.q.device) // (self.b * self.h * columns))
        return (slice(start, min(start + rows, self.t)) for start in range(0, self.t, rows))

    def key_blocks(self) -> Iterator[slice]:
        columns = self._columns
        return (slice(start, min(start + columns, self.s)) for start in range(0, self.s, columns))

    def products(self, rows: slice, keys: slice) -> Tensor:
        """q·k, without the scale: (b, h, rows, keys)."""
        q, k = self._grouped(self.q[:, :, rows]), self.k_grouped[..., keys, :]
        return (q @ k.transpose(-2, -1)).flatten(1, 2)

    def _grouped(self, q_bhtd: Tensor) -> Tensor:
        """(b, key heads, heads that share one, t, d)."""
        return q_bhtd.reshape(self.b, self.k_grouped.shape[1], -1, *q_bhtd.shape[2:])

    def logits(self, products: Tensor) -> Tensor:
        logits = products * self.scale
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap

    @property
    def _columns(self) -> int:
        """Keys in a block: few enough for 16 queries beside them."""
        return max(1, _at_once(self.q.device) // (16 * self.b * self.h))

    def visible(self, rows: slice, keys: slice) -> Tensor | None:
        """Which of these pairs count, broadcasting to (b, h, rows, keys), and whole in the last two; None if all do."""
        if self.mask is None and self.queries is None and not self.is_causal:
            return None
        size, device = (rows.stop - rows.start, keys.stop - keys.start), self.q.device
        visible = torch.ones(1, 1, *size, dtype=torch.bool, device=device)
        if self.is_causal:  # the last query is aligned with the last key
            visible = visible.tril(diagonal=rows.start + self.s - self.t - keys.start)
        if self.mask is not None:
            visible = visible & visible_keys(_part(self.mask, rows, keys))
        if self.queries is not None:
            visible = visible & self.queries[:, None, rows, None]
        return visible

    def scores(self, logits: Tensor, visible: Tensor | None, rows: slice, keys: slice) -> Tensor:
        """What the softmax is taken of: logits with what an additive mask adds; −∞ where hidden."""
        if self.mask is not None and self.mask.dtype != torch.bool:
            logits = logits + _part(self.mask, rows, keys).to(logits.dtype)
        return where_visible(visible, logits, -torch.inf)

    def seen_keys(self) -> Tensor:
        """(b, h, s): the keys that some query may see; those that none may see are padding."""
        seen = torch.zeros(self.b, self.h, self.s, dtype=torch.bool, device=self.q.device)
        if self.mask is None and self.queries is None:
            return ~seen  # causal or not, the last query sees all
        for rows in self.row_blocks():
            visible = self.visible(rows, slice(0, self.s))
            assert visible is not None
            seen |= visible.any(dim=-2)
        return seen


def _at_once(device: torch.device) -> int:
    return LOGITS_AT_ONCE.get(device.type, 1 << 22)


def where_visible(visible: Tensor | None, x: Tensor, elsewhere: float) -> Tensor:
    """x, and another number where hidden."""
    return x if visible is None else torch.where(visible, x, elsewhere)


def _part(mask: Tensor, rows: slice, keys: slice) -> Tensor:
    """The block of a mask that may be one wide in any direction."""
    mask = mask[:, :, rows] if mask.shape[2] > 1 else mask
    return mask[..., keys] if mask.shape[3] > 1 else mask


def sum_dtype(device: torch.device) -> torch.dtype:
    """What sums over many numbers are held in; Apple's GPUs have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Within it, products are neither cast to a narrow type nor rounded to TensorFloat-32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def _check(q: Tensor, k: Tensor, mask: Tensor | None, queries: Tensor | None) -> None:
    if q.dim() != 4 or k.dim() != 4 or q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q and k must be (batch, heads, time, head_dim) with one batch and head_dim, got {tuple(q.shape)} and "
            f"{tuple(k.shape)}"
        )
    if not q.numel() or not k.numel():
        raise ValueError(f"there is nothing to measure in q of {tuple(q.shape)} and k of {tuple(k.shape)}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads evenly")
    whole = (*q.shape[:3], k.shape[2])
    if mask is not None and (
        mask.dim() > 4 or any(one not in (1, all_) for one, all_ in zip(mask.shape[::-1], whole[::-1], strict=False))
    ):
        raise ValueError(f"a mask of {tuple(mask.shape)} does not broadcast to {whole}, (batch, heads, queries, keys)")
    if queries is not None and (queries.dtype != torch.bool or queries.shape != (q.shape[0], q.shape[2])):
        raise ValueError(
            f"queries must be a boolean mask of {(q.shape[0], q.shape[2])}, got {queries.dtype} {tuple(queries.shape)}"
        )
