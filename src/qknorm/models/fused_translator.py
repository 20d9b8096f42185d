"""A pass of the translator through the fused parts that are switched on; `translator.py` is the reference."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor
from torch.nn import functional as F

from qknorm.attention import KeyValueCache, MultiheadAttention, Visibility, attend
from qknorm.attention.attend import may_fuse
from qknorm.attention.cut import cut_heads, cut_heads_with_room
from qknorm.config import Model
from qknorm.models import fused_layers
from qknorm.models.fused_layers import Part
from qknorm.models.fused_linear import linear_side_by_side
from qknorm.models.fused_run import FusedRun, compute_dtype, current_run, share_of, whole
from qknorm.models.layers import WordVectors

if TYPE_CHECKING:
    from qknorm.models.translator import DecoderCache, DecoderLayer, EncoderLayer, Memory, Translator


class KeysAndValues(NamedTuple):
    """What a cross-attention reads of the memory, (b, h, s, d)."""

    keys: Tensor
    values: Tensor


def run_for(model: "Translator") -> FusedRun | None:
    """The run to take part in: where one is under way, for norms that stand before their sublayers.

    Out of training only one with fused layers, since the fused linear maps are there for their gradients.
    """
    run = current_run()
    if run is None or not (run.layers or (run.linear and model.training)):
        return None
    return run if takes_part(model.settings) else None


def takes_part(settings: Model) -> bool:
    """Whether fused parts are made for models of these settings."""
    return settings.norm_position == "pre" and settings.norm != "none" and fused_layers.fits(settings.width)


def encode(model: "Translator", run: FusedRun, source: Tensor, visibility: Visibility) -> Tensor:
    """What `Translator.encode` makes of source ids."""
    x = _embed(model, run, source, model.words, side=0)
    if run.layers:
        parts = [part for layer in model.encoder for part in _encoder_parts(layer, visibility)]  # type: ignore[arg-type]
        return fused_layers.run_pre_norm(run, x, parts, model.encoder_norm)
    for layer in model.encoder:
        x = layer(x, visibility)
    states: Tensor = model.encoder_norm(x)
    return states


def decode(
    model: "Translator", run: FusedRun, target: Tensor, memory: "Memory", cache: "DecoderCache | None" = None
) -> Tensor:
    """What `Translator.decode` makes of targets."""
    x = _embed(model, run, target, model.words_of("target"), side=1, cache=cache)
    layers: list[DecoderLayer] = list(model.decoder)  # type: ignore[arg-type]
    own: Sequence[KeyValueCache | None] = [None] * len(layers) if cache is None else cache.own
    across: Sequence[KeysAndValues | KeyValueCache | None] = own if cache is None else cache.across
    if cache is None and run.linear:
        across = _read_memory(run, [each.cross_attention for each in layers], memory)
    known = zip(layers, own, across, strict=True)
    parts = [part for layer, mine, read in known for part in _decoder_parts(layer, memory, mine, read)]
    if run.layers:
        return fused_layers.run_pre_norm(run, x, parts, model.decoder_norm)
    for part in parts:
        x = part.around(x, part.sublayer)
    states: Tensor = model.decoder_norm(x)
    return states


def output_table(model: "Translator", run: FusedRun) -> Tensor:
    """The word vectors of the output, with rows of zeros at its end where the kernels make them."""
    words = model.words_of("output")
    if not (run.layers and words.fixnorm):
        return words.table()
    return fused_layers.unit_rows(run, words.weight, whole(len(words.weight)), compute_dtype(words.weight))


def _embed(
    model: "Translator",
    run: FusedRun,
    ids: Tensor,
    words: WordVectors,
    side: int,
    cache: "DecoderCache | None" = None,
) -> Tensor:
    if not run.layers:
        return model._embed(ids, words.table(), side, cache)
    return fused_layers.embed(
        run,
        ids,
        words.weight,
        None if model.languages is None else model.languages[side],
        model._positions_of(ids, cache),
        share_of(model.dropout, model.dropout.p),
        factor=math.sqrt(model.settings.width),
        fixnorm=words.fixnorm,
    )


def _encoder_parts(layer: "EncoderLayer", visibility: Visibility) -> list[Part]:
    def attend_to_self(y: Tensor) -> Tensor:
        out: Tensor = layer.attention(y, y, y, visibility=visibility, need_weights=False)[0]
        return out

    return [
        Part(layer.around_attention, attend_to_self, layer.attention.out_proj.bias),
        Part(layer.around_feed_forward, layer.feed_forward, layer.feed_forward.narrow.bias),
    ]


def _decoder_parts(
    layer: "DecoderLayer",
    memory: "Memory",
    own: KeyValueCache | None,
    across: KeysAndValues | KeyValueCache | None,
) -> list[Part]:
    def attend_to_self(y: Tensor) -> Tensor:
        out: Tensor = layer.attention(y, y, y, need_weights=False, is_causal=True, cache=own)[0]
        return out

    return [
        Part(layer.around_attention, attend_to_self, layer.attention.out_proj.bias),
        Part(
            layer.around_cross_attention,
            lambda y: _cross(layer, y, memory, across),
            layer.cross_attention.out_proj.bias,
        ),
        Part(layer.around_feed_forward, layer.feed_forward, layer.feed_forward.narrow.bias),
    ]


def _cross(layer: "DecoderLayer", y: Tensor, memory: "Memory", across: KeysAndValues | KeyValueCache | None) -> Tensor:
    """Cross-attention, whose keys and values may be at hand already."""
    attention = layer.cross_attention
    if not isinstance(across, KeysAndValues):
        return layer._read(y, memory, across)
    norm, weight, bias = attention.norm, attention.in_proj_weight, attention.in_proj_bias
    if norm.kind != "lp" or norm.p_raw is not None or norm.query_over == "width":
        cache = KeyValueCache(fixed=True)
        cache.adopt(norm.key(across.keys, attention.backend), norm.value(across.values))
        return layer._read(y, memory, cache)
    assert weight is not None
    width = attention.embed_dim
    q = F.linear(y, weight[:width], None if bias is None else bias[:width])
    read = attend(
        _heads(q, attention),
        across.keys,
        norm.value(across.values),
        scale=norm.scale,
        p=norm.p_init,
        mask=memory.visibility,
        dropout=share_of(attention, attention.dropout),
        backend=attention.backend,
    )
    out: Tensor = attention.out_proj(read.transpose(1, 2).flatten(2))
    return out


def _read_memory(run: FusedRun, attentions: list[MultiheadAttention], memory: "Memory") -> list[KeysAndValues]:
    """Keys and values of the memory for every layer, not yet normalised, by one product."""
    weights, biases = [], []
    for attention in attentions:
        assert attention.in_proj_weight is not None
        weights.append(attention.in_proj_weight[attention.embed_dim :])
        bias = attention.in_proj_bias
        biases.append(None if bias is None else bias[attention.embed_dim :])
    projected = linear_side_by_side(run, memory.states, weights, biases)
    cut = cut_heads_with_room if may_fuse(attentions[0].backend, projected) else cut_heads
    heads = cut(projected, [attentions[0].num_kv_heads] * 2 * len(attentions), attentions[0].head_dim)
    return [KeysAndValues(k_bhsd, v_bhsd) for k_bhsd, v_bhsd in zip(heads[::2], heads[1::2], strict=True)]


def _heads(x_btd: Tensor, attention: MultiheadAttention) -> Tensor:
    return x_btd.view(*x_btd.shape[:2], -1, attention.head_dim).transpose(1, 2)
