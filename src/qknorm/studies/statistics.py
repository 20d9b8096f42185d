"""Paired tests over folds, small enough to read: Student's t, Wilcoxon's signed ranks (exact), Holm's correction."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_SMALLEST = 1e-300
_PRECISION = 1e-15


@dataclass(frozen=True)
class PairedTest:
    """How `values` differ from `baseline`, pair by pair; p-values are two-sided and NaN where nothing can be said."""

    pairs: int
    difference: float
    t_p: float
    wilcoxon_p: float


def compare_pairs(values: Sequence[float], baseline: Sequence[float]) -> PairedTest:
    """Both paired tests of values[i] against baseline[i]; `difference` is the mean of values − baseline."""
    if len(values) != len(baseline):
        raise ValueError(f"pairs need as many values as baselines, got {len(values)} and {len(baseline)}")
    differences = [value - base for value, base in zip(values, baseline, strict=True)]
    if not differences or not all(map(math.isfinite, differences)):
        return PairedTest(len(differences), math.nan, math.nan, math.nan)
    mean = math.fsum(differences) / len(differences)
    return PairedTest(len(differences), mean, t_test(differences), wilcoxon(differences))


def t_test(differences: Sequence[float]) -> float:
    """Two-sided p that the mean is 0, by Student's t; NaN for fewer than two, or where all are 0."""
    n = len(differences)
    if n < 2:
        return math.nan
    mean = math.fsum(differences) / n
    variance = math.fsum((each - mean) ** 2 for each in differences) / (n - 1)
    if variance == 0:
        return math.nan if mean == 0 else 0.0
    t_squared = mean * mean * n / variance
    freedom = n - 1
    return incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t_squared))


def wilcoxon(differences: Sequence[float]) -> float:
    """Two-sided p that the differences lie evenly around 0, from all 2ⁿ signs of their ranks.

    Differences of 0 are left out; equal sizes share their mean rank. NaN if nothing is left.
    """
    left = [each for each in differences if each != 0]
    if not left:
        return math.nan
    doubled = [round(2 * rank) for rank in mean_ranks([abs(each) for each in left])]
    positive = sum(rank for rank, each in zip(doubled, left, strict=True) if each > 0)
    extreme = min(positive, sum(doubled) - positive)
    ways = Counter({0: 1})
    for rank in doubled:
        more: Counter[int] = Counter(ways)
        for total, count in ways.items():
            more[total + rank] += count
        ways = more
    as_extreme = sum(count for total, count in ways.items() if total <= extreme)
    return float(min(1.0, 2 * as_extreme / 2 ** len(doubled)))


def mean_ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1 on; equal values share the mean of theirs."""
    order = sorted(values)
    return [(order.index(value) + 1 + len(order) - order[::-1].index(value)) / 2 for value in values]


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction, in the order given; NaN stays NaN and does not count as a test."""
    places = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    adjusted = [math.nan] * len(p_values)
    highest = 0.0
    for done, (p, place) in enumerate(places):
        highest = max(highest, min(1.0, (len(places) - done) * p))
        adjusted[place] = highest
    return adjusted


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """The mean and the sample standard deviation, which is NaN for fewer than two values."""
    if not values:
        return math.nan, math.nan
    mean = math.fsum(values) / len(values)
    if len(values) < 2 or not math.isfinite(mean):
        return mean, math.nan
    return mean, math.sqrt(math.fsum((each - mean) ** 2 for each in values) / (len(values) - 1))


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (Lentz's way)."""
    if not 0 <= x <= 1:
        raise ValueError(f"x must lie between 0 and 1, got {x}")
    if x in (0.0, 1.0):
        return x
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side
        return 1 - incomplete_beta(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) / a / _beta_fraction(a, b, x)


def _beta_fraction(a: float, b: float, x: float) -> float:
    """1 + d₁/(1 + d₂/(1 + …)), the denominator of the incomplete beta function."""
    value, above, below = 1.0, 1.0, 0.0
    for step in range(1, 10_000):
        m, odd = divmod(step, 2)
        if odd:
            d = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            d = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        below = 1 / _away_from_zero(1 + d * below)
        above = _away_from_zero(1 + d / above)
        value *= above * below
        if abs(above * below - 1) < _PRECISION:
            break
    return value


def _away_from_zero(number: float) -> float:
    return number if abs(number) > _SMALLEST else _SMALLEST
