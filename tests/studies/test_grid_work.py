import json
import os
import shutil
import signal

import pytest
from paper_cases import prepare_copy, tiny

from qknorm.errors import InputError
from qknorm.studies.grid import work
from qknorm.studies.grid.claims import CLAIM, find_holder, take
from qknorm.studies.grid.jobs import (
    EXIT_STATUS,
    FAILURE,
    GIVEN_OUT,
    LOG,
    TRANSLATIONS,
    Job,
    is_free,
    look,
    read_result,
    read_translations,
)
from qknorm.studies.grid.scores import MOSES, RELEASED, TOKENISED, TREEBANK
from qknorm.studies.grid.work import do
from qknorm.training.checkpoint import list_steps
from qknorm.training.translation import TranslationTask


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare_copy(tmp_path_factory.mktemp("copy"), pretokenized=True)


def make(data, root, **changes):
    job = Job.plan("job", data, tiny(**changes), root)
    job.write()
    return job


def test_a_job_is_trained_scored_and_done_once(data, tmp_path, monkeypatch):
    job = make(data, tmp_path)
    assert do(job.folder, "cpu") == "done"
    result = read_result(job.folder)
    assert (result.status, result.steps) == ("finished", 8)
    assert set(result.scores) == {TOKENISED, RELEASED, MOSES, TREEBANK}
    assert all(score["signature"] for score in result.scores.values())
    assert read_translations(job.folder / TRANSLATIONS, len(data.split("test")), job.folder)
    assert result.made_by["code"] == job.code
    assert find_holder(job.folder) is None
    assert list_steps(job.run) == [result.best_step]
    monkeypatch.setattr(work, "train", None)  # a second time nothing is trained
    assert do(job.folder, "cpu") == "done"


def test_an_interrupted_job_goes_on_and_ends_as_one_that_never_stopped(data, tmp_path, monkeypatch):
    whole, stopped = make(data, tmp_path / "whole"), make(data, tmp_path / "stopped")
    evaluate, left = TranslationTask.evaluate, [1]

    def interrupt_once(self, progress=None):
        if left:
            left.pop()
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(self, progress)

    monkeypatch.setattr(TranslationTask, "evaluate", interrupt_once)
    assert do(stopped.folder, "cpu") == "interrupted"
    assert (look(stopped).state, look(stopped).note) == ("waiting", "stopped at step 4")
    assert do(stopped.folder, "cpu") == "done"
    assert do(whole.folder, "cpu") == "done"
    one, other = read_result(stopped.folder), read_result(whole.folder)
    assert (one.scores, one.best_step, one.dev_bleu) == (other.scores, other.best_step, other.dev_bleu)
    assert (stopped.folder / TRANSLATIONS).read_bytes() == (whole.folder / TRANSLATIONS).read_bytes()


def interrupt_at_the_first_evaluation(job, monkeypatch):
    evaluate = TranslationTask.evaluate

    def interrupt(self, progress=None):
        os.kill(os.getpid(), signal.SIGINT)
        return evaluate(self, progress)

    with monkeypatch.context() as patched:
        patched.setattr(TranslationTask, "evaluate", interrupt)
        assert do(job.folder, "cpu") == "interrupted"


@pytest.mark.parametrize("name", ["settings.toml", "run.json", "tokenizer.json"])
def test_a_damaged_file_of_a_run_has_a_way_out_that_helps(data, tmp_path, monkeypatch, name):
    job = make(data, tmp_path)
    interrupt_at_the_first_evaluation(job, monkeypatch)
    (job.run / name).write_text("{", encoding="utf-8")
    assert do(job.folder, "cpu") == "failed"
    assert look(job).note.endswith(f"; or remove {job.run} to begin it anew")
    shutil.rmtree(job.run)
    assert do(job.folder, "cpu") == "done"


def test_what_is_no_damage_costs_no_run(data, tmp_path, monkeypatch):
    job = make(data, tmp_path)
    interrupt_at_the_first_evaluation(job, monkeypatch)

    def fail(*_, **__):
        raise InputError("the disk is full; make room")

    monkeypatch.setattr(work, "train", fail)
    assert do(job.folder, "cpu") == "failed"
    assert look(job).note == "the disk is full; make room"


def test_a_job_that_came_without_its_large_files_begins_anew_and_says_so(data, tmp_path, monkeypatch):
    whole, stripped = make(data, tmp_path / "whole"), make(data, tmp_path / "stripped")
    interrupt_at_the_first_evaluation(stripped, monkeypatch)
    for file in stripped.run.rglob("*.safetensors"):
        file.unlink()
    assert list_steps(stripped.run) == [4]
    assert do(stripped.folder, "cpu") == "done" and do(whole.folder, "cpu") == "done"
    one, other = read_result(stripped.folder), read_result(whole.folder)
    assert (one.scores, one.best_step, one.dev_bleu) == (other.scores, other.best_step, other.dev_bleu)
    metrics = [(each.run / "metrics.jsonl").read_text(encoding="utf-8").count("\n") for each in (stripped, whole)]
    assert metrics[0] == metrics[1]  # nothing is left of the first beginning
    note = "begun anew, since no checkpoint could be read (step-00000004: model.safetensors is missing)"
    assert look(stripped).note == note and look(whole).note == ""
    assert note in (stripped.folder / LOG).read_text(encoding="utf-8")


def test_a_checkpoint_that_may_not_be_read_is_not_thrown_away(data, tmp_path, monkeypatch):
    job = make(data, tmp_path)
    interrupt_at_the_first_evaluation(job, monkeypatch)

    def refuse(run, step):
        raise InputError("cannot read it: permission denied; ask its owner for access")

    monkeypatch.setattr(work, "load_checkpoint", refuse)
    assert do(job.folder, "cpu") == "failed" and "ask its owner" in look(job).note
    assert list_steps(job.run) == [4]


def test_a_disk_that_does_not_answer_costs_no_checkpoint(data, tmp_path, monkeypatch):
    job = make(data, tmp_path)
    interrupt_at_the_first_evaluation(job, monkeypatch)
    with monkeypatch.context() as patched:

        def fail(path):
            raise OSError(5, "Input/output error")

        patched.setattr("qknorm.training.checkpoint._fingerprint", fail)
        assert do(job.folder, "cpu") == "failed" and "Input/output error" in look(job).note
    assert list_steps(job.run) == [4]
    assert do(job.folder, "cpu") == "done" and look(job).note == ""


def test_a_job_that_diverges_has_a_result_without_scores(data, tmp_path):
    job = make(data, tmp_path, **{"training.schedule.peak": 1e38, "training.schedule.warmup": 0})
    assert do(job.folder, "cpu") == "done"
    result = read_result(job.folder)
    assert (result.status, dict(result.scores)) == ("diverged", {})
    assert "not finite" in result.reason


def test_a_job_that_another_is_at_is_left_alone(data, tmp_path):
    job = make(data, tmp_path)
    with take(job.folder):
        assert do(job.folder, "cpu") == "taken"


def test_a_job_that_was_given_to_a_cluster_is_left_to_it(data, tmp_path):
    job = make(data, tmp_path)
    with take(job.folder / GIVEN_OUT):
        assert not is_free(job) and look(job).note == "on the cluster"
        assert do(job.folder, "cpu") == "taken"
        assert do(job.folder, "cpu", given_out=True) == "done"
    assert is_free(job)


@pytest.mark.parametrize(
    ("error", "ending", "told"),
    [
        (RuntimeError("CUDA out of memory. Tried"), "out of memory", "lower --parallel"),
        (RuntimeError("a mistake of ours"), "failed", "RuntimeError: a mistake of ours"),
    ],
)
def test_what_goes_wrong_is_written_down(data, tmp_path, monkeypatch, error, ending, told):
    def fail(*_, **__):
        raise error

    job = make(data, tmp_path)
    monkeypatch.setattr(work, "train", fail)
    assert do(job.folder, "cpu") == ending
    assert look(job).state == "failed" and told in look(job).note
    assert "raise error" in (job.folder / FAILURE).read_text(encoding="utf-8")
    monkeypatch.undo()
    assert do(job.folder, "cpu") == "done"
    assert look(job).state == "finished"


def test_other_code_and_other_data_are_refused(data, tmp_path, monkeypatch):
    job = make(data, tmp_path)
    monkeypatch.setattr(work, "code_version", lambda: "0.0+other")
    assert do(job.folder, "cpu") == "failed"
    assert "planned by qknorm" in look(job).note
    monkeypatch.undo()
    text = (job.folder / "job.json").read_text(encoding="utf-8").replace(job.fingerprint, "f" * 32)
    (job.folder / "job.json").write_text(text, encoding="utf-8")
    assert do(job.folder, "cpu") == "failed"
    assert "holds other data" in look(job).note


class Ended(Exception):
    """In place of the end of this process."""


@pytest.fixture
def lose(monkeypatch):
    """Has a job lose its claim, and gives the status that its process would end with."""

    def end(folder, status=1):
        raise Ended(status)

    def lose_it(job):
        with pytest.raises(Ended) as ended:
            work._leave(job.folder)
        return ended.value.args[0]

    monkeypatch.setattr(work, "end_process", end)
    return lose_it


def test_a_job_whose_claim_stays_away_has_failed_and_says_of_which_file(data, tmp_path, lose):
    job = make(data, tmp_path)
    assert lose(job) == 1
    assert look(job).state == "failed"
    assert look(job).note.startswith(
        f"{job.folder / CLAIM} was gone or could not be read for 20 s, so its process ended"
    )
    assert look(job).note.endswith("then run the same command again")


def test_a_job_that_another_took_over_has_not_failed(data, tmp_path, lose):
    job = make(data, tmp_path)
    other = {"host": "far", "machine": "far", "pid": 7, "began": "1", "token": "another"}
    (job.folder / CLAIM).write_text(json.dumps(other), encoding="utf-8")
    assert lose(job) == EXIT_STATUS["taken"]
    assert not (job.folder / FAILURE).exists() and look(job).state == "running"


def test_a_folder_that_is_gone_is_not_made_again_to_say_so(data, tmp_path, lose):
    job = make(data, tmp_path)
    job.folder.rename(tmp_path / "away")
    assert lose(job) == 1
    assert not job.folder.exists()


def test_a_result_is_not_written_without_the_claim(data, tmp_path, monkeypatch):
    job = make(data, tmp_path)
    monkeypatch.setattr(work.Claim, "held", lambda self: False)
    assert do(job.folder, "cpu") == "taken"
    assert read_result(job.folder) is None
