"""The parts of encoder and decoder against their formulas, written down anew."""

import math

import pytest
import torch
from torch import nn

from qknorm.attention import MultiheadAttention
from qknorm.config import Dropout, Model
from qknorm.models.layers import FeedForward, Residual, ScaleNorm, WordVectors, init_weights, make_norm, sinusoids
from qknorm.models.translator import Translator

QUIET = Dropout.everywhere(0.0, word=0.0)


@pytest.mark.parametrize("width", [2, 5, 8, 512])
def test_sinusoids_equal_their_formula(width):
    half = math.ceil(width / 2)
    table = sinusoids(40, width)
    for position in (0, 1, 7, 39):
        angles = [position / 10_000 ** (i / half) for i in range(half)]
        expected = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
        assert table[position].tolist() == pytest.approx(expected[:width], abs=1e-6)


def test_the_slip_has_sines_in_both_halves():
    slip = sinusoids(30, 16, slip=True)
    assert torch.equal(slip[:, :8], slip[:, 8:])
    assert torch.equal(slip[:, :8], sinusoids(30, 16)[:, :8])


def test_scale_norm_is_x_over_its_length_times_a_learned_number():
    norm = ScaleNorm(16)
    x = 3 * torch.randn(4, 5, 16)
    assert norm.scale.item() == pytest.approx(4.0)
    torch.testing.assert_close(norm(x), 4 * x / (x**2).sum(-1, keepdim=True).sqrt())
    with torch.no_grad():
        norm.scale.fill_(7.0)
    torch.testing.assert_close(norm(x).pow(2).sum(-1).sqrt(), torch.full((4, 5), 7.0))


def test_norms_by_name():
    assert isinstance(make_norm(Model(norm="layer")), nn.LayerNorm)
    assert isinstance(make_norm(Model(norm="rms")), nn.RMSNorm)
    assert isinstance(make_norm(Model(norm="scale")), ScaleNorm)


def layer_norm(x):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def test_the_norm_stands_before_the_sublayer_or_after_the_sum():
    x, mix = torch.randn(3, 8), torch.randn(8, 8)
    pre, post = (Residual(Model(width=8, norm_position=place, dropout=QUIET)) for place in ("pre", "post"))
    torch.testing.assert_close(pre(x, lambda y: y @ mix), x + layer_norm(x) @ mix)
    torch.testing.assert_close(post(x, lambda y: y @ mix), layer_norm(x + x @ mix))


def test_dropout_falls_on_what_the_sublayer_adds_and_not_on_the_residual_path():
    around = Residual(Model(width=8, dropout=Dropout(residual=0.5)))
    added = around(torch.full((400, 8), 10.0), torch.ones_like) - 10
    assert set(added.flatten().tolist()) == {0.0, 2.0}
    assert (added == 0).float().mean().item() == pytest.approx(0.5, abs=0.05)


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


@pytest.mark.parametrize(
    ("activation", "between"),
    [
        ("relu", lambda h: h.clamp(min=0)),
        ("gelu", lambda h: h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))),
        ("swiglu", lambda h: h[:, :12] * sigmoid(h[:, :12]) * h[:, 12:]),
    ],
)
def test_feed_forward_equals_its_formula(activation, between):
    layer = FeedForward(Model(width=8, feed_forward=12, activation=activation, dropout=QUIET))
    x = torch.randn(5, 8)
    hidden = between(x @ layer.widen.weight.T + layer.widen.bias)
    torch.testing.assert_close(layer(x), hidden @ layer.narrow.weight.T + layer.narrow.bias)


def test_fixnorm_rows_count_as_unit_vectors_whatever_their_length():
    words = WordVectors(30, Model(width=16, fixnorm=True))
    with torch.no_grad():
        words.weight.mul_(torch.logspace(-3, 3, 30).unsqueeze(1))
    torch.testing.assert_close(words.table().norm(dim=1), torch.ones(30))
    torch.testing.assert_close(words.table(), words.weight / words.weight.norm(dim=1, keepdim=True))
    plain = WordVectors(30, Model(width=16, fixnorm=False))
    assert plain.table() is plain.weight


def test_word_vectors_start_as_in_the_paper():
    fixed = WordVectors(2_000, Model(width=64, fixnorm=True)).weight
    assert fixed.abs().max() <= 0.01
    assert fixed.std().item() == pytest.approx(0.01 / math.sqrt(3), rel=0.02)
    plain = WordVectors(2_000, Model(width=64, fixnorm=False)).weight
    assert plain.std().item() == pytest.approx(1 / 8, rel=0.02)


def test_paper_weights_have_the_papers_spread_and_biases_are_zero():
    settings = Model(width=64, feed_forward=192, encoder_layers=2, decoder_layers=2, heads=4)
    model = Translator(30, settings)
    for part in model.modules():
        if isinstance(part, MultiheadAttention):
            weights, biases, std = [part.in_proj_weight, part.out_proj.weight], [part.in_proj_bias], 2 / (5 * 64)
            biases.append(part.out_proj.bias)
        elif isinstance(part, FeedForward):
            weights, biases, std = [part.widen.weight, part.narrow.weight], [part.widen.bias], 2 / (64 + 192)
            biases.append(part.narrow.bias)
        else:
            continue
        for weight in weights:
            assert weight.std().item() == pytest.approx(math.sqrt(std), rel=0.05)
            assert weight.abs().max() > 3 * math.sqrt(std)  # normal, not uniform
        assert all(not bias.any() for bias in biases)


def test_xavier_weights_are_uniform_within_their_bound():
    layer = FeedForward(Model(width=64, feed_forward=192))
    init_weights(layer, Model(width=64, feed_forward=192, init="xavier"))
    bound = math.sqrt(6 / (64 + 192))
    for weight in (layer.widen.weight, layer.narrow.weight):
        assert 0.99 * bound < weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
