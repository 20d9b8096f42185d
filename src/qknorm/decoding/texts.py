"""Text in, text out, whichever engine searches: cutting, batches, joining. Nothing here imports PyTorch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from qknorm.decoding.results import Alternative, Hypothesis, Translation, join_texts, split_long
from qknorm.errors import InputError
from qknorm.progress import Progress
from qknorm.text.batching import batches_by_length
from qknorm.text.cleaning import clean_line
from qknorm.text.subwords import Tokenizer

Settings = TypeVar("Settings")
SearchBatch = Callable[[list[Sequence[int]], int], list[list[Hypothesis]]]
"""Finds the best hypotheses for sources, none of which is empty; told the length to pad them to."""

BATCH_TOKENS = 16_384
"""Source tokens times beam at a time on a CPU, where the settings leave it open."""


class AnyTranslator(ABC, Generic[Settings]):
    """What turns texts into translations with an engine; each engine has a form of settings of its own."""

    tokenizer: Tokenizer
    source: str
    target: str
    longest: int
    """Tokens of the longest sentence in training: what is longer is cut."""

    @abstractmethod
    def settings_for(self, asked: Mapping[str, float], nbest: int, *, align: bool) -> Settings:
        """The settings with what is asked for instead of some, and a beam of `nbest` at least; refuses what is odd."""

    @abstractmethod
    def search(
        self, sources: Sequence[Sequence[int]], settings: Settings, *, nbest: int, progress: Progress | None
    ) -> list[list[Hypothesis]]:
        """The best hypotheses for every source sentence, best first; an empty sentence translates to nothing."""

    def align(self, text: str, parts: list[str], best: list[list[int]]) -> list[tuple[int, int]]:
        """Which word of the text each word came from, given the tokens found for its parts."""
        raise NotImplementedError(f"{type(self).__name__} does not align words, and should have refused to")

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
        """Translations with scores, alternatives and, where asked for, word alignments.

        A sentence longer than any in training is cut after stops or at spaces, translated in parts and put together.
        The beam of the settings grows to `nbest`; one that is asked for does not: it would change the best translation.
        """
        if isinstance(texts, str):
            raise TypeError("give a list of sentences, not one string")
        check_nbest(nbest, beam)
        asked = {"beam": beam, "length_penalty": length_penalty, "no_repeat_ngram": no_repeat_ngram}
        given = {name: value for name, value in asked.items() if value is not None}
        settings = self.settings_for(given, nbest, align=align)
        cleaned = [clean_line(text) for text in texts]
        parts_of = [split_long(self.tokenizer, text, self.longest) for text in cleaned]
        sources = [self.tokenizer.encode(part) for parts in parts_of for part in parts]
        found = iter(self.search(sources, settings, nbest=nbest, progress=progress))
        return [
            self._join(text, parts, [next(found) for _ in parts], align)
            for text, parts in zip(cleaned, parts_of, strict=True)
        ]

    def _join(self, text: str, parts: list[str], found: list[list[Hypothesis]], align: bool) -> Translation:
        alternatives = [
            Alternative(
                join_texts(self.tokenizer.decode(hypotheses[rank].tokens) for hypotheses in found),
                sum(hypotheses[rank].score for hypotheses in found) / len(found),
            )
            for rank in range(min(len(hypotheses) for hypotheses in found))
        ]
        alignment = self.align(text, parts, [hypotheses[0].tokens for hypotheses in found]) if align else None
        return Translation(alternatives[0].text, alternatives[0].score, alternatives, alignment, len(parts))


def search_by_length(
    sources: Sequence[Sequence[int]],
    search_batch: SearchBatch,
    *,
    budget: int,
    beam: int,
    step: int = 1,
    progress: Progress | None = None,
) -> list[list[Hypothesis]]:
    """What is found for every source, in the order given, by batches of like length; for an empty one, nothing.

    A batch is padded to a multiple of `step` that has room for its longest source and the end after it; sentences times
    beam times that stay within `budget`.
    """
    found = [[Hypothesis([], 0.0, 0.0)] for _ in sources]
    waiting = [i for i, ids in enumerate(sources) if len(ids)]
    lengths = [padded_length(len(sources[i]), step) for i in waiting]
    done = 0
    for group in batches_by_length([length * beam for length in lengths], budget):
        chosen = [waiting[i] for i in group]
        results = search_batch([sources[i] for i in chosen], lengths[group[0]])  # the longest comes first
        for i, hypotheses in zip(chosen, results, strict=True):
            found[i] = hypotheses
        done += len(chosen)
        if progress is not None:
            progress("translate", done, len(waiting))
    return found


def padded_length(tokens: int, step: int) -> int:
    """The least multiple of `step` that holds so many tokens and the end of the sentence."""
    return -(-(tokens + 1) // step) * step


def check_nbest(nbest: int, beam: int | None) -> None:
    """Refuses more alternatives than the beam that is asked for would find."""
    if beam is not None and nbest > beam:
        raise InputError(f"a beam of {beam} finds no {nbest} alternatives; raise beam, lower nbest, or leave beam out")
