"""`qknorm demo` from its corpus to its pictures, with a fraction of the sentences and steps."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from qknorm.cli import demo
from qknorm.cli import main as run_qknorm
from qknorm.text.demo_corpus import generate
from qknorm.training.record import Recorder, read_metrics

TEST_PAIRS = 24


@pytest.fixture
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """A corpus of 300 pairs in place of the whole; returns its test pairs."""
    monkeypatch.setattr(demo.console, "_width", 400)  # it was made at import, when COLUMNS was read
    pairs = generate(300 + 12 + TEST_PAIRS, seed=5)
    splits = {"train": pairs[:300], "dev": pairs[300:312], "test": pairs[312:]}
    monkeypatch.setattr(demo, "demo_splits", lambda: splits)
    monkeypatch.setattr(demo, "MERGES", 300)
    return splits["test"]


def run_demo(out: Path, steps: int = 4) -> None:
    run_qknorm(["demo", "--out", str(out), "--steps", str(steps), "--device", "cpu"])


@pytest.mark.slow
def test_demo_shows_all_it_promises_and_can_run_again(
    tmp_path: Path, small_corpus: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "demo"
    run_demo(out)
    printed = capsys.readouterr().out
    for split in ("dev", "test"):
        assert re.search(rf"{split} +│ +\d+ +│ +\d+% +│ +\d+\.\d\d +│ +\d+\.\d\d", printed), f"no scores of {split}"
    assert "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:" in printed
    shown = [pair for pair in small_corpus if all(f" {side} " in printed for side in pair)]
    assert len(shown) == demo.SHOWN_TRANSLATIONS, "a dozen sources and references"
    scales = re.findall(r"(\d+\.\d\d) → (\d+\.\d\d)", printed)
    assert len(scales) == 6 and len({start for start, _ in scales}) == 1, "g of 2 encoder and 2 + 2 decoder attentions"
    for command in ("prepare data/mine", "train data/mine", "score runs/mine", f"translate {out / 'run'}"):
        assert f"qknorm {command}" in printed
    for picture in (out / "attention.png", out / "run" / "curves.png"):
        assert str(picture) in printed
        assert imread(picture).std() > 0.02, f"{picture.name} is blank"
    assert (out / "corpus" / "test.en").read_text(encoding="utf-8").splitlines() == [pair[1] for pair in small_corpus]

    (out / "run" / "notes.txt").write_text("of the first run")
    run_demo(out, steps=2)
    assert not (out / "run" / "notes.txt").exists()
    assert [row["step"] for row in read_metrics(out / "run") if row["kind"] == "evaluation"][-1] == 2
    assert {path.name for path in out.iterdir()} == demo.OURS


@pytest.mark.parametrize("also_a_demo", [False, True])
def test_foreign_folders_are_left_alone(
    also_a_demo: bool, tmp_path: Path, small_corpus: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "weights").write_text("mine")
    (tmp_path / "thesis.txt").write_text("mine")
    if also_a_demo:
        (tmp_path / demo.MARKER).write_text("{}")
    with pytest.raises(SystemExit) as ended:
        run_demo(tmp_path)
    assert ended.value.code == 2
    assert "thesis.txt" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == (tmp_path / "run" / "weights").read_text() == "mine"


def test_a_run_that_no_demo_made_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(SystemExit) as ended:
        run_demo(tmp_path)
    assert ended.value.code == 2
    assert "was not made by qknorm demo" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(("options", "complaint"), [(["--steps", "0"], "--steps is 0"), ([], "is a file")])
def test_impossible_options_are_one_sentence(
    options: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "demo"
    path.write_text("")
    with pytest.raises(SystemExit) as ended:
        run_qknorm(["demo", "--out", str(path), *options])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1


@pytest.mark.slow
def test_ctrl_c_leaves_cleanly_and_the_next_demo_works(
    tmp_path: Path,
    small_corpus: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "demo"
    log_step = Recorder.log_step

    def press_ctrl_c(recorder: Recorder, **row: Any) -> None:
        log_step(recorder, **row)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "log_step", press_ctrl_c)
        with pytest.raises(SystemExit) as ended:
            run_demo(out, steps=300)
    assert ended.value.code == 130
    assert f"qknorm train {out / 'data'} --run {out / 'run'} --resume" in capsys.readouterr().out
    assert not list(out.rglob("*.partial"))
    run_demo(out, steps=1)
    assert (out / "attention.png").is_file()


def test_leftovers_of_a_killed_demo_are_swept(tmp_path: Path, small_corpus: list[tuple[str, str]]) -> None:
    (tmp_path / demo.MARKER).write_text("{}")
    (tmp_path / ".data.abc.partial").mkdir()
    (tmp_path / ".attention.png.abc.partial").write_text("half")
    demo._clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [demo.MARKER]
