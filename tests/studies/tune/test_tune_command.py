"""`qknorm study tune` itself, its trainings made tiny and done in this process."""

import shutil

import pytest
from paper_cases import GridInThisProcess, prepare_copy, tiny

from qknorm import files
from qknorm.cli import study_tune
from qknorm.cli.study import run
from qknorm.errors import InputError
from qknorm.studies.grid.jobs import write_failure
from qknorm.studies.recipes import change
from qknorm.studies.tune.data import DataByMerges, keep_text, require_same_text


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare_copy(tmp_path_factory.mktemp("copy"))


@pytest.fixture
def here(data, monkeypatch):
    """Quick settings smaller still, on a copy task, and a grid that does one job after another in this process."""

    def shrink(settings):
        return change(tiny(), {"model.norm": settings.model.norm, "model.positions": settings.model.positions})

    monkeypatch.setattr(study_tune, "make_quick", shrink)
    monkeypatch.setattr(study_tune, "LocalGrid", GridInThisProcess)
    monkeypatch.setattr(study_tune, "_open", lambda arguments: data)


def test_quick_searches_tests_and_goes_on_where_it_stopped(here, tmp_path, capsys):
    words = ["tune", "--quick", "--only", "norm", "--margin", "-100", "--test", "--out", str(tmp_path)]
    run(words)
    told = capsys.readouterr()
    assert "single: 3 runs, 0 finished before" in told.out
    assert "norm rms, seed 0: finished, dev BLEU" in told.err and "test BLEU" not in told.err
    assert "Best of the search on dev: " in told.out and "Test, after the choice" in told.out
    assert f"The page: {tmp_path / 'report.md'} and {tmp_path / 'report.html'}\n" in told.out
    for name in ("report.md", "report.html", "results.csv", "best/settings.toml"):
        assert (tmp_path / name).stat().st_size > 200
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "says nothing of real text" in page and "Command: `qknorm study tune --quick" in page
    run(words)
    assert "single: 3 runs, 3 finished before" in capsys.readouterr().out
    run([*words, "--report"])
    assert "--test" not in capsys.readouterr().err


def test_the_test_set_is_left_alone_unless_asked_for(here, tmp_path, capsys):
    words = ["tune", "--quick", "--only", "none", "--out", str(tmp_path)]
    run(words)
    assert "--test" not in capsys.readouterr().err
    run([*words, "--test", "--report"])
    assert "--test: the test set is not translated yet, and --report does not do it" in capsys.readouterr().err
    assert not list(tmp_path.glob("runs/*/test*.txt"))


def test_the_test_set_waits_for_runs_that_failed(here, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study_tune.LocalGrid, "run", lambda self: True)
    run(["tune", "--quick", "--test", "--out", str(tmp_path)])
    told = capsys.readouterr()
    assert "the test set waits" in told.err and "Go on: qknorm study tune --quick --test" in told.out


def test_nothing_is_trained_again_while_the_test_set_waits(here, tmp_path, monkeypatch, capsys):
    words = ["tune", "--quick", "--only", "none", "--out", str(tmp_path)]
    run(words)
    shutil.rmtree(next(tmp_path.glob("runs/*/run/checkpoints")))
    monkeypatch.setattr(study_tune.LocalGrid, "run", lambda self: True)  # whatever is missing fails
    run([*words[:3], "norm", *words[4:], "--test"])
    assert "the test set waits" in capsys.readouterr().err
    assert len(list(tmp_path.glob("runs/*/result.json"))) == 2 and not list(tmp_path.glob("runs/*/again"))


def test_what_lost_its_weights_is_trained_again_for_the_test_set(here, tmp_path, capsys):
    words = ["tune", "--quick", "--only", "none", "--out", str(tmp_path)]
    run(words)
    for folder in tmp_path.glob("runs/*/run/checkpoints"):
        shutil.rmtree(folder)
    run([*words, "--test"])
    told = capsys.readouterr().out
    assert "again, for the test set: 2 runs, 0 finished before" in told and "Test, after the choice" in told
    run([*words, "--test"])
    assert "again" not in capsys.readouterr().out


def test_a_report_without_training(here, tmp_path, capsys):
    run(["tune", "--quick", "--only", "none", "--out", str(tmp_path)])
    capsys.readouterr()
    run(["tune", "--quick", "--report", "--out", str(tmp_path)])
    told = capsys.readouterr().out
    assert "Not finished: 3 of 5 runs. The same command without --report goes on with them." in told
    assert "Go on" not in told


def test_a_report_of_nothing_is_refused_and_leaves_what_is_there(here, tmp_path):
    words = ["tune", "--quick", "--report", "--out", str(tmp_path)]
    with pytest.raises(InputError, match=r"nothing is finished in .*; run it first: qknorm study tune --quick --out"):
        run(words)
    assert not list(tmp_path.iterdir())  # no data are prepared either
    files.write_text(tmp_path / "runs" / "0-0" / "result.json", "{}")
    files.write_text(tmp_path / "results.csv", "of an earlier search\n")
    with pytest.raises(InputError, match=r"other settings, data or code than asked for; .* --any-code"):
        run(words)
    assert (tmp_path / "results.csv").read_text(encoding="utf-8") == "of an earlier search\n"
    assert not (tmp_path / "report.md").exists()


def test_nothing_to_report_of_is_told_before_data_are_asked_for(tmp_path):
    with pytest.raises(InputError, match=r"nothing is finished in .*none.runs; run it first: qknorm study tune --out"):
        run(["tune", "--report", "--out", str(tmp_path / "none")])
    files.write_text(tmp_path / "runs" / "0-0" / "result.json", "{}")
    files.write_text(tmp_path / "data" / "demo" / "prepared.json", "{}")
    with pytest.raises(InputError, match="holds a quick study; add --quick"):
        run(["tune", "--report", "--out", str(tmp_path)])


def test_a_run_that_failed_is_told_by_the_exit_status_too(here, tmp_path, monkeypatch, capsys):
    def fail(self):
        for job in self._jobs:
            write_failure(job.folder, "the disk is full")
        return True

    monkeypatch.setattr(study_tune.LocalGrid, "run", fail)
    files.write_text(tmp_path / "report.md", "of an earlier search\n")
    with pytest.raises(SystemExit) as end:
        run(["tune", "--quick", "--only", "none", "--out", str(tmp_path)])
    told = capsys.readouterr().err
    assert end.value.code == 1 and "start, seed 0 failed: the disk is full" in told
    assert f"{tmp_path} has no finished run of what is asked for yet" in told
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == "of an earlier search\n"


def test_another_text_in_the_folder_of_a_search_is_refused(here, data, tmp_path, tmp_path_factory, monkeypatch):
    words = ["tune", "--quick", "--only", "none", "--out", str(tmp_path)]
    monkeypatch.setattr(study_tune.LocalGrid, "run", lambda self: False)
    run(words)
    config = tmp_path / "my.toml"
    config.write_text("[model]\nheads = 8\n", encoding="utf-8")
    run([*words, "--config", str(config), "--merges", "50"])  # another start is no other text
    other = prepare_copy(tmp_path_factory.mktemp("other"), pairs=60)
    monkeypatch.setattr(study_tune, "_open", lambda arguments: other)
    with pytest.raises(InputError, match=r"a search on 80 pairs of gl→en, not on the text of .*; name another --out"):
        run(words)


def test_a_folder_older_than_its_note_of_the_text_is_known_by_its_data(data, tmp_path, tmp_path_factory):
    other = prepare_copy(tmp_path_factory.mktemp("other"), pairs=60)
    DataByMerges(data, tmp_path / "data").at(5)
    require_same_text(other, tmp_path)  # there is no run that could be lost
    files.write_text(tmp_path / "runs" / "0-0" / "result.json", "{}")
    require_same_text(data, tmp_path)
    told = r"a search on 80 pairs of gl→en, not on the text of .*; name another --out"
    with pytest.raises(InputError, match=told):
        require_same_text(other, tmp_path)
    shutil.copytree(other.folder, tmp_path / "data" / "demo")  # as --quick leaves it before it is refused
    require_same_text(data, tmp_path)
    with pytest.raises(InputError, match=told):
        require_same_text(other, tmp_path)
    next(tmp_path.glob("data/*-5/train.gl")).unlink()  # nothing tells the text any more
    require_same_text(other, tmp_path)


def test_the_folder_of_another_study_is_told_as_such(here, tmp_path):
    text = tmp_path / "words.txt"
    text.write_text("to be or not to be, " * 40, encoding="utf-8")
    out = tmp_path / "out"
    lp = ["lp", "--text", str(text), "--out", str(out), "--max-minutes", "1e-9", "--device", "cpu", "--workers", "1"]
    lp += ["--model.context", "12", "--fold-count", "3"]
    run(lp)
    before = (out / "study.json").read_bytes()
    with pytest.raises(InputError, match=r"out holds a study of qknorm study lp; name another folder"):
        run(["tune", "--quick", "--only", "none", "--out", str(out)])
    assert (out / "study.json").read_bytes() == before


def test_the_folder_of_a_search_is_none_for_lp(data, tmp_path):
    keep_text(data, tmp_path)
    with pytest.raises(InputError, match=r"holds a study of qknorm study tune; name another folder"):
        run(["lp", "--quick", "--device", "cpu", "--out", str(tmp_path)])


def test_a_text_cut_into_other_subwords_is_the_same(data, tmp_path):
    keep_text(data, tmp_path)
    require_same_text(DataByMerges(data, tmp_path / "data").at(5), tmp_path)
    for content in ("[]", "{", "null", '{"text": {}}'):
        files.write_text(tmp_path / "study.json", content)
        with pytest.raises(InputError, match=r"study\.json is damaged"):
            require_same_text(data, tmp_path)


def test_data_that_cannot_be_searched_on_hold_no_folder(data, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "splits", ("train",))
    monkeypatch.setattr(study_tune, "_open", lambda arguments: data)
    with pytest.raises(InputError, match="has no dev set to choose by"):
        run(["tune", "--data", str(data.folder), "--out", str(tmp_path)])
    assert not (tmp_path / "study.json").exists()


def test_when_time_is_up_it_tells_how_to_go_on(here, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study_tune.LocalGrid, "run", lambda self: False)
    run(["tune", "--quick", "--max-minutes", "1", "--out", str(tmp_path)])
    told = capsys.readouterr()
    assert "Go on: qknorm study tune --quick --max-minutes 1" in told.out and "time is up" in told.err


def test_an_interrupt_tells_how_to_go_on(here, tmp_path, monkeypatch, capsys):
    def stop(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(study_tune.LocalGrid, "run", stop)
    with pytest.raises(SystemExit) as end:
        run(["tune", "--quick", "--out", str(tmp_path)])
    assert end.value.code == 130 and "what was saved" in capsys.readouterr().err


def test_the_reference_is_the_papers_recipe_with_its_own_merges(data, tmp_path):
    arguments = study_tune._check(study_tune.Arguments(data=data.folder, out=tmp_path, max_steps=7))
    search = study_tune._search(arguments)
    assert (search.reference_name, search.reference_merges) == ("paper-qknorm-gl-en", 3_000)
    assert search.merges == data.manifest["merges"] and search.max_steps == 7
    config = tmp_path / "my.toml"
    config.write_text("[model]\nheads = 8\n", encoding="utf-8")
    other = study_tune.Arguments(data=data.folder, out=tmp_path, config=config, merges=50, against="demo")
    search = study_tune._search(study_tune._check(other))
    assert (search.start.model.heads, search.merges, search.reference_merges) == (8, 50, 50)


def test_a_quick_change_goes_over_the_small_settings(data, tmp_path, monkeypatch):
    monkeypatch.setattr(study_tune, "_open", lambda arguments: data)
    only = ("dropout", "width", "feed-forward", "batch", "word-dropout")  # small ones have their own of these
    search = study_tune._search(study_tune._check(study_tune.Arguments(quick=True, only=only, out=tmp_path)))
    tried = {trial.candidate.factor for trial in next(search.stages())} - {""}
    assert tried == {*only} and not search.without_effect
    assert search.start.model.width == 64 and search.reference.model.width == 64


def test_a_change_without_effect_is_named(here, tmp_path, capsys):
    run(["tune", "--quick", "--only", "steps", "--max-steps", "2", "--values", "2", "--out", str(tmp_path)])
    told = capsys.readouterr()
    assert "left out, since with --max-steps 2 they change nothing: steps 50000, steps 25000" in told.err
    assert "on a CPU" not in told.err


def test_a_search_that_takes_days_on_a_cpu_names_the_small_preset(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study_tune.LocalGrid, "run", lambda self: False)
    for words, warned in (([], True), (["--preset", "low-resource-small"], False)):
        run(["tune", "--data", str(data.folder), "--device", "cpu", "--only", "none", "--out", str(tmp_path), *words])
        told = "takes days; smaller is --preset low-resource-small --against low-resource-small"
        assert (told in capsys.readouterr().err) is warned


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "give the text to search on"),
        (["--quick", "--data", "x"], "--quick has data of its own"),
        (["--data", "x", "--only", "head"], "--only head: there is no such factor"),
        (["--data", "x", "--seeds", "0"], "--seeds is 0; give a number above 0"),
        (["--data", "x", "--max-minutes", "0"], "--max-minutes is 0"),
        (["--data", "x", "--margin", "nan"], "--margin is nan; give a number of BLEU"),
        (["--data", "x", "--only", "none", "merges"], "--only: none stands alone"),
        (["--data", "nowhere"], "nowhere is no folder"),
    ],
)
def test_bad_words_get_a_sentence(words, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=told):
        run(["tune", *words])


def test_a_language_models_preset_is_refused(data, tmp_path):
    with pytest.raises(InputError, match="preset of a language model"):
        study_tune._search(study_tune.Arguments(data=data.folder, out=tmp_path, preset="character-lm"))
