"""Is one system better than another, or was it luck? Three answers from the same sentences.

- `koehn_p`: paired bootstrap resampling of Koehn (2004): the share of resampled test sets on which the system that won
  does not win. One-sided, in the direction observed; `win_rate` is the share on which the system beats the baseline.
- `bootstrap_p`: sacreBLEU's paired bootstrap: how often the size of a resampled difference exceeds the mean size by as
  much as the difference observed.
- `randomization_p`: paired approximate randomisation, two-sided: how often swapping the two systems' outputs at random
  makes a difference as large as the one observed.

The last two are sacreBLEU's numbers for the same seed, save that a difference equal to the observed counts as chance
here: so two identical systems have p = 1, where sacreBLEU's strict comparison makes them differ at p = 0.001.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qknorm.errors import InputError
from qknorm.progress import Progress
from qknorm.scoring.line_checks import check_parallel
from qknorm.scoring.metrics import Metric
from qknorm.scoring.resampling import Interval, Statistics, bootstrap_totals, estimate_interval, shuffled_totals

_TIE = 1e-9  # rounding in sums must not make two equal scores differ


@dataclass(frozen=True)
class ComparedSystem:
    """A system beside the baseline; `difference` is its score less the baseline's. The baseline itself has no p."""

    name: str
    value: float
    interval: Interval
    difference: float
    win_rate: float | None = None
    tie_rate: float | None = None
    koehn_p: float | None = None
    bootstrap_p: float | None = None
    randomization_p: float | None = None


@dataclass(frozen=True)
class Comparison:
    """All systems of a comparison under one metric, the baseline first."""

    metric: str
    signature: str
    baseline: str
    higher_is_better: bool
    samples: int
    trials: int
    seed: int
    systems: tuple[ComparedSystem, ...]


def compare(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[Sequence[str]],
    baseline: str,
    metric: str = "bleu",
    samples: int = 1000,
    seed: int = 12345,
    *,
    trials: int = 10_000,
    lang: str = "",
    tokenizer: str | None = None,
    lowercase: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """Tests every system against `baseline` with `samples` bootstrap samples and `trials` random swaps."""
    check_parallel(systems, references)
    check_baseline(systems, baseline)
    chosen = Metric(metric, lang, tokenizer, lowercase)
    counts = {name: chosen.count(lines, references, progress, name) for name, lines in systems.items()}
    return compare_counts(chosen, counts, baseline, samples, trials, seed)


def check_baseline(systems: Mapping[str, Sequence[str]], baseline: str) -> None:
    """Raises InputError unless there is a baseline among the systems and something to compare with it."""
    if baseline not in systems:
        raise InputError(f'baseline "{baseline}" is not among the systems: {", ".join(systems)}')
    if len(systems) < 2:
        raise InputError(f'"{baseline}" is the only system: a comparison needs at least two')


def compare_counts(
    metric: Metric,
    counts: Mapping[str, Statistics],
    baseline: str,
    samples: int,
    trials: int,
    seed: int,
    prep: str = "",
) -> Comparison:
    """The comparison of systems of which `metric` has already counted the sentences."""
    names = [baseline, *(name for name in counts if name != baseline)]
    drawn = bootstrap_totals([counts[name] for name in names], samples, seed)
    resampled = [metric.score_totals(totals) for totals in drawn]
    values = [metric.score_total(counts[name].sum(axis=0)) for name in names]
    compared = [ComparedSystem(baseline, values[0], estimate_interval(resampled[0]), 0.0)]
    for name, value, scores in zip(names[1:], values[1:], resampled[1:], strict=True):
        difference = value - values[0]
        direction = 1 if metric.higher_is_better else -1
        gains = direction * (scores - resampled[0])
        swapped = shuffled_totals(counts[baseline], counts[name], trials, seed)
        shuffled = metric.score_totals(swapped[0]) - metric.score_totals(swapped[1])
        compared.append(
            ComparedSystem(
                name,
                value,
                estimate_interval(scores),
                difference,
                win_rate=float(np.mean(gains > _TIE)),
                tie_rate=float(np.mean(np.abs(gains) <= _TIE)),
                koehn_p=koehn_p(gains, direction * difference),
                bootstrap_p=_share(np.abs(gains) - np.abs(gains).mean() >= abs(difference) - _TIE),
                randomization_p=_share(np.abs(shuffled) >= abs(difference) - _TIE),
            )
        )
    signature = metric.signature(bs=samples, ar=trials, seed=seed, prep=prep or None)
    order = metric.higher_is_better
    return Comparison(metric.name, signature, baseline, order, samples, trials, seed, tuple(compared))


def koehn_p(gains: NDArray[np.float64], gain: float) -> float:
    """The share of resampled gains in which the system that won does not win; never 0."""
    if abs(gain) <= _TIE:
        return 1.0
    return _share(gains <= _TIE if gain > 0 else gains >= -_TIE)


def _share(events: NDArray[np.bool_]) -> float:
    """The share of events, the observed one counted among them: never 0, so that chance is never ruled out."""
    return (int(events.sum()) + 1) / (len(events) + 1)
