"""What `translate` and `score` say about their own doings."""

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
