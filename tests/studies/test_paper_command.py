"""`qknorm study paper` itself, its trainings made tiny and done in this process."""

import json

import pytest
from paper_cases import GridInThisProcess, finish, prepare_copy, tiny

from qknorm import files
from qknorm.cli import grid_display, study_paper
from qknorm.cli.main import main
from qknorm.cli.study import run
from qknorm.errors import InputError
from qknorm.studies.grid.claims import take
from qknorm.studies.grid.jobs import look, write_failure
from qknorm.studies.paper import plan as planning
from qknorm.studies.recipes import change
from qknorm.text.prepared import PreparedData


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare_copy(tmp_path_factory.mktemp("copy"), pretokenized=True)


@pytest.fixture
def here(data, monkeypatch):
    """Quick settings smaller still, on a copy task, and a grid that does one job after another in this process."""

    def shrink(settings):
        norms = {"model.norm": settings.model.norm, "model.attention": settings.model.attention.model_dump()}
        return change(tiny(), {**norms, "training.seed": settings.training.seed})

    monkeypatch.setattr(planning, "make_quick", shrink)
    monkeypatch.setattr(study_paper, "LocalGrid", GridInThisProcess)
    monkeypatch.setattr(study_paper, "_prepare_demo", lambda folder: None)
    monkeypatch.setattr(planning, "find_data", lambda pair, folder: data.folder)


def test_quick_gives_tables_pictures_and_a_page(here, tmp_path, capsys):
    run(["paper", "--quick", "--figure", "1", "2", "--table", "2", "3", "--seeds", "1", "--out", str(tmp_path / "out")])
    told = capsys.readouterr()
    assert "2 runs, 0 finished before" in told.out
    assert "gl-en qknorm, seed 0: finished" in told.err
    for name in ("report.md", "report.html", "results.csv", "figure-1-gl-en.png", "figure-2-gl-en.png"):
        assert (tmp_path / "out" / name).stat().st_size > 200
    page = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "## Table 2: " in page and "## Table 3: " in page and "## What the heads do" in page
    assert "script:multi-bleu-detok" in page and "treebank-detok" in page
    assert "says nothing of the claims" in page and str(tmp_path) in page.split("Command: ")[1]
    run(["paper", "--quick", "--table", "2", "--seeds", "1", "--out", str(tmp_path / "out")])
    assert "2 runs, 2 finished before" in capsys.readouterr().out


def test_a_report_without_training(here, tmp_path, capsys):
    out = ["--out", str(tmp_path)]
    run(["paper", "--quick", "--systems", "baseline", "--seeds", "1", *out])
    capsys.readouterr()
    run(["paper", "--quick", "--report", "--figure", "1", *out])
    told = capsys.readouterr()
    assert "not run yet 1" in told.out and "Not finished: 3 of 4 runs" in told.out
    assert "the figures need both systems of Table 2" in told.err


def test_a_run_that_failed_is_told_by_the_exit_status_too(here, data, tmp_path, monkeypatch, capsys):
    def fail_the_first(self):
        finish(self._jobs[1], data, wrong=2)
        write_failure(self._jobs[0].folder, "the disk is full")
        return True

    monkeypatch.setattr(study_paper, "LocalGrid", type("Failing", (GridInThisProcess,), {"run": fail_the_first}))
    words = ["paper", "--quick", "--seeds", "1", "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as end:
        run(words)
    told = capsys.readouterr()
    assert end.value.code == 1 and "seed 0 failed: the disk is full; see " in told.err
    assert "The page: " in told.out and "Not finished: 1 of 2 runs" in told.out
    run([*words, "--report"])  # which has nothing to fail


def test_while_nothing_is_finished_an_earlier_page_stays(here, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study_paper.LocalGrid, "run", lambda self: False)
    files.write_text(tmp_path / "report.md", "of an earlier study\n")
    run(["paper", "--quick", "--figure", "1", "--out", str(tmp_path)])
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == "of an earlier study\n"
    assert f"{tmp_path} has no finished run of what is asked for yet" in capsys.readouterr().err


@pytest.mark.parametrize("report", [[], ["--report"]])
@pytest.mark.parametrize(
    ("about", "words", "told"),
    [
        ({"study": "paper --quick"}, [], "s holds a study of qknorm study paper --quick; name another folder"),
        ({"study": "paper"}, ["--quick"], "s holds a study of qknorm study paper; name another folder"),
        ({"text": {}}, [], "s holds a study of qknorm study tune; name another folder"),
        ({"settings": {}, "text": {}}, ["--quick"], "s holds a study of qknorm study lp; name another folder"),
        ({}, [], r"study\.json is damaged; move it away"),
        (["study"], [], r"study\.json is damaged; move it away"),
        ({"study": None}, [], r"study\.json is damaged; move it away"),
    ],
)
def test_studies_leave_each_others_pages(about, words, told, report, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    files.write_text(tmp_path / "s" / "runs" / "0-0" / "result.json", "{}")
    files.write_json(tmp_path / "s" / "study.json", about)
    with pytest.raises(InputError, match=told):
        run(["paper", *words, *report, "--out", "s"])
    assert "not here" not in capsys.readouterr().err  # what to download is beside the point
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["runs", "study.json"]


def test_a_study_leaves_its_mark_and_goes_on_by_it(here, tmp_path):
    words = ["paper", "--quick", "--seeds", "1", "--out", str(tmp_path)]
    for name in ("data/prepared.json", "corpus/train.gl"):  # as --quick leaves them
        files.write_text(tmp_path / name, "{}")
    run(words)
    assert json.loads((tmp_path / "study.json").read_text(encoding="utf-8")) == {"study": "paper --quick"}
    run(words)
    (tmp_path / "study.json").unlink()  # a folder from before there were marks is known by its runs
    for other in (["tune", "--quick"], ["lp", "--quick", "--device", "cpu"], ["paper", "--report"]):
        with pytest.raises(InputError, match="holds a study of qknorm study paper --quick; name another folder"):
            run([*other, "--out", str(tmp_path)])
    run([*words, "--report"])
    assert (tmp_path / "study.json").is_file()


def test_what_cannot_begin_leaves_no_mark(here, tmp_path):
    with pytest.raises(InputError, match="--device tpu is no device"):
        run(["paper", "--quick", "--device", "tpu", "--out", str(tmp_path)])
    assert not (tmp_path / "study.json").exists()


def test_a_report_of_nothing_is_refused_and_leaves_what_is_there(here, tmp_path, monkeypatch):
    words = ["paper", "--quick", "--report", "--table", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(study_paper, "_prepare_demo", None)  # nothing is prepared either
    with pytest.raises(InputError, match=r"nothing is finished in .*; run it first: qknorm study paper --quick") as no:
        run(words)
    assert "--report" not in str(no.value).removeprefix("--report") and not list(tmp_path.iterdir())
    monkeypatch.setattr(study_paper, "_prepare_demo", lambda folder: None)
    files.write_text(tmp_path / "runs" / "0-0" / "result.json", "{}")
    files.write_text(tmp_path / "results.csv", "of an earlier study\n")
    with pytest.raises(InputError, match=r"other settings, data or code than asked for; .* --any-code"):
        run(words)
    assert (tmp_path / "results.csv").read_text(encoding="utf-8") == "of an earlier study\n"
    assert not (tmp_path / "report.md").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--table", "7"], "--table 7: give some of 2, 3, 4, 5, 6"),
        (["--table", "2", "--table", "3"], "--table is given more than once; name all after the first: --table A B"),
        (["--beyond=control", "--seeds", "2", "--beyond", "norms"], "--beyond is given more than once"),
        (["--beyond", "heads"], "--beyond heads: give some of control"),
        (["--systems", "qknrm"], "no qknrm in what is asked for"),
        (["--max-minutes", "0"], "--max-minutes takes a number above 0"),
        (["--max-minutes", "5", "--ray", "auto"], "leave it out with --ray"),
        (["--quick", "--data", "x"], "--quick has data of its own"),
        (["--quick", "--data=x"], "--quick has data of its own"),
        (["--data", "nowhere"], "nothing can be run: nowhere holds no prepared data"),
        (["--pair", "xx-yy"], "no data set is known"),
    ],
)
def test_bad_words_get_a_sentence(words, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=told):
        run(["paper", *words])


@pytest.mark.parametrize("quick", [True, False])
def test_an_interrupt_tells_how_to_go_on(here, data, tmp_path, monkeypatch, capsys, quick):
    class Stopped:
        def __init__(self, *_, **__):
            pass

        def run(self):
            raise KeyboardInterrupt

    monkeypatch.setattr(study_paper, "LocalGrid", Stopped)
    size = ["--quick"] if quick else ["--pair", "gl-en", "--device", "cpu"]
    with pytest.raises(SystemExit) as end:
        run(["paper", *size, "--out", str(tmp_path)])
    assert end.value.code == 130
    told = capsys.readouterr()
    assert f"qknorm study paper {size[0]}" in told.out and "what was saved" in told.err
    assert ("half a day or more" in told.err) is not quick


def test_when_time_is_up_it_ends_well_and_tells_how_to_go_on(here, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study_paper.LocalGrid, "run", lambda self: False)
    run(["paper", "--quick", "--max-minutes", "1", "--out", str(tmp_path)])
    told = capsys.readouterr()
    assert "Go on: qknorm study paper --quick --max-minutes 1" in told.out and "time is up" in told.err


def test_the_live_table_shows_who_is_at_what(data, tmp_path):
    plan = planning.make_plan([study_paper.find_experiment("2")], tmp_path, data.folder, quick=True)
    with take(plan.jobs[0].folder):
        drawn = grid_display.state_table([look(job) for job in plan.jobs])
    assert drawn.row_count == 2 and drawn.title.startswith("1 running, 0 failed")


def test_the_embedded_corpus_is_prepared_once(tmp_path):
    study_paper._prepare_demo(tmp_path / "data")
    data = PreparedData.load(tmp_path / "data")
    assert (data.source, data.target, len(data.split("test"))) == ("gl", "en", study_paper.QUICK_TEST)
    study_paper._prepare_demo(tmp_path / "data")


def test_help_names_the_study(capsys):
    with pytest.raises(SystemExit):
        main(["study", "paper", "--help"])
    assert "--any-code" in capsys.readouterr().out
