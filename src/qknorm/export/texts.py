"""Exported translators in their folders, for engines other than PyTorch, and without it."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from qknorm.decoding.results import Hypothesis
from qknorm.decoding.texts import BATCH_TOKENS, AnyTranslator, search_by_length
from qknorm.errors import InputError
from qknorm.export.card import TOKENIZER, Card, read_card
from qknorm.export.search import check_settings
from qknorm.progress import Progress
from qknorm.text.subwords import Tokenizer


class EngineTranslator(AnyTranslator[Card]):
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
        self.source, self.target, self.longest = self.card.source, self.card.target, self.card.longest

    @abstractmethod
    def search_batch(self, sources: list[Sequence[int]], card: Card, nbest: int) -> list[list[Hypothesis]]:
        """The best hypotheses for every sentence of a batch, none of which is empty, best first."""

    def search(
        self, sources: Sequence[Sequence[int]], settings: Card, *, nbest: int, progress: Progress | None
    ) -> list[list[Hypothesis]]:
        return search_by_length(
            sources,
            lambda chosen, _: self.search_batch(chosen, settings, nbest),
            budget=settings.batch_tokens or BATCH_TOKENS,
            beam=settings.beam,
            progress=progress,
        )

    def settings_for(self, asked: Mapping[str, float], nbest: int, *, align: bool) -> Card:
        if align:
            raise InputError(f"the engine {self.engine} does not align words; use --engine torch on the run itself")
        card = replace(self.card, **asked)  # type: ignore[arg-type]
        card = replace(card, beam=max(card.beam, nbest))
        check_settings(card.beam, card.length_penalty, nbest, card.no_repeat_ngram)
        return card


def _load_tokenizer(path: Path, engine: str) -> Tokenizer:
    try:
        return Tokenizer.load(path)
    except InputError:
        what = "is damaged" if path.is_file() else "is missing"
        raise InputError(f"{path} {what}; write it again with qknorm export RUN --to {engine}") from None
