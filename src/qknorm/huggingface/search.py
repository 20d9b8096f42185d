"""Our beam search and length penalty for `generate` of transformers."""

from typing import Any

import torch
from torch import Tensor

from qknorm.decoding.search import beam_search
from qknorm.decoding.translate import ModelStepper
from qknorm.huggingface.model import QKNormForConditionalGeneration, read_memory
from qknorm.models.translator import DecoderCache, Memory, Translator
from qknorm.specials import END, PAD, START


class _StepperFromMemory(ModelStepper):
    """Begins from what was read of the sources already."""

    def __init__(self, model: Translator, memory: Memory, beam: int) -> None:
        self._model, self._memory, self._beam = model, memory, beam
        self._cache = DecoderCache(len(model.decoder))


def search(
    model: QKNormForConditionalGeneration,
    input_ids: Tensor,
    *,
    generation_config: Any,
    encoder_outputs: Any,
    attention_mask: Tensor | None = None,
    logits_processor: object = None,
    stopping_criteria: object = None,
    **_: object,
) -> Tensor:
    """Our beam search and length penalty, for `model.generate(…, custom_generate=search)`.

    Of the generation's settings it follows num_beams, num_return_sequences, length_penalty (the exponent of our
    penalty), max_new_tokens or max_length, and no_repeat_ngram_size. An empty source translates to nothing.
    """
    del logits_processor, stopping_criteria
    beam, wanted = generation_config.num_beams, generation_config.num_return_sequences
    sentences = len(input_ids) // max(beam, wanted)
    states = _once(encoder_outputs[0], sentences)
    memory = read_memory(states, None if attention_mask is None else _once(attention_mask, sentences), None)
    most = generation_config.max_length - input_ids.shape[1]
    lengths = memory.real.sum(dim=(1, 2, 3)) - 1
    limits = (lengths + model.config.extra_length).clamp(max=most)
    found = beam_search(
        _StepperFromMemory(model.translator, memory, beam),
        sentences,
        limits,
        beam=beam,
        alpha=generation_config.length_penalty,
        nbest=wanted,
        no_repeat_ngram=generation_config.no_repeat_ngram_size or 0,
    )
    rows = [
        [START, *(each.tokens if length else ()), END]
        for best, length in zip(found, lengths.tolist(), strict=True)
        for each in (best * wanted)[:wanted]
    ]
    sequences = torch.full((len(rows), max(map(len, rows))), PAD, device=states.device)
    for sequence, row in zip(sequences, rows, strict=True):
        sequence[: len(row)] = torch.tensor(row, device=states.device)
    return sequences


def _once(rows: Tensor, sentences: int) -> Tensor:
    """One row a sentence of what transformers may have repeated for the beam."""
    return rows[:: len(rows) // sentences]
