"""The tests over folds beside SciPy's."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qknorm.studies.statistics import (
    compare_pairs,
    holm,
    incomplete_beta,
    mean_and_deviation,
    mean_ranks,
    t_test,
    wilcoxon,
)

scipy_stats = pytest.importorskip("scipy.stats", reason="SciPy is what we compare with")
scipy_special = pytest.importorskip("scipy.special")

seeds = st.integers(0, 2**32 - 1)


@given(seeds, st.integers(2, 30), st.floats(-2, 2))
def test_t_is_scipys(seed: int, n: int, shift: float) -> None:
    differences = np.random.default_rng(seed).normal(shift, 1, n)
    expected = scipy_stats.ttest_1samp(differences, 0).pvalue
    assert t_test(list(differences)) == pytest.approx(expected, rel=1e-9, abs=1e-14)


@given(seeds, st.integers(1, 15), st.floats(-1, 1))
def test_wilcoxon_is_scipys_exact_one(seed: int, n: int, shift: float) -> None:
    differences = np.random.default_rng(seed).normal(shift, 1, n)
    expected = scipy_stats.wilcoxon(differences, method="exact").pvalue
    assert wilcoxon(list(differences)) == pytest.approx(expected, rel=1e-12)


@given(st.lists(st.integers(-4, 4).filter(bool), min_size=1, max_size=10))
def test_wilcoxon_with_ties_counts_all_signs(differences: list[int]) -> None:
    """All 2ⁿ signs, one by one, with SciPy's ranks."""
    ranks = scipy_stats.rankdata(np.abs(differences))
    signs = np.array([[(code >> bit) & 1 for bit in range(len(ranks))] for code in range(2 ** len(ranks))])
    sums = signs @ ranks
    observed = sum(rank for rank, each in zip(ranks, differences, strict=True) if each > 0)
    extreme = min(observed, ranks.sum() - observed)
    assert wilcoxon(differences) == pytest.approx(min(1.0, 2 * np.mean(sums <= extreme + 1e-9)), rel=1e-12)


@given(st.lists(st.floats(0, 1), max_size=12))
def test_holm_is_the_definition(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    order = np.argsort(p_values, kind="stable")
    for place, index in enumerate(order):
        steps = [(len(order) - k) * p_values[order[k]] for k in range(place + 1)]
        assert adjusted[index] == pytest.approx(min(1.0, max(steps)))


def test_holm_of_a_known_example_leaves_out_what_is_no_number() -> None:
    adjusted = holm([0.01, math.nan, 0.04, 0.03])
    assert math.isnan(adjusted.pop(1))
    assert adjusted == pytest.approx([0.03, 0.06, 0.06])


@given(st.floats(0.1, 60), st.floats(0.1, 60), st.floats(0, 1))
def test_incomplete_beta_is_scipys(a: float, b: float, x: float) -> None:
    assert incomplete_beta(a, b, x) == pytest.approx(scipy_special.betainc(a, b, x), rel=1e-8, abs=1e-13)


@given(st.lists(st.floats(-5, 5), max_size=20))
def test_mean_ranks_are_scipys(values: list[float]) -> None:
    assert mean_ranks(values) == pytest.approx(list(scipy_stats.rankdata(values)))


def test_what_cannot_be_tested_is_no_number() -> None:
    assert math.isnan(t_test([0.1]))
    assert math.isnan(t_test([0.0, 0.0, 0.0]))
    assert t_test([0.25, 0.25, 0.25]) == 0.0
    assert math.isnan(wilcoxon([0.0, 0.0]))
    for values, baseline in (([], []), ([math.inf, 1.0], [1.0, 1.0])):
        tested = compare_pairs(values, baseline)
        assert math.isnan(tested.difference) and math.isnan(tested.t_p) and math.isnan(tested.wilcoxon_p)
    with pytest.raises(ValueError, match="as many"):
        compare_pairs([1.0], [1.0, 2.0])


def test_mean_and_deviation() -> None:
    assert mean_and_deviation([1.0, 2.0, 6.0]) == pytest.approx((3.0, np.std([1, 2, 6], ddof=1)))
    assert mean_and_deviation([4.0])[0] == 4.0 and math.isnan(mean_and_deviation([4.0])[1])
    assert all(map(math.isnan, mean_and_deviation([])))
