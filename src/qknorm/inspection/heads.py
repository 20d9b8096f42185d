"""What each head does, read off its attention weights: the questions of Clark et al. 2019.

Weights are arrays (heads, queries, keys) whose rows sum to 1; a row without any visible key is all zeros and counts
for nothing, and neither do weights that are no numbers.
"""

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qknorm.text.subwords import END_OF_WORD, SPACE, SPECIALS

Weights = NDArray[np.float64]

ROLES = {
    "previous": "looks at the token before",
    "same": "looks at the token itself",
    "next": "looks at the token after",
    "first": "looks at the first token",
    "delimiters": "looks at punctuation and marks of the end",
    "broad": "spreads its weight over nearly all tokens",
    "focused": "gives nearly everything to one token, which content chooses",
    "mixed": "has no pattern of these",
}
"""Every role a head can have, in words."""

PATTERN_SHARE = 0.4
"""A head has a role when this share of its weight goes where the role says."""
BROAD, FOCUSED = 0.9, 0.2
"""A head is broad when its entropy is at least this share of what equal weights would have, focused at most at that."""
TINY = float(np.finfo(np.float64).tiny)
END_MARKS = frozenset({"</s>", "<s>", "<pad>", "<eos>", "<bos>", "<|endoftext|>", "[SEP]", "[CLS]", "[EOS]", "[BOS]"})


@dataclass(frozen=True)
class HeadPattern:
    """Where one head's weight goes: the mean share on each kind of key, and how even it is (1: all keys alike).

    Means are over the queries that have a choice of keys, without any of which evenness is NaN. `delimiters` leaves
    out the first key, which is `first`.
    """

    previous: float
    same: float
    next: float
    first: float
    delimiters: float
    evenness: float

    @property
    def role(self) -> str:
        """The one word of ROLES that fits best."""
        if self.evenness >= BROAD:  # over few keys an even head would also seem to look at each of them
            return "broad"
        shares = {name: getattr(self, name) for name in ("previous", "same", "next", "first", "delimiters")}
        best = max(shares, key=shares.__getitem__)
        if shares[best] >= PATTERN_SHARE:
            return best
        return "focused" if self.evenness <= FOCUSED else "mixed"


def find_patterns(
    weights: ArrayLike, keys: Sequence[str], *, one_text: bool, visible: ArrayLike | None = None
) -> list[HeadPattern]:
    """The pattern of every head; `keys` are the key tokens.

    Neighbours have a meaning only where queries and keys are `one_text` (self-attention). `visible` is how many keys a
    query may see (heads, queries); without it those count that any head gives weight, which saturated heads may not.
    """
    heads = _check(weights)
    count = heads.shape[-1]
    if count != len(keys):
        raise ValueError(f"weights over {count} keys do not fit {len(keys)} key tokens")
    seen = (heads > 0).any(axis=0).sum(axis=-1) if visible is None else np.asarray(visible)
    seen = np.broadcast_to(seen, heads.shape[:2])
    choosing = seen > 1
    at_ends = np.array([place > 0 and is_delimiter(key) for place, key in enumerate(keys)], dtype=bool)
    shares = {
        "first": _mean_over(heads[..., 0], choosing),
        "delimiters": _mean_over(heads[..., at_ends].sum(axis=-1), choosing),
        "evenness": _mean_over(_entropy(heads) / np.log(np.maximum(seen, 2)), choosing),
    }
    shares["evenness"][~choosing.any(axis=-1)] = math.nan
    for name, step in (("previous", -1), ("same", 0), ("next", 1)):
        shares[name] = _diagonal_share(heads, choosing, step) if one_text else np.zeros(len(heads))
    return [HeadPattern(**{name: float(share[head]) for name, share in shares.items()}) for head in range(len(heads))]


def is_delimiter(token: str) -> bool:
    """Whether a token is punctuation alone, or marks where a sentence begins or ends."""
    if token in SPECIALS or token in END_MARKS:
        return token != "<unk>"
    letters = token.removesuffix(END_OF_WORD).replace(SPACE, "").strip()
    return bool(letters) and all(unicodedata.category(letter).startswith("P") for letter in letters)


# ------------------------------------------------------------------ how alike heads are


def head_distances(weights: ArrayLike) -> NDArray[np.float64]:
    """Distances (heads, heads) of heads over the same tokens: the root of their mean Jensen-Shannon divergence.

    The root is a metric, and one of Euclidean kind, which is what makes a map of it faithful.
    """
    heads = _check(weights)
    real = heads.sum(axis=-1).min(axis=0) > 0
    rows = heads[:, real]
    distances = np.zeros((len(heads), len(heads)))
    if not rows.shape[1]:
        return distances
    entropies = _entropy(rows).mean(axis=-1)
    for place, head in enumerate(rows[:-1]):  # the divergence is the entropy of the middle less the mean of entropies
        middle = _entropy((head + rows[place + 1 :]) / 2).mean(axis=-1)
        distances[place, place + 1 :] = middle - (entropies[place] + entropies[place + 1 :]) / 2
    return np.sqrt(np.maximum(distances + distances.T, 0.0))


def map_points(distances: ArrayLike) -> NDArray[np.float64]:
    """Points (n, 2) whose distances are as near to the given ones as classical scaling brings them.

    Exact where points of a plane have them. The largest coordinate on each axis is positive, so that the same
    distances always give the same map.
    """
    given = np.asarray(distances, dtype=np.float64)
    if given.ndim != 2 or given.shape[0] != given.shape[1]:
        raise ValueError(f"distances are a square matrix, not of shape {given.shape}")
    count = len(given)
    if count == 0:
        return np.zeros((0, 2))
    centre = np.eye(count) - 1.0 / count
    products = -0.5 * centre @ (given**2) @ centre
    values, vectors = np.linalg.eigh((products + products.T) / 2)
    largest = np.argsort(values)[::-1][:2]
    points = vectors[:, largest] * np.sqrt(np.maximum(values[largest], 0.0))
    points *= np.where(np.take_along_axis(points, np.abs(points).argmax(axis=0)[None], axis=0) < 0, -1.0, 1.0)
    return np.pad(points, ((0, 0), (0, 2 - points.shape[1])))


# ------------------------------------------------------------------ numbers


def _check(weights: ArrayLike) -> Weights:
    heads = np.nan_to_num(np.asarray(weights, dtype=np.float64))  # a broken model is looked at too
    if heads.ndim != 3 or not heads.size:
        raise ValueError(f"weights of shape {heads.shape}; give (heads, queries, keys), with at least one of each")
    return heads


def _mean_over(values: Weights, counted: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The mean over those queries that count; 0 without any."""
    counts = counted.sum(axis=-1)
    return np.asarray((values * counted).sum(axis=-1) / np.maximum(counts, 1), dtype=np.float64)


def _diagonal_share(heads: Weights, counted: NDArray[np.bool_], step: int) -> NDArray[np.float64]:
    """The mean weight of key t + step over the queries t that have such a key."""
    queries, keys = heads.shape[1:]
    places = np.arange(queries)
    inside = (places + step >= 0) & (places + step < keys)
    rows, columns = places[inside], places[inside] + step
    return _mean_over(heads[:, rows, columns], counted[:, rows])


def _entropy(heads: Weights) -> NDArray[np.float64]:
    logs = np.log(np.maximum(heads, TINY))
    return np.asarray(-np.einsum("...s,...s->...", heads, logs))
