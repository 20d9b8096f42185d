"""CTranslate2 on the same work as ours: a model of the same size, made of random weights with its own layers."""

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy
import torch

from qknorm.config import Model
from qknorm.models.layers import sinusoids


class CTranslate2Peer:
    """Decodes with CTranslate2 in one precision (float32 or int8); raises ImportError where it is not installed."""

    def __init__(self, settings: Model, vocabulary: int, precision: str, longest: int) -> None:
        if torch.backends.cpu.get_cpu_capability() == "AVX512":
            # read when it is imported; on AMD it would else leave these instructions unused, and be slower
            os.environ.setdefault("CT2_FORCE_CPU_ISA", "AVX512")
        import ctranslate2

        self._words = ["<unk>", "<s>", "</s>", *(str(number) for number in range(3, vocabulary))]
        with tempfile.TemporaryDirectory() as folder:
            _write_model(Path(folder), settings, self._words, longest)
            self._translator = ctranslate2.Translator(
                folder,
                device="cpu",
                compute_type=precision,
                inter_threads=1,
                intra_threads=torch.get_num_threads(),
            )

    def decode(self, source: list[list[int]], beam: int, steps: int, at_once: int) -> None:
        """Translates sentences of ids, each held to so many tokens."""
        found = self._translator.translate_batch(
            [[self._words[number] for number in sentence] for sentence in source],
            beam_size=beam,
            max_batch_size=at_once,
            min_decoding_length=steps,
            max_decoding_length=steps,
        )
        assert all(len(each.hypotheses[0]) == steps for each in found)


def _write_model(folder: Path, settings: Model, words: list[str], longest: int) -> None:
    from ctranslate2.specs import TransformerSpec

    layers = (settings.encoder_layers, settings.decoder_layers)
    spec = TransformerSpec.from_config(layers, settings.heads, pre_norm=True)
    draw = numpy.random.default_rng(0)
    width, hidden = settings.width, settings.feed_forward
    table = draw.normal(0, width**-0.5, (len(words), width)).astype(numpy.float32)
    for stack in (spec.encoder, spec.decoder):
        embeddings = stack.embeddings[0] if isinstance(stack.embeddings, list) else stack.embeddings
        embeddings.weight = table
        stack.position_encodings.encodings = sinusoids(longest, width).numpy()
        _fill_norm(stack.layer_norm, width)
        for layer in stack.layer:
            _fill_attention(layer.self_attention, draw, width, [3 * width, width])
            if stack is spec.decoder:
                _fill_attention(layer.attention, draw, width, [width, 2 * width, width])
            _fill_norm(layer.ffn.layer_norm, width)
            _fill_linear(layer.ffn.linear_0, draw, hidden, width)
            _fill_linear(layer.ffn.linear_1, draw, width, hidden)
    spec.decoder.projection.weight = table
    spec.decoder.projection.bias = numpy.zeros(len(words), dtype=numpy.float32)
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.validate()
    spec.optimize()
    spec.save(str(folder))


def _fill_attention(spec: Any, draw: numpy.random.Generator, width: int, outputs: list[int]) -> None:
    _fill_norm(spec.layer_norm, width)
    for linear, size in zip(spec.linear, outputs, strict=True):
        _fill_linear(linear, draw, size, width)


def _fill_linear(spec: Any, draw: numpy.random.Generator, outputs: int, inputs: int) -> None:
    spec.weight = draw.normal(0, (2 / (outputs + inputs)) ** 0.5, (outputs, inputs)).astype(numpy.float32)
    spec.bias = numpy.zeros(outputs, dtype=numpy.float32)


def _fill_norm(spec: Any, width: int) -> None:
    spec.gamma = numpy.ones(width, dtype=numpy.float32)
    spec.beta = numpy.zeros(width, dtype=numpy.float32)
