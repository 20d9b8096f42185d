"""Text and names of users that look like terminal markup are shown as they are."""

import re
from pathlib import Path
from typing import Any

import pytest

from qknorm.cli import average, display, train
from qknorm.cli.main import main
from qknorm.training.loop import Outcome


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A folder whose path holds [music] and [/b]."""
    folder = tmp_path / "[music] [" / "b]"
    folder.mkdir(parents=True)
    return folder


def test_prepare_shows_dropped_pairs_and_paths(odd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"word{i} [music]\tWORT{i} [/b]" for i in range(40)] + ["a [/b] [music] :smile:\ta [/b] [music] :smile:"]
    (odd / "pairs.tsv").write_text("".join(f"{line}\n" for line in lines))
    main(["prepare", str(odd / "data"), "--source", "aa", "--target", "bb", "--train", str(odd / "pairs.tsv")])
    told = capsys.readouterr().out
    assert "a [/b] [music] :smile: ⇄ a [/b] [music] :smile:" in told
    assert f"Next: qknorm train '{odd / 'data'}' --run runs/aa-bb" in told


def test_score_shows_names(odd: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(odd.parents[1])
    names = [f"[music] [/b]/{name}" for name in ("ref", "one", "two")]
    for name in names:
        Path(name).write_text("a b c d e\nf g h i j\n")
    main(["score", "--ref", names[0], "--hyp", names[1], "--hyp", names[2]])
    told = capsys.readouterr().out.splitlines()
    for title in (names[1], names[2], f"bleu against {names[1]}"):
        assert title in map(str.rstrip, told)
    assert any(line.startswith(f"│ {names[2]} ") for line in told)
    signatures = [line for line in told if line.startswith("ter  ")]
    assert len(signatures) == 2  # none is cut in two
    assert all(re.search(r"nrefs:1\|.*\|version:\d+\.\d+\.\d+$", line.rstrip()) for line in signatures)


@pytest.mark.parametrize("interrupted", [True, False])
def test_train_shows_what_comes_next(
    odd: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    outcome = Outcome("done", 1, 1, 2.0, 3.0, interrupted)
    monkeypatch.setattr("qknorm.training.fit.train", lambda *_, **__: outcome)
    words = [str(odd), "--run", str(odd / "run")]
    if interrupted:
        with pytest.raises(SystemExit):
            train.run(words)
    else:
        train.run(words)
    expected = f"train '{odd}' --run '{odd / 'run'}' --resume" if interrupted else f"score '{odd / 'run'}' --split test"
    assert f"qknorm {expected}" in capsys.readouterr().out


def test_average_shows_its_file(odd: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def pretend(*_: Any, **__: Any) -> tuple[Path, list[int]]:
        return odd / "averaged", [1, 2]

    monkeypatch.setattr("qknorm.training.averaging.average", pretend)
    average.run([str(odd), "--last", "2"])
    assert capsys.readouterr().out == f"{odd / 'averaged'}: the mean of steps 1, 2\n"


def test_warnings_and_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    display.warn("no [music] in [/b]")
    assert capsys.readouterr().err == "note: no [music] in [/b]\n"
    monkeypatch.setattr(display.errors, "_force_terminal", True)
    with display.progress_bar(transient=False) as progress:
        progress("read [/b]", 1, 2)
    assert "read [/b]" in capsys.readouterr().err
