"""A run folder for ONNX Runtime: the encoder and one step of the decoder as two graphs.

The graphs are written node by node from the weights rather than traced, so that they do not depend on how a version of
PyTorch traces, and say what they compute.

encoder.onnx: `source` (batch, source), ids with their end, padded with 0 → for every decoder layer i the keys and
values of its cross-attention, `cross_keys_i` and `cross_values_i` (batch, key heads, source, head size).

decoder.onnx: one step for `beam` hypotheses of every sentence, all of which read `past` stored tokens as far as
`visible` (batch, beam, past + beam) lets them, the new ones of this step last. `log_probabilities` (batch, beam,
vocabulary) is what may follow; `new_keys_i` and `new_values_i` are to be stored for the next step.
"""

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qknorm.attention import MultiheadAttention
from qknorm.decoding.translate import ModelStepper, TextTranslator
from qknorm.errors import InputError
from qknorm.export.card import TOKENIZER, write_card
from qknorm.export.describing import describe
from qknorm.export.onnx_engine import DECODER, ENCODER, OnnxModel
from qknorm.export.onnx_graph import OPSET, Axis, Graph
from qknorm.export.onnx_layers import (
    KeysAndValues,
    Turn,
    numbers,
    write_attention,
    write_feed_forward,
    write_keys_and_values,
    write_linear,
    write_mask,
    write_norm,
    write_projections,
    write_queries,
    write_residual,
    write_sinusoids,
    write_turn,
)
from qknorm.models.translator import DecoderLayer, EncoderLayer, Translator
from qknorm.specials import END, PAD, START

TOLERANCE = 1e-3
"""By how much log-probabilities may differ: float32 adds up in another order elsewhere, a wrong formula shows more."""


def write_folder(translator: TextTranslator, folder: Path, *, quantize: str | None = None) -> float:
    """Fills a folder that exists with two graphs, the tokenizer and translator.json.

    Returns how far log-probabilities of the graphs in float32 are from PyTorch's; refuses a model for which that is
    more than rounding.
    """
    model = translator.model
    write_graphs(model, folder)
    apart = largest_difference(model, OnnxModel(folder))
    if not apart <= TOLERANCE:
        raise InputError(
            f"the ONNX graphs of this model differ from PyTorch by {apart:.2g} in log-probability: its weights have "
            f"diverged, or a setting of it is unknown to this export; look at the run with qknorm inspect"
        )
    if quantize is not None:
        write_graphs(model, folder, int8=True)
    translator.tokenizer.save(folder / TOKENIZER)
    details = {"opset": OPSET, "encoder": ENCODER, "decoder": DECODER}
    write_card(folder, describe(translator, "onnx", quantize or "float32", **details))
    return apart


@torch.no_grad()
def write_graphs(model: Translator, folder: Path, *, int8: bool = False) -> None:
    """Writes encoder.onnx and decoder.onnx, in float32 or with linear layers in 8-bit integers."""
    _encoder(model, int8).save(folder / ENCODER)
    _decoder(model, int8).save(folder / DECODER)


@torch.no_grad()
def largest_difference(model: Translator, exported: OnnxModel) -> float:
    """How far log-probabilities of the graphs are from PyTorch's over a few steps, for random sentences and beams."""
    draw = torch.Generator().manual_seed(0)
    lengths, beam = (11, 2, 6), 3
    source = torch.full((len(lengths), max(lengths) + 1), PAD)
    for row, length in zip(source, lengths, strict=True):
        row[:length] = torch.randint(model.vocabulary, (length,), generator=draw).clamp(min=END)
        row[length] = END
    training = model.training
    ours, theirs = ModelStepper(model.eval(), source, beam), exported.start(source.numpy(), beam)
    tokens, apart = torch.full((len(lengths), beam), START), 0.0
    for _ in range(5):
        expected, found = ours.step(tokens), torch.from_numpy(theirs.step(tokens.numpy()))
        apart = max(apart, _apart(expected, found))
        tokens = torch.randint(model.vocabulary, tokens.shape, generator=draw)
        origin = torch.randint(beam, tokens.shape, generator=draw)
        ours.reorder(origin)
        theirs.reorder(origin.numpy())
    model.train(training)
    return apart


def _apart(expected: Tensor, found: Tensor) -> float:
    """The largest difference; infinite where one is −∞ and the other is not, or where one is no number."""
    if not torch.equal(expected == -torch.inf, found == -torch.inf):
        return math.inf
    finite = expected != -torch.inf
    return float((expected - found)[finite].abs().nan_to_num(math.inf).max())


def _encoder(model: Translator, int8: bool) -> Graph:
    g = Graph("encoder", int8=int8)
    source = g.input("source", np.int64, ["batch", "source"])
    length = g.add("Squeeze", g.add("Shape", source, start=1, end=2), g.indices(0))
    positions = g.add("Range", g.constant(0, np.int64), length, g.constant(1, np.int64))
    real = g.add("Not", g.add("Equal", source, g.constant(PAD, np.int64)))
    mask = write_mask(g, real, [1, 2])
    x = _embedded(g, model, source, positions, side=0)
    turn = _turn(g, model, positions)
    for layer in model.encoder:
        x = _encoder_layer(g, layer, x, mask, turn)  # type: ignore[arg-type]
    x = write_norm(g, x, model.encoder_norm)
    for i, layer in enumerate(model.decoder):
        across: MultiheadAttention = layer.cross_attention  # type: ignore[assignment]
        for what, tensor in zip(("keys", "values"), write_keys_and_values(g, x, across), strict=True):
            g.output(tensor, f"cross_{what}_{i}", np.float32, _stored(across, "source"))
    return g


def _encoder_layer(g: Graph, layer: EncoderLayer, x: str, mask: str, turn: Turn | None) -> str:
    def attend(y: str) -> str:
        q, own = write_projections(g, y, layer.attention, turn)
        return write_attention(g, q, [own], layer.attention, mask)

    x = write_residual(g, x, layer.around_attention, attend)
    return write_residual(g, x, layer.around_feed_forward, lambda y: write_feed_forward(g, y, layer.feed_forward))


def _decoder(model: Translator, int8: bool) -> Graph:
    g = Graph("decoder", int8=int8)
    tokens = g.input("tokens", np.int64, ["batch", "beam"])
    position = g.input("position", np.int64, [1])
    own_mask = write_mask(g, g.input("visible", np.bool_, ["batch", "beam", "past_and_beam"]), [1])
    cross_mask = write_mask(g, g.input("source_real", np.bool_, ["batch", "source"]), [1, 2])
    x = _embedded(g, model, tokens, position, side=1)
    turn, new = _turn(g, model, position), []
    for i, layer in enumerate(model.decoder):
        past = _given(g, f"own_{{}}_{i}", layer.attention, "past")  # type: ignore[arg-type]
        across = _given(g, f"cross_{{}}_{i}", layer.cross_attention, "source")  # type: ignore[arg-type]
        x, own = _decoder_layer(g, layer, x, past, across, (own_mask, cross_mask), turn)  # type: ignore[arg-type]
        new.append(own)
    g.output(
        _log_probabilities(g, model, x, tokens), "log_probabilities", np.float32, ["batch", "beam", model.vocabulary]
    )
    for i, (layer, own) in enumerate(zip(model.decoder, new, strict=True)):
        for what, tensor in zip(("keys", "values"), own, strict=True):
            g.output(tensor, f"new_{what}_{i}", np.float32, _stored(layer.attention, "beam"))  # type: ignore[arg-type]
    return g


def _decoder_layer(
    g: Graph,
    layer: DecoderLayer,
    x: str,
    past: KeysAndValues,
    across: KeysAndValues,
    masks: tuple[str, str],
    turn: Turn | None,
) -> tuple[str, KeysAndValues]:
    """The layer's output, and what it wants stored."""
    new: list[KeysAndValues] = []

    def attend(y: str) -> str:
        q, own = write_projections(g, y, layer.attention, turn)
        new.append(own)
        sizes = g.add("Concat", *(g.add("Shape", lot.keys, start=2, end=3) for lot in (past, own)), axis=0)
        return write_attention(g, q, [past, own], layer.attention, masks[0], sizes)

    def read(y: str) -> str:
        return write_attention(g, write_queries(g, y, layer.cross_attention), [across], layer.cross_attention, masks[1])

    x = write_residual(g, x, layer.around_attention, attend)
    x = write_residual(g, x, layer.around_cross_attention, read)
    x = write_residual(g, x, layer.around_feed_forward, lambda y: write_feed_forward(g, y, layer.feed_forward))
    return x, new[0]


def _embedded(g: Graph, model: Translator, ids: str, positions: str, side: int) -> str:
    table = (model.words if side == 0 else model.words_of("target")).table()
    width = model.settings.width
    x = g.add("Mul", g.add("Gather", g.constant(numbers(table)), ids), g.constant(math.sqrt(width)))
    if model.languages is not None:
        x = g.add("Add", x, g.constant(numbers(model.languages[side])))
    if model.settings.positions == "rotary":
        return x
    slip = model.settings.positions == "sinusoid-slip"
    return g.add("Add", x, write_sinusoids(g, positions, width, slip=slip))


def _turn(g: Graph, model: Translator, positions: str) -> Turn | None:
    if model.settings.positions != "rotary":
        return None
    return write_turn(g, positions, model.encoder[0].attention)  # type: ignore[arg-type]


def _log_probabilities(g: Graph, model: Translator, x: str, tokens: str) -> str:
    """Of every type after each hypothesis; −∞ for types that may not be produced."""
    width, types = model.settings.width, model.vocabulary
    states = g.add("Reshape", write_norm(g, x, model.decoder_norm), g.indices(-1, width))
    table, bias = model.words_of("output").table(), model.output_bias.masked_fill(~model.allowed, -torch.inf)
    if g.int8:
        logits = write_linear(g, states, table, bias)
    else:  # the table as it is, so that input and output may share one
        logits = g.add("Gemm", states, g.constant(numbers(table)), g.constant(numbers(bias)), transB=1)
    shape = g.add("Concat", g.add("Shape", tokens), g.indices(types), axis=0)
    return g.add("Reshape", g.add("LogSoftmax", logits, axis=-1), shape)


def _given(g: Graph, name: str, attention: MultiheadAttention, time: str) -> KeysAndValues:
    shape = _stored(attention, time)
    return KeysAndValues(*(g.input(name.format(what), np.float32, shape) for what in ("keys", "values")))


def _stored(attention: MultiheadAttention, time: str) -> list[Axis]:
    return ["batch", attention.num_kv_heads, time, attention.head_dim]
