"""What `translate` and `score` say about their own doings."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from qknorm.cli import score, translate
from qknorm.decoding.translate import Alternative, Translation
from qknorm.errors import InputError


class Echo:
    """Says everything again, in two parts."""

    source, target = "aa", "bb"

    def explain(self, texts: list[str], **_: Any) -> list[Translation]:
        return [Translation(text, 0.0, [Alternative(text, 0.0)], parts=2) for text in texts]


def test_a_conversation_tells_of_parts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    typed = iter(["so long", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    translate._converse(Echo(), translate.Arguments(run=Path("run")))  # type: ignore[arg-type]
    told = capsys.readouterr()
    assert "bb> so long" in told.out
    assert told.err == "note: this is longer than any in training; translated in 2 parts\n"


def test_alignments_of_alternatives_need_json() -> None:
    with pytest.raises(InputError, match=r"--align with --nbest .* add --json"):
        translate.run(["run", "--align", "--nbest", "2"])
    for allowed in (["--align"], ["--nbest", "2"], ["--align", "--nbest", "2", "--json"]):
        with pytest.raises(InputError, match="run is no run folder"):
            translate.run(["run", *allowed])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_precision_is_passed_on(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **given: Any) -> None:
        raise InputError(f"loaded in {given['precision']}")

    monkeypatch.setattr(translate, "load", load)
    with pytest.raises(InputError, match=f"loaded in {precision}"):
        translate.run(["run", "--precision", precision])


def test_translations_that_cannot_be_kept_are_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    score._keep(["ñ", "b"], tmp_path / "test.bb")
    assert (tmp_path / "test.bb").read_text(encoding="utf-8") == "ñ\nb\n"
    assert capsys.readouterr().err == ""
    score._keep(["a"], tmp_path / "test.bb" / "under.a.file")
    assert "note: the translations are not kept, since" in capsys.readouterr().err


def test_a_pipe_is_answered_when_it_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translate, "AT_ONCE", 3)
    monkeypatch.setattr(translate, "PAUSE", 0.01)
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as file:
        piped = translate._Arriving(file)
        lines = translate.decode_lines(piped, "a pipe")
        os.write(writing, b"\xef\xbb\xbfone\r\ntwo\nthr")
        assert translate._take(lines, piped) == ["one", "two"]
        os.write(writing, b"ee\n4\n5\n\n7")
        assert translate._take(lines, piped) == ["three", "4", "5"]
        assert translate._take(lines, piped) == [""]
        os.close(writing)
        assert translate._take(lines, piped) == ["7"]
        assert translate._take(lines, piped) == []


def test_a_name_that_cannot_become_a_file_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is a folder; name a file"):
        translate.run(["run", "--output", str(tmp_path)])
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot be written, since .*file takes no files"):
        translate.run(["run", "--output", str(tmp_path / "file" / "below" / "out")])
    (tmp_path / "link").symlink_to(tmp_path / "file" / "below")
    with pytest.raises(InputError, match=r"cannot be written, since .*file takes no files"):
        translate.run(["run", "--output", str(tmp_path / "link")])
    with (tmp_path / "file").open() as read:
        for number in (read.fileno(), 9_999, 10**20):  # the last is none that a system has
            with pytest.raises(InputError, match=f"--output /dev/fd/{number} is not open for writing"):
                translate.run(["run", "--output", f"/dev/fd/{number}"])
    with (tmp_path / "file").open("w") as written:
        for good in (tmp_path / "new" / "out", "/dev/null", f"/dev/fd/{written.fileno()}"):
            with pytest.raises(InputError, match="run is no run folder"):
                translate.run(["run", "--output", str(good)])


def test_a_packed_name_is_packed(tmp_path: Path) -> None:
    with translate._destination(tmp_path / "o.gz") as out:
        out.write("ñ\n")
    assert gzip.decompress((tmp_path / "o.gz").read_bytes()) == "ñ\n".encode()
    assert list(translate.read_lines(tmp_path / "o.gz")) == ["ñ"]


def test_more_alternatives_than_the_beam_asked_for_are_refused() -> None:
    with pytest.raises(InputError, match="a beam of 2 finds no 3 alternatives; raise beam"):
        translate.run(["run", "--beam", "2", "--nbest", "3"])
    with pytest.raises(InputError, match="run is no run folder"):
        translate.run(["run", "--beam", "3", "--nbest", "3"])


def test_scoring_knows_an_exported_folder(tmp_path: Path) -> None:
    (tmp_path / "translator.json").write_text(json.dumps({"engine": "onnx"}))
    with pytest.raises(InputError, match="exported for onnx; name the run it was made from"):
        score.run([str(tmp_path), "--split", "test"])
