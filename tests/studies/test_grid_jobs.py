import json
from dataclasses import replace
from pathlib import Path

import pytest
from paper_cases import finish, prepare_copy, tiny

from qknorm.errors import InputError
from qknorm.studies.grid import jobs, scores
from qknorm.studies.grid.claims import take
from qknorm.studies.grid.jobs import (
    DECIDING,
    DEVICE_TIME,
    RESULT,
    RUN,
    TRANSLATIONS,
    Job,
    Result,
    begin_count,
    code_version,
    end_count,
    look,
    read_device_seconds,
    read_result,
    read_translations,
    unfinished,
    write_failure,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare_copy(tmp_path_factory.mktemp("copy"))


def test_a_job_is_known_by_settings_data_and_code(data, tmp_path, monkeypatch):
    first = Job.plan("one name", data, tiny(), tmp_path)
    assert Job.plan("another name", data, tiny(), tmp_path).folder == first.folder
    assert Job.plan("", data, tiny(**{"training.seed": 1}), tmp_path).folder != first.folder
    monkeypatch.setattr(jobs, "code_version", lambda: "another")
    newer = Job.plan("", data, tiny(), tmp_path)
    assert newer.folder != first.folder
    monkeypatch.undo()
    monkeypatch.setattr(data, "fingerprint", "other data")
    assert Job.plan("", data, tiny(), tmp_path).folder not in (first.folder, newer.folder)


def test_a_job_that_ends_otherwise_is_another_and_is_read_back(data, tmp_path):
    usual = Job.plan("job", data, tiny(), tmp_path)
    other = Job.plan("job", data, tiny(), tmp_path, split="dev", averages=(2, 4))
    assert len({usual.folder, other.folder, Job.plan("job", data, tiny(), tmp_path, split="dev").folder}) == 3
    for job in (usual, other):
        job.write()
        assert Job.read(job.folder) == job
    assert "split" not in json.loads((usual.folder / "job.json").read_text(encoding="utf-8"))
    Result("finished", "", 1.0, 8, 4, 30.0, 9, averaged={"2": 32.0}).write(other.folder)
    assert look(other).dev_bleu == 30.0
    assert read_result(other.folder).averaged == {"2": 32.0}


def test_what_other_code_finished_counts_where_it_may(data, tmp_path, monkeypatch):
    old = Job.plan("job", data, tiny(), tmp_path)
    finish(old, data, wrong=1)
    monkeypatch.setattr(jobs, "code_version", lambda: "newer")
    assert Job.plan("job", data, tiny(), tmp_path).folder != old.folder
    assert Job.plan("job", data, tiny(), tmp_path, any_code=True).folder == old.folder
    other = tiny(**{"training.seed": 5})
    assert Job.plan("job", data, other, tmp_path, any_code=True).folder != old.folder


def test_the_code_version_follows_the_source(tmp_path):
    version, _, digest = code_version().partition("+")
    assert version and len(digest) == 16


def test_a_job_comes_back_from_its_folder(data, tmp_path):
    job = Job.plan("job", data, tiny(), tmp_path)
    job.write()
    assert Job.read(job.folder) == job


def test_a_job_is_laid_out_anew_where_the_data_or_the_folder_moved(data, tmp_path):
    """A folder that was brought from elsewhere holds jobs that name data of that place."""
    job = Job.plan("job", data, tiny(), tmp_path)
    replace(job, name="earlier", data=tmp_path / "elsewhere", code="older").write()
    job.write()
    assert Job.read(job.folder) == job
    replace(job, name="another name").write()
    assert Job.read(job.folder).name == "job"
    (job.folder / "job.json").write_text("{", encoding="utf-8")
    job.write()
    assert Job.read(job.folder) == job


def test_states_are_what_the_folder_says(data, tmp_path):
    job = Job.plan("job", data, tiny(), tmp_path)
    assert look(job).state == "waiting"
    job.write()
    with take(job.folder) as claim:
        assert (look(job).state, look(job).holder) == ("running", claim.holder)
    write_failure(job.folder, "no luck")
    assert (look(job).state, look(job).note) == ("failed", "no luck")
    assert unfinished([job, job]) == [job]
    finish(job, data, wrong=0)
    view = look(job)
    assert (view.state, view.step, view.seconds, view.dev_bleu) == ("finished", 100, 60.0, 90.0)
    assert unfinished([job]) == []


def test_what_a_job_took_of_its_device_is_told_where_all_of_it_was_counted(tmp_path):
    end_count(tmp_path, 1.0)
    assert read_device_seconds(tmp_path) is None, "its process ended before it began"
    begin_count(tmp_path)
    assert read_device_seconds(tmp_path) is None
    (tmp_path / RUN).mkdir()
    end_count(tmp_path, 2.0)
    assert read_device_seconds(tmp_path) == 2.0
    begin_count(tmp_path)
    end_count(tmp_path, 3.0)
    assert read_device_seconds(tmp_path) == 5.0
    begin_count(tmp_path)
    begin_count(tmp_path)  # the first one was killed, or another has begun the same
    end_count(tmp_path, 1.0)
    assert read_device_seconds(tmp_path) is None


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"device_seconds'])
def test_a_run_that_was_begun_without_a_count_has_none(tmp_path, damage):
    (tmp_path / RUN).mkdir()
    (tmp_path / DEVICE_TIME).write_text(damage)
    begin_count(tmp_path)
    end_count(tmp_path, 1.0)
    assert read_device_seconds(tmp_path) is None


def test_where_a_count_cannot_be_written_it_is_not_known(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    begin_count(tmp_path)
    (tmp_path / RUN).mkdir()
    end_count(tmp_path, 2.0)
    with monkeypatch.context() as there:
        there.setattr(jobs.files, "write_json", full)
        begin_count(tmp_path)
        end_count(tmp_path, 2.0)
    assert read_device_seconds(tmp_path) is None
    begin_count(tmp_path)
    end_count(tmp_path, 2.0)
    assert read_device_seconds(tmp_path) is None


def test_progress_is_read_from_the_end_of_the_metrics(data, tmp_path):
    job = Job.plan("job", data, tiny(), tmp_path)
    job.run.mkdir(parents=True)
    rows = [{"kind": "step", "step": step, "time": {"elapsed": step / 10}} for step in range(1, 500)]
    rows.insert(490, {"kind": "evaluation", "step": 490, "dev_bleu": 12.5, "time": {"elapsed": 49.0}})
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "step", "st'
    (job.run / "metrics.jsonl").write_text(text, encoding="utf-8")
    view = look(job)
    assert (view.state, view.step, view.total, view.dev_bleu, view.seconds) == ("waiting", 499, 8, 12.5, 49.9)
    assert view.note == "stopped at step 499"


def test_damaged_lines_of_metrics_and_a_damaged_account_tell_nothing(data, tmp_path):
    job = Job.plan("job", data, tiny(), tmp_path)
    job.run.mkdir(parents=True)
    good, damaged = '{"step": 5, "dev_bleu": 2.5, "time": {"elapsed": 1.0}}', '{"step": "x", "dev_bleu": {}, "time": 3}'
    (job.run / "metrics.jsonl").write_text(f"{good}\n{damaged}\n[7]\n", encoding="utf-8")
    assert (look(job).step, look(job).dev_bleu, look(job).seconds) == (5, 2.5, 1.0)
    (job.folder / DEVICE_TIME).write_text('{"device_seconds": "x"}', encoding="utf-8")
    assert read_device_seconds(job.folder) is None
    begin_count(job.folder)
    end_count(job.folder, 1.0)
    assert read_device_seconds(job.folder) is None, "of the run that is there nothing was counted"


def test_translations_keep_what_other_readers_take_for_line_ends(data, tmp_path):
    lines = ["a\u2028b", "", "c\rd", " e "]
    (tmp_path / TRANSLATIONS).write_bytes("".join(f"{line}\n" for line in lines).encode())
    assert read_translations(tmp_path / TRANSLATIONS, 4, tmp_path) == lines


def test_damage_is_named(data, tmp_path):
    job = Job.plan("job", data, tiny(), tmp_path)
    job.write()
    whole = {"status": "finished", "reason": "", "seconds": 1.0, "steps": 1, "best_step": 1, "dev_bleu": 1.0}
    scores = {"bleu": {"value": 1.0, "signature": "s"}}
    damaged = [
        {"what": 1},
        {**whole, "what": 1},
        {**whole, "scores": None},
        {**whole, "seconds": "x"},
        {**whole, "scores": {"bleu": {"value": 1.0}}},
        {**whole, "scores": {"bleu": {"value": "x", "signature": "s"}}},
    ]
    for content in ("{", "[1]", *map(json.dumps, damaged)):
        (job.folder / RESULT).write_text(content, encoding="utf-8")
        with pytest.raises(InputError, match=rf"result\.json is damaged.*remove {job.folder}"):
            read_result(job.folder)
    (job.folder / RESULT).write_text(json.dumps({**whole, "scores": scores}), encoding="utf-8")
    assert read_result(job.folder).scores == scores
    (job.folder / "job.json").write_text('{"name": "x"}', encoding="utf-8")
    with pytest.raises(InputError, match=r"job\.json is damaged"):
        Job.read(job.folder)
    path = tmp_path / TRANSLATIONS
    with pytest.raises(InputError, match=rf"test\.txt cannot be read .*; remove {job.folder} and run the same again"):
        read_translations(path, 2, job.folder)
    for content, sentences, told in (
        (b"a\n", 2, r"has 1 lines for 2 sentences"),
        (b"", 1, r"has 0 lines for 1 sentences"),
        (b"a\n\xff\n", 2, r"is damaged, and no UTF-8"),
    ):
        path.write_bytes(content)
        with pytest.raises(InputError, match=rf"test\.txt {told}; remove {path} and run the same again"):
            read_translations(path, sentences, path)
    path.write_bytes(b"\n")
    assert read_translations(path, 1, path) == [""]


def test_the_code_that_a_result_is_known_by_is_there():
    package = Path(jobs.__file__).parents[2]
    assert all((package / part).exists() for part in DECIDING)
    assert any(Path(scores.__file__).is_relative_to(package / part) for part in DECIDING)


def test_a_result_takes_the_place_of_a_failure(tmp_path):
    write_failure(tmp_path, "once")
    Result("diverged", "no number", 1.0, 5, 0, None).write(tmp_path)
    assert not (tmp_path / jobs.FAILURE).exists()
    assert read_result(tmp_path).status == "diverged"


def test_data_without_a_test_set_are_refused(data, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "splits", ("train", "dev"))
    with pytest.raises(InputError, match="has no test set; prepare it with --test"):
        Job.plan("job", data, tiny(), tmp_path)


def test_a_default_that_changed_since_is_another_job_and_a_new_setting_is_not(data, tmp_path, monkeypatch):
    old = Job.plan("job", data, tiny(), tmp_path)
    finish(old, data, wrong=1)
    monkeypatch.setattr(jobs, "code_version", lambda: "newer")
    plain = json.loads((old.folder / "job.json").read_text(encoding="utf-8"))
    del plain["settings"]["training"]["schedule"]["decay"]  # as if the older code had known no such setting
    (old.folder / "job.json").write_text(json.dumps(plain), encoding="utf-8")
    assert Job.plan("job", data, tiny(), tmp_path, any_code=True).folder == old.folder
    plain["settings"]["training"]["clip"] = 5.0
    (old.folder / "job.json").write_text(json.dumps(plain), encoding="utf-8")
    assert Job.plan("job", data, tiny(), tmp_path, any_code=True).folder != old.folder
