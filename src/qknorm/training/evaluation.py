"""How good a model is on a split: its loss, and the BLEU of what it really translates."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from qknorm.config import Decoding
from qknorm.decoding.recorded import RecordedDecoder
from qknorm.decoding.translate import translate_ids
from qknorm.models.translator import Translator
from qknorm.scoring import corpus_bleu, tokenized_bleu
from qknorm.text.batching import collate, plan_batches
from qknorm.text.prepared import PreparedData, Split
from qknorm.text.subwords import Tokenizer
from qknorm.training.objective import label_smoothed_loss


@dataclass(frozen=True)
class Evaluation:
    """Loss in nats a token (without smoothing), perplexity, BLEU, and the translations themselves."""

    loss: float
    perplexity: float
    bleu: float
    translations: list[str]


class Evaluator:
    """Evaluates one split again and again: what can be made ready once is."""

    def __init__(self, data: PreparedData, split: str, settings: Decoding, *, sentences: int | None = None) -> None:
        self._split, self._settings, self._tokenizer = data.split(split), settings, data.tokenizer
        self._target = data.target
        self._recorded: RecordedDecoder | None = None
        count = min(len(self._split), sentences or len(self._split))
        self._sources = [self._split.source[i].tolist() for i in range(count)]
        self._references = self._split.text(data.target)[:count]

    def __call__(self, model: Translator, progress: Callable[[str, int, int | None], None] | None = None) -> Evaluation:
        """Leaves the model as it was. On a GPU its decoding steps are recorded and replayed at the next evaluations."""
        loss = dev_loss(model, self._split)
        found = translate_ids(
            model, self._sources, self._settings, make_stepper=self._stepper_for(model), progress=progress
        )
        translations = [self._tokenizer.decode(best.tokens) for best, *_ in found]
        bleu = bleu_like_its_text(self._tokenizer, translations, self._references, self._target)
        return Evaluation(loss, math.exp(min(loss, 700.0)), bleu, translations)

    def _stepper_for(self, model: Translator) -> RecordedDecoder | None:
        weights = next(model.parameters())
        if not weights.is_cuda or hasattr(weights, "full_tensor"):  # a share of a model is gathered by every step
            return None
        if self._recorded is None or self._recorded.model is not model:
            self._recorded = RecordedDecoder(model, torch.float32)
        return self._recorded


def bleu_like_its_text(tokenizer: Tokenizer, translations: list[str], references: list[str], language: str) -> float:
    """BLEU over the tokens of text that came tokenised, sacreBLEU's own tokens for raw text."""
    if tokenizer.pretokenized:
        return tokenized_bleu(translations, references)
    return corpus_bleu(translations, references, lang=language)


@torch.no_grad()
def dev_loss(model: Translator, split: Split, budget: int = 8_192) -> float:
    """Mean cross-entropy in nats of the target tokens, without smoothing and dropout."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in plan_batches(split.source.lengths + 1, split.target.lengths + 1, budget):
        arrays = collate(
            [split.source[int(i)] for i in batch.sentences], [split.target[int(i)] for i in batch.sentences]
        )
        source, target_in, target_out = (torch.from_numpy(array).to(device) for array in arrays)
        losses = label_smoothed_loss(model(source, target_in), target_out, model.allowed, 0.0)
        sums += torch.stack([losses.plain, losses.tokens.float()])
    model.train(training)
    return float(sums[0] / sums[1].clamp(min=1))
