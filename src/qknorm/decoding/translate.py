"""Text in, text out by PyTorch: batches of token ids through a search, plain or recorded."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from qknorm.attention.cache import moved_rows
from qknorm.config import Decoding
from qknorm.decoding.alignment import align_words
from qknorm.decoding.results import Alternative, Hypothesis, Translation, join_texts, space_between, split_long
from qknorm.decoding.search import beam_search
from qknorm.decoding.texts import BATCH_TOKENS, AnyTranslator, search_by_length
from qknorm.models.translator import DecoderCache, Memory, Translator
from qknorm.progress import Progress
from qknorm.text.batching import collate
from qknorm.text.subwords import Tokenizer

if TYPE_CHECKING:
    from qknorm.decoding.recorded_search import RecordedSearch


class Search(Protocol):
    """What finds hypotheses for source ids (b, s), as `beam_search` does; `RecordedSearch` is one."""

    source_step: int
    """What s is to be a multiple of."""

    def __call__(
        self, source: Tensor, max_lengths: Tensor, *, beam: int, alpha: float, nbest: int, no_repeat_ngram: int
    ) -> list[list[Hypothesis]]: ...


MANY = 64
"""Sentences from which on a GPU records its steps: for fewer that would take longer than it saves."""
GPU_BATCH_TOKENS = 131_072
"""Source tokens times beam at a time on a GPU, where the settings leave it open."""

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
    """`beam_search` with a model, step by step."""

    source_step = 1

    def __init__(self, model: Translator) -> None:
        self._model = model

    def __call__(
        self, source: Tensor, max_lengths: Tensor, *, beam: int, alpha: float, nbest: int, no_repeat_ngram: int
    ) -> list[list[Hypothesis]]:
        device = next(self._model.parameters()).device
        return beam_search(
            ModelStepper(self._model, source.to(device), beam),
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
    search: Search | None = None,
    progress: Progress | None = None,
) -> list[list[Hypothesis]]:
    """The best hypotheses for every source sentence, in the order given; an empty sentence translates to nothing.

    A `search` is made for this model and takes the place of the plain one.
    """
    find = search or PlainSearch(model)
    device = next(model.parameters()).device

    def search_batch(chosen: list[Sequence[int]], length: int) -> list[list[Hypothesis]]:
        source = torch.from_numpy(collate(chosen, [], (len(chosen), length)).source)
        limits = torch.tensor([len(ids) + settings.extra_length for ids in chosen])
        with torch.autocast(device.type, dtype=precision, enabled=precision != torch.float32):
            return find(
                source,
                limits,
                beam=settings.beam,
                alpha=settings.length_penalty,
                nbest=nbest,
                no_repeat_ngram=settings.no_repeat_ngram,
            )

    budget = settings.batch_tokens or (GPU_BATCH_TOKENS if device.type == "cuda" else BATCH_TOKENS)
    with evaluating(model):
        return search_by_length(
            sources, search_batch, budget=budget, beam=settings.beam, step=find.source_step, progress=progress
        )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within it a model computes without dropout; after it the model is as it was, whatever happened."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


class TextTranslator(AnyTranslator[Decoding]):
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

    def settings_for(self, asked: Mapping[str, float], nbest: int, *, align: bool) -> Decoding:
        settings = self.settings.model_copy(update=dict(asked))
        return settings.model_copy(update={"beam": max(settings.beam, nbest)})

    def search(
        self, sources: Sequence[Sequence[int]], settings: Decoding, *, nbest: int, progress: Progress | None
    ) -> list[list[Hypothesis]]:
        many = len(sources) >= MANY and _may_record(self.model)
        with self._one_at_a_time if many else nullcontext():
            return translate_ids(
                self.model,
                sources,
                settings,
                nbest=nbest,
                precision=self.precision,
                search=self._recorded_search() if many else None,
                progress=progress,
            )

    def align(self, text: str, parts: list[str], best: list[list[int]]) -> list[tuple[int, int]]:
        """By the attention of the model itself."""
        alignment: list[tuple[int, int]] = []
        place, joined = 0, ""
        for part, tokens in zip(parts, best, strict=True):
            links = align_words(self.model, self.tokenizer, part, tokens)
            sources = text.count(" ", 0, place)  # a part may begin in the middle of a word
            words = self.tokenizer.decode(tokens)
            targets = len(joined.split())
            if targets and not space_between(joined, words.strip()):  # its first word is one with the last before it
                targets -= 1
            alignment += [(sources + s, targets + t) for s, t in links]
            place += len(part)
            place += text.startswith(" ", place)
            joined = join_texts([joined, words])
        return alignment

    def _recorded_search(self) -> "RecordedSearch":
        """The one of the model and the precision in force, made now if there is none."""
        from qknorm.decoding.recorded_search import RecordedSearch

        before = self._recorded
        if before is None or before.model is not self.model or before.precision != self.precision:
            self._recorded = RecordedSearch(self.model, self.precision)
        assert self._recorded is not None
        return self._recorded


def _may_record(model: Translator) -> bool:
    """Whether steps of a model can be recorded: on a GPU."""
    return next(model.parameters()).is_cuda
