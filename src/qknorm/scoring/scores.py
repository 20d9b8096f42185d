"""Scores of one system, each with its signature."""

from collections.abc import Sequence
from dataclasses import dataclass

from qknorm.scoring.line_checks import check_parallel
from qknorm.scoring.metrics import METRICS, Detail, Metric, Progress
from qknorm.scoring.resampling import Interval, Statistics, bootstrap_totals, estimate_interval

__all__ = [
    "METRICS",
    "Score",
    "corpus_bleu",
    "multi_bleu",
    "multi_bleu_detok",
    "score",
    "score_counts",
    "tokenized_bleu",
]


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


def multi_bleu(hypotheses: Sequence[str], references: Sequence[Sequence[str]], *, lowercase: bool = False) -> Score:
    """The number of Moses' multi-bleu.perl on tokenised text: corpus BLEU-4 over words, unsmoothed.

    It is 0 where some order has no match. `lowercase` is the script's -lc, which lowers only A to Z.
    """
    return score(hypotheses, references, ("multi-bleu",), lowercase=lowercase)[0]


def multi_bleu_detok(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Score:
    """The number of Moses' multi-bleu-detok.perl, which makes its own tokens (mteval's 13a) of any text it is given.

    It is meant for plain text. The released QKNorm code runs it on tokenised text: there an `&apos;` of Moses'
    tokeniser becomes the three tokens `& apos ;`, which match easily, so that the score is higher, by about three BLEU
    on English text of the TED talks.
    """
    return score(hypotheses, references, ("multi-bleu-detok",))[0]


def corpus_bleu(hypotheses: Sequence[str], reference: Sequence[str], *, lang: str = "") -> float:
    """sacreBLEU's default BLEU of detokenised text against one reference."""
    return score(hypotheses, [reference], ("bleu",), lang=lang)[0].value


def tokenized_bleu(hypotheses: Sequence[str], reference: Sequence[str]) -> float:
    """The multi-bleu number of tokenised text against one reference."""
    return multi_bleu(hypotheses, [reference]).value
