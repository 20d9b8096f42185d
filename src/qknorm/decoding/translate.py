"""Text in, text out: cuts and batches sentences, searches, and puts translations back in order."""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from qknorm.attention.cache import moved_rows
from qknorm.config import Decoding
from qknorm.decoding.alignment import align_words
from qknorm.decoding.results import Alternative, Hypothesis, Progress, Translation, split_long
from qknorm.decoding.search import Stepper, beam_search
from qknorm.models.translator import DecoderCache, Memory, Translator
from qknorm.text.batching import batches_by_length, collate
from qknorm.text.cleaning import clean_line
from qknorm.text.subwords import Tokenizer

if TYPE_CHECKING:
    from qknorm.decoding.recorded_search import RecordedSearch


class Search(Protocol):
    """What finds hypotheses for source ids (b, s), as `beam_search` does; `RecordedSearch` is one."""

    def __call__(
        self, source: Tensor, max_lengths: Tensor, *, beam: int, alpha: float, nbest: int, no_repeat_ngram: int
    ) -> list[list[Hypothesis]]: ...


MANY = 64
"""Sentences from which on a GPU records its steps: for fewer that would take longer than it saves."""
BATCH_TOKENS = {False: 16_384, True: 131_072}
"""Source tokens times beam at a time, on the CPU and on a GPU, where the settings leave it open."""

__all__ = ["Alternative", "ModelStepper", "Progress", "TextTranslator", "Translation", "split_long", "translate_ids"]


class ModelStepper:
    """A translator in the midst of decoding: b sentences, k hypotheses each."""

    def __init__(self, model: Translator, source: Tensor, beam: int) -> None:
        self._model, self._beam = model, beam
        self._memory = model.encode(source)
        self._cache = DecoderCache(len(model.decoder))

    def step(self, tokens_bk: Tensor) -> Tensor:
        states = self._model.decode(tokens_bk.reshape(-1, 1), self._memory, self._cache)
        logits = self._model.score(states, self._cache).float()
        return torch.log_softmax(logits, dim=-1).view(*tokens_bk.shape, -1)

    def state(self) -> tuple[Memory, DecoderCache]:
        """What it has read of the source and decoded so far."""
        return self._memory, self._cache

    def reorder(self, origin_bk: Tensor) -> None:
        first = torch.arange(len(origin_bk), device=origin_bk.device).unsqueeze(1) * self._beam
        moved = moved_rows((first + origin_bk).flatten())  # once for all layers: a GPU waits for the host here
        for cache in self._cache.own:
            cache.move(*moved)

    def keep(self, sentences: Tensor) -> None:
        self._memory = Memory(self._memory.states[sentences], self._memory.real[sentences])
        slots = torch.arange(self._beam, device=sentences.device)
        rows = (sentences.unsqueeze(1) * self._beam + slots).flatten()
        for own, across in zip(self._cache.own, self._cache.across, strict=True):
            own.reorder(rows)
            across.reorder(sentences)


class PlainSearch:
    """`beam_search` with steppers of a model, plain ones if no others are given."""

    def __init__(self, model: Translator, make_stepper: Callable[[Tensor, int], Stepper] | None = None) -> None:
        self._model = model
        self._make_stepper = make_stepper or functools.partial(ModelStepper, model)

    def __call__(
        self, source: Tensor, max_lengths: Tensor, *, beam: int, alpha: float, nbest: int, no_repeat_ngram: int
    ) -> list[list[Hypothesis]]:
        device = next(self._model.parameters()).device
        return beam_search(
            self._make_stepper(source.to(device), beam),
            len(source),
            max_lengths.to(device),
            beam=beam,
            alpha=alpha,
            nbest=nbest,
            no_repeat_ngram=no_repeat_ngram,
        )


@torch.no_grad()
def translate_ids(
    model: Translator,
    sources: Sequence[Sequence[int]],
    settings: Decoding,
    *,
    nbest: int = 1,
    precision: torch.dtype = torch.float32,
    make_stepper: Callable[[Tensor, int], Stepper] | None = None,
    search: Search | None = None,
    progress: Progress | None = None,
) -> list[list[Hypothesis]]:
    """The best hypotheses for every source sentence, in the order given; an empty sentence translates to nothing.

    A `search` is made for this model and takes the place of the plain one over steppers.
    """
    search = search or PlainSearch(model, make_stepper)
    device = next(model.parameters()).device
    found: list[list[Hypothesis]] = [[Hypothesis([], 0.0, 0.0)] for _ in sources]
    waiting = [i for i, ids in enumerate(sources) if len(ids)]
    done = 0
    budget = settings.batch_tokens or BATCH_TOKENS[device.type == "cuda"]
    # a search that records has few shapes to record where batches are cut as if lengths came in steps
    lengths = [len(sources[i]) if isinstance(search, PlainSearch) else -(-len(sources[i]) // 16) * 16 for i in waiting]
    with evaluating(model):
        for group in batches_by_length([length * settings.beam for length in lengths], budget):
            chosen = [waiting[i] for i in group]
            source = torch.from_numpy(collate([sources[i] for i in chosen], []).source)
            limits = torch.tensor([len(sources[i]) + settings.extra_length for i in chosen])
            with torch.autocast(device.type, dtype=precision, enabled=precision != torch.float32):
                results = search(
                    source,
                    limits,
                    beam=settings.beam,
                    alpha=settings.length_penalty,
                    nbest=nbest,
                    no_repeat_ngram=settings.no_repeat_ngram,
                )
            for i, hypotheses in zip(chosen, results, strict=True):
                found[i] = hypotheses
            done += len(chosen)
            if progress is not None:
                progress("translate", done, len(waiting))
    return found


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within it a model computes without dropout; after it the model is as it was, whatever happened."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


class TextTranslator:
    """A trained model with its tokenizer: `translate` is all most people need."""

    def __init__(
        self,
        model: Translator,
        tokenizer: Tokenizer,
        source: str,
        target: str,
        settings: Decoding,
        longest: int,
        *,
        precision: torch.dtype = torch.float32,
    ) -> None:
        self.model, self.tokenizer, self.settings = model.eval(), tokenizer, settings
        self.source, self.target = source, target
        self.longest, self.precision = longest, precision
        self._recorded: RecordedSearch | None = None
        self._one_at_a_time = threading.RLock()  # recordings have one set of buffers

    def __getstate__(self) -> dict[str, Any]:
        """Neither recordings nor locks can be copied; a copy makes its own."""
        return {name: value for name, value in vars(self).items() if name not in ("_recorded", "_one_at_a_time")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _recorded=None, _one_at_a_time=threading.RLock())

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

        A sentence longer than any in training is cut at spaces, translated in parts and put together again.
        """
        if isinstance(texts, str):
            raise TypeError("give a list of sentences, not one string")
        asked = {"beam": beam, "length_penalty": length_penalty, "no_repeat_ngram": no_repeat_ngram}
        settings = self.settings.model_copy(update={k: v for k, v in asked.items() if v is not None})
        settings = settings.model_copy(update={"beam": max(settings.beam, nbest)})
        cleaned = [clean_line(text) for text in texts]
        parts_of = [split_long(self.tokenizer, text, self.longest) for text in cleaned]
        sources = [self.tokenizer.encode(part) for parts in parts_of for part in parts]
        many = len(sources) >= MANY and _may_record(self.model)
        with self._one_at_a_time if many else nullcontext():
            found = iter(
                translate_ids(
                    self.model,
                    sources,
                    settings,
                    nbest=nbest,
                    precision=self.precision,
                    search=self._recorded_search() if many else None,
                    progress=progress,
                )
            )
        return [
            self._join(text, parts, [next(found) for _ in parts], align)
            for text, parts in zip(cleaned, parts_of, strict=True)
        ]

    def _recorded_search(self) -> "RecordedSearch":
        """The one of the model and the precision in force, made now if there is none."""
        from qknorm.decoding.recorded_search import RecordedSearch

        before = self._recorded
        if before is None or before.model is not self.model or before.precision != self.precision:
            self._recorded = RecordedSearch(self.model, self.precision)
        assert self._recorded is not None
        return self._recorded

    def _join(self, text: str, parts: list[str], found: list[list[Hypothesis]], align: bool) -> Translation:
        ranks = min(len(hypotheses) for hypotheses in found)
        alternatives = [
            Alternative(
                " ".join(filter(None, (self.tokenizer.decode(hypotheses[rank].tokens) for hypotheses in found))),
                sum(hypotheses[rank].score for hypotheses in found) / len(found),
            )
            for rank in range(ranks)
        ]
        alignment: list[tuple[int, int]] | None = None
        if align:
            alignment, place, targets = [], 0, 0
            for part, hypotheses in zip(parts, found, strict=True):
                links = align_words(self.model, self.tokenizer, part, hypotheses[0].tokens)
                sources = text.count(" ", 0, place)  # a part may begin in the middle of a word
                alignment += [(sources + s, targets + t) for s, t in links]
                place += len(part)
                place += text.startswith(" ", place)
                targets += len(self.tokenizer.decode(hypotheses[0].tokens).split())
        return Translation(alternatives[0].text, alternatives[0].score, alternatives, alignment, len(parts))


def _may_record(model: Translator) -> bool:
    """Whether steps of a model can be recorded: on a GPU."""
    return next(model.parameters()).is_cuda
