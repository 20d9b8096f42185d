"""The language model: sizes, causality, the cache, what is tied, how it starts."""

import math

import pytest
import torch

from qknorm.attention import initial_scale, matched_scale
from qknorm.config import Attention, LanguageModelDropout
from qknorm.config import LanguageModel as Settings
from qknorm.models.language_model import LanguageModel

SMALL = {"width": 16, "feed_forward": 32, "layers": 2, "heads": 2, "context": 12}
VARIANTS = [
    {},
    {"positions": "rotary"},
    {"positions": "rotary", "rotary_order": "before_norm", "attention": Attention(p=3.0)},
    {"tie": False, "biases": True, "norm": "rms", "activation": "swiglu"},
    {"attention": Attention(qk_norm="none"), "kv_heads": 1},
    {"attention": Attention(p=2.5, p_learned=True, scale_per_head=True)},
]


def make(vocabulary: int = 11, **settings) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(vocabulary, Settings(**SMALL, **settings)).double().eval()


def ids(rows: int, length: int, vocabulary: int = 11) -> torch.Tensor:
    return torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(1))


def count(model: LanguageModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_defaults_have_the_papers_size():
    """12 · 384² weights and two norms a layer, tables of 65 characters and 256 positions, a last norm, six scales."""
    expected = 6 * (12 * 384**2 + 2 * 384) + (65 + 256) * 384 + 384 + 6
    assert count(LanguageModel(65, Settings())) == expected == 10_745_094


def test_biases_and_an_untied_output_add_their_own():
    base = count(make())
    assert count(make(tie=False)) - base == 11 * 16
    assert count(make(positions="rotary")) - base == -12 * 16
    a_layer = (3 * 16 + 16) + (32 + 16) + 2 * 16
    assert count(make(biases=True)) - base == 2 * a_layer + 16


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 12)])
def test_logits_have_one_row_a_token(variant, shape):
    assert make(**variant)(ids(*shape)).shape == (*shape, 11)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_token_sees_a_later_one(variant):
    model, text = make(**variant), ids(2, 12)
    changed = text.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 11
    before, after = model(text), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], atol=1e-12, rtol=0)
    assert (before[:, 7:] - after[:, 7:]).abs().max() > 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cuts", [[1] * 12, [5, 1, 1, 5], [12]])
def test_reading_through_a_cache_gives_the_same(variant, cuts):
    model, text = make(**variant), ids(2, 12)
    cache = model.new_cache()
    with torch.no_grad():
        parts = [model(part, cache) for part in text.split(cuts, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(text), atol=1e-12, rtol=0)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_order_matters(positions):
    model = make(positions=positions)
    assert not torch.allclose(model(torch.tensor([[1, 2, 3]]))[0, -1], model(torch.tensor([[2, 1, 3]]))[0, -1])


def test_more_than_the_context_is_refused():
    model = make()
    with pytest.raises(ValueError, match="13 tokens are more than the model's context of 12"):
        model(ids(1, 13))
    cache = model.new_cache()
    model(ids(1, 12), cache)
    with pytest.raises(ValueError, match="13 tokens"):
        model(ids(1, 1), cache)


def test_the_output_is_the_input_table_where_tied():
    tied, untied = make(), make(tie=False)
    assert "output_words" not in tied.state_dict()
    for model, alike in ((tied, True), (untied, False)):
        before = model(ids(1, 4))
        with torch.no_grad():
            model.words[10] += 100  # a character that the text below does not hold
        assert (ids(1, 4) != 10).all()
        assert torch.equal(before, model(ids(1, 4))) != alike


def test_the_scale_starts_at_the_papers_from_the_context():
    assert list(make().scales()) == ["decoder.0.self", "decoder.1.self"] == list(make().attentions())
    assert make(attention={"qk_norm": "none"}).scales() == {}
    matched = matched_scale(initial_scale(12), 3.0, 8)
    for model, start in (
        (make(), initial_scale(12)),
        (make(attention=Attention(scale_init=5.0)), 5.0),
        (make(attention=Attention(p=3.0, scale_matched=True)), matched),
        (LanguageModel(11, Settings(**SMALL), scale_init=2.5), 2.5),
    ):
        assert list(model.scales().values()) == pytest.approx([start, start])


def test_weights_start_as_they_should():
    torch.manual_seed(0)
    model = LanguageModel(65, Settings(biases=True, tie=False))
    layer, writers = model.decoder[0], 0.02 / math.sqrt(12)
    for weight, std in (
        (model.words, 0.02),
        (model.positions, 0.02),
        (model.output_words, 0.02),
        (layer.attention.in_proj_weight, 0.02),
        (layer.feed_forward.widen.weight, 0.02),
        (layer.attention.out_proj.weight, writers),
        (layer.feed_forward.narrow.weight, writers),
    ):
        assert weight.std().item() == pytest.approx(std, rel=0.03)
        assert abs(weight.mean().item()) < std / 30
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name


def test_dropout_is_for_training_alone():
    model = make(dropout=LanguageModelDropout.everywhere(0.5))
    text = ids(2, 6)
    assert torch.equal(model(text), model(text))
    model.train()
    assert not torch.equal(model(text), model(text))


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match=r"model\.width 15 is no multiple of model\.heads 2"):
        Settings(width=15, heads=2)
    with pytest.raises(ValueError, match="even head size"):
        Settings(width=6, heads=2, positions="rotary")
    with pytest.raises(ValueError, match="at least one type"):
        LanguageModel(0, Settings(**SMALL))


def test_every_parameter_learns():
    model = make(biases=True, tie=False, attention=Attention(p=2.5, p_learned=True)).train()
    model(ids(2, 12)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
