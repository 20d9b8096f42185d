"""What is finished stays: resuming, parts, merging, and what is refused."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from lp_cases import tiny_study, tiny_text

from qknorm.errors import InputError
from qknorm.studies.lp.corpus import make_text
from qknorm.studies.lp.design import (
    LpStudy,
    Run,
    fingerprint,
    parse_arms,
    parse_exponents,
    parse_folds,
    plan_runs,
)
from qknorm.studies.lp.records import Point, Record, StudyFolder, read_about, write_curves
from qknorm.studies.lp.training import Execution
from qknorm.studies.lp.work import News, Plan, _Clock, make_stacks, name_stack, run_missing

TEXT = tiny_text()
RUNS = [Run("dot-product", None, 0), Run("same-scale", 2.0, 0), Run("same-scale", 2.0, 1), Run("matched", 3.0, 1)]


def quiet(_: News) -> None:
    """Nobody listens."""


def curves(folder: StudyFolder) -> dict[Run, tuple[Point, ...]]:
    return {record.run: record.curve for record in folder.records()}


def same(one: object, other: object) -> bool:
    return repr(one) == repr(other)  # NaN is no equal of itself


def run_all(path: Path, runs: list[Run], study: LpStudy | None = None, plan: Plan | None = None) -> StudyFolder:
    folder = StudyFolder.create_or_open(path, study or tiny_study(), TEXT)
    assert run_missing(folder, runs, TEXT, Execution(), plan or Plan(), quiet) == []
    return folder


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    folder = StudyFolder.create_or_open(tmp_path, tiny_study(), TEXT)
    (tmp_path / "runs").write_text("no folder")
    with pytest.raises(InputError, match=r"cannot write .*dot-product-fold0\.json"):
        run_missing(folder, RUNS[:1], TEXT, Execution(), Plan(), quiet)


def test_an_interrupted_study_goes_on_and_ends_as_if_never_stopped(tmp_path: Path) -> None:
    whole = run_all(tmp_path / "whole", RUNS, plan=Plan(stack_size=2))
    broken = StudyFolder.create_or_open(tmp_path / "broken", tiny_study(), TEXT)

    def interrupt(news: News) -> None:
        if "same-scale" in news.stack and news.done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_missing(broken, RUNS, TEXT, Execution(), Plan(stack_size=2), interrupt)
    assert broken.missing(RUNS) == RUNS[1:]
    assert not list((tmp_path / "broken").rglob("*.partial"))
    kept = broken.file_of(RUNS[0]).stat().st_mtime_ns
    run_all(tmp_path / "broken", RUNS)
    assert broken.file_of(RUNS[0]).stat().st_mtime_ns == kept
    assert same(curves(broken), curves(whole))


def test_parts_from_different_folders_merge(tmp_path: Path) -> None:
    whole = run_all(tmp_path / "whole", RUNS)
    first, second = run_all(tmp_path / "a", RUNS[:2]), run_all(tmp_path / "b", RUNS[1:])
    assert first.merge([second.path]) == 2
    assert first.merge([second.path]) == 0
    assert same(curves(first), curves(whole))


def test_a_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    run_all(tmp_path / "a", RUNS[:1])
    with pytest.raises(InputError, match=r"clip = 1\.0 instead of 0\.5.*another --out"):
        StudyFolder.create_or_open(tmp_path / "a", tiny_study(clip=0.5), TEXT)
    with pytest.raises(InputError, match="the text 'words' of"):
        StudyFolder.create_or_open(tmp_path / "a", tiny_study(), make_text("other", "abc" * 100))
    other = run_all(tmp_path / "b", RUNS[:1], tiny_study(seed=1))
    with pytest.raises(InputError, match=r"cannot be merged.*seed = 1 instead of 0"):
        StudyFolder.open(tmp_path / "a").merge([other.path])


def test_a_copied_run_of_another_study_is_refused(tmp_path: Path) -> None:
    here, other = run_all(tmp_path / "a", RUNS[:1]), run_all(tmp_path / "b", RUNS[1:2], tiny_study(seed=1))
    file = other.file_of(RUNS[1])
    here.file_of(RUNS[1]).write_bytes(file.read_bytes())
    with pytest.raises(InputError, match="other settings"):
        here.records()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"arm": "matched"}', "null"])
def test_a_damaged_run_is_named(tmp_path: Path, content: str) -> None:
    folder = run_all(tmp_path / "a", RUNS[:1])
    folder.file_of(RUNS[0]).write_text(content)
    with pytest.raises(InputError, match=r"dot-product-fold0\.json is damaged"):
        folder.records()


def test_a_run_under_another_name_is_refused(tmp_path: Path) -> None:
    folder = run_all(tmp_path / "a", RUNS[:1])
    folder.file_of(RUNS[0]).rename(folder.file_of(RUNS[1]))
    with pytest.raises(InputError, match="does not hold the run that its name says"):
        folder.records()


def test_no_folder_and_a_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no study"):
        StudyFolder.open(tmp_path)
    (tmp_path / "study.json").write_text('{"settings": {"bananas": 1}, "text": {}, "fingerprint": ""}')
    with pytest.raises(InputError, match="damaged or of another version"):
        StudyFolder.open(tmp_path)


def test_files_of_another_format_are_told_as_such(tmp_path: Path) -> None:
    folder = run_all(tmp_path, RUNS[:1])
    for file, read in (
        (folder.file_of(RUNS[0]), folder.records),
        (tmp_path / "study.json", lambda: read_about(tmp_path)),
    ):
        file.write_text(json.dumps({**json.loads(file.read_text()), "format_version": 2}))
        with pytest.raises(InputError, match=f"{file.name} has format 2, this version of qknorm reads 1; move it away"):
            read()


def test_records_survive_their_file_even_without_numbers(tmp_path: Path) -> None:
    folder = StudyFolder.create_or_open(tmp_path, tiny_study(), TEXT)
    curve = (Point(0, 4.25, math.nan, scales=(1.5, 2.0)), Point(6, math.nan, math.inf, p=(2.5,)))
    made_by = {"device": "none", "together": "stacked", "layers": "compiled"}  # ways that there once were
    record = Record(Run("infinity", math.inf, 2), folder.about.fingerprint, curve, 1.25, made_by, 7)
    folder.add(record)
    (back,) = folder.records()
    assert (back.run, back.curve[0].scales, back.curve[1].p) == (record.run, (1.5, 2.0), (2.5,))
    assert math.isnan(back.curve[1].validation)
    assert back.final == math.inf and back.best == 4.25
    assert back.skipped_steps == 7 and back.made_by == made_by
    content = json.loads(folder.file_of(record.run).read_text(), parse_constant=pytest.fail)
    del content["skipped_steps"]
    folder.file_of(record.run).write_text(json.dumps(content))
    assert folder.records()[0].skipped_steps is None  # one that was written before steps were counted


def test_curves_as_csv(tmp_path: Path) -> None:
    folder = run_all(tmp_path, RUNS[:2])
    write_curves(folder.records(), tmp_path / "curves.csv")
    lines = (tmp_path / "curves.csv").read_text().splitlines()
    assert lines[0].startswith("arm,p,fold,iteration,validation")
    assert len(lines) == 1 + 2 * 3
    assert lines[1].startswith("same-scale,2,0,0,") and lines[-1].startswith("dot-product,,0,6,")


def test_time_that_is_up_begins_no_stack(tmp_path: Path) -> None:
    folder = StudyFolder.create_or_open(tmp_path, tiny_study(), TEXT)
    left = run_missing(folder, RUNS, TEXT, Execution(), Plan(max_minutes=1e-9), quiet)
    assert left == RUNS
    assert folder.records() == []


@pytest.mark.parametrize("workers", [1, 2])
def test_runs_of_the_folder_tell_how_long_the_next_takes(tmp_path: Path, workers: int) -> None:
    folder = StudyFolder.create_or_open(tmp_path, tiny_study(), TEXT)
    slow = Record(RUNS[0], folder.about.fingerprint, (Point(6, 1.0, 1.0),), 60_000.0, Execution().facts())  # 6 minutes
    folder.add(slow)
    plan = Plan(workers=workers, max_minutes=5)
    assert run_missing(folder, RUNS, TEXT, Execution(), plan, quiet) == RUNS[1:]
    if workers == 1:
        folder.add(replace(slow, made_by={"device": "cuda (another)", "layers": "plain"}))
        assert run_missing(folder, RUNS[:2], TEXT, Execution(), plan, quiet) == []


@pytest.mark.slow
def test_processes_side_by_side_make_the_same_records(tmp_path: Path) -> None:
    whole = run_all(tmp_path / "whole", RUNS)
    shared = run_all(tmp_path / "shared", RUNS, plan=Plan(workers=2))
    for run, curve in curves(whole).items():
        assert [point.validation for point in curves(shared)[run]] == pytest.approx(
            [point.validation for point in curve], abs=1e-5
        )


def test_the_plan_runs_everything_once_and_p_2_for_both_arms() -> None:
    runs = plan_runs(("same-scale", "matched", "dot-product", "learned-p", "infinity"), (3.0, 2.0), (0, 1))
    assert len(runs) == len(set(runs)) == 2 * (2 + 1 + 1 + 1 + 1)
    assert Run("matched", 2.0, 0) not in runs and Run("same-scale", 2.0, 0) in runs
    assert plan_runs(("matched",), (2.0,), (0,)) == [Run("same-scale", 2.0, 0)]


def test_stacks_are_of_one_p() -> None:
    runs = plan_runs(("same-scale", "matched", "dot-product", "learned-p"), (2.0, 3.0), (0, 1, 2))
    stacks = make_stacks(runs, 4)
    assert [run for stack in stacks for run in stack] == runs
    assert all(len({(run.p, run.arm == "learned-p") for run in stack}) == 1 for stack in stacks)
    assert [len(stack) for stack in stacks] == [3, 3, 3, 3, 3]  # dot products, learned p, p = 2, both arms of p = 3
    assert [len(stack) for stack in make_stacks(runs, 6)] == [3, 3, 3, 6]
    assert len({name_stack(stack) for stack in stacks}) == len(stacks)


def test_the_clock_goes_by_the_slowest_of_the_newest_stacks() -> None:
    clock = _Clock(minutes=1)
    pair = [Run("same-scale", 2.0, fold) for fold in range(2)]
    assert clock.allows(pair)  # nothing is known yet
    for seconds in (90.0, 20.0, 20.0):  # of two runs; the first has compiled
        clock.note(News("a stack", 1, 1, None, runs=2, finished=True, seconds=seconds))
    assert not clock.allows(pair)
    clock.note(News("a stack", 0, 1, None, runs=2))
    assert not clock.allows(pair)
    clock.note(News("a stack", 1, 1, None, runs=2, finished=True, seconds=30.0))
    assert clock.allows(pair) and not clock.allows([*pair, *pair, pair[0]])


def test_parts_in_words() -> None:
    assert parse_folds("0-2, 5,2", 10) == (0, 1, 2, 5) and parse_folds(None, 3) == (0, 1, 2)
    assert parse_exponents("2,2.5, 2.0") == (2.0, 2.5)
    assert parse_arms("matched,dot-product,matched") == ("matched", "dot-product")


@pytest.mark.parametrize(
    ("parse", "word", "sentence"),
    [
        (lambda word: parse_folds(word, 3), "2-4", "folds go from 0 to 2"),
        (lambda word: parse_folds(word, 3), "2-1", "not there"),
        (lambda word: parse_folds(word, 3), "-1", "no fold"),
        (lambda word: parse_folds(word, 3), "1-", "no fold"),
        (lambda word: parse_folds(word, 3), "²", "no fold"),
        (lambda word: parse_folds(word, 3), " ,", "names nothing"),
        (parse_exponents, "two", "no number"),
        (parse_exponents, "0.5", "at least 1"),
        (parse_exponents, "nan", "at least 1"),
        (parse_exponents, "inf", "--arms infinity"),
        (parse_arms, "mached", "known are same-scale, matched"),
    ],
)
def test_parts_that_are_none(parse: object, word: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        parse(word)  # type: ignore[operator]


def test_the_mark_of_a_study_is_its_settings_and_text() -> None:
    marks = {fingerprint(study, text) for study in (tiny_study(), tiny_study(seed=1)) for text in ("a", "b")}
    assert len(marks) == 4
    assert fingerprint(tiny_study(), "a") == fingerprint(LpStudy.model_validate(tiny_study().model_dump()), "a")


def test_the_folder_of_a_search_is_told_as_such(tmp_path: Path) -> None:
    about = {"text": {"source": "gl", "target": "en", "pairs": 80, "fingerprint": "0"}}
    (tmp_path / "study.json").write_text(json.dumps(about))
    for enter in (StudyFolder.open, lambda path: StudyFolder.create_or_open(path, tiny_study(), TEXT)):
        with pytest.raises(InputError, match=r"holds a study of qknorm study tune; name another folder"):
            enter(tmp_path)
    assert json.loads((tmp_path / "study.json").read_text()) == about
