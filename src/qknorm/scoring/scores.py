"""Scores of one system, each with its signature."""

from collections.abc import Sequence
from dataclasses import dataclass

from qknorm.progress import Progress
from qknorm.scoring.line_checks import check_parallel
from qknorm.scoring.metrics import Detail, Metric
from qknorm.scoring.resampling import Interval, Statistics, bootstrap_totals, estimate_interval


@dataclass(frozen=True)
class Score:
    """A score, the signature under which it may be compared, its parts, and its interval where one was asked for."""

    metric: str
    value: float
    signature: str
    details: dict[str, Detail]
    interval: Interval | None = None


def score(
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    metrics: Sequence[str] = ("bleu", "chrf", "ter"),
    *,
    lang: str = "",
    tokenizer: str | None = None,
    lowercase: bool = False,
    samples: int = 0,
    seed: int = 12345,
    progress: Progress | None = None,
) -> list[Score]:
    """One Score for each metric; `references` holds one or more whole reference texts.

    With `samples` each score has a 95% interval from that many bootstrap samples.
    """
    check_parallel({"the translation": hypotheses}, references)
    names = [metrics] if isinstance(metrics, str) else metrics
    chosen = [Metric(name, lang, tokenizer, lowercase) for name in names]
    return [score_counts(metric, metric.count(hypotheses, references, progress), samples, seed) for metric in chosen]


def score_counts(metric: Metric, counts: Statistics, samples: int = 0, seed: int = 12345, prep: str = "") -> Score:
    """The Score of what `metric` counted; `prep` tells the signature what was done to the text before."""
    total = counts.sum(axis=0)
    interval = None
    if samples:
        interval = estimate_interval(metric.score_totals(bootstrap_totals([counts], samples, seed)[0]))
    signature = metric.signature(bs=samples or None, seed=seed if samples else None, prep=prep or None)
    return Score(metric.name, metric.score_total(total), signature, metric.describe_total(total), interval)
