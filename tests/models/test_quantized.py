"""Int8 layers against the same arithmetic in float64, and the model made of them against the one it came from."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from qknorm.config import Attention, Decoding, Dropout, Model
from qknorm.decoding.alignment import cross_attention_weights
from qknorm.decoding.translate import translate_ids
from qknorm.errors import InputError
from qknorm.models import quantized
from qknorm.models.quantized import QuantizedLinear, quantize, weight_levels
from qknorm.models.translator import Translator, start_of_scale

TYPES = 60
CHANGES = [
    {},
    {"positions": "rotary", "kv_heads": 2, "activation": "swiglu", "norm": "rms"},
    {"tie": "none", "norm": "scale", "norm_position": "post", "attention": Attention(qk_norm="none")},
]


def make_model(**changes: object) -> Translator:
    shape = {"width": 64, "feed_forward": 128, "encoder_layers": 2, "decoder_layers": 2, "heads": 4}
    chosen = Model(**shape, **changes, dropout=Dropout.everywhere(0.3))  # type: ignore[arg-type]
    allowed = torch.ones(TYPES, dtype=torch.bool)
    allowed[[0, 1, 7]] = False
    return Translator(TYPES, chosen, scale_init=start_of_scale(chosen, 20), allowed=allowed)


def by_hand(x: Tensor, weight: Tensor, bias: Tensor | None) -> np.ndarray:
    """Rounded to integers as the layer says it does, and multiplied in float64."""
    rows, w = x.double().numpy(), weight.double().numpy()
    row_step = np.abs(rows).max(1, keepdims=True) / 127
    column_step = np.abs(w).max(1, keepdims=True) / weight_levels()
    q_rows = np.round(np.divide(rows, row_step, out=np.zeros_like(rows), where=row_step > 0))
    q_w = np.round(np.divide(w, column_step, out=np.zeros_like(w), where=column_step > 0))
    product = (q_rows * row_step) @ (q_w * column_step).T
    return product if bias is None else product + bias.double().numpy()


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 70), st.integers(1, 70), st.booleans())
def test_a_layer_is_its_rounded_numbers_multiplied(seed: int, rows: int, inputs: int, outputs: int, bias: bool) -> None:
    draw = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(rows, inputs, generator=draw), torch.randn(outputs, inputs, generator=draw)
    x *= 10.0 ** torch.randint(-3, 4, (rows, 1), generator=draw)
    b = torch.randn(outputs, generator=draw) if bias else None
    expected = by_hand(x, weight, b)
    # where a number falls between two integers, rounding in float32 and in float64 may differ by one of them
    step = (x.abs().amax(1, keepdim=True) / 127 * weight.abs().max()).double().numpy()
    apart = np.abs(QuantizedLinear(weight, b)(x).double().numpy() - expected)
    assert (apart <= 2.1 * step + 1e-5 * np.abs(expected) + 1e-6).all()
    # each of two factors is off by half a step at most, and the other is at most the largest there is
    exact = F.linear(x.double(), weight.double(), None if b is None else b.double()).numpy()
    assert (np.abs(expected - exact) <= inputs * step * (0.5 + 0.51 * 127 / weight_levels()) + 1e-6).all()


def test_a_row_does_not_depend_on_its_company() -> None:
    layer = QuantizedLinear(torch.randn(33, 48), torch.randn(33))
    x = torch.randn(5, 7, 48) * 10 ** torch.linspace(-4, 4, 35).view(5, 7, 1)
    together = layer(x)
    assert together.shape == (5, 7, 33)
    assert all(torch.equal(together[i, j], layer(x[i, j])) for i in range(5) for j in range(7))


def test_zeros_nothing_and_no_numbers_go_through() -> None:
    weight, bias = torch.randn(6, 8), torch.randn(6)
    weight[2] = 0.0
    layer = QuantizedLinear(weight, bias)
    assert torch.equal(layer(torch.zeros(3, 8)), bias.expand(3, 6))
    assert torch.equal(layer(torch.randn(3, 8))[:, 2], bias[2].expand(3))
    assert layer(torch.empty(0, 8)).shape == (0, 6)
    x = torch.randn(2, 8)
    x[1, 3] = torch.nan
    assert layer(x)[1].isnan().all() and not layer(x)[0].isnan().any()


@pytest.fixture
def forget_levels() -> None:
    weight_levels.cache_clear()
    yield
    weight_levels.cache_clear()


@pytest.mark.usefixtures("forget_levels")
def test_where_pairs_of_products_overflow_weights_are_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    def saturating(a: Tensor, b: Tensor) -> Tensor:
        products = (a.long()[:, :, None] + 128) * b.long()[None]
        pairs = products.view(len(a), -1, 2, b.shape[1]).sum(2).clamp(-(2**15), 2**15 - 1)
        return (pairs.sum(1) - 128 * b.long().sum(0)).int()

    monkeypatch.setattr(torch, "_int_mm", saturating)
    assert weight_levels() == 63


@pytest.mark.usefixtures("forget_levels")
def test_products_that_are_wrong_or_missing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: torch.zeros(len(a), b.shape[1], dtype=torch.int32))
    with pytest.raises(InputError, match="not exact on this processor; leave int8 out"):
        weight_levels()

    def fails(*_: Tensor) -> Tensor:
        raise RuntimeError("not implemented\nat all")

    monkeypatch.setattr(torch, "_int_mm", fails)
    with pytest.raises(InputError, match=r"multiplies no int8 matrices \(not implemented\)"):
        weight_levels()
    monkeypatch.delattr(torch, "_int_mm")
    with pytest.raises(InputError, match="cannot multiply int8 matrices; update it"):
        weight_levels()


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_a_quantized_model_scores_nearly_alike(changes: dict[str, object]) -> None:
    model = make_model(**changes).eval()
    small = quantize(model)
    source, target = torch.randint(4, TYPES, (3, 9)), torch.randint(4, TYPES, (3, 6))
    source[1, 5:] = 0
    with torch.no_grad():
        expected, found = model(source, target), small(source, target)
    assert torch.equal(found == -torch.inf, expected == -torch.inf)
    finite = expected > -torch.inf
    apart = (found - expected)[finite]
    assert 0 < apart.std() < 0.05 * expected[finite].std()
    assert cross_attention_weights(small, [5, 6], [7]).shape == (2, 4, 2, 3)


def test_translations_do_not_depend_on_the_model_they_came_from_any_more() -> None:
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    small = quantize(model)
    sources = [[5, 9, 12], [20, 8], list(range(10, 30))]
    first = translate_ids(small, sources, Decoding(extra_length=6))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert translate_ids(small, sources, Decoding(extra_length=6)) == first


def test_it_is_neither_trained_nor_saved() -> None:
    small = quantize(make_model().train())
    assert not small.training and not any(parameter.requires_grad for parameter in small.parameters())
    assert small.eval() is small
    with pytest.raises(RuntimeError, match="cannot be trained; train the one"):
        small.train()
    with pytest.raises(RuntimeError, match="is not saved"):
        small.state_dict()


def test_a_model_elsewhere_is_refused() -> None:
    with pytest.raises(InputError, match="int8 is for the CPU, and this model is on meta; use --device cpu"):
        quantize(make_model().to("meta"))
    assert quantized.KINDS == ("int8",)


def test_what_is_quantised_already_stays_as_it_is() -> None:
    model = quantize(make_model())
    assert quantize(model) is model
