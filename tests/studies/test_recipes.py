"""The presets against the paper's table, written down here a second time."""

import pytest

from qknorm.errors import InputError
from qknorm.studies.recipes import MERGES, PAIRS, PRESETS, preset

EVALUATE_EVERY = {"en-vi": 1_500, "ar-en": 2_000, "en-he": 2_000, "sk-en": 600, "gl-en": 100}


@pytest.mark.parametrize("pair", EVALUATE_EVERY)
@pytest.mark.parametrize("system", ["qknorm", "baseline"])
def test_the_papers_presets_are_its_table_line_by_line(system, pair):
    small = pair == "gl-en"
    settings = preset(f"paper-{system}-{pair}")
    model, training, decoding = settings.model, settings.training, settings.decoding
    assert (model.width, model.feed_forward) == (512, 2_048)
    assert (model.encoder_layers, model.decoder_layers, model.heads) == ((4, 4, 4) if small else (6, 6, 8))
    assert model.kv_heads is None
    assert (model.activation, model.init) == ("relu", "paper")
    assert (model.tie, model.fixnorm, model.language_vectors, model.logit_mask) == ("all", True, True, True)
    assert (model.norm_position, model.positions) == ("pre", "sinusoid-slip")
    share = 0.4 if small else 0.3
    dropout = model.dropout
    assert [dropout.residual, dropout.embedding, dropout.attention, dropout.feed_forward] == [share] * 4
    assert dropout.word == 0.1
    assert (training.label_smoothing, training.batch_tokens, training.accumulate) == (0.1, 4_096, 1)
    assert (training.betas, training.clip, training.weight_decay) == ((0.9, 0.999), 1.0, 0.0)
    assert training.bpe_dropout == 0.0
    schedule = training.schedule
    assert (schedule.kind, schedule.warmup, schedule.decay, schedule.patience) == ("plateau", 8_000, 0.8, 3)
    assert schedule.peak is None  # width^-0.5 · warmup^-0.5
    assert schedule.floor == (5e-5 if small else 1e-5)
    assert training.evaluate_every == EVALUATE_EVERY[pair]
    assert training.max_evaluations == (1_000 if small else 200)
    assert training.max_steps >= training.max_evaluations * training.evaluate_every
    assert training.stop_after is training.max_minutes is training.dev_sentences is None
    assert (decoding.beam, decoding.length_penalty, decoding.extra_length, decoding.no_repeat_ngram) == (4, 0.6, 50, 0)


@pytest.mark.parametrize("pair", PAIRS)
def test_the_two_systems_differ_in_attention_and_norm_alone(pair):
    ours, theirs = preset(f"paper-qknorm-{pair}").model, preset(f"paper-baseline-{pair}").model
    assert (ours.norm, theirs.norm) == ("layer", "scale")
    assert (ours.attention.qk_norm, ours.attention.p, theirs.attention.qk_norm) == ("lp", 2.0, "none")
    assert ours.attention.scale_init is None and ours.attention.scale_percentile == 97.5
    assert not ours.attention.scale_per_head and not ours.attention.normalize_values
    alike = {"norm": theirs.norm, "attention": theirs.attention}
    assert ours.model_copy(update=alike) == theirs
    assert preset(f"paper-qknorm-{pair}").training == preset(f"paper-baseline-{pair}").training


def test_merges_are_the_papers():
    assert MERGES == {"en-vi": 8_000, "ar-en": 8_000, "en-he": 8_000, "sk-en": 8_000, "gl-en": 3_000}


def test_our_own_default_is_what_the_dev_sets_chose():
    settings = preset("low-resource")
    assert settings.model.positions == "sinusoid" and settings.model.norm == "scale"
    assert settings.model.attention.qk_norm == "lp"
    assert settings.training.bpe_dropout == 0.1 and settings.model.dropout.word == 0
    schedule = settings.training.schedule
    assert (schedule.kind, schedule.floor, settings.training.max_steps) == ("cosine", 1e-5, 25_000)
    assert (settings.training.batch_tokens, schedule.peak) == (8_192, 1e-3)
    assert (settings.model.encoder_layers, settings.model.decoder_layers, settings.model.feed_forward) == (6, 6, 2_048)
    dropout = settings.model.dropout
    assert dropout.residual == dropout.embedding == 0.3 and dropout.attention == dropout.feed_forward == 0.1


def test_presets_have_the_names_that_are_promised():
    papers = {f"paper-{system}-{pair}" for system in ("qknorm", "baseline") for pair in EVALUATE_EVERY}
    ours = {"low-resource", "low-resource-small", "demo", "character-lm", "character-lm-small"}
    assert papers | ours == set(PRESETS)


def test_an_unknown_preset_is_an_error_that_helps():
    with pytest.raises(InputError, match=r"no preset paper-qknorm-glen; did you mean paper-qknorm-gl-en\?"):
        preset("paper-qknorm-glen")
    with pytest.raises(InputError, match=r"no preset 123456; known are low-resource, low-resource-small, demo, "):
        preset("123456")
