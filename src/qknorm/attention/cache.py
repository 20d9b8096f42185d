"""What attention has seen already, kept for decoding one token after another."""

import torch
from torch import Tensor

from qknorm.attention.masks import Visibility


class KeyValueCache:
    """Keys, already normalised (and rotated), and values of one attention module: (batch, heads, time, head_dim).

    A growing cache (self-attention) is appended to by every call; a `fixed` one (cross-attention) is filled by the
    first call and read by the others. For inference: what is stored carries no gradient.
    """

    def __init__(self, *, fixed: bool = False) -> None:
        self.fixed = fixed
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def visibility(self) -> Visibility | None:
        """Which of the keys it returns a query may see; None where all of them."""
        return None

    @property
    def filled(self) -> bool:
        """Whether a fixed cache can be read, so that its keys and values need not be computed again."""
        return self.fixed and self._keys is not None

    def read(self) -> tuple[Tensor, Tensor]:
        """Keys and values seen so far, without a copy."""
        if self._keys is None or self._values is None:
            raise RuntimeError("the cache is empty; attend once with it before reading from it")
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]

    @torch.no_grad()
    def append(self, k_bhsd: Tensor, v_bhsd: Tensor) -> tuple[Tensor, Tensor]:
        """Adds keys and values at the end and returns all of them; the room doubles as needed."""
        if self.filled:
            raise RuntimeError("a fixed cache is filled once; use a new one for another sequence")
        if self._keys is not None and self._keys.shape[0] != k_bhsd.shape[0]:
            raise ValueError(
                f"the cache holds a batch of {self._keys.shape[0]} and this call has one of {k_bhsd.shape[0]}: use a"
                " cache of its own for every batch, or reorder to drop or repeat rows"
            )
        grown = self.length + k_bhsd.shape[2]
        self._keys = _with_room(self._keys, k_bhsd, self.length, grown if self.fixed else None)
        self._values = _with_room(self._values, v_bhsd, self.length, grown if self.fixed else None)
        self._keys[:, :, self.length : grown] = k_bhsd
        self._values[:, :, self.length : grown] = v_bhsd
        self.length = grown
        return self.read()

    def adopt(self, keys: Tensor, values: Tensor) -> None:
        """Makes these tensors the stored ones, without a copy."""
        self._keys, self._values, self.length = keys, values, keys.shape[2]

    def reorder(self, index: Tensor) -> None:
        """Row i becomes what row index[i] was (beam search); an index of another length drops or repeats rows."""
        if self._keys is None or self._values is None:
            return
        if len(index) == len(self._keys):
            self.move(*moved_rows(index))
        else:
            self._keys, self._values = self._keys[index], self._values[index]

    @torch.no_grad()
    def move(self, rows: Tensor, origins: Tensor) -> None:
        """Each of these rows becomes what its origin was; all other rows stay, and are not copied."""
        if self._keys is not None and self._values is not None and len(rows):
            for stored in (self._keys, self._values):
                stored[rows, :, : self.length] = stored[origins, :, : self.length]


def moved_rows(index: Tensor) -> tuple[Tensor, Tensor]:
    """Of an order of rows, those that do not stay where they are, and where they come from."""
    rows = (index != torch.arange(len(index), device=index.device)).nonzero().squeeze(1)
    return rows, index[rows]


def _with_room(stored: Tensor | None, new: Tensor, length: int, exact: int | None) -> Tensor:
    """A buffer with room for `new` after the first `length` steps, its old content kept."""
    b, h, s, d = new.shape
    if stored is not None and stored.shape[2] >= length + s:
        return stored
    room = exact or max(16, 2 * (length + s))
    grown = new.new_empty(b, h, room, d)
    if stored is not None:
        grown[:, :, :length] = stored[:, :, :length]
    return grown
