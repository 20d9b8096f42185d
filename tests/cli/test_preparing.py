"""What the words of `qknorm prepare` ask for, and what they cannot ask for together."""

from pathlib import Path

import pytest

from qknorm.cli.main import main


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of multi30k-en-de, made up."""
    monkeypatch.setenv("QKNORM_DATA", str(tmp_path))
    folder = tmp_path / "multi30k-en-de"
    folder.mkdir()
    for split in ("train", "dev", "test"):
        for side in ("en", "de"):
            (folder / f"{split}.{side}").write_text("".join(f"{split} {side} {n}\n" for n in range(30)))
    return folder


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--dev-pairs", "7"], "--dev-pairs is for splitting off a dev set, but --corpus brings one"),
        (["--dev-pairs", "1000"], "--dev-pairs is for splitting off a dev set, but --corpus brings one"),
        (["--test-pairs", "3"], "--test-pairs is for splitting off a test set, but --corpus brings one"),
        (["--dev", "train.en", "train.de", "--dev-pairs", "7"], "a dev set, but --dev gives one"),
    ],
)
def test_sets_that_are_there_are_not_split_off(
    words: list[str], told: str, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = corpus.parent / "out"
    with pytest.raises(SystemExit):
        main(["prepare", str(out), "--corpus", corpus.name, *words])
    assert told in " ".join(capsys.readouterr().err.split())
    assert not out.exists()
    main(
        ["prepare", str(out), "--corpus", corpus.name, "--test-pairs", "0"]
    )  # none is split off, and none is asked for
