"""`--quantize` from the command line to a model: what is passed on, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from qknorm.cli import translate
from qknorm.config import Model, Prepare, Train
from qknorm.errors import InputError
from qknorm.models.quantized import QuantizedTranslator
from qknorm.text.prepare import prepare
from qknorm.text.prepared import PreparedData
from qknorm.training.checkpoint import save_checkpoint
from qknorm.training.run_folder import build_model, create_run, load_translator

SETTINGS = Train(model=Model(width=16, feed_forward=16, encoder_layers=1, decoder_layers=1, heads=2))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint, though nothing was trained."""
    folder = tmp_path_factory.mktemp("quantizing")
    (folder / "pairs.tsv").write_text("".join(f"word{i} and{i % 7}\tWORD{i} AND{i % 7}\n" for i in range(40)))
    prepare(Prepare(source="aa", target="bb", train=(folder / "pairs.tsv",)), folder / "data")
    about = create_run(folder / "run", SETTINGS, PreparedData.load(folder / "data"))
    save_checkpoint(folder / "run", 5, build_model(SETTINGS, about).state_dict(), {}, {})
    return folder / "run"


@pytest.mark.parametrize("words", [[], ["--quantize", "int8"]])
def test_the_option_is_passed_on(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def pretend(*_: Any, **given: Any) -> None:
        raise InputError(f"quantize is {given['quantize']}")

    monkeypatch.setattr(translate, "load", pretend)
    with pytest.raises(InputError, match=f"quantize is {words[-1] if words else None}"):
        translate.run(["run", *words])


def test_an_unknown_kind_is_no_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        translate.run(["run", "--quantize", "int4"])
    assert "int8" in capsys.readouterr().err


def test_lines_are_translated_in_int8(run: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("word1 and1\n\nword2 and2\n", encoding="utf-8")
    words = [str(run), "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out"), "--align"]
    translate.run([*words, "--quantize", "int8"])
    lines = (tmp_path / "out").read_text(encoding="utf-8").split("\n")
    assert len(lines) == 4 and lines[1] == "\t" and lines[3] == ""


def test_load_quantizes_on_the_cpu_and_refuses_what_it_cannot(run: Path) -> None:
    assert isinstance(load_translator(run, quantize="int8").model, QuantizedTranslator)
    assert not isinstance(load_translator(run, device="cpu").model, QuantizedTranslator)
    with pytest.raises(InputError, match="quantize int4 is not known; use int8, or leave it out"):
        load_translator(run, quantize="int4")
    with pytest.raises(InputError, match="quantize int8 goes with precision float32, not bfloat16"):
        load_translator(run, quantize="int8", precision="bfloat16")
