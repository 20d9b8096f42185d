import pytest
from paper_cases import prepare_copy

from qknorm import files
from qknorm.errors import InputError
from qknorm.studies.paper.experiments import BEYOND, TABLES
from qknorm.studies.paper.plan import how_to_get, make_plan
from qknorm.studies.recipes import paper


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of prepared pairs, of which Galician and one of our own are there."""
    place = tmp_path_factory.mktemp("pairs")
    for source in ("gl", "eo"):
        data = prepare_copy(place / "text" / source, source=source)
        data.folder.rename(place / f"{source}-en")
    return place


def test_pairs_whose_data_are_not_here_are_told_with_commands(folder, tmp_path):
    plan = make_plan([TABLES["2"]], tmp_path, folder, seeds=2)
    assert {each.pair for each in plan.planned} == {"gl-en"} and len(plan.jobs) == 4
    missing = {each.pair: each.commands for each in plan.missing}
    assert set(missing) == {"en-vi", "ar-en", "en-he", "sk-en"}
    assert missing["sk-en"] == (
        "qknorm corpora download ted-sk-en",
        f"qknorm prepare {folder / 'sk-en'} --corpus ted-sk-en --subwords.merges 8000 --subwords.pretokenized",
    )
    assert missing["en-vi"][0] == "qknorm corpora download iwslt15-en-vi"
    assert "--subwords.pretokenized" not in how_to_get("de-en", folder).commands[1]
    assert how_to_get("de-en", folder / "de-en").commands == how_to_get("de-en", folder).commands


def test_a_corpus_that_is_here_is_not_to_be_downloaded(folder, tmp_path, monkeypatch):
    files.write_text(tmp_path / "ted-sk-en" / "train.sk", "Ahoj\n")
    monkeypatch.setenv("QKNORM_DATA", str(tmp_path))
    (only,) = how_to_get("sk-en", folder).commands
    assert only.startswith("qknorm prepare") and "--corpus ted-sk-en" in only
    assert len(how_to_get("ar-en", folder).commands) == 2


def test_the_commands_that_are_told_are_known(folder):
    from qknorm.cli.prepare import Arguments
    from qknorm.studies.recipes import CORPORA
    from qknorm.text.catalogue import find

    for pair, corpus in CORPORA.items():
        assert find(corpus).languages == tuple(pair.split("-"))
        assert "--corpus" in how_to_get(pair, folder).commands[1]
    assert {"corpus", "subwords"} <= set(Arguments.__dataclass_fields__)


def test_tables_share_their_runs_and_first_seeds_come_first(folder, tmp_path):
    plan = make_plan([TABLES["2"], TABLES["3"], TABLES["4"]], tmp_path, folder, pair="gl-en", seeds=2)
    assert len(plan.planned) == (2 + 2 + 5) * 2
    assert len(plan.jobs) == (2 + 5 - 1) * 2  # gl-en has four heads, which Table 4 tries as well
    seeds = [job.settings.training.seed for job in plan.jobs]
    assert seeds == sorted(seeds)
    assert [job.name for job in plan.jobs[:2]] == ["gl-en baseline, seed 0", "gl-en qknorm, seed 0"]  # as in Table 2


def test_without_a_pair_the_one_that_the_data_hold_is_taken(folder, tmp_path):
    plan = make_plan([TABLES["6"], BEYOND["control"]], tmp_path, folder / "gl-en")
    assert {each.pair for each in plan.planned} == {"gl-en"} and not plan.missing
    assert {each.pair for each in make_plan([BEYOND["lp"]], tmp_path, folder).planned} == {"gl-en"}


def test_a_pair_of_ones_own_goes_by_the_recipe_of_its_size_or_the_one_named(folder, tmp_path):
    plan = make_plan([TABLES["2"]], tmp_path, folder, pair="eo-en")
    assert plan.planned[1].job.settings == paper("gl-en", "qknorm")
    plan = make_plan([TABLES["2"]], tmp_path, folder, pair="eo-en", recipe="sk-en")
    assert plan.planned[1].job.settings == paper("sk-en", "qknorm")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"seeds": 0}, "--seeds is 0; give 1 or more"),
        ({"recipe": "gl"}, "--recipe: the paper has none for gl"),
        ({"pair": "xx-yy"}, "--pair xx-yy: no data set is known for it"),
    ],
)
def test_bad_wishes_get_a_sentence(folder, tmp_path, options, told):
    with pytest.raises(InputError, match=told):
        make_plan([TABLES["2"]], tmp_path, folder, **options)


def test_data_of_another_pair_are_refused(folder, tmp_path):
    with pytest.raises(InputError, match="holds gl-en, not sk-en"):
        make_plan([TABLES["2"]], tmp_path, folder / "gl-en", pair="sk-en")
