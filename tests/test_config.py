"""Settings: what is refused and in which words, what a file changes, and that TOML keeps all of it."""

import math
import types
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from qknorm.config import (
    Attention,
    Model,
    Prepare,
    Schedule,
    Train,
    Training,
    explain_validation,
    merge,
    read_settings,
    setting_names,
)
from qknorm.errors import InputError
from qknorm.studies.recipes import PRESETS, preset
from qknorm.training.run_folder import SETTINGS, write_settings


@pytest.fixture
def read(tmp_path):
    """Reads TOML text as the settings of a file called my.toml."""

    def from_text(text: str, base: Train | None = None) -> Train:
        (tmp_path / "my.toml").write_text(text, encoding="utf-8")
        return read_settings(tmp_path / "my.toml", Train, base)

    return from_text


@pytest.mark.parametrize(
    ("text", "name", "nearest"),
    [
        ("[model]\nhead = 4", "model.head", "model.heads"),
        ("[model.attention]\nscale_int = 4.0", "model.attention.scale_int", "model.attention.scale_init"),
        ("[modle]\nheads = 4", "modle", "model"),
        ("[training]\nlabel_smooting = 0.1", "training.label_smooting", "training.label_smoothing"),
        ("[training.schedule]\nwarm_up = 10", "training.schedule.warm_up", "training.schedule.warmup"),
    ],
)
def test_unknown_names_are_errors_with_the_nearest_known_one(read, text, name, nearest):
    with pytest.raises(InputError, match=rf"my\.toml: there is no setting {name}; did you mean {nearest}\?$"):
        read(text)


def test_a_name_like_none_gets_no_suggestion(read):
    with pytest.raises(InputError, match=r"my\.toml: there is no setting zzzzqqqq$"):
        read("zzzzqqqq = 1")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[model]\nheads = 0", "model.heads: Input should be greater than or equal to 1"),
        ("[model]\nwidth = 'wide'", "model.width: Input should be a valid integer"),
        ("[model]\nnorm = 'batch'", "model.norm: Input should be 'layer', 'scale', 'rms' or 'none'"),
        ("[model]\nwidth = 100", "model.width 100 is no multiple of model.heads 8"),
        ("[model]\nkv_heads = 3", "model.heads 8 is no multiple of model.kv_heads 3"),
        ("[model]\nwidth = 24\npositions = 'rotary'", "even head size: model.width / model.heads"),
        ("[model]\nattention = 3", "model.attention: Input should be a valid dictionary"),
        ("[model.attention]\np = 0.5", "model.attention.p: Input should be greater than or equal to 1"),
        ("[model.attention]\np = nan", "model.attention.p: "),
        ("[model.attention]\np = 1\np_learned = true", "model.attention.p_learned needs qk_norm lp and a p above 1"),
        ("[model.attention]\nqk_norm = 'rms'\np_learned = true", "not qk_norm rms and p 2"),
        ("[model.attention]\nscale_init = inf", "model.attention.scale_init: Input should be a finite number"),
        ("[model.dropout]\nword = 1.0", "model.dropout.word: Input should be less than 1"),
        ("[training]\nbetas = [0.9, 1.5]", "training.betas.1: Input should be less than 1"),
        ("[training]\nseed = -1", "training.seed: Input should be greater than or equal to 0"),
        ("[training.schedule]\npeak = 0", "training.schedule.peak: Input should be greater than 0"),
        ("[training]\nbatch_tokens = 'none'", "training.batch_tokens: Input should be a valid integer"),
    ],
)
def test_bad_values_name_the_file_and_the_setting_once(read, text, complaint):
    with pytest.raises(InputError) as caught:
        read(text)
    message = str(caught.value)
    assert complaint in message
    assert message.count("my.toml") == 1 and "\n" not in message
    assert "model: model." not in message and "Value error" not in message


def test_files_that_cannot_be_settings_are_named(tmp_path, read):
    with pytest.raises(InputError, match=r"absent\.toml cannot be read .*name a TOML file of settings"):
        read_settings(tmp_path / "absent.toml", Train)
    with pytest.raises(InputError, match="cannot be read"):
        read_settings(tmp_path, Train)
    with pytest.raises(InputError, match=r"my\.toml is no TOML: .*line 1"):
        read("[model\nheads = 4")
    (tmp_path / "latin.toml").write_bytes(b"# \xe9\n")
    with pytest.raises(InputError, match=r"latin\.toml is no TOML"):
        read_settings(tmp_path / "latin.toml", Train)


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(read):
    assert read("\ufeff[model]\r\nheads = 4\r\n").model.heads == 4


def test_a_file_changes_what_it_names_and_keeps_the_rest_of_its_base(read):
    base = preset("paper-qknorm-gl-en")
    changed = read("[model.attention]\np = 3\n[training.schedule]\nwarmup = 5\n", base)
    assert changed.model.attention == base.model.attention.model_copy(update={"p": 3.0})
    assert changed.training.schedule == base.training.schedule.model_copy(update={"warmup": 5})
    assert changed.model.model_copy(update={"attention": base.model.attention}) == base.model
    assert changed.decoding == base.decoding


def test_a_file_alone_starts_from_the_defaults(read):
    assert read("") == Train()
    assert read("[model]\nheads = 4") == Train(model=Model(heads=4))


def test_none_undoes_the_value_of_a_base_where_a_setting_may_be_open(read):
    base = read("[training]\nstop_after = 10\nschedule.peak = 1e-3\n")
    assert base.training.stop_after is not None and base.training.schedule.peak is not None
    changed = read('[training]\nstop_after = "none"\nschedule.peak = "none"\n', base)
    assert changed.training.stop_after is changed.training.schedule.peak is None
    assert read('[model]\ntie = "none"\nattention.qk_norm = "none"\n').model.tie == "none"


def test_merge_goes_group_by_group_and_leaves_its_arguments_alone():
    base, changes = {"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 5}, "d": {"e": 6}, "f": 7}
    assert merge(base, changes) == {"a": {"b": 1, "c": 5}, "d": {"e": 6}, "f": 7}
    assert base == {"a": {"b": 1, "c": 2}, "d": 3}


def test_settings_are_frozen():
    with pytest.raises(ValidationError):
        Model().heads = 4


def test_names_reach_every_leaf_of_the_tree():
    names = list(setting_names(Train))
    assert {"model", "model.attention.p", "model.dropout.word", "training.schedule.peak", "decoding.beam"} <= set(names)
    assert len(names) == len(set(names))


def test_explanations_know_other_trees():
    with pytest.raises(ValidationError) as caught:
        Prepare.model_validate({"source": "gl", "target": "en", "train": [], "subwords": {"merge": 3}})
    assert explain_validation(caught.value, "settings", Prepare) == (
        "settings: there is no setting subwords.merge; did you mean subwords.merges?"
    )


def kinds_of_settings(kind: type[BaseModel]) -> list[type[BaseModel]]:
    inner = [entry.annotation for entry in kind.model_fields.values()]
    groups = [each for each in inner if isinstance(each, type) and issubclass(each, BaseModel)]
    return [kind, *(deeper for group in groups for deeper in kinds_of_settings(group))]


@pytest.mark.parametrize("kind", kinds_of_settings(Train), ids=lambda kind: kind.__name__)
def test_what_may_be_open_is_open_by_default(kind):
    """TOML has no null: a setting that is None is left out of the file, and must read back as None."""
    for name, entry in kind.model_fields.items():
        if isinstance(entry.annotation, types.UnionType) and type(None) in get_args(entry.annotation):
            assert entry.default is None, name


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_toml(name, tmp_path):
    write_settings(tmp_path, preset(name))
    assert read_settings(tmp_path / SETTINGS, type(preset(name))) == preset(name)


trees = st.builds(
    Train,
    model=st.builds(
        Model,
        heads=st.sampled_from([2, 4, 8]),
        kv_heads=st.sampled_from([None, 1, 2]),
        tie=st.sampled_from(["all", "target", "none"]),
        attention=st.builds(
            Attention,
            p=st.floats(1, 50) | st.just(math.inf),
            scale_init=st.none() | st.floats(0.1, 1e6),
            scale_learned=st.none() | st.booleans(),
        ),
    ),
    training=st.builds(
        Training,
        seed=st.integers(0, 2**31),
        stop_after=st.none() | st.integers(1, 100),
        betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.9999)),
        schedule=st.builds(Schedule, peak=st.none() | st.floats(1e-9, 1.0), floor=st.floats(0, 1e-3)),
    ),
)


@given(trees)
@settings(max_examples=40)
def test_any_settings_survive_toml(tmp_path_factory, tree):
    folder = tmp_path_factory.mktemp("toml")
    write_settings(folder, tree)
    assert read_settings(folder / SETTINGS, Train) == tree
