from dataclasses import replace

import numpy as np
import pytest
from paper_cases import finish, prepare_copy

from qknorm.scoring import compare
from qknorm.studies.grid.jobs import TRANSLATIONS, Result
from qknorm.studies.grid.scores import MOSES, PLAIN, RELEASED, TOKENISED, TREEBANK
from qknorm.studies.paper.comparing import SAMPLES, SEED, Compared, Comparer, combine_seeds, measure_name
from qknorm.studies.paper.experiments import BEYOND, TABLES
from qknorm.studies.paper.plan import make_plan
from qknorm.studies.published import AVERAGE_GAIN


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare_copy(tmp_path_factory.mktemp("copy"))


def planned(data, root, experiment, seeds=1):
    return make_plan([experiment], root, data.folder, pair="gl-en", seeds=seeds).planned


def test_with_one_seed_it_is_koehns_test(data, tmp_path):
    baseline, qknorm = planned(data, tmp_path, TABLES["2"])
    finish(baseline.job, data, wrong=3)
    finish(qknorm.job, data, wrong=1)
    _, line = Comparer().compare([baseline, qknorm])
    references = data.split("test").text("en")
    systems = {
        each.system.name: (each.job.folder / TRANSLATIONS).read_text(encoding="utf-8").splitlines()
        for each in (baseline, qknorm)
    }
    expected = compare(systems, [references], "baseline", samples=SAMPLES, seed=SEED, lang="en").systems[1]
    assert line.difference == pytest.approx(expected.difference)
    assert line.p == pytest.approx(expected.koehn_p)


def test_seeds_that_differ_make_p_larger():
    generator = np.random.default_rng(0)
    noise = generator.normal(0, 0.1, 500)
    steady = np.stack([30 + noise, 30 + noise, 30 + noise])
    ahead, wild = steady + 1, np.stack([28 + noise, 31 + noise, 34 + noise])
    assert combine_seeds(ahead, steady, 1.0) == pytest.approx(1 / 501)
    # of the 27 ways to draw three seeds, those whose mean is not above 30
    lost = sum((a + b + c) / 3 <= 30 for a in (28, 31, 34) for b in (28, 31, 34) for c in (28, 31, 34)) / 27
    assert combine_seeds(wild, steady, 1.0) == pytest.approx(lost, abs=0.06)
    assert combine_seeds(steady, ahead, -1.0) == pytest.approx(1 / 501)


def test_equal_systems_have_p_1():
    assert combine_seeds(np.ones((2, 10)), np.ones((2, 10)), 0.0) == 1.0


def test_a_line_tells_means_and_what_the_paper_says(data, tmp_path):
    everything = planned(data, tmp_path, TABLES["2"], seeds=2)
    for each in everything:
        finish(each.job, data, wrong=8 if each.system.name == "baseline" else each.seed)
    baseline, qknorm = Comparer().compare(everything)
    assert (baseline.against, baseline.difference, baseline.claimed, baseline.outcome) == (None, None, None, "")
    assert (baseline.published, qknorm.published) == (22.01, 24.21)
    assert qknorm.claimed == pytest.approx(2.20)
    assert len(qknorm.scores) == qknorm.planned == 2 and qknorm.scores[0] == pytest.approx(100)
    assert qknorm.outcome == "holds" and qknorm.seconds == (60.0, 60.0)


def test_what_is_not_finished_or_diverged_is_told(data, tmp_path):
    everything = planned(data, tmp_path, TABLES["6"].choose(["without-g"]), seeds=2)
    own, bad = ([each for each in everything if each.system.name == name] for name in ("qknorm", "without-g"))
    finish(own[0].job, data, wrong=0)
    for each in bad:
        each.job.write()
        Result("diverged", "no number", 5.0, 3, 0, 0.2).write(each.job.folder)
    first, second = Comparer().compare(everything)
    assert (len(first.scores), first.planned) == (1, 2)
    assert (second.scores, second.diverged, second.difference, second.outcome) == ((), 2, None, "diverged")
    assert (second.dev, second.seconds) == ((), ()), "nor has it a part in what means are taken of"
    assert second.published == 24.53 and second.claimed == pytest.approx(24.53 - 33.24)


def test_on_a_pair_of_its_own_the_papers_difference_is_its_average(data, tmp_path):
    everything = planned(data, tmp_path, TABLES["2"])
    elsewhere = [replace(each, pair="de-en") for each in everything]
    line = Comparer().compare(elsewhere)[1]
    assert line.published is None and line.claimed == pytest.approx(AVERAGE_GAIN)


def test_pairs_under_one_change_are_compared_with_each_other(data, tmp_path):
    everything = planned(data, tmp_path, BEYOND["warmup"])
    lines = Comparer().compare(everything)
    assert {line.system: line.against for line in lines if "-0-" in line.system} == {
        "warmup-0-baseline": "warmup-8000-baseline",
        "warmup-0-qknorm": "warmup-0-baseline",
    }
    assert all(line.outcome == "" and line.published is None for line in lines)


def line_with(difference, p, experiment, claimed):
    known = {"difference": difference, "p": p, "claimed": claimed, "published": None}
    nothing = {"scores": (), "dev": (), "seconds": (), "device_seconds": ()}
    return Compared(experiment, "gl-en", "gl→en", "s", "", "r", planned=1, diverged=0, **known, **nothing)


@pytest.mark.parametrize(
    ("difference", "p", "claimed", "outcome"),
    [
        (1.0, 0.009, 2.0, "holds"),
        (1.0, 0.02, 2.0, "not shown"),
        (-1.0, 0.009, 2.0, "reversed"),
        (-1.0, 0.5, 2.0, "not shown"),
        (-1.0, 0.001, -0.1, "holds"),
        (1.0, 0.001, None, "better"),
        (-1.0, 0.001, None, "worse"),
        (-1.0, 0.2, None, "no difference shown"),
    ],
)
def test_outcomes_go_by_sign_and_level(difference, p, claimed, outcome):
    assert line_with(difference, p, TABLES["2"], claimed).outcome == outcome


def test_the_level_is_the_papers_own_where_it_states_one():
    assert line_with(-1.0, 0.04, TABLES["6"], -1.0).outcome == "holds"
    assert line_with(-1.0, 0.04, TABLES["2"], -1.0).outcome == "not shown"


def test_measures_are_those_of_the_paper():
    tokens = (TOKENISED, RELEASED, MOSES, TREEBANK)
    assert measure_name(TABLES["2"], tokens) == RELEASED
    assert measure_name(TABLES["3"], tokens) == TREEBANK
    assert measure_name(TABLES["3"], (PLAIN,)) == PLAIN
