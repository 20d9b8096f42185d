"""Test scores by the measures that the papers use, and the counts that tests between systems are made of."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # these import sacrebleu, which a command's help does without; so do those that methods import below
    from qknorm.scoring.resampling import Statistics
    from qknorm.scoring.scores import Score

TOKENISED, RELEASED, MOSES, TREEBANK, PLAIN = "multi-bleu", "multi-bleu-detok", "bleu-moses", "bleu-treebank", "bleu"
"""BLEU over the tokens as they are; as the released code scores them; after Moses' detokeniser; after NLTK's Treebank
one; of text never tokenised."""


def measures_for(pretokenized: bool) -> tuple[str, ...]:
    """The measures that fit a text; the first is the one it was chosen by on dev."""
    return (TOKENISED, RELEASED, MOSES, TREEBANK) if pretokenized else (PLAIN,)


class Measure:
    """A measure for a target language."""

    def __init__(self, name: str, language: str) -> None:
        from qknorm.scoring.metrics import AS_GIVEN, Metric

        self.name, self._language = name, language
        self.metric = Metric(name) if name in AS_GIVEN else Metric("bleu", language)

    def count(self, translations: Sequence[str], references: Sequence[str]) -> "Statistics":
        """What the measure counts, one row a sentence."""
        return self.metric.count(self._prepare(translations), [self._prepare(references)])

    def score(self, translations: Sequence[str], references: Sequence[str]) -> "Score":
        """The score with its signature."""
        from qknorm.scoring.scores import score_counts

        prep = {MOSES: f"unescape+moses-detok[{self._language}]", TREEBANK: "treebank-detok"}.get(self.name, "")
        return score_counts(self.metric, self.count(translations, references), prep=prep)

    def _prepare(self, lines: Sequence[str]) -> Sequence[str]:
        from qknorm.scoring import detokenize, treebank_detokenize

        if self.name == MOSES:
            return detokenize(lines, self._language)
        return treebank_detokenize(lines) if self.name == TREEBANK else lines
