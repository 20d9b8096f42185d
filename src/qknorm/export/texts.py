"""Text in, text out, for engines other than PyTorch: the same cutting, joining and results, and no torch."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from qknorm.decoding.results import Alternative, Hypothesis, Progress, Translation, split_long
from qknorm.errors import InputError
from qknorm.export.card import TOKENIZER, Card, read_card
from qknorm.export.search import check_settings
from qknorm.text.batching import batches_by_length
from qknorm.text.cleaning import clean_line
from qknorm.text.subwords import Tokenizer

BATCH_TOKENS = 16_384
"""Source tokens times beam at a time, where the settings leave it open."""


class EngineTranslator(ABC):
    """An exported translator in its folder: like `TextTranslator`, but for word alignment, which needs PyTorch."""

    engine: str

    def __init__(self, folder: Path) -> None:
        self.card = read_card(folder, self.engine)
        self.tokenizer = _load_tokenizer(folder / TOKENIZER, self.engine)
        if self.tokenizer.size != self.card.vocabulary:
            raise InputError(
                f"{folder / TOKENIZER} has {self.tokenizer.size:,} types but the model has {self.card.vocabulary:,}: "
                f"export the run again"
            )
        self.source, self.target = self.card.source, self.card.target

    @abstractmethod
    def search_batch(self, sources: list[Sequence[int]], card: Card, nbest: int) -> list[list[Hypothesis]]:
        """The best hypotheses for every sentence of a batch, none of which is empty, best first."""

    def search(
        self, sources: Sequence[Sequence[int]], card: Card, *, nbest: int, progress: Progress | None
    ) -> list[list[Hypothesis]]:
        """The best hypotheses for every source sentence, best first; an empty sentence translates to nothing."""
        found = [[Hypothesis([], 0.0, 0.0)] for _ in sources]
        waiting = [i for i, ids in enumerate(sources) if len(ids)]
        done, budget = 0, card.batch_tokens or BATCH_TOKENS
        for group in batches_by_length([len(sources[i]) * card.beam for i in waiting], budget):
            chosen = [waiting[i] for i in group]
            results = self.search_batch([sources[i] for i in chosen], card, nbest)
            for i, hypotheses in zip(chosen, results, strict=True):
                found[i] = hypotheses
            done += len(chosen)
            if progress is not None:
                progress("translate", done, len(waiting))
        return found

    def translate(self, texts: Sequence[str], **options: object) -> list[str]:
        """The best translation of every text; options are those of `explain`."""
        return [translation.text for translation in self.explain(texts, **options)]  # type: ignore[arg-type]

    def explain(
        self,
        texts: Sequence[str],
        *,
        nbest: int = 1,
        align: bool = False,
        beam: int | None = None,
        length_penalty: float | None = None,
        no_repeat_ngram: int | None = None,
        progress: Progress | None = None,
    ) -> list[Translation]:
        """Translations with scores and alternatives.

        A sentence longer than any in training is cut at spaces, translated in parts and put together again.
        """
        if isinstance(texts, str):
            raise TypeError("give a list of sentences, not one string")
        if align:
            raise InputError(f"the engine {self.engine} does not align words; use --engine torch on the run itself")
        asked = {"beam": beam, "length_penalty": length_penalty, "no_repeat_ngram": no_repeat_ngram}
        card = replace(self.card, **{name: value for name, value in asked.items() if value is not None})  # type: ignore[arg-type]
        card = replace(card, beam=max(card.beam, nbest))
        check_settings(card.beam, card.length_penalty, nbest, card.no_repeat_ngram)
        parts_of = [split_long(self.tokenizer, clean_line(text), card.longest) for text in texts]
        sources = [self.tokenizer.encode(part) for parts in parts_of for part in parts]
        found = iter(self.search(sources, card, nbest=nbest, progress=progress))
        return [self._join([next(found) for _ in parts]) for parts in parts_of]

    def _join(self, found: list[list[Hypothesis]]) -> Translation:
        alternatives = [
            Alternative(
                " ".join(filter(None, (self.tokenizer.decode(hypotheses[rank].tokens) for hypotheses in found))),
                sum(hypotheses[rank].score for hypotheses in found) / len(found),
            )
            for rank in range(min(len(hypotheses) for hypotheses in found))
        ]
        return Translation(alternatives[0].text, alternatives[0].score, alternatives, parts=len(found))


def _load_tokenizer(path: Path, engine: str) -> Tokenizer:
    try:
        return Tokenizer.load(path)
    except InputError:
        what = "is damaged" if path.is_file() else "is missing"
        raise InputError(f"{path} {what}; write it again with qknorm export RUN --to {engine}") from None
