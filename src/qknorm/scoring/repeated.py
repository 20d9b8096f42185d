"""BLEU of one system after another against the same reference, which is cut into words and counted once."""

from collections.abc import Sequence

from qknorm.scoring.line_checks import check_parallel
from qknorm.scoring.metrics import Metric


class RepeatedBleu:
    """`score` by bleu against one reference, or by multi-bleu where the text is tokenised, as often as is asked."""

    def __init__(self, reference: Sequence[str], *, tokenized: bool, lang: str = "") -> None:
        self._reference = list(reference)
        check_parallel({"the translation": self._reference}, [self._reference])
        self._metric = Metric("multi-bleu") if tokenized else Metric("bleu", lang)
        self._metric.remember([self._reference])

    def __call__(self, hypotheses: Sequence[str]) -> float:
        """The score of these translations, one for each line of the reference."""
        check_parallel({"the translation": hypotheses}, [self._reference])
        return self._metric.score_total(self._metric.count_against_remembered(hypotheses).sum(axis=0))
