"""The layers of our models as ONNX nodes, each with the arithmetic of the module it is written from.

Letters in names of tensors: b batch, h heads, t queries in time, s keys in time, d head dimension.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from qknorm.attention import MultiheadAttention, QKNorm, rotary_angles
from qknorm.errors import InputError
from qknorm.export.onnx_graph import DOUBLE, FLOAT, UINT8, Graph
from qknorm.models.layers import FeedForward, Residual, ScaleNorm

TINY = float(np.finfo(np.float32).tiny)
SMALLEST = 1e-30
"""What counts as zero where numbers are rounded to integers: 127 over it is still a number."""
INPUT_ZERO, INPUT_LEVELS = 128, 127
WEIGHT_LEVELS = 64
"""Largest integer for weights: processors without VNNI add pairs of products in 16 bits, and 2 · 255 · 64 fits."""


class Turn(NamedTuple):
    """Cosines and sines (t, d/2) by which rotary positions turn queries and keys."""

    cos: str
    sin: str


class KeysAndValues(NamedTuple):
    """Both (b, h, s, d), normalised and turned."""

    keys: str
    values: str


def numbers(tensor: Tensor) -> object:
    """The numbers of a parameter, as a graph stores them."""
    return tensor.detach().float().cpu().numpy()


def write_linear(g: Graph, x: str, weight: Tensor, bias: Tensor | None) -> str:
    """x Wᵀ + bias."""
    product = _int8_product(g, x, weight) if g.int8 else g.add("MatMul", x, g.constant(numbers(weight.t())))
    return product if bias is None else g.add("Add", product, g.constant(numbers(bias)))


def _int8_product(g: Graph, x: str, weight: Tensor) -> str:
    """x Wᵀ, W rounded to int8 by a scale for each output, x to uint8 around 128 by one for each row.

    A row by its own scale does not depend on what stands beside it, as it would by the one of the whole array that
    ONNX's own operation takes. Inputs are unsigned since products of two signed arrays are slow in ONNX Runtime.
    """
    step = (weight.detach().float().abs().amax(1) / WEIGHT_LEVELS).clamp(min=SMALLEST)
    integers = (weight.detach() / step.unsqueeze(1)).round().to(torch.int8).t().cpu().numpy()
    largest = g.add("Max", g.add("ReduceMax", g.add("Abs", x), g.indices(-1)), g.constant(SMALLEST))
    signed = g.add("Mul", x, g.add("Div", g.constant(INPUT_LEVELS), largest))
    unsigned = g.add("Cast", g.add("Round", g.add("Add", signed, g.constant(INPUT_ZERO))), to=UINT8)
    zero = g.constant(INPUT_ZERO, np.uint8)
    product = g.add("Cast", g.add("MatMulInteger", unsigned, g.constant(integers, np.int8), zero), to=FLOAT)
    return g.add("Mul", g.add("Mul", product, g.constant(numbers(step / INPUT_LEVELS))), largest)


def write_unit(g: Graph, x: str, p: float | Tensor) -> str:
    """x/‖x‖ₚ over the last axis; as in `lp_normalize`, divided by the largest entry first, and zero stays zero."""
    last = g.indices(-1)
    largest = g.add("ReduceMax", g.add("Abs", x), last)
    nothing = g.add("LessOrEqual", largest, g.constant(TINY))
    unit = g.add("Div", x, g.add("Where", nothing, g.constant(math.inf), largest))
    if isinstance(p, Tensor):
        length = _power_mean(g, unit, g.constant(numbers(p)), g.constant(numbers(1 / p)))
    elif p == 2:
        length = g.add("ReduceL2", unit, last)
    elif p == math.inf:
        length = g.add("ReduceMax", g.add("Abs", unit), last)
    elif p == 1:
        length = g.add("ReduceL1", unit, last)
    else:
        length = _power_mean(g, unit, g.constant(p), g.constant(1 / p))
    return g.add("Div", unit, g.add("Max", length, g.constant(1.0)))


def _power_mean(g: Graph, unit: str, p: str, inverse: str) -> str:
    """(Σ|x|ᵖ)^(1/p), at least 1."""
    total = g.add("ReduceSum", g.add("Pow", g.add("Abs", unit), p), g.indices(-1))
    return g.add("Pow", g.add("Max", total, g.constant(1.0)), inverse)


def write_norm(g: Graph, x: str, norm: nn.Module) -> str:
    """Any norm that stands around sublayers or over a head."""
    if isinstance(norm, nn.Identity):
        return x
    if isinstance(norm, ScaleNorm):
        return g.add("Mul", write_unit(g, x, 2.0), g.constant(numbers(norm.scale)))
    if isinstance(norm, nn.RMSNorm):
        mean = g.add("ReduceMean", g.add("Mul", x, x), g.indices(-1))
        root = g.add("Sqrt", g.add("Add", mean, g.constant(norm.eps)))
        return g.add("Mul", g.add("Div", x, root), g.constant(numbers(norm.weight)))
    if isinstance(norm, nn.LayerNorm):
        parameters = [g.constant(numbers(each)) for each in (norm.weight, norm.bias) if each is not None]
        return g.add("LayerNormalization", x, *parameters, axis=-1, epsilon=norm.eps)
    raise InputError(f"{type(norm).__name__} cannot be written as ONNX; update qknorm")


def write_residual(g: Graph, x: str, around: Residual, sublayer: Callable[[str], str]) -> str:
    """x + sublayer(norm(x)), or norm(x + sublayer(x))."""
    if around.before:
        return g.add("Add", x, sublayer(write_norm(g, x, around.norm)))
    return write_norm(g, g.add("Add", x, sublayer(x)), around.norm)


def write_feed_forward(g: Graph, x: str, module: FeedForward) -> str:
    """Two linear maps with an activation between, or SwiGLU's three."""
    hidden = write_linear(g, x, module.widen.weight, module.widen.bias)
    if module.activation == "swiglu":
        gate, hidden = g.add_many("Split", 2, hidden, axis=-1, num_outputs=2)
        hidden = g.add("Mul", g.add("Mul", gate, g.add("Sigmoid", gate)), hidden)
    elif module.activation == "gelu":
        error = g.add("Erf", g.add("Div", hidden, g.constant(math.sqrt(2))))
        hidden = g.add("Mul", g.add("Mul", hidden, g.add("Add", error, g.constant(1.0))), g.constant(0.5))
    else:
        hidden = g.add("Relu", hidden)
    return write_linear(g, hidden, module.narrow.weight, module.narrow.bias)


def write_sinusoids(g: Graph, positions: str, width: int, *, slip: bool) -> str:
    """`sinusoids` at these positions (t,), worked out in float64 as there, for a sentence of any length."""
    half = (width + 1) // 2
    frequencies = np.tile(10_000.0 ** -(np.arange(half) / half), 2)[:width]
    quarter = np.repeat([0.0, 0.0 if slip else math.pi / 2], half)[:width]  # a cosine is a sine a quarter turn on
    column = g.add("Unsqueeze", g.add("Cast", positions, to=DOUBLE), g.indices(-1))
    angles = g.add("Mul", column, g.constant(frequencies, np.float64))
    return g.add("Cast", g.add("Sin", g.add("Add", angles, g.constant(quarter, np.float64))), to=FLOAT)


def write_turn(g: Graph, positions: str, attention: MultiheadAttention) -> Turn:
    """By how much rotary positions turn at these positions (t,)."""
    frequencies = rotary_angles(torch.ones(1), attention.head_dim, attention.rotary_base)
    column = g.add("Unsqueeze", g.add("Cast", positions, to=FLOAT), g.indices(-1))
    angles = g.add("Mul", column, g.constant(numbers(frequencies)))
    return Turn(g.add("Cos", angles), g.add("Sin", angles))


def write_projections(g: Graph, x: str, attention: MultiheadAttention, turn: Turn | None) -> tuple[str, KeysAndValues]:
    """Queries that carry the scale, keys and values of self-attention, from one product."""
    assert attention.in_proj_weight is not None  # our models have one width everywhere
    packed = write_linear(g, x, attention.in_proj_weight, attention.in_proj_bias)
    sizes = [heads * attention.head_dim for heads in (attention.num_heads, *[attention.num_kv_heads] * 2)]
    q, k, v = g.add_many("Split", 3, packed, g.indices(*sizes), axis=-1)
    return _queries(g, q, attention, turn), _keys_and_values(g, k, v, attention, turn)


def write_queries(g: Graph, x: str, attention: MultiheadAttention) -> str:
    """Queries of cross-attention, which carry the scale."""
    return _queries(g, write_linear(g, x, *attention._projection(0)), attention, None)


def write_keys_and_values(g: Graph, x: str, attention: MultiheadAttention) -> KeysAndValues:
    """Keys and values of cross-attention."""
    k, v = (write_linear(g, x, *attention._projection(which)) for which in (1, 2))
    return _keys_and_values(g, k, v, attention, None)


def _queries(g: Graph, q: str, attention: MultiheadAttention, turn: Turn | None) -> str:
    norm, heads = attention.norm, attention.num_heads
    if norm.query_over == "width":
        # over all heads together, as long as if each had unit length
        q = g.add("Mul", write_unit(g, q, norm.p_init), g.constant(heads ** (1 / norm.p_init)))

    def normalise(x: str) -> str:
        unit = x if norm.query_over == "width" else _normalised(g, x, norm, heads, "q_norm")
        return g.add("Mul", unit, g.constant(numbers(norm.scale.view(-1, 1, 1))))

    return _placed(g, _heads(g, q, heads, attention.head_dim), attention, turn, normalise)


def _keys_and_values(g: Graph, k: str, v: str, attention: MultiheadAttention, turn: Turn | None) -> KeysAndValues:
    norm, heads = attention.norm, attention.num_kv_heads
    keys = _placed(
        g,
        _heads(g, k, heads, attention.head_dim),
        attention,
        turn,
        lambda x: _normalised(g, x, norm, heads, "k_norm"),
    )
    values = _heads(g, v, heads, attention.head_dim)
    return KeysAndValues(keys, write_unit(g, values, norm.p_for(heads)) if norm.values_normalized else values)


def _heads(g: Graph, x: str, heads: int, head_dim: int) -> str:
    return g.add("Transpose", g.add("Reshape", x, g.indices(0, 0, heads, head_dim)), perm=[0, 2, 1, 3])


def _normalised(g: Graph, x: str, norm: QKNorm, heads: int, which: str) -> str:
    if norm.kind == "lp":
        return write_unit(g, x, norm.p_for(heads))
    return x if norm.kind == "none" else write_norm(g, x, getattr(norm, which))


def _placed(g: Graph, x: str, attention: MultiheadAttention, turn: Turn | None, normalise: Callable[[str], str]) -> str:
    """Normalised and, in the order of the module, turned by position."""
    if turn is None:
        return normalise(x)
    if attention.rotary == "before_norm":
        return normalise(_turned(g, x, turn))
    return _turned(g, normalise(x), turn)


def _turned(g: Graph, x: str, turn: Turn) -> str:
    first, second = g.add_many("Split", 2, x, axis=-1, num_outputs=2)
    a = g.add("Sub", g.add("Mul", first, turn.cos), g.add("Mul", second, turn.sin))
    b = g.add("Add", g.add("Mul", second, turn.cos), g.add("Mul", first, turn.sin))
    return g.add("Concat", a, b, axis=-1)


def write_attention(
    g: Graph,
    q: str,
    read: Sequence[KeysAndValues],
    attention: MultiheadAttention,
    added: str,
    sizes: str | None = None,
) -> str:
    """The module's output for these queries.

    `added` (b, 1, t, s) is added to the logits. Keys and values may come in two lots of the given sizes, as past and
    new ones do: their logits are joined, so that no key or value is ever copied.
    """
    heads, groups = attention.num_heads, attention.num_heads // attention.num_kv_heads
    if groups > 1:  # each key head serves several query heads, which stand side by side
        q = g.add("Reshape", q, g.indices(0, attention.num_kv_heads, groups, -1, attention.head_dim))
        added = g.add("Unsqueeze", added, g.indices(1))
        read = [KeysAndValues(*(g.add("Unsqueeze", x, g.indices(2)) for x in lot)) for lot in read]
    swap = [0, 1, 2, 4, 3] if groups > 1 else [0, 1, 3, 2]
    logits = [g.add("MatMul", q, g.add("Transpose", lot.keys, perm=swap)) for lot in read]
    joined = logits[0] if len(logits) == 1 else g.add("Concat", *logits, axis=-1)
    weights = g.add("Softmax", g.add("Add", joined, added), axis=-1)
    parts = [weights] if sizes is None else g.add_many("Split", len(read), weights, sizes, axis=-1)
    output, *others = [g.add("MatMul", part, lot.values) for part, lot in zip(parts, read, strict=True)]
    for other in others:
        output = g.add("Add", output, other)
    if groups > 1:
        output = g.add("Reshape", output, g.indices(0, heads, -1, attention.head_dim))
    merged = g.add("Reshape", g.add("Transpose", output, perm=[0, 2, 1, 3]), g.indices(0, 0, attention.embed_dim))
    return write_linear(g, merged, attention.out_proj.weight, attention.out_proj.bias)


def write_mask(g: Graph, visible: str, axes: Sequence[int]) -> str:
    """0 where `visible` is true and −∞ elsewhere, with these axes put in."""
    added = g.add("Where", visible, g.constant(0.0), g.constant(-math.inf))
    return g.add("Unsqueeze", added, g.indices(*axes))
