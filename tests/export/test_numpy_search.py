"""The search without PyTorch against PyTorch's, over scripted log-probabilities."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qknorm.decoding import search as torch_search
from qknorm.errors import InputError
from qknorm.export import search as numpy_search


class Scripted:
    """Log-probabilities that depend on all tokens of a hypothesis so far, the same wherever they are asked for.

    Rounded, so that equals are frequent; some types are impossible.
    """

    def __init__(self, sentences: int, beam: int, types: int, seed: int) -> None:
        self._types, self._seed = types, seed
        self._pasts = [[(i,) for _ in range(beam)] for i in range(sentences)]

    def step(self, tokens_bk: np.ndarray) -> np.ndarray:
        self._pasts = [
            [(*past, int(token)) for past, token in zip(row, tokens, strict=True)]
            for row, tokens in zip(self._pasts, tokens_bk, strict=True)
        ]
        return np.array([[self._after(past) for past in row] for row in self._pasts], dtype=np.float32)

    def _after(self, past: tuple[int, ...]) -> np.ndarray:
        draw = np.random.default_rng([self._seed, *past])
        scores = -np.round(draw.exponential(1.5, self._types), 1)
        return np.where(draw.random(self._types) < 0.2, -np.inf, scores)

    def reorder(self, origin_bk: np.ndarray) -> None:
        self._pasts = [[row[j] for j in origin] for row, origin in zip(self._pasts, origin_bk, strict=True)]

    def keep(self, sentences: np.ndarray) -> None:
        self._pasts = [self._pasts[i] for i in sentences]


class ScriptedForTorch:
    """The same in tensors."""

    def __init__(self, inner: Scripted) -> None:
        self._inner = inner

    def step(self, tokens_bk: Tensor) -> Tensor:
        return torch.from_numpy(self._inner.step(tokens_bk.numpy()))

    def reorder(self, origin_bk: Tensor) -> None:
        self._inner.reorder(origin_bk.numpy())

    def keep(self, sentences: Tensor) -> None:
        self._inner.keep(sentences.numpy())


def as_lists(found: Sequence[Sequence[object]]) -> list[list[tuple[object, ...]]]:
    return [[(each.tokens, each.score, each.log_probability) for each in sentence] for sentence in found]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    limits=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    beam=st.integers(1, 5),
    types=st.integers(5, 90),
    alpha=st.sampled_from([0.0, 0.6, 1.0, 2.0]),
    ngram=st.integers(0, 3),
    data=st.data(),
)
def test_the_search_finds_what_pytorchs_finds(
    seed: int, limits: list[int], beam: int, types: int, alpha: float, ngram: int, data: st.DataObject
) -> None:
    """Bit for bit, equals in the same order, whatever is impossible."""
    nbest = data.draw(st.integers(1, beam))
    options = {"beam": beam, "alpha": alpha, "nbest": nbest, "no_repeat_ngram": ngram}
    script = [Scripted(len(limits), beam, types, seed) for _ in range(2)]
    expected = torch_search.beam_search(ScriptedForTorch(script[0]), len(limits), torch.tensor(limits), **options)
    found = numpy_search.beam_search(script[1], np.array(limits), **options)
    assert as_lists(found) == as_lists(expected)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 300), st.integers(1, 9))
def test_the_best_are_those_of_a_stable_sort(seed: int, rows: int, length: int, count: int) -> None:
    scores = np.random.default_rng(seed).integers(-9, 9, (rows, length)).astype(np.float32)
    values, places = numpy_search.best_of(scores, min(count, length), width=16)
    expected = np.argsort(-scores, axis=1, kind="stable")[:, : min(count, length)]
    assert np.array_equal(places, expected)
    assert np.array_equal(values, np.take_along_axis(scores, expected, axis=1))


def test_numbers_that_are_none_and_odd_settings_are_refused() -> None:
    class Diverged(Scripted):
        def step(self, tokens_bk: np.ndarray) -> np.ndarray:
            scores = super().step(tokens_bk)
            scores[0, 0, 4] = np.nan
            return scores

    with pytest.raises(FloatingPointError, match="are not numbers"):
        numpy_search.beam_search(Diverged(2, 2, 9, 0), np.array([3, 3]), beam=2)
    script = Scripted(1, 2, 9, 0)
    for options, reason in (
        ({"beam": 0}, "beam must be at least 1"),
        ({"beam": 2, "nbest": 3}, "nbest must be between 1 and the beam of 2"),
        ({"alpha": -1.0}, "alpha must be between 0"),
        ({"no_repeat_ngram": -1}, "no_repeat_ngram cannot be negative"),
    ):
        with pytest.raises(InputError, match=reason):
            numpy_search.beam_search(script, np.array([3]), **options)  # type: ignore[arg-type]
    assert numpy_search.beam_search(script, np.zeros(0, dtype=np.int64)) == []
