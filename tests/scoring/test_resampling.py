import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qknorm.errors import InputError
from qknorm.scoring import resampling
from qknorm.scoring.resampling import bootstrap_totals, estimate_interval, shuffled_totals


def some_counts(sentences: int, seed: int) -> resampling.Statistics:
    return np.random.default_rng(seed).integers(0, 50, size=(sentences, 3)).astype(np.float64)


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**32))
@settings(max_examples=50)
def test_every_bootstrap_sample_has_as_many_sentences_as_the_test_set(sentences: int, samples: int, seed: int) -> None:
    counts = some_counts(sentences, seed)
    twice, ones = bootstrap_totals([np.hstack([counts, 2 * counts]), np.ones((sentences, 1))], samples, seed)
    assert (ones == sentences).all() and ones.shape == (samples, 1)
    assert (2 * twice[:, :3] == twice[:, 3:]).all()


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**32))
@settings(max_examples=50)
def test_swapping_keeps_the_sum_of_both_systems(sentences: int, trials: int, seed: int) -> None:
    first, second = some_counts(sentences, seed), some_counts(sentences, seed + 1)
    a, b = shuffled_totals(first, second, trials, seed)
    assert (a + b == first.sum(axis=0) + second.sum(axis=0)).all()
    assert (a >= np.minimum(first, second).sum(axis=0)).all() and (a <= np.maximum(first, second).sum(axis=0)).all()


def test_draws_are_the_plain_ones_whatever_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = some_counts(37, 1), some_counts(37, 2)
    chosen = np.random.default_rng(7).choice(37, size=(100, 37), replace=True)
    heads = np.random.default_rng(7).integers(2, size=(100, 37), dtype=bool)
    for block in (1 << 20, 2000, 1):
        monkeypatch.setattr(resampling, "_BLOCK_DRAWS", block)
        assert (bootstrap_totals([first], 100, 7)[0] == first[chosen].sum(axis=1)).all()
        a, b = shuffled_totals(first, second, 100, 7)
        assert (a == [np.where(row[:, None], first, second).sum(axis=0) for row in heads]).all()
        assert (b == [np.where(row[:, None], second, first).sum(axis=0) for row in heads]).all()


def test_interval_leaves_a_fortieth_on_either_side() -> None:
    interval = estimate_interval(np.arange(1000, dtype=np.float64)[::-1])
    assert (interval.low, interval.high, interval.mean) == (25.0, 974.0, 499.5)
    assert estimate_interval(np.array([3.0])).low == 3.0


@pytest.mark.parametrize(("samples", "seed"), [(0, 1), (-5, 1), (10, -1)])
def test_impossible_draws_are_refused(samples: int, seed: int) -> None:
    with pytest.raises(InputError, match="must"):
        bootstrap_totals([some_counts(3, 0)], samples, seed)
    with pytest.raises(InputError, match="must"):
        shuffled_totals(some_counts(3, 0), some_counts(3, 0), samples, seed)
