"""Which part went first, for a fault put into each kind of part."""

import pytest
import torch

from qknorm.config import Dropout, Model
from qknorm.models.translator import Translator
from qknorm.training.diagnosis import name_first_bad_part

SHAPE = {"width": 16, "feed_forward": 32, "encoder_layers": 2, "decoder_layers": 2, "heads": 2}


@pytest.fixture
def model() -> Translator:
    allowed = torch.ones(20, dtype=torch.bool)
    allowed[:3] = False
    return Translator(20, Model(**SHAPE, dropout=Dropout.everywhere(0.0, word=0.0)), allowed=allowed)


def diagnose(model: Translator) -> str:
    source, target = torch.randint(4, 20, (2, 2, 6))
    return name_first_bad_part(model, source, target)


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ("encoder.1.feed_forward.widen.bias", "the activations of encoder.1.feed_forward.widen went first"),
        ("decoder.0.cross_attention.in_proj_bias", "decoder.0.cross_attention.out_proj went first"),
        ("decoder.1.attention.norm.scale", "decoder.1.attention"),
        ("encoder_norm.weight", "encoder_norm went first"),
        ("words.weight", "dropout went first"),
        ("output_bias", "the logits went first"),
    ],
)
def test_the_part_with_a_fault_is_named(model, part, named):
    with torch.no_grad():
        model.get_parameter(part).view(-1)[-1] = torch.nan
        if part == "words.weight":
            model.words.weight.fill_(torch.nan)
    assert named in diagnose(model)


def test_the_first_of_several_is_named_with_the_size_of_what_went_in(model):
    with torch.no_grad():
        model.encoder[0].feed_forward.narrow.weight.fill_(3e38)
        model.decoder[1].feed_forward.widen.bias.fill_(torch.inf)
    answer = diagnose(model)
    assert "encoder.0.feed_forward.narrow went first (largest input " in answer
    assert float(answer.rpartition("input ")[2].rstrip(")")) < 1e3


def test_a_gradient_alone_is_named(model):
    model.decoder[0].feed_forward.widen.weight.grad = torch.full((32, 16), torch.nan)
    assert diagnose(model) == (
        "all activations are finite, but the gradient of decoder.0.feed_forward.widen.weight is not"
    )


def test_a_sound_model_is_not_accused_and_keeps_no_hooks(model):
    assert "finite when computed again" in diagnose(model)
    assert not any(module._forward_hooks for module in model.modules())
