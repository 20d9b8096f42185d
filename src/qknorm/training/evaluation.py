"""How good a model is on a split: its loss, and the BLEU of what it really translates."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qknorm.config import Decoding
from qknorm.decoding.graphs import Graphs
from qknorm.decoding.recorded_search import RecordedSearch, addresses_of
from qknorm.decoding.results import Hypothesis
from qknorm.decoding.translate import evaluating, translate_ids
from qknorm.models.translator import Translator
from qknorm.progress import Progress
from qknorm.scoring.repeated import RepeatedBleu
from qknorm.text.batching import Arrays, collate, plan_batches
from qknorm.text.prepared import PreparedData, Split
from qknorm.training.objective import label_smoothed_loss

RECORDED_BATCH_TOKENS = 1 << 19
"""Source tokens times beam at a time where the search is recorded: what its long tail costs hardly depends on rows."""
MOST_RECORDED_BATCHES = 128
"""A loss over more is computed batch by batch: a recording of them all would take too much memory for itself."""


@dataclass(frozen=True)
class Evaluation:
    """Loss in nats a token (without smoothing), perplexity, BLEU, and the translations themselves."""

    loss: float
    perplexity: float
    bleu: float
    translations: list[str]


class Evaluator:
    """Evaluates one split again and again: what can be made ready once is.

    On a GPU a whole evaluation is recorded, shape by shape, as it comes up, and replayed from then on; the recordings
    read the weights in force, and hold while these stay where they are.
    """

    def __init__(
        self,
        data: PreparedData,
        split: str,
        settings: Decoding,
        *,
        sentences: int | None = None,
        precision: torch.dtype = torch.float32,
    ) -> None:
        self._settings, self._tokenizer, self._precision = settings, data.tokenizer, precision
        rows = data.split(split)
        self.recorded: RecordedSearch | None = None
        self.loss = DevLoss(rows)
        count = min(len(rows), sentences or len(rows))
        self._sources = [rows.source[i].tolist() for i in range(count)]
        self._bleu = RepeatedBleu(
            rows.text(data.target)[:count], tokenized=data.tokenizer.pretokenized, lang=data.target
        )

    def __call__(self, model: Translator, progress: Progress | None = None) -> Evaluation:
        """Leaves the model as it was."""
        found = self.search(model, progress)
        sums = self.loss.begin(model)  # computed while the host counts words
        translations = self.texts(found)
        bleu = self.bleu(translations)
        loss = self.loss.read(sums)
        return Evaluation(loss, math.exp(min(loss, 700.0)), bleu, translations)

    def search(self, model: Translator, progress: Progress | None = None) -> list[list[Hypothesis]]:
        """What the model finds for every source."""
        search, settings = self._search_for(model), self._settings
        if search is not None and settings.batch_tokens is None and not settings.no_repeat_ngram:
            settings = settings.model_copy(update={"batch_tokens": RECORDED_BATCH_TOKENS})
        return translate_ids(
            model, self._sources, settings, precision=self._precision, search=search, progress=progress
        )

    def texts(self, found: list[list[Hypothesis]]) -> list[str]:
        """The best hypotheses as text."""
        return [self._tokenizer.decode(best.tokens) for best, *_ in found]

    def bleu(self, translations: list[str]) -> float:
        """Over the tokens of text that came tokenised, sacreBLEU's own for raw text."""
        return self._bleu(translations)

    def _search_for(self, model: Translator) -> RecordedSearch | None:
        if not next(model.parameters()).is_cuda or _is_shared_out(model):
            return None
        if self.recorded is None or self.recorded.model is not model:
            self.recorded = RecordedSearch(model, self._precision)
        return self.recorded


class DevLoss:
    """Mean cross-entropy in nats of a split's target tokens, without smoothing and dropout, in float32."""

    def __init__(self, split: Split, budget: int = 8_192) -> None:
        self._split, self._budget = split, budget
        self._batches: list[tuple[Tensor, ...]] = []
        self._sums = torch.zeros(2, dtype=torch.float64)
        self._graphs = Graphs(torch.device("cpu"))
        self._made_for: tuple[int, ...] = ()

    def __call__(self, model: Translator) -> float:
        """Leaves the model as it was."""
        return self.read(self.begin(model))

    @torch.no_grad()
    def begin(self, model: Translator) -> Tensor:
        """The same, without waiting for a GPU; `read` gives the number, before the next one is begun."""
        self._make_ready(model)
        with evaluating(model):
            self._graphs.run("loss", lambda: self._add_up(model))
        return self._sums

    @staticmethod
    def read(sums: Tensor) -> float:
        """What was begun."""
        loss, tokens = sums.tolist()
        return float(loss / max(tokens, 1.0))

    def _add_up(self, model: Translator) -> None:
        self._sums.zero_()
        for source, target_in, target_out in self._batches:
            losses = label_smoothed_loss(model(source, target_in), target_out, model.allowed, 0.0)
            self._sums += torch.stack([losses.plain, losses.tokens.float()])

    def _make_ready(self, model: Translator) -> None:
        """Puts all batches where the model is; a recording is thrown away where its weights are not in their place."""
        device = next(model.parameters()).device
        if self._sums.device != device or not self._batches:
            self._sums = self._sums.to(device)
            self._batches = [tuple(torch.from_numpy(part).to(device) for part in batch) for batch in self._arrays()]
            self._made_for = ()
        record = not _is_shared_out(model) and len(self._batches) <= MOST_RECORDED_BATCHES
        weights = id(model), *(addresses_of(model) if record else ())
        if weights != self._made_for:
            self._graphs, self._made_for = Graphs(device, record=record), weights

    def _arrays(self) -> Iterator[Arrays]:
        source, target = self._split.source, self._split.target
        for batch in plan_batches(source.lengths + 1, target.lengths + 1, self._budget):
            chosen = [int(i) for i in batch.sentences]
            yield collate([source[i] for i in chosen], [target[i] for i in chosen])


def _is_shared_out(model: Translator) -> bool:
    """Whether this process holds a share of each weight, which every step gathers: then nothing can be recorded."""
    return hasattr(next(model.parameters()), "full_tensor")
