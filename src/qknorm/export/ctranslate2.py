"""A run folder for CTranslate2, whose RMS norms of queries and keys can say what QKNorm says.

RMSNorm of x with weights γ is √d · γ · x/‖x‖₂, so that unit vectors times g have γ = g/√d for queries and 1/√d for
keys, and logits are not divided by anything. It adds an epsilon to the mean square, which must not show: queries and
keys are made 64 times as long first, which their direction does not depend on.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from qknorm.attention import MultiheadAttention
from qknorm.config import Model
from qknorm.decoding.translate import TextTranslator
from qknorm.errors import InputError
from qknorm.export.card import TOKENIZER, write_card
from qknorm.export.ctranslate2_engine import import_ctranslate2
from qknorm.export.describing import describe
from qknorm.models.layers import FeedForward, Residual, ScaleNorm, sinusoids
from qknorm.models.translator import DecoderLayer, EncoderLayer, Translator
from qknorm.specials import END, START, UNKNOWN

LENGTHENED = 64.0
"""Times which queries and keys are as long there as here."""
NEVER = -1e4
"""Bias of types that are never produced: far below any logit, and within the range of half precision."""
LEAST_POSITIONS = 512

Array = NDArray[np.float32]


def write_folder(translator: TextTranslator, folder: Path, *, quantize: str | None = None) -> None:
    """Fills a folder that exists with the model, its tokenizer and translator.json; refuses what it cannot compute."""
    ctranslate2 = import_ctranslate2()
    if (reason := refusal(translator.model.settings)) is not None:
        raise InputError(f"CTranslate2 cannot compute this model: {reason}")
    positions = max(LEAST_POSITIONS, translator.longest + 1 + translator.settings.extra_length)
    types = translator.tokenizer.tokens(range(translator.tokenizer.size))
    with torch.no_grad():
        spec = _write_model(translator.model, types, positions)
    spec.validate()
    spec.optimize(quantization=quantize)
    spec.save(str(folder))
    translator.tokenizer.save(folder / TOKENIZER)
    details = {"ctranslate2": ctranslate2.__version__, "positions": positions}
    write_card(folder, describe(translator, "ctranslate2", quantize or "float32", **details))


def refusal(settings: Model) -> str | None:
    """Why CTranslate2 cannot compute a model of these settings, and what to do; None if it can."""
    attention = settings.attention
    elsewhere = "or export to onnx or huggingface, which take every model"
    if attention.qk_norm not in ("lp", "none"):
        return f"model.attention.qk_norm is {attention.qk_norm}; train with lp or none, {elsewhere}"
    if attention.normalize_values:
        return f"model.attention.normalize_values is on; train without, {elsewhere}"
    if settings.norm == "none":
        return f"model.norm is none, and it needs norms around sublayers; train with layer, rms or scale, {elsewhere}"
    if attention.qk_norm == "none":
        return None
    if attention.p != 2 or attention.p_learned:
        p = "learned" if attention.p_learned else f"{attention.p:g}"
        return f"model.attention.p is {p}, and it knows the L2 length alone; train with p 2, {elsewhere}"
    if attention.scale_per_head:
        return f"model.attention.scale_per_head is on, and its heads share one scale; train without, {elsewhere}"
    if attention.cross_query_norm == "head" and settings.heads > 1:
        return (
            "in cross-attention it takes the length of a query over the whole width, and this model takes it head by "
            f"head; train with --model.attention.cross-query-norm width, {elsewhere}"
        )
    return None


def _write_model(model: Translator, types: list[str], positions: int) -> Any:
    specs = import_ctranslate2().specs
    settings = model.settings
    if settings.activation == "swiglu":
        activation = specs.Activation.SWISH
    else:
        activation = specs.Activation.RELU if settings.activation == "relu" else specs.Activation.GELU
    shape: dict[str, Any] = {
        "num_heads": settings.heads,
        "pre_norm": settings.norm_position == "pre",
        "activation": activation,
        "ffn_glu": settings.activation == "swiglu",
        "rms_norm": settings.norm != "layer",
        "num_heads_kv": settings.kv_heads,
        "qk_norm": settings.attention.qk_norm == "lp",
    }
    if settings.positions == "rotary":
        shape |= {"rotary_dim": settings.width // settings.heads, "rotary_interleave": False}
    encoder = specs.TransformerEncoderSpec(settings.encoder_layers, **shape)
    decoder = specs.TransformerDecoderSpec(settings.decoder_layers, **shape)
    spec = specs.TransformerSpec(encoder, decoder)
    _write_inputs(encoder, encoder.embeddings[0], model, model.words.table(), positions, side=0)
    _write_inputs(decoder, decoder.embeddings, model, model.words_of("target").table(), positions, side=1)
    for stack, layers in ((encoder, model.encoder), (decoder, model.decoder)):
        for into, layer in zip(stack.layer, layers, strict=True):
            _write_layer(into, layer)  # type: ignore[arg-type]
    if settings.norm_position == "pre":
        _write_norm(encoder.layer_norm, model.encoder_norm, settings.width)
        _write_norm(decoder.layer_norm, model.decoder_norm, settings.width)
    decoder.projection.weight = _array(model.words_of("output").table())
    decoder.projection.bias = _array(model.output_bias.masked_fill(~model.allowed, NEVER))
    _write_vocabulary(spec, types)
    return spec


def _write_vocabulary(spec: Any, types: list[str]) -> None:
    spec.register_source_vocabulary(types)
    spec.register_target_vocabulary(types)
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = types[UNKNOWN], types[START], types[END]
    spec.config.decoder_start_token, spec.config.add_source_eos = types[START], True


def _write_inputs(stack: Any, words: Any, model: Translator, table: Tensor, positions: int, side: int) -> None:
    """Word vectors and positions of a side; the vector of its language goes with what is added to every word."""
    width = model.settings.width
    language = torch.zeros(width) if model.languages is None else model.languages[side]
    if model.settings.positions == "rotary":  # nothing is added, and words are multiplied by the root of the width
        words.weight = _array(table + language / math.sqrt(width))
        if hasattr(stack, "position_encodings"):
            delattr(stack, "position_encodings")
        return
    slip = model.settings.positions == "sinusoid-slip"
    words.weight = _array(table)
    stack.position_encodings.encodings = _array(sinusoids(positions, width, slip=slip) + language)


def _write_layer(into: Any, layer: EncoderLayer | DecoderLayer) -> None:
    _write_self_attention(into.self_attention, layer.attention, layer.around_attention)
    if isinstance(layer, DecoderLayer):
        _write_cross_attention(into.attention, layer.cross_attention, layer.around_cross_attention)
    _write_feed_forward(into.ffn, layer.feed_forward, layer.around_feed_forward)


def _write_self_attention(into: Any, attention: MultiheadAttention, around: Residual) -> None:
    projections = _write_qk_norm(into, attention, attention.head_dim)
    _write_linear(into.linear[0], *(torch.cat(each) for each in zip(*projections, strict=True)))
    _write_linear(into.linear[1], attention.out_proj.weight, attention.out_proj.bias)
    _write_norm(into.layer_norm, around.norm, attention.embed_dim)


def _write_cross_attention(into: Any, attention: MultiheadAttention, around: Residual) -> None:
    query, *memory = _write_qk_norm(into, attention, attention.embed_dim)
    _write_linear(into.linear[0], *query)
    _write_linear(into.linear[1], *(torch.cat(each) for each in zip(*memory, strict=True)))
    _write_linear(into.linear[2], attention.out_proj.weight, attention.out_proj.bias)
    _write_norm(into.layer_norm, around.norm, attention.embed_dim)


def _write_qk_norm(into: Any, attention: MultiheadAttention, query_size: int) -> list[tuple[Tensor, Tensor]]:
    """Writes the norms of queries, over vectors of this size, and keys; returns weight and bias of q, k and v."""
    projections = []
    for which in range(3):
        weight, bias = attention._projection(which)
        assert bias is not None  # our translators have biases everywhere
        projections.append((weight, bias))
    scale, head_dim = attention.norm.scale, attention.head_dim
    into.queries_scale = np.float32(1.0)
    if attention.norm.kind == "none":
        by_row = scale.expand(attention.num_heads).repeat_interleave(head_dim)
        query_weight, query_bias = projections[0]
        return [(query_weight * by_row[:, None], query_bias * by_row), *projections[1:]]
    into.q_norm.gamma = _array((scale * head_dim**-0.5).expand(query_size))
    into.k_norm.gamma = _array(torch.full((head_dim,), head_dim**-0.5))
    lengthened = [(weight * LENGTHENED, bias * LENGTHENED) for weight, bias in projections[:2]]
    return [*lengthened, projections[2]]


def _write_feed_forward(into: Any, module: FeedForward, around: Residual) -> None:
    weight, bias = module.widen.weight, module.widen.bias
    if module.activation == "swiglu":
        (gate, hidden), (gate_bias, hidden_bias) = weight.chunk(2), bias.chunk(2)
        _write_linear(into.linear_0, gate, gate_bias)
        _write_linear(into.linear_0_noact, hidden, hidden_bias)
    else:
        _write_linear(into.linear_0, weight, bias)
    _write_linear(into.linear_1, module.narrow.weight, module.narrow.bias)
    _write_norm(into.layer_norm, around.norm, module.widen.in_features)


def _write_norm(into: Any, norm: nn.Module, width: int) -> None:
    if isinstance(norm, ScaleNorm):  # s · x/‖x‖₂ is an RMSNorm whose weights are all s/√width
        into.gamma = _array(norm.scale.expand(width) / math.sqrt(width))
    elif isinstance(norm, nn.LayerNorm):
        into.gamma, into.beta = _array(norm.weight), _array(norm.bias)
    else:
        assert isinstance(norm, nn.RMSNorm)
        into.gamma = _array(norm.weight)


def _write_linear(into: Any, weight: Tensor, bias: Tensor) -> None:
    into.weight, into.bias = _array(weight), _array(bias)


def _array(tensor: Tensor) -> Array:
    # a copy: quantising works in place, and would reach the weights of the model
    return np.array(tensor.detach().float().cpu().numpy(), order="C")
