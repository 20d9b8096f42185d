"""The pasts of a beam stored as a tree, in numpy.

The keys and values of all tokens of a sentence stand in one row, whichever hypothesis they were made for. When
hypotheses change places, only the record of who sees which token does, and nothing is copied.
"""

from collections.abc import Sequence

import numpy as np

from qknorm.export.search import Array

ROOM = 8
"""Steps between two prunings, each of which copies what is left of the trees."""


class Tree:
    """Keys and values (b, heads, places, head_dim) by name, and who sees which place: (b, k, places)."""

    def __init__(self, sentences: int, beam: int, names: Sequence[str]) -> None:
        self._names, self._beam = names, beam
        self._seen_bkp = np.zeros((sentences, beam, 0), dtype=np.bool_)
        self.stored: dict[str, Array] = {}
        self.step = 0

    def make_room(self, heads: int, head_dim: int) -> None:
        """Empty places; zeros, since what nobody sees must still be a number."""
        sentences, beam, _ = self._seen_bkp.shape
        shape = (sentences, heads, ROOM * beam, head_dim)
        self.stored = {name: np.zeros(shape, dtype=np.float32) for name in self._names}

    @property
    def _places(self) -> int:
        places: int = next(iter(self.stored.values())).shape[2]
        return places

    def visible(self) -> Array:
        """Who sees which place (b, k, places + k), the k tokens of this step last, each seen by its own hypothesis."""
        sentences, beam, used = self._seen_bkp.shape
        visible_bkp = np.zeros((sentences, beam, self._places + beam), dtype=np.bool_)
        visible_bkp[:, :, :used] = self._seen_bkp
        visible_bkp[:, :, self._places :] = np.eye(beam, dtype=np.bool_)
        return visible_bkp

    def grow(self, new: Sequence[Array]) -> None:
        """Stores the keys and values (b, heads, k, head_dim) of this step, in the order of the names."""
        sentences, beam, used = self._seen_bkp.shape
        for name, array in zip(self._names, new, strict=True):
            self.stored[name][:, :, used : used + beam] = array
        own = np.broadcast_to(np.eye(beam, dtype=np.bool_), (sentences, beam, beam))
        self._seen_bkp = np.concatenate([self._seen_bkp, own], axis=2)
        self.step += 1

    def reorder(self, origin_bk: Array) -> None:
        """Hypotheses take over what those they go on from saw."""
        self._seen_bkp = np.take_along_axis(self._seen_bkp, origin_bk[:, :, None], axis=1)

    def keep(self, sentences: Array) -> None:
        """Only these sentences stay."""
        self._seen_bkp = self._seen_bkp[sentences]
        self.stored = {name: array[sentences] for name, array in self.stored.items()}

    def prune_if_full(self) -> None:
        """Forgets tokens that no hypothesis sees, and makes room for more, where there is none left."""
        used = self._seen_bkp.shape[2]
        if used < self._places:
            return
        seen_bp = self._seen_bkp.any(axis=1)
        left = int(seen_bp.sum(axis=1).max())
        order_bp = np.argsort(~seen_bp, axis=1, kind="stable")[:, :left]
        self._seen_bkp = np.take_along_axis(self._seen_bkp, order_bp[:, None], axis=2)
        for name, array in self.stored.items():
            moved = np.zeros((*array.shape[:2], left + ROOM * self._beam, array.shape[3]), dtype=np.float32)
            for row, places, to in zip(array, order_bp, moved, strict=True):
                np.take(row, places, axis=1, out=to[:, :left], mode="clip")
            self.stored[name] = moved
