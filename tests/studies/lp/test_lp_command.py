"""`qknorm study lp` as it is typed, and the text that it studies."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lp_cases import WORDS, made_up

from qknorm.cli import display, grid_display, study_lp
from qknorm.cli.study import run
from qknorm.cli.study_lp import _parse
from qknorm.errors import InputError
from qknorm.studies.grid import claims
from qknorm.studies.grid.claims import CLAIM, find_holder, take
from qknorm.studies.lp.analysis import Results
from qknorm.studies.lp.corpus import find_text, make_text
from qknorm.studies.lp.design import Arm, LpStudy, Run, quick_study
from qknorm.studies.lp.records import StudyFolder
from qknorm.studies.lp.report import Report, command_of, make_tables
from qknorm.studies.lp.work import run_missing

SMALL = [
    *("--model.width", "16", "--model.feed-forward", "32", "--model.layers", "1", "--model.heads", "2"),
    *("--model.context", "12", "--fold-count", "3", "--iterations", "3", "--batch", "2", "--evaluate-every", "2"),
    *("--workers", "1", "--device", "cpu"),
]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "words.txt"
    file.write_text(WORDS * 6, encoding="utf-8")
    return file


def study(text: Path, out: Path, *words: str) -> None:
    run(["lp", "--text", str(text), "--out", str(out), *SMALL, *words])


def test_a_study_in_parts_and_its_page(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    with monkeypatch.context() as patched:
        patched.setattr("qknorm.studies.lp.report.draw_all", lambda *_: {})  # pictures take their time
        study(text, first, "--p", "2,3", "--arms", "same-scale,dot-product", "--folds", "0-1")
        out = capsys.readouterr().out
        assert "6 runs on words.txt, 0 finished before, on cpu" in out
        assert "Does p > 2 end lower than p = 2" in out and "Validation loss (nats per character)" in out
        study(text, first, "--p", "2,3", "--arms", "same-scale,dot-product", "--folds", "0-1")
        assert "6 finished before" in capsys.readouterr().out
        study(text, second, "--p", "2,3", "--arms", "same-scale,matched", "--folds", "2", "--stack", "2")
        capsys.readouterr()
    with pytest.raises(InputError, match="batch = 2 instead of 3"):
        study(text, first, "--batch", "3")

    merged = tmp_path / "all"
    run(["lp", "--out", str(merged), "--merge", str(first), str(second)])
    assert "9 runs taken from 2 folders" in capsys.readouterr().out
    assert len(list((merged / "runs").glob("*.json"))) == 9
    assert "same-scale | 3 | 3 |" in (merged / "report.md").read_text(encoding="utf-8")
    assert (merged / "curves.csv").exists() and (merged / "arms.png").exists()


def test_time_that_is_up_is_told_with_the_command_to_go_on(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study(text, tmp_path / "a", "--max-minutes", "1e-9", "--folds", "0", "--p", "2", "--arms", "same-scale")
    out, err = capsys.readouterr()
    assert "1 runs are left" in err and "no finished run" in err
    assert "Go on: qknorm study lp --text" in out


def test_an_interrupt_tells_how_to_go_on(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(folder: StudyFolder, *_: object) -> None:
        assert find_holder(folder.path) is not None
        raise KeyboardInterrupt

    monkeypatch.setattr("qknorm.studies.lp.work.run_missing", stop)
    with pytest.raises(SystemExit) as end:
        study(text, tmp_path / "a")
    told = capsys.readouterr()
    assert end.value.code == 130 and "the same command goes on" in told.err
    assert "Go on: qknorm study lp --text" in told.out
    assert find_holder(tmp_path / "a") is None


def test_a_second_study_in_one_folder_is_refused_while_the_first_is_at_work(text: Path, tmp_path: Path) -> None:
    with take(tmp_path / "a"), pytest.raises(InputError, match=r"another study is at work in .*--folds and --out"):
        study(text, tmp_path / "a", "--folds", "0", "--p", "2", "--arms", "same-scale")
    assert not list(tmp_path.glob("a/runs/*"))


def test_a_study_that_loses_its_claim_says_so_and_goes_on(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threading.Event()

    def warn(sentence: str) -> None:
        display.warn(sentence)
        told.set()

    def lose_then_work(folder: StudyFolder, *words: Any) -> list[Run]:
        (folder.path / CLAIM).unlink()
        assert told.wait(30)
        return run_missing(folder, *words)

    monkeypatch.setattr(claims, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(study_lp, "warn", warn)
    monkeypatch.setattr("qknorm.studies.lp.work.run_missing", lose_then_work)
    monkeypatch.setattr("qknorm.studies.lp.report.draw_all", lambda *_: {})
    study(text, tmp_path / "a", "--folds", "0", "--p", "2", "--arms", "same-scale")
    assert (
        capsys.readouterr().err.count("claim.json is gone, cannot be read, or is another study's: this one goes on")
        == 1
    )
    assert len(list(tmp_path.glob("a/runs/*.json"))) == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--folds", "7"], "folds go from 0 to 2"),
        (["--stack", "0"], "--stack is 0"),
        (["--max-minutes", "nan"], "--max-minutes is nan"),
        (["--device", "tpu"], "--device tpu is no device"),
        (["--device", "meta"], "cpu or cuda"),
        (["--fold-count", "1"], "fold_count"),
        (["--model.attention.p", "3"], "--arms and --p instead"),
        (["--model.context", "200"], "no window of 200 is left"),
        (["--p", "2,2.0000001"], "more than six digits"),
    ],
)
def test_bad_words_are_one_sentence(text: Path, tmp_path: Path, words: list[str], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        study(text, tmp_path / "a", *words)
    assert not (tmp_path / "a").exists()  # else the next study there would be refused for this one's settings


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(text: Path, tmp_path: Path) -> None:
    for device in ("cuda", "cuda:7"):
        with pytest.raises(InputError, match="no GPU"):
            study(text, tmp_path / "a", "--device", device)


def test_the_command_on_the_page_can_be_typed(tmp_path: Path) -> None:
    words = [*SMALL, "--model.no-tie", "--betas", "0.8", "0.9", "--precision", "float32", "--characters", "400"]
    settings = _parse(words).settings
    folder = StudyFolder.create_or_open(tmp_path, settings, make_text("x", WORDS * 6))
    printed = command_of(folder, Results([made_up("same-scale", 2.0, 0, 1.5)]))
    assert printed[:3] == ["qknorm", "study", "lp"] and "--model.no-tie" in printed
    assert _parse(printed[3:]).settings == settings


def test_reports_and_merges_of_nothing(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "a")]
    told = f"nothing is finished in .*; run it first: qknorm study lp --quick {' '.join(out)}$"
    with pytest.raises(InputError, match=told):
        run(["lp", "--quick", *out, "--report"])
    with pytest.raises(InputError, match="holds no study"):
        run(["lp", *out, "--merge", str(tmp_path / "nowhere")])
    assert not list(tmp_path.iterdir())
    older = tmp_path / "older"  # of a study from before its folder said which it is
    (older / "runs" / "0-0").mkdir(parents=True)
    (older / "runs" / "0-0" / "job.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match="older holds a study of qknorm study paper; name another folder"):
        run(["lp", "--out", str(older), "--merge", str(tmp_path / "nowhere")])


def test_a_report_before_any_run_is_finished(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "a"
    study(text, out, "--max-minutes", "1e-9", "--folds", "0", "--p", "2", "--arms", "same-scale")
    with pytest.raises(InputError, match=f"nothing is finished in {out}; run it first: qknorm study lp --out {out}$"):
        run(["lp", "--out", str(out), "--report"])
    assert not (out / "report.md").exists()


@pytest.mark.parametrize("skipped", [0, 3])
def test_at_80_columns_the_tables_show_every_word_and_skipped_steps_if_there_are_some(
    skipped: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    variants: list[tuple[Arm, float | None]] = [("same-scale", 2.0), ("same-scale", 3.0), ("dot-product", None)]
    records = [replace(made_up(arm, p, fold, 2.0), skipped_steps=skipped) for arm, p in variants for fold in range(3)]
    for module in (study_lp, grid_display):
        monkeypatch.setattr(module.console, "_width", 80)
    folder = StudyFolder.create_or_open(tmp_path, quick_study(), make_text("x", WORDS))
    paths = (tmp_path / name for name in ("report.md", "report.html", "curves.csv"))
    study_lp._show(Report(tuple(make_tables(Results(records))), (), {}, *paths), folder)
    told = capsys.readouterr().out
    assert "…" not in told and "dot-product" in told and "difference" in told and "Wilcoxon" in told
    assert ("skipped" in told) == (skipped > 0)
    assert f"The page: {tmp_path / 'report.md'} and {tmp_path / 'report.html'}\n" in told


def test_the_verb_knows_its_studies(capsys: pytest.CaptureFixture[str]) -> None:
    for words, status in ((["--help"], 0), ([], 2)):
        with pytest.raises(SystemExit) as ended:
            run(words)
        assert ended.value.code == status
        assert "qknorm study lp --quick" in capsys.readouterr().out
    with pytest.raises(InputError, match="there is no study pl"):
        run(["pl"])


def test_settings_are_nanogpts_and_the_papers_model() -> None:
    study = LpStudy()
    model = study.model
    assert (model.layers, model.heads, model.width, model.context) == (6, 6, 384, 256)
    assert {model.dropout.residual, model.dropout.embedding, model.dropout.attention} == {0.2}
    assert (study.batch, study.iterations, study.warmup, study.fold_count) == (64, 5_000, 100, 10)
    assert (study.learning_rate, study.final_learning_rate, study.weight_decay) == (1e-3, 1e-4, 0.1)
    assert study.betas == (0.9, 0.99) and study.clip == 1.0
    assert study.first_scale == pytest.approx(15.9944, abs=1e-4)
    assert json.loads(quick_study().model_dump_json())["fold_count"] == 3


# ------------------------------------------------------------------ text


def test_a_corpus_that_is_here_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tinyshakespeare"
    folder.mkdir()
    (folder / "input.txt").write_text("To be, or not\n", encoding="utf-8")
    monkeypatch.setenv("QKNORM_DATA", str(tmp_path))
    found = find_text()
    assert (found.name, len(found.ids)) == ("tinyshakespeare", 14)
    assert len(find_text(characters=5).ids) == 5


def test_without_a_corpus_our_own_sentences_are_always_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QKNORM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = find_text()
    assert own.digest == find_text().digest
    assert 150_000 < len(own.ids) < 300_000 and own.vocabulary < 80


def test_ids_are_codes_of_sorted_characters_in_the_smallest_type() -> None:
    text = make_text("x", "bab\nß")
    assert text.ids.tolist() == [2, 1, 2, 0, 3] and text.ids.dtype == torch.uint8 and text.vocabulary == 4
    wide = make_text("y", "".join(map(chr, range(0x4E00, 0x4E00 + 300))))
    assert wide.vocabulary == 300 and wide.ids.tolist() == list(range(300))


def test_texts_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.txt"):
        find_text(tmp_path / "nowhere.txt")
    (tmp_path / "latin.txt").write_bytes("ñandú".encode("latin-1"))
    with pytest.raises(InputError, match="not UTF-8"):
        find_text(tmp_path / "latin.txt")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(InputError, match=r"empty\.txt is empty"):
        find_text(tmp_path / "empty.txt")
