import pytest
import torch

from qknorm.config import Train
from qknorm.errors import InputError
from qknorm.models.translator import Translator
from qknorm.studies.paper.experiments import (
    BEYOND,
    EXPERIMENTS,
    PEAK,
    QKNORM,
    TABLES,
    check_systems,
    find_experiment,
    make_quick,
)
from qknorm.studies.recipes import PAIRS, change, paper
from qknorm.training.schedule import LearningRate


@pytest.mark.parametrize("experiment", TABLES.values(), ids=list(TABLES))
def test_every_system_of_a_table_has_its_number_in_the_paper(experiment):
    for pair in experiment.pairs:
        for system in experiment.systems:
            assert experiment.published(pair, system.name) is not None


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=list(EXPERIMENTS))
def test_systems_are_distinct_also_in_small_and_what_they_are_compared_with_is_there(experiment):
    names = {system.name for system in experiment.systems}
    assert experiment.reference in names
    assert all(system.against in names for system in experiment.systems if system.against)
    for make in (lambda settings: settings, make_quick):
        made = [make(system.settings("en-vi", 0)).model_dump_json() for system in experiment.systems]
        assert len(set(made)) == len(made)


@pytest.mark.parametrize("pair", PAIRS)
def test_the_two_systems_of_table_2_are_the_presets(pair):
    for system in TABLES["2"].systems:
        assert system.settings(pair, 0) == paper(pair, system.name)
        assert system.settings(pair, 3).training.seed == 3


def test_what_is_the_paper_s_own_is_the_same_training_in_every_table():
    own = QKNORM.settings("en-vi", 0)
    names = [("4", "heads-8"), ("5", "percentile-97.5"), ("6", "qknorm"), ("warmup", "warmup-8000-qknorm")]
    names += [("learning-rate", "rate-1-qknorm"), ("depth", "depth-6-qknorm"), ("bpe-dropout", "bpe-dropout-0-qknorm")]
    for experiment, name in names:
        system = next(each for each in EXPERIMENTS[experiment].systems if each.name == name)
        assert system.settings("en-vi", 0) == own


def test_ablations_change_what_their_names_say():
    made = {system.name: system.settings("en-vi", 0).model for system in TABLES["6"].systems}
    assert (made["without-g"].attention.scale_init, made["without-g"].attention.scale_learned) == (1.0, False)
    assert made["without-layernorm"].norm == "none"
    assert not made["without-fixnorm"].fixnorm and made["without-fixnorm"].norm_position == "pre"
    both = made["without-fixnorm-prenorm"]
    assert not both.fixnorm and both.norm_position == "post"
    assert made["values-normalised"].attention.normalize_values


def test_the_control_changes_one_thing_at_a_time():
    made = {system.name: system.settings("gl-en", 0).model for system in BEYOND["control"].systems}
    parts = {name: (model.norm, model.attention.qk_norm) for name, model in made.items()}
    assert parts == {
        "layernorm-dot-products": ("layer", "none"),
        "baseline": ("scale", "none"),
        "scalenorm-qknorm": ("scale", "lp"),
        "qknorm": ("layer", "lp"),
    }


def test_what_the_paper_left_open_is_tried_at_these_values():
    """By experiment: what each system changes of its recipe, in their order."""

    def changes(name):
        made = [{**system.changes, "of": system.base} for system in BEYOND[name].systems]
        return [{key.split(".", 1)[1] if "." in key else key: value for key, value in each.items()} for each in made]

    def of_both(*each):
        return [{**change, "of": system} for change in each for system in ("baseline", "qknorm")]

    assert set(BEYOND) == {
        *("control", "norms", "width-query", "lp", "warmup", "bpe-dropout", "learning-rate", "depth"),
    }
    own = {"of": "qknorm"}
    assert changes("norms") == [own, own | {"attention.scale_per_head": True}, own | {"attention.qk_norm": "rms"}]
    assert changes("lp") == [own, *(own | {"attention.p": p, "attention.scale_matched": True} for p in (1.5, 3, 4))]
    warmups = [{"schedule.warmup": steps, "schedule.peak": PEAK} for steps in (4_000, 1_000, 0)]
    assert changes("warmup") == of_both({}, *warmups)
    assert changes("bpe-dropout") == of_both({}, {"bpe_dropout": 0.1})
    rates = [{"schedule.peak": PEAK * times} for times in (0.5, 2, 4)]
    assert changes("learning-rate") == of_both({}, *rates)
    depths = [{"encoder_layers": layers, "decoder_layers": layers} for layers in (2, 4, 6, 8)]
    assert changes("depth") == of_both(*depths)


def test_warm_ups_climb_to_the_same_rate():
    for system in BEYOND["warmup"].systems:
        settings = system.settings("en-vi", 0)
        assert LearningRate(settings.training.schedule, settings.model.width, 10).peak == pytest.approx(PEAK)


def test_a_model_without_norms_has_none_and_computes():
    settings = change(
        Train(),
        {
            "model.norm": "none",
            "model.width": 16,
            "model.feed_forward": 16,
            "model.heads": 2,
            "model.encoder_layers": 2,
            "model.decoder_layers": 2,
        },
    )
    model = Translator(20, settings.model, scale_init=3.0)
    assert not [part for part in model.modules() if type(part).__name__ in ("LayerNorm", "RMSNorm", "ScaleNorm")]
    assert torch.isfinite(model(torch.randint(4, 20, (2, 5)), torch.randint(4, 20, (2, 6)))).all()


def test_chosen_systems_bring_along_what_they_are_compared_with():
    table = TABLES["6"].choose(["without-g"])
    assert [system.name for system in table.systems] == ["qknorm", "without-g"]
    warmup = BEYOND["warmup"].choose(["warmup-0-qknorm"])
    assert [system.name for system in warmup.systems] == ["warmup-0-baseline", "warmup-0-qknorm"]
    assert TABLES["4"].choose(["without-g"]).systems == ()
    assert TABLES["4"].choose([]) == TABLES["4"]


def test_unknown_names_get_the_nearest():
    with pytest.raises(InputError, match="no experiment contrl: did you mean 'control'"):
        find_experiment("contrl")
    with pytest.raises(InputError, match="no without-q in what is asked for: did you mean 'without-g'"):
        check_systems(["without-q"], [TABLES["6"]])
    with pytest.raises(InputError, match=r"no setting model\.headz; did you mean model\.heads"):
        change(Train(), {"model.headz": 2})
    with pytest.raises(InputError, match="no multiple"):
        change(Train(), {"model.heads": 7})
