"""Whether a model can be exported, before it is trained: a random one of the same settings is, and compared."""

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from qknorm.config import Train
from qknorm.decoding.translate import TextTranslator
from qknorm.errors import InputError
from qknorm.export import Target, ctranslate2, huggingface, onnx
from qknorm.export.ctranslate2_engine import CTranslate2Translator
from qknorm.export.onnx import TOLERANCE
from qknorm.models.translator import Translator, start_of_scale
from qknorm.specials import END
from qknorm.text.batching import collate
from qknorm.text.prepared import PreparedData
from qknorm.training.run_folder import allowed_types

SENTENCES = 12
SPREAD = 0.1
"""Standard deviation of what is added to every parameter, so that none of them is left at a start that hides it."""

Ids = Sequence[Sequence[int]]
Logits = Callable[[Tensor, Tensor], Tensor]
"""Logits (b, t, v) of source ids and of target ids that begin with the start."""
Difference = Callable[[TextTranslator, Path, Ids, Ids], float]


def check_export(target: Target, settings: Train, data: PreparedData) -> float:
    """Exports a random model of these settings and returns how far its log-probabilities are from PyTorch's.

    Refuses settings that cannot be exported to this target, and says what to change.
    """
    translator = random_translator(settings, data)
    pairs = data.split("dev" if "dev" in data.splits else "train")
    chosen = range(min(SENTENCES, len(pairs)))
    sources, targets = ([side[i].tolist() for i in chosen] for side in (pairs.source, pairs.target))
    with tempfile.TemporaryDirectory(prefix="qknorm-check-") as folder:
        apart = _DIFFERENCES[target](translator, Path(folder), sources, targets)
    if not apart <= TOLERANCE:
        raise InputError(
            f"a model of these settings cannot be exported to {target}: log-probabilities differ by {apart:.2g} there; "
            f"train without --for, or for another target"
        )
    return apart


def random_translator(settings: Train, data: PreparedData) -> TextTranslator:
    """A translator as these settings begin with it on these data, and no parameter of which is at its start."""
    allowed = allowed_types(settings, data)
    start = start_of_scale(settings.model, data.length_percentile(settings.model.attention.scale_percentile))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = Translator(data.tokenizer.size, settings.model, scale_init=start, allowed=allowed)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=SPREAD * _size(parameter))
    longest = int(data.length_percentile(100))
    return TextTranslator(model, data.tokenizer, data.source, data.target, settings.decoding, longest)


def _size(parameter: Tensor) -> float:
    """Of a typical entry; 1 for what starts at zero, such as biases."""
    return float(parameter.square().mean().sqrt()) or 1.0


@torch.no_grad()
def log_probabilities(logits_of: Logits, sources: Ids, targets: Ids) -> list[list[float]]:
    """Of every token of each target and of its end, given its source and what stands before it."""
    arrays = collate(sources, targets)
    log_p_btv = logits_of(torch.from_numpy(arrays.source), torch.from_numpy(arrays.target_in)).log_softmax(-1)
    return [row[torch.arange(len(ids) + 1), [*ids, END]].tolist() for row, ids in zip(log_p_btv, targets, strict=True)]


def largest_difference(expected: list[list[float]], found: list[list[float]]) -> float:
    """Between two answers, of tokens that may be produced at all; infinite where one of them is no number."""
    apart = [
        abs(one - other)
        for row, others in zip(expected, found, strict=True)
        for one, other in zip(row, others, strict=True)
        if one > -math.inf
    ]
    return math.inf if any(math.isnan(each) for each in apart) else max(apart, default=0.0)


# ------------------------------------------------------------------ the targets


def _differs_in_onnx(translator: TextTranslator, folder: Path, sources: Ids, targets: Ids) -> float:
    del sources, targets  # it draws sentences of its own, and beams
    return onnx.write_folder(translator, folder)


def _differs_in_ctranslate2(translator: TextTranslator, folder: Path, sources: Ids, targets: Ids) -> float:
    ctranslate2.write_folder(translator, folder)
    found = CTranslate2Translator(folder).log_probabilities(sources, targets)
    return largest_difference(log_probabilities(translator.model, sources, targets), found)


def _differs_in_huggingface(translator: TextTranslator, folder: Path, sources: Ids, targets: Ids) -> float:
    huggingface.write_folder(translator, folder)
    model = huggingface.load_model(folder)
    found = log_probabilities(lambda s, t: model(s, decoder_input_ids=t).logits, sources, targets)
    return largest_difference(log_probabilities(translator.model, sources, targets), found)


_DIFFERENCES: dict[Target, Difference] = {
    "onnx": _differs_in_onnx,
    "huggingface": _differs_in_huggingface,
    "ctranslate2": _differs_in_ctranslate2,
}
