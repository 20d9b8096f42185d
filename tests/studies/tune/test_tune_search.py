import csv
import shutil

import pytest
from paper_cases import prepare_copy, tiny

from qknorm import files
from qknorm.config import Train, read_settings
from qknorm.errors import InputError
from qknorm.studies.grid.jobs import Result, read_result
from qknorm.studies.grid.work import averaged_weights, do
from qknorm.studies.recipes import change
from qknorm.studies.tune.data import DataByMerges
from qknorm.studies.tune.report import write_report
from qknorm.studies.tune.search import Search
from qknorm.studies.tune.testing import (
    AVERAGED,
    best_average,
    job_for_test,
    jobs_to_repeat,
    tabulate_test,
    translate_test,
)
from qknorm.training.evaluation import Evaluator


@pytest.fixture(scope="module", params=[False, True], ids=["raw", "tokenised"])
def base(request, tmp_path_factory):
    return prepare_copy(tmp_path_factory.mktemp("copy"), pretokenized=request.param)


@pytest.fixture
def search(base, tmp_path):
    def make(**options):
        data = DataByMerges(base, tmp_path / "data")
        usual = {"only": ("heads", "norm", "positions"), "averages": (2,), "start_seeds": 1}
        return Search(data, tmp_path, tiny(), 30, tiny(), "reference", 20, **{**usual, **options})

    return make


def end(trial, dev, status="finished", averaged=None):
    """Writes what a finished trial leaves."""
    trial.job.write()
    scores = {"bleu": {"value": dev, "signature": "s"}}
    Result(status, "the end", 60.0, 8, 4, dev, 1_000, scores, {"device": "cpu"}, averaged or {}).write(trial.job.folder)


def walk(search, devs):
    """Goes through the stages, each trial ended with the dev BLEU of its system, or with one that nobody wins by."""
    stages = []
    for stage in search.stages():
        stages.append([trial.system for trial in stage])
        for trial in stage:
            if (dev := devs.get(trial.system, 10.0)) is not None:
                end(trial, dev - trial.seed)
    return stages


def test_a_change_that_the_most_steps_undo_is_no_candidate(search):
    made_of_steps = ["steps 50000", "steps 12500"]
    for most, expected in ((8, []), (20_000, ["steps 12500"]), (None, ["steps 50000", "steps 12500"])):
        made = search(only=("steps",), max_steps=most)
        made.start = change(made.start, {"training.max_steps": 25_000})
        assert [trial.system for trial in next(made.stages()) if trial.candidate.factor] == expected
        assert [each.name for each in made.without_effect] == [each for each in made_of_steps if each not in expected]


def test_other_merges_keep_the_text_and_leave_out_the_test_set(base, tmp_path):
    data = DataByMerges(base, tmp_path)
    few, many = data.at(5), data.at(40)
    assert few.tokenizer.size < many.tokenizer.size and data.merges == base.manifest["merges"]
    assert few.fingerprint != many.fingerprint and few.tokenizer.pretokenized is base.tokenizer.pretokenized
    for split in ("train", "dev"):
        for language in ("gl", "en"):
            assert few.split(split).text(language) == base.split(split).text(language)
    assert few.splits == many.splits == ("train", "dev")
    assert DataByMerges(base, tmp_path).at(5).fingerprint == few.fingerprint
    (few.folder / "dev.en").write_bytes((few.folder / "dev.en").read_bytes().replace(b"U", b"V"))
    with pytest.raises(InputError, match=r"other dev\.en"):
        DataByMerges(base, tmp_path).at(5)


def test_dev_bleu_of_the_same_translations_does_not_depend_on_the_subwords(base, tmp_path):
    data = DataByMerges(base, tmp_path)
    translations = [line.replace("UN", "DOUS") for line in base.split("dev").text("en")]
    found = [Evaluator(data.at(merges), "dev", tiny().decoding).bleu(translations) for merges in (0, 5, 40)]
    assert 0 < found[0] < 100 and found[0] == found[1] == found[2]


def test_winners_are_joined_and_those_that_lead_get_more_seeds(search):
    found = search(seeds=2, start_seeds=2)
    gains = {"start": 10.5, "heads 8": 11.0, "norm rms": 10.5, "positions rotary": 10.1, "best 2 joined": 12.0}
    first, joined, seeds = walk(found, gains)
    assert first[:3] == ["start", "reference", "start"]
    assert first[3:6] == ["heads 8", "norm scale", "positions rotary"]  # two heads are what the start has
    assert joined == ["best 2 joined"]
    assert seeds == ["best 2 joined", "heads 8", "norm rms", "reference"]
    assert [(trial.system, trial.seed) for trial in found.best()] == [(joined[0], 0), (joined[0], 1)]
    both = found.best()[0].job.settings
    assert (both.model.heads, both.model.norm, both.training.keep) == (8, "rms", 2)
    assert found.of_reference()[0].merges == 20 and found.of_reference()[0].job.data.name.endswith("-20")
    assert {trial.job.split for trial in found.trials} == {"dev"}


def test_gains_are_told_against_the_mean_of_the_starts_seeds(search):
    """One lucky or unlucky run of the start would move all gains alike."""
    found = search(start_seeds=3, seeds=2)
    stages = found.stages()
    starts = [trial for trial in next(stages) if trial.system == "start"]
    for trial, dev in zip(starts, (9.0, 11.0, 13.0), strict=True):
        end(trial, dev)
    for trial in found.trials:
        if trial.result is None:
            end(trial, {"norm rms": 12.0, "heads 8": 11.5}.get(trial.system, 10.0))
    assert {each.name: gain for each, gain in found.gains().items() if gain > 0} == {"norm rms": 1.0, "heads 8": 0.5}
    assert found.best()[0].system == "norm rms"  # not the start, which alone has three seeds so far
    assert any("The start's 3 seeds lie 4.00 BLEU apart" in line for line in write_report(found, "qknorm").page.summary)
    for stage in stages:
        for trial in stage:
            end(trial, {"norm rms": 8.0, "best 2 joined": 12.5}.get(trial.system, 10.0))
    assert [(trial.system, trial.seed) for trial in found.best()] == [("best 2 joined", 0), ("best 2 joined", 1)]
    told = "\n".join(write_report(found, "qknorm").page.summary)
    assert "12.50 BLEU (+1.50 to the start" in told and "not chosen by: +0.50 to the start" in told


def test_a_search_that_finds_nothing_keeps_the_start(search):
    found = search()
    assert len(walk(found, {"start": 11.0, "norm rms": 11.1})) == 1
    assert [trial.system for trial in found.best()] == ["norm rms"]  # the best, but not sure enough to join anything
    assert walk(search(only=("none",)), {}) == [["start", "reference"]]


def test_a_start_without_a_result_joins_nothing_and_a_diverged_run_does_not_lead(search):
    found = search()
    assert len(walk(found, {"start": None})) == 1
    end(found.trials[-1], 99.0, status="diverged")
    assert found.gains() == {} and found.best()[0].system != found.trials[-1].system
    report = write_report(found, "qknorm study tune")
    assert any("Not finished: 1 of" in line for line in report.page.summary)


def test_a_reference_that_is_better_is_told(search):
    found = search()
    walk(found, {"heads 8": 11.0, "reference": 12.5})
    told = write_report(found, "qknorm").page.summary
    assert told[0].startswith("Best of the search on dev: heads 8, 11.00 BLEU (+1.00 to the start, -1.50 to reference)")
    assert told[1] == "The reference, reference, is better: 12.50 BLEU."


def test_merges_are_changed_in_the_data_and_not_in_the_settings(search):
    start, _, few, *_ = next(search(only=("merges",)).stages())
    assert few.system == "merges 1000" and few.merges == 1_000 and few.job.settings == start.job.settings
    assert few.job.fingerprint != start.job.fingerprint and few.job.folder != start.job.folder


def test_a_cap_on_steps_goes_for_all(search):
    stage = next(search(max_steps=5).stages())
    assert {trial.job.settings.training.max_steps for trial in stage} == {5}


def test_the_report_tells_what_helped_and_what_did_not(search, tmp_path):
    found = search(averages=(2, 4))
    walk(found, {"heads 8": 11.0, "norm rms": 10.5, "positions rotary": 10.1, "best 2 joined": 9.0})
    end(found.best()[0], 11.0, averaged={"2": 11.5, "4": 10.9})
    report = write_report(found, "qknorm study tune --data x")
    told = "\n".join(report.page.summary)
    assert "Best of the search on dev: heads 8, 11.00 BLEU (+1.00 to the start, +1.00 to reference)" in told
    assert "is better" not in told.replace("is better on dev", "")
    assert "Helped by more than 0.2 BLEU: heads 8 (+1.00), norm rms (+0.50)." in told
    assert "Did not, by the best value of each: positions rotary (+0.10)." in told
    assert "mean of its last 2 checkpoints" in told and "It changes of the start: model.heads 8." in told
    page = report.markdown.read_text(encoding="utf-8")
    assert "| heads 8 | 11.00 | +1.00 | +0.50 | -0.10 | 8 | 60 | 1,000 |" in page
    assert "| best 2 joined | 9.00 | -1.00 |" in page and "qknorm study tune --data x" in page
    assert "The best changes, in this order: heads 8, norm rms." in page
    rows = list(csv.DictReader(report.results.open(encoding="utf-8")))
    assert len(rows) == len(found.trials)
    (eight,) = (row for row in rows if row["system"] == "heads 8")
    assert (eight["difference"], eight["float32"], eight["averaged"]) == ("1.0000", "11.0", '{"2": 11.5, "4": 10.9}')
    assert read_settings(tmp_path / "best" / "settings.toml", Train) == found.best()[0].job.settings


@pytest.mark.parametrize(
    ("of_the_second", "expected"),
    [
        ({"2": 10.5, "4": 9.9}, "last 2 checkpoints is 0.25 better"),
        ({"2": 10.3, "4": 9.9}, None),
        ({"2": 8.0, "4": 8.5}, None),
        ({"4": 10.5}, "last 4"),
    ],
    ids=["together another", "too little", "none", "not made"],
)
def test_a_mean_of_checkpoints_is_advised_by_all_seeds(search, of_the_second, expected):
    found = search(only=("none",), seeds=2, averages=(2, 4))
    walk(found, {"start": 10.0})
    first, second = found.best()
    end(first, 10.0, averaged={"2": 10.0, "4": 10.4})
    end(second, 10.0, averaged=of_the_second)
    told = "\n".join(write_report(found, "qknorm").page.summary)
    assert expected in told if expected else "qknorm average" not in told


def test_the_test_set_is_translated_by_the_best_and_the_reference_alone(search, base):
    found = search(only=("heads",), values=1)
    for stage in found.stages():
        for trial in stage:
            trial.job.write()
            assert do(trial.job.folder, "cpu") == "done"
            assert "2" in trial.result.averaged and (trial.job.folder / "dev.txt").is_file()
            kept = averaged_weights(trial.job.run, 2).is_file()
            assert kept is (best_average(trial.job) is not None)
    assert tabulate_test(found) is None
    translate_test(found, "cpu")
    touched = {trial.system for trial in found.trials if (trial.job.folder / "test.txt").is_file()}
    assert touched == {"reference", found.best()[0].system}
    table = tabulate_test(found)
    assert [row[0] for row in table.rows][:2] == ["reference", found.best()[0].system]
    main = "multi-bleu-detok" if base.tokenizer.pretokenized else "bleu"
    assert table.columns[-3:] == (f"difference, {main}", "p", "seeds")
    assert any("|version:" in note for note in table.notes)
    assert "Test, after the choice" in write_report(found, "qknorm").markdown.read_text(encoding="utf-8")


def test_the_test_table_shows_the_mean_of_checkpoints_that_dev_prefers(search, base):
    found = search(only=("none",))
    walk(found, {"start": 20.0})
    end(found.best()[0], 20.0, averaged={"2": 21.0})
    references = base.split("test").text("en")
    for trial, name, right in (
        (found.of_reference()[0], "test.txt", 5),
        (found.best()[0], "test.txt", 8),
        (found.best()[0], "test-averaged-2.txt", 10),
    ):
        lines = [*references[:right], *["X Y"] * (len(references) - right)]
        files.write_text(trial.job.folder / name, "".join(f"{line}\n" for line in lines))
    table = tabulate_test(found)
    assert [row[0] for row in table.rows] == ["reference", "start", f"start, {AVERAGED}"]
    main = table.columns.index("multi-bleu-detok" if base.tokenizer.pretokenized else "bleu")
    values = [float(row[main]) for row in table.rows]
    assert values[0] < values[1] < values[2] == 100.0
    assert table.rows[0][-3:-1] == ("", "") and float(table.rows[2][-2]) < 0.05
    found.quick = True  # says nothing, so it is not to say that it is sure
    assert [row[-2] for row in tabulate_test(found).rows] == ["", "", ""]


def test_a_run_whose_weights_are_gone_is_trained_again_and_stays_chosen(search):
    """On a GPU a second training scores otherwise; the choice is not made anew by that."""
    found = search(only=("none",))
    walk(found, {"start": 90.0, "reference": 80.0})
    chosen = [*found.best(), *found.of_reference()]
    again = jobs_to_repeat(chosen)
    assert len(again) == 2 and [trial.dev for trial in chosen] == [90.0, 80.0]
    for job in again:
        job.write()
        assert do(job.folder, "cpu") == "done"
        assert read_result(job.folder).dev_bleu < 80.0
    assert jobs_to_repeat(chosen) == [] and [*found.best(), *found.of_reference()] == chosen
    translate_test(found, "cpu")
    for trial in chosen:  # a second time without them, after the test
        shutil.rmtree(job_for_test(trial).run / "checkpoints")
    assert jobs_to_repeat(chosen) == [] and tabulate_test(found) is not None


def test_a_folder_that_came_without_its_large_files_has_no_weights(search):
    found = search(only=("none",))
    for trial in next(found.stages()):
        trial.job.write()
        assert do(trial.job.folder, "cpu") == "done"
    assert jobs_to_repeat(found.best()) == []
    for path in found.best()[0].job.run.rglob("*.safetensors"):
        path.unlink()
    assert jobs_to_repeat(found.best()) == [job_for_test(found.best()[0])] != [found.best()[0].job]


def test_a_second_training_whose_weights_are_gone_too_is_done_once_more(search):
    found = search(only=("none",))
    walk(found, {})
    (first,) = jobs_to_repeat(found.best())
    Result("finished", "the end", 1.0, 8, 4, 1.0).write(first.folder)
    assert jobs_to_repeat(found.best()) == [first] and read_result(first.folder) is None
