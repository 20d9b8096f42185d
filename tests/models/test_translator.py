"""The encoder-decoder: its size, every setting in use, and what must never change a result."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from qknorm.attention import matched_scale
from qknorm.config import Attention, Dropout, Model
from qknorm.models.layers import sinusoids
from qknorm.models.translator import DecoderCache, Translator, start_of_scale
from qknorm.specials import END, PAD, START, UNKNOWN
from qknorm.studies.recipes import preset

QUIET = Dropout.everywhere(0.0, word=0.0)
TINY = {"width": 16, "feed_forward": 24, "encoder_layers": 1, "decoder_layers": 2, "heads": 4, "dropout": QUIET}
SETTINGS = [
    {},
    {"kv_heads": 2},
    {"kv_heads": 1, "positions": "rotary"},
    {"norm": "scale"},
    {"norm": "rms"},
    {"norm_position": "post"},
    {"norm_position": "post", "norm": "scale"},
    {"fixnorm": False},
    {"tie": "target"},
    {"tie": "none"},
    {"tie": "none", "fixnorm": False},
    {"language_vectors": False},
    {"positions": "sinusoid-slip"},
    {"positions": "rotary"},
    {"positions": "rotary", "rotary_order": "before_norm", "attention": {"p": 3.0}},
    {"activation": "gelu"},
    {"activation": "swiglu"},
    {"init": "xavier"},
    {"attention": {"qk_norm": "none"}},
    {"attention": {"qk_norm": "none", "scale_learned": True}},
    {"attention": {"qk_norm": "rms"}},
    {"attention": {"qk_norm": "layer"}},
    {"attention": {"p": 1.0}},
    {"attention": {"p": 4.0, "scale_matched": True}},
    {"attention": {"p": math.inf}},
    {"attention": {"p_learned": True, "p": 2.5}, "kv_heads": 2},
    {"attention": {"scale_per_head": True}},
    {"attention": {"scale_learned": False}},
    {"attention": {"scale_init": 3.0}},
    {"attention": {"normalize_values": True}},
    {"dropout": {"residual": 0.2, "embedding": 0.2, "attention": 0.2, "feed_forward": 0.2, "word": 0.2}},
]
VOCABULARY = 20


def tiny(**changes) -> Translator:
    chosen = Model.model_validate({**TINY, **changes})
    allowed = torch.ones(VOCABULARY, dtype=torch.bool)
    allowed[[PAD, UNKNOWN, START, 11]] = False
    model = Translator(VOCABULARY, chosen, scale_init=start_of_scale(chosen, 20), allowed=allowed)
    with torch.no_grad():  # from their starts at 0 and 1 some mistakes would not show
        for name, parameter in model.named_parameters():
            if "bias" in name or parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def ids(rows: int, length: int, low: int = 4) -> torch.Tensor:
    return torch.randint(low, VOCABULARY, (rows, length))


@pytest.mark.parametrize(
    ("name", "types", "expected"),
    [
        ("paper-qknorm-gl-en", 3_164, 31_051_880),
        ("paper-qknorm-sk-en", 8_217, 48_356_907),
        ("paper-qknorm-en-he", 8_304, 48_401_538),
    ],
)
def test_parameters_are_as_many_as_the_paper_prints(name, types, expected):
    with torch.device("meta"):
        model = Translator(types, preset(name).model)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_every_setting_trains_with_a_finite_gradient_for_every_parameter(changes):
    model = tiny(**changes).train()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    target = ids(3, 7, low=12)
    loss = F.cross_entropy(model(ids(3, 9), ids(3, 7)).flatten(0, 1), target.flatten())
    loss.backward()
    assert loss.isfinite()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
    optimizer.step()
    assert all(not torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_decoding_step_by_step_equals_the_full_pass(changes):
    model = tiny(**changes).eval()
    source, target = ids(3, 9), ids(3, 7)
    source[1, 5:] = PAD
    with torch.no_grad():
        memory, cache = model.encode(source), DecoderCache(2)
        steps = [model.score(model.decode(target[:, t : t + 1], memory, cache), cache) for t in range(7)]
        torch.testing.assert_close(torch.cat(steps, dim=1), model(source, target), atol=1e-5, rtol=1e-5)
    assert cache.length == 7


def test_hypotheses_of_a_beam_read_one_memory_as_if_it_were_copied():
    model = tiny().eval()
    source, target = ids(2, 9), ids(6, 5)
    with torch.no_grad():
        together = torch.cat(
            [
                model.decode(target[:, t : t + 1], memory, cache)
                for memory, cache in [(model.encode(source), DecoderCache(2))]
                for t in range(5)
            ],
            dim=1,
        )
        alone = model.decode(target, model.encode(source.repeat_interleave(3, dim=0)))
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


@given(st.integers(0, 12), st.integers(0, 12), st.sampled_from(SETTINGS))
@settings(max_examples=25)
def test_padding_never_changes_the_logits_of_real_positions(more_source, more_target, changes):
    torch.manual_seed(0)
    model = tiny(**changes).eval()
    source, target = ids(3, 6), ids(3, 5)
    source[0, 4:], target[2, 3:] = PAD, PAD
    with torch.no_grad():
        plain = model(source, target)
        padded = model(F.pad(source, (0, more_source)), F.pad(target, (0, more_target)))[:, :5]
    real = target != PAD
    torch.testing.assert_close(padded[real], plain[real], atol=1e-5, rtol=1e-5)


def test_a_row_without_a_sentence_stays_finite_and_disturbs_no_other():
    model = tiny()
    source, target = ids(2, 6), ids(2, 5)
    empty_source = torch.tensor([[END, *[PAD] * 5]])
    logits = model(torch.cat([source, empty_source]), F.pad(target, (0, 0, 0, 1)))
    torch.testing.assert_close(logits[:2], model(source, target), atol=1e-5, rtol=1e-5)
    assert logits[2][:, model.allowed].isfinite().all()


def test_a_target_position_sees_nothing_after_it():
    model = tiny().eval()
    source, target = ids(2, 6), ids(2, 8)
    changed = target.clone()
    changed[:, 5:] = ids(2, 3)
    with torch.no_grad():
        one, other = model(source, target), model(source, changed)
    torch.testing.assert_close(one[:, :5], other[:, :5], atol=1e-6, rtol=1e-6)
    assert not torch.allclose(one[:, 5:], other[:, 5:])


def test_logits_are_minus_infinity_exactly_where_a_type_is_not_allowed():
    model = tiny()
    logits = model(ids(2, 6), ids(2, 5))
    assert torch.equal(logits.isneginf(), (~model.allowed).expand_as(logits))
    assert logits[..., model.allowed].isfinite().all()
    assert Translator(VOCABULARY, Model(**TINY))(ids(2, 6), ids(2, 5)).isfinite().all()


@pytest.mark.parametrize("fixnorm", [True, False])
def test_inputs_and_outputs_use_the_word_vectors_in_force(fixnorm):
    model = tiny(fixnorm=fixnorm).eval()
    words = model.words.weight
    rows = words / words.norm(dim=1, keepdim=True) if fixnorm else words
    source = ids(1, 6)
    expected = 4 * rows[source] + model.languages[0] + sinusoids(6, 16)
    torch.testing.assert_close(model._embed(source, model.words.table(), side=0), expected)
    states = torch.randn(1, 3, 16)
    scores = (states @ rows.T + model.output_bias)[..., model.allowed]
    torch.testing.assert_close(model.score(states)[..., model.allowed], scores)
    if fixnorm:
        torch.testing.assert_close(rows.norm(dim=1), torch.ones(VOCABULARY))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_may_not_be_produced_scores_minus_infinity_and_learns_nothing(dtype):
    model = tiny()
    allowed = model.allowed
    states = torch.randn(2, 3, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        logits = model.score(states)
    assert torch.equal(logits == -torch.inf, (~allowed).expand_as(logits))
    logits.float().logsumexp(-1).sum().backward()
    assert all(each.grad.isfinite().all() for each in (states, model.words.weight, model.output_bias))
    assert not model.output_bias.grad[~allowed].any() and not model.words.weight.grad[~allowed].any()
    assert model.output_bias.grad[allowed].all()


@pytest.mark.parametrize(
    ("tie", "moved"), [("all", {"source", "target", "output"}), ("target", {"target", "output"}), ("none", {"output"})]
)
def test_tied_words_are_one_and_others_are_not(tie, moved):
    """Moves the vectors that the output uses and looks which sides move with them."""
    model = tiny(tie=tie).eval()
    tables = {
        "all": [model.words],
        "target": [model.words, model.target_words],
        "none": [model.words, model.target_words, model.output_words],
    }[tie]
    assert {name for name, _ in model.named_parameters() if name.endswith("words.weight")} == {
        f"{name}.weight" for name in ("words", "target_words", "output_words")[: len(tables)]
    }
    source, target, states = ids(1, 4), ids(1, 4), torch.randn(1, 2, 16)

    def look() -> dict[str, torch.Tensor]:
        with torch.no_grad():
            memory = model.encode(source)
            return {
                "source": memory.states,
                "target": model.decode(target, memory._replace(states=torch.ones_like(memory.states))),
                "output": model.score(states)[..., model.allowed],
            }

    before = look()
    with torch.no_grad():
        tables[-1].weight.copy_(torch.randn_like(tables[-1].weight))
    after = look()
    assert {side for side in before if not torch.equal(before[side], after[side])} == moved


def test_each_side_has_its_own_language_vector():
    model = tiny().eval()
    source, target = ids(1, 4), ids(1, 4)
    with torch.no_grad():
        memory = model.encode(source)
        decoded = model.decode(target, memory)
        model.languages[1] = torch.randn(16)
        assert torch.equal(model.encode(source).states, memory.states)
        assert not torch.allclose(model.decode(target, memory), decoded)
        model.languages[0] = torch.randn(16)
        assert not torch.allclose(model.encode(source).states, memory.states)
    assert tiny(language_vectors=False).languages is None


def test_word_dropout_replaces_the_right_share_by_unknown_and_never_padding():
    model = tiny(dropout={**QUIET.model_dump(), "word": 0.1}).train()
    source = ids(100, 300)
    source[:, 250:] = PAD
    dropped = model._drop_words(source)
    assert torch.equal(dropped[:, 250:], source[:, 250:])
    changed = dropped != source
    assert (dropped[changed] == UNKNOWN).all()
    assert changed[:, :250].float().mean().item() == pytest.approx(0.1, abs=0.01)
    assert torch.equal(model.eval()._drop_words(source), source)


def test_word_dropout_falls_on_both_sides_in_training_alone():
    model = tiny(dropout={**QUIET.model_dump(), "word": 0.5})
    seen: dict[int, torch.Tensor] = {}
    embed = model._embed

    def watch(tokens, table, side, cache=None):
        seen[side] = tokens
        return embed(tokens, table, side, cache)

    model._embed = watch
    source, target = ids(4, 30), ids(4, 30)
    model.train()(source, target)
    assert all((seen[side] == UNKNOWN).float().mean() > 0.3 for side in (0, 1))
    model.eval()(source, target)
    assert torch.equal(seen[0], source) and torch.equal(seen[1], target)


def layer_norm(x):
    return F.layer_norm(x, x.shape[-1:])


@pytest.mark.parametrize("place", ["pre", "post"])
def test_an_encoder_layer_is_wired_as_its_position_of_norms_says(place):
    model = Translator(VOCABULARY, Model(**{**TINY, "norm_position": place})).eval()
    layer = model.encoder[0]
    source = ids(2, 6)
    with torch.no_grad():
        x = model._embed(source, model.words.table(), side=0)
        if place == "pre":
            y = layer_norm(x)
            x = x + layer.attention(y, y, y)[0]
            x = layer_norm(x + layer.feed_forward(layer_norm(x)))
        else:
            x = layer_norm(x + layer.attention(x, x, x)[0])
            x = layer_norm(x + layer.feed_forward(x))
        torch.testing.assert_close(model.encode(source).states, x, atol=1e-5, rtol=1e-5)


def test_positions_reach_beyond_the_table_that_is_made_first():
    model = tiny().eval()
    long = ids(1, 700)
    torch.testing.assert_close(model._positions_from(290, 410), sinusoids(700, 16)[290:])
    assert model.encode(long).states.isfinite().all()
    assert "positions" not in model.state_dict()


def test_attentions_and_scales_have_names_that_say_what_they_are():
    model = tiny(attention={"scale_init": 3.0, "scale_per_head": True})
    names = ["encoder.0.self", "decoder.0.self", "decoder.0.cross", "decoder.1.self", "decoder.1.cross"]
    assert list(model.attentions()) == names
    with torch.no_grad():
        for number, attention in enumerate(model.attentions().values()):
            attention.norm.scale.copy_(torch.tensor([0.0, 1.0, 2.0, 5.0]) + number)
    assert model.scales() == pytest.approx({name: 2.0 + number for number, name in enumerate(names)})
    assert tiny(attention={"qk_norm": "none"}).scales() == {}, "1/√d is no g"


def test_rotary_positions_turn_self_attention_alone():
    turned = {name: each.rotary for name, each in tiny(positions="rotary").attentions().items()}
    assert turned["encoder.0.self"] == turned["decoder.1.self"] == "after_norm"
    assert turned["decoder.0.cross"] == "none"


def test_the_scale_starts_where_the_paper_says():
    def start(length: float = 79, **attention) -> float | None:
        return start_of_scale(Model(width=64, heads=1, attention=Attention(**attention)), length)

    assert start() == pytest.approx(12.589, abs=5e-4)
    assert start() == pytest.approx(math.log2(79 * 79 - 79))
    assert start(1.0) == pytest.approx(1.0)
    assert start(scale_init=5.0) == 5.0
    assert start(p=3.0) == pytest.approx(12.589, abs=5e-4)
    assert start(p=3.0, scale_matched=True) == pytest.approx(matched_scale(start(), 3.0, 64))
    assert start(p=3.0, scale_matched=True) == pytest.approx(12.589 / 2.96, rel=0.01)
    assert start(p=3.0, scale_matched=True, scale_init=5.0) == pytest.approx(5 / 2.96, rel=0.01)
    assert start(qk_norm="rms") is None
    assert start(qk_norm="none") is None
    assert start(qk_norm="none", scale_init=0.1) == 0.1


def test_the_start_reaches_every_attention():
    settings = Model(**TINY)
    model = Translator(VOCABULARY, settings, scale_init=start_of_scale(settings, 79))
    assert list(model.scales().values()) == pytest.approx([math.log2(79 * 78)] * 5)
