"""Translating with CTranslate2 and tokenizers alone: no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qknorm.decoding.results import Hypothesis
from qknorm.errors import InputError
from qknorm.export.card import Card
from qknorm.export.texts import EngineTranslator
from qknorm.specials import END


def import_ctranslate2() -> Any:
    """The package ctranslate2, or a sentence on how to get it."""
    try:
        import ctranslate2
    except ImportError:
        raise InputError("this needs the package ctranslate2; get it with pip install 'qknorm[ctranslate2]'") from None
    return ctranslate2


class CTranslate2Translator(EngineTranslator):
    """A folder that `qknorm export RUN --to ctranslate2` wrote, ready for `translate`.

    The search is CTranslate2's: finished hypotheses leave the beam, where in ours they keep their slot. What it finds
    is ranked by our length penalty, which it does not know.
    """

    engine = "ctranslate2"

    def __init__(self, folder: str | Path, *, threads: int | None = None) -> None:
        super().__init__(Path(folder))
        ctranslate2 = import_ctranslate2()
        self._ids = {token: number for number, token in enumerate(self.tokenizer.tokens(range(self.tokenizer.size)))}
        try:
            self._model = ctranslate2.Translator(
                str(folder),
                device="cpu",
                compute_type=self.card.precision,
                intra_threads=threads or 0,
                flash_attention=False,  # exact without it alone
            )
        except (RuntimeError, ValueError) as error:
            raise InputError(f"{folder} cannot be loaded by CTranslate2 ({error}); export the run again") from None

    def log_probabilities(
        self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Of every token of each target and of its end, given its source and what stands before it."""
        tokens = self.tokenizer.tokens
        scored = self._model.score_batch([tokens(ids) for ids in sources], [tokens(ids) for ids in targets])
        return [list(each.log_probs) for each in scored]

    def search_batch(self, sources: list[Sequence[int]], card: Card, nbest: int) -> list[list[Hypothesis]]:
        """Sentences have limits of their own, which one call cannot tell the search."""
        limit = max(map(len, sources)) + card.extra_length
        found = self._call(sources, limit, card)
        for i, ids in enumerate(sources):
            own = len(ids) + card.extra_length
            if own < limit and any(len(each.tokens) + 1 > own for each in found[i]):
                found[i] = self._call([ids], own, card)[0]
        return [sorted(hypotheses, key=_worst_last)[:nbest] for hypotheses in found]

    def _call(self, sources: list[Sequence[int]], limit: int, card: Card) -> list[list[Hypothesis]]:
        results = self._model.translate_batch(
            [self.tokenizer.tokens(ids) for ids in sources],
            beam_size=card.beam,
            num_hypotheses=card.beam,
            length_penalty=0,
            no_repeat_ngram_size=card.no_repeat_ngram,
            max_input_length=0,
            max_decoding_length=limit,
            return_scores=True,
            return_end_token=True,
        )
        return [
            [
                self._hypothesis(tokens, score, card)
                for tokens, score in zip(result.hypotheses, result.scores, strict=True)
            ]
            for result in results
        ]

    def _hypothesis(self, tokens: list[str], log_probability: float, card: Card) -> Hypothesis:
        ids = [self._ids[token] for token in tokens]
        penalty = ((5 + len(ids)) / 6) ** card.length_penalty
        return Hypothesis(ids[:-1] if ids[-1:] == [END] else ids, log_probability / penalty, log_probability)


def _worst_last(hypothesis: Hypothesis) -> tuple[float, int]:
    """Orders hypotheses best first, the shorter first among equals."""
    return -hypothesis.score, len(hypothesis.tokens)
