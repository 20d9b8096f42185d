"""BLEU of one system after another against the same reference, of which everything is counted once."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from qknorm.scoring.line_checks import check_parallel
from qknorm.scoring.metrics import Metric

ORDERS = 4
"""N-grams of up to so many words count."""


class RepeatedBleu:
    """`corpus_bleu` against one reference, or `tokenized_bleu` where the text is tokenised, as often as is asked.

    sacreBLEU cuts text into words and turns counts into a score; counting n-grams, which takes most of the time, is
    done here, of the reference once and of a translation where it is not the one of the last time.
    """

    def __init__(self, reference: Sequence[str], *, tokenized: bool, lang: str = "") -> None:
        self._reference = list(reference)
        check_parallel({"the translation": self._reference}, [self._reference])
        self._metric = Metric("multi-bleu") if tokenized else Metric("bleu", lang)
        self._known = [_count_ngrams(self._words(line)) for line in self._reference]
        self._lines: list[str | None] = [None] * len(self._reference)
        self._rows: list[list[int]] = [[]] * len(self._reference)

    def __call__(self, hypotheses: Sequence[str]) -> float:
        """The score of these translations, one for each line of the reference."""
        check_parallel({"the translation": hypotheses}, [self._reference])
        for i, line in enumerate(hypotheses):
            if line != self._lines[i]:
                self._lines[i], self._rows[i] = line, _count_matches(self._words(line), self._known[i])
        return self._metric.score_total(np.array(self._rows, dtype=np.float64).sum(axis=0))

    def _words(self, line: str) -> list[str]:
        return self._metric._metric._preprocess_segment(self._metric._prepare(line)).split()


Ngrams = list[Counter[tuple[str, ...]]]


def _count_ngrams(words: list[str]) -> Ngrams:
    """The n-grams of a line, order by order."""
    return [Counter(zip(*(words[i:] for i in range(n)), strict=False)) for n in range(1, ORDERS + 1)]


def _count_matches(words: list[str], known: Ngrams) -> list[int]:
    """What sacreBLEU counts in a line: its length, that of the reference, n-grams that match, and all n-grams."""
    matches = []
    for n, ngrams in enumerate(known, start=1):
        found = list(filter(ngrams.__contains__, zip(*(words[i:] for i in range(n)), strict=False)))
        if len(set(found)) == len(found):  # most often; then each is there once at least
            matches.append(len(found))
        else:
            matches.append(sum(min(count, ngrams[ngram]) for ngram, count in Counter(found).items()))
    all_ngrams = [max(0, len(words) - n) for n in range(ORDERS)]
    return [len(words), sum(known[0].values()), *matches, *all_ngrams]
