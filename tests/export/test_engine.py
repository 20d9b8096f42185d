"""Translating without PyTorch: the whole way from text to text, and the commands, against PyTorch's."""

import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from export_cases import SHAPE, make_translator, write_run

from qknorm.cli import export as export_command
from qknorm.cli import main
from qknorm.cli import translate as translate_command
from qknorm.config import Decoding, Model, Train
from qknorm.decoding.translate import TextTranslator, translate_ids
from qknorm.errors import InputError
from qknorm.export import ENGINES, Target, texts
from qknorm.export.card import Card, read_card, write_card
from qknorm.text.demo_corpus import demo_splits
from qknorm.text.prepared import PreparedData


@pytest.fixture(scope="module")
def translators(tmp_path_factory: pytest.TempPathFactory) -> "tuple[TextTranslator, texts.EngineTranslator]":
    """One random translator, by PyTorch and by ONNX Runtime."""
    pytest.importorskip("onnx", reason="exporting to ONNX needs the package onnx")
    pytest.importorskip("onnxruntime", reason="running ONNX graphs needs the package onnxruntime")
    from qknorm.export.onnx import write_folder
    from qknorm.export.onnx_engine import OnnxTranslator

    folder, translator = tmp_path_factory.mktemp("engine"), make_translator()
    write_folder(translator, folder)
    return translator, OnnxTranslator(folder, threads=1)


def check_alike(expected: Sequence[object], found: Sequence[object], what: Callable[[object], object]) -> None:
    """The same sentences; where two are all but equally good, rounding may decide between them once in a hundred."""
    same = [what(ours) == what(theirs) for ours, theirs in zip(expected, found, strict=True)]
    assert sum(same) >= 0.99 * len(same)
    for ours, theirs, equal in zip(expected, found, same, strict=True):
        assert not equal or abs(ours.score - theirs.score) < 1e-4


@pytest.mark.parametrize(
    "options", [{}, {"beam": 1}, {"beam": 5, "length_penalty": 1.5}, {"no_repeat_ngram": 2}], ids=str
)
def test_random_sentences_are_decoded_as_by_pytorch(
    options: dict[str, float], translators: "tuple[TextTranslator, texts.EngineTranslator]"
) -> None:
    ours, theirs = translators
    draw = random.Random(0)
    sources = [draw.choices(range(4, ours.tokenizer.size), k=draw.choice([0, 1, 2, 5, 9, 20])) for _ in range(60)]
    decoding = Decoding(extra_length=8, **options)  # type: ignore[arg-type]
    expected = translate_ids(ours.model, sources, decoding, nbest=1)
    card = Card(**{**vars(theirs.card), **options})  # type: ignore[arg-type]
    found = theirs.search(sources, card, nbest=1, progress=None)
    check_alike([best for (best,) in expected], [best for (best,) in found], lambda each: each.tokens)
    lengths = {len(best.tokens) for (best,) in found}
    assert len(lengths) > 5, "sentences should end at various lengths"


def test_real_sentences_are_translated_as_by_pytorch(
    translators: "tuple[TextTranslator, texts.EngineTranslator]",
) -> None:
    ours, theirs = translators
    lines = [gl for gl, _ in demo_splits()["test"]][:200]
    assert len(lines) == 200
    check_alike(ours.explain(lines), theirs.explain(lines), lambda each: each.text)
    assert theirs.translate(lines[:3]) == [each.text for each in theirs.explain(lines[:3])]


def test_sentences_of_a_corpus_are_translated_as_by_pytorch(
    translators: "tuple[TextTranslator, texts.EngineTranslator]",
) -> None:
    folder = Path(os.environ.get("QKNORM_DATA", "data")) / "gl-en"
    if not (folder / "prepared.json").is_file():
        pytest.skip("there is no prepared corpus in data/gl-en")
    ours, theirs = translators
    lines = PreparedData.load(folder).split("test").text("gl")[:60]
    check_alike(ours.explain(lines), theirs.explain(lines), lambda each: each.text)


@pytest.mark.parametrize("options", [{}, {"nbest": 3}, {"nbest": 6}, {"beam": 2, "length_penalty": 0.0}], ids=str)
def test_odd_texts_and_options_give_what_pytorch_gives(
    options: dict[str, float], translators: "tuple[TextTranslator, texts.EngineTranslator]"
) -> None:
    ours, theirs = translators
    long = "O gato, que non era negro, durmía na casa. " * 12
    odd = ["", "   ", "▁ ▁", "猫\u200d\x00はどこ", "a" * 300, long, "O\ud800gato", "<s> </s>"]
    expected, found = ours.explain(odd, **options), theirs.explain(odd, **options)  # type: ignore[arg-type]
    assert [each.parts for each in found] == [each.parts for each in expected]
    assert max(each.parts for each in found) > 4
    for one, other in zip(expected, found, strict=True):
        assert len(one.alternatives) == len(other.alternatives)
        assert [each.score for each in other.alternatives] == pytest.approx(
            [each.score for each in one.alternatives], abs=1e-3
        )
    assert found[0].text == "" and found[0].score == 0.0
    assert theirs.explain([]) == []


def test_what_only_pytorch_does_is_refused(translators: "tuple[TextTranslator, texts.EngineTranslator]") -> None:
    _, theirs = translators
    with pytest.raises(InputError, match="does not align words; use --engine torch"):
        theirs.explain(["gato"], align=True)
    with pytest.raises(TypeError, match="a list of sentences"):
        theirs.explain("gato")
    with pytest.raises(InputError, match="alpha must be between 0"):
        theirs.explain(["gato"], length_penalty=11)


def test_progress_is_told(translators: "tuple[TextTranslator, texts.EngineTranslator]") -> None:
    told: list[tuple[str, int, int | None]] = []
    translators[1].explain(["gato", "", "o can"], progress=lambda *state: told.append(state))
    assert told == [("translate", 2, 2)]


WITHOUT_TORCH = """
import importlib.abc, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "safetensors", "onnx"):
            raise ModuleNotFoundError(f"{name} is not needed here", name=name)

sys.meta_path.insert(0, Refuse())
from qknorm.cli.main import main
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings_ = Train(model=Model(**SHAPE), decoding=Decoding(extra_length=5))  # type: ignore[arg-type]
    return write_run(tmp_path_factory.mktemp("run"), settings_)


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    pytest.importorskip("onnx", reason="exporting to ONNX needs the package onnx")
    pytest.importorskip("onnxruntime", reason="running ONNX graphs needs the package onnxruntime")
    main(["export", str(run), "--to", "onnx"])
    return run.with_name("run-onnx")


def test_the_command_needs_no_torch(run: Path, exported: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("O gato dorme.\n\nUn can\n", encoding="utf-8")
    common = ["--input", str(tmp_path / "in"), "--output"]
    main(["translate", str(run), *common, str(tmp_path / "torch")])
    words = ["translate", str(exported), "--engine", "onnx", *common, str(tmp_path / "onnx")]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "onnx").read_text(encoding="utf-8") == (tmp_path / "torch").read_text(encoding="utf-8")


ALONE = """
import sys
from qknorm.export.onnx_engine import OnnxTranslator
assert len(OnnxTranslator(sys.argv[1]).translate(["O gato dorme."])) == 1
installed = [module for module in sys.modules.values() if "site-packages" in (getattr(module, "__file__", "") or "")]
print(*{module.__name__.partition(".")[0] for module in installed})
"""


def test_the_class_needs_onnxruntime_numpy_and_tokenizers_alone(exported: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(exported)], capture_output=True, text=True, timeout=120, check=True
    )
    assert {"onnxruntime", "numpy", "tokenizers"} <= set(done.stdout.split())
    assert not {"torch", "pydantic", "rich", "tyro", "safetensors", "onnx", "matplotlib"} & set(done.stdout.split())


def test_alternatives_are_written_alike(run: Path, exported: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("O gato dorme.\nUn can\n", encoding="utf-8")
    for name, words in (("torch", [str(run)]), ("onnx", [str(exported), "--engine", "onnx"])):
        out = tmp_path / name
        main(["translate", *words, "--input", str(tmp_path / "in"), "--output", str(out), "--nbest", "2", "--json"])
    ours, theirs = (
        [json.loads(line) for line in (tmp_path / name).read_text(encoding="utf-8").splitlines()]
        for name in ("torch", "onnx")
    )
    assert [each["text"] for each in ours] == [each["text"] for each in theirs]
    assert [each.keys() for each in ours] == [each.keys() for each in theirs]
    assert [len(each["alternatives"]) for each in theirs] == [2, 2]


def test_the_command_offers_every_engine() -> None:
    assert get_args(get_type_hints(translate_command.Arguments)["engine"]) == ("torch", *ENGINES)
    assert set(ENGINES) <= set(get_args(Target))


def test_the_folder_is_named_after_the_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    assert export_command._beside(Path(), "onnx") == run.resolve().with_name("run-onnx")
    assert export_command._beside(Path("runs/a/"), "onnx") == Path("runs/a-onnx")


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_wrong_folders_and_options_are_refused_by_the_commands(
    run: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is a translator exported for onnx; add --engine onnx" in refusal(capsys, "translate", exported)
    assert "is no exported translator" in refusal(capsys, "translate", run, "--engine", "onnx")
    for option in (["--align"], ["--checkpoint", "last"], ["--quantize", "int8"], ["--device", "cpu"]):
        said = refusal(capsys, "translate", exported, "--engine", "onnx", *option)
        assert f"{option[0]} is for --engine torch" in said
    other = tmp_path / "other"
    other.mkdir()
    (other / "translator.json").write_text('{"engine": "huggingface"}')
    assert "exported for huggingface; name the run it was made from" in refusal(capsys, "translate", other)
    for verb, *words in (["export", "--to", "onnx"], ["serve"]):
        assert "exported for onnx; name the run it was made from" in refusal(capsys, verb, exported, *words)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("do not touch")
    said = refusal(capsys, "export", run, "--to", "onnx", "--output", tmp_path / "mine")
    assert "exists and is no exported translator; name another --output" in said
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "do not touch"
    assert "--quantize is for onnx and ctranslate2" in refusal(
        capsys, "export", run, "--to", "huggingface", "--output", tmp_path / "hf", "--quantize", "int8"
    )


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "translator.json").write_text("{"), "is damaged; write it again"),
        (lambda folder: (folder / "translator.json").write_text("[]"), "is damaged; write it again"),
        (lambda folder: (folder / "translator.json").write_text('{"format_version": 9}'), "has format 9"),
        (lambda folder: (folder / "decoder.onnx").unlink(), "decoder.onnx is missing"),
        (lambda folder: (folder / "encoder.onnx").write_bytes(b"no graph"), "encoder.onnx cannot be loaded"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json is damaged"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing; .* qknorm export"),
        (lambda folder: (folder / "decoder.onnx").write_bytes((folder / "encoder.onnx").read_bytes()), "not belong"),
        (lambda folder: _change_card(folder, vocabulary=7), "but the model has 7"),
        (lambda folder: _change_card(folder, beam=None), "is damaged; write it again"),
        (lambda folder: _change_card(folder, beam=True), "is damaged; write it again"),
        (lambda folder: _change_card(folder, longest=0), "is damaged; write it again"),
        (lambda folder: _change_card(folder, extra_length=-9), "is damaged; write it again"),
        (lambda folder: _change_card(folder, no_repeat_ngram=1.5), "is damaged; write it again"),
        (lambda folder: _change_card(folder, length_penalty="high"), "is damaged; write it again"),
        (lambda folder: _change_card(folder, length_penalty=float("nan")), "is damaged; write it again"),
        (lambda folder: _change_card(folder, batch_tokens="many"), "is damaged; write it again"),
        (lambda folder: _change_card(folder, source=None), "is damaged; write it again"),
        (lambda folder: _change_card(folder, engine="ctranslate2"), "was exported for ctranslate2, not onnx"),
    ],
)
def test_damaged_folders_are_refused(
    damage: Callable[[Path], object], reason: str, exported: Path, tmp_path: Path
) -> None:
    from qknorm.export.onnx_engine import OnnxTranslator

    for path in exported.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damage(tmp_path)
    with pytest.raises(InputError, match=reason):
        OnnxTranslator(tmp_path, threads=1)


def _change_card(folder: Path, **changes: object) -> None:
    write_card(folder, Card(**{**vars(read_card(folder, "onnx")), **changes}))  # type: ignore[arg-type]


def test_the_guide_does_what_it_says(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command and the Python of its part on ONNX, as they stand."""
    pytest.importorskip("onnx", reason="exporting to ONNX needs the package onnx")
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "export.md").read_text(encoding="utf-8")
    part = guide.split("## ONNX Runtime\n")[1].split("\n## ")[0]
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, tmp_path / "runs" / "gl-en")
    (tmp_path / "news.gl").write_text("O gato dorme.\nUn can\n", encoding="utf-8")
    (tmp_path / "data" / "gl-en").mkdir(parents=True)
    for language in ("gl", "en"):
        shutil.copy(tmp_path / "news.gl", tmp_path / "data" / "gl-en" / f"test.{language}")
    commands = [line for block in re.findall(r"```sh\n(.*?)```", part, re.DOTALL) for line in block.splitlines()]
    assert len(commands) >= 4
    for command in commands:
        main(shlex.split(command)[1:])
        if "--output news.en" in command:
            assert len(Path("news.en").read_text(encoding="utf-8").splitlines()) == 2
            Path("news.en").unlink()
    for block in re.findall(r"```python\n(.*?)```", part, re.DOTALL):
        exec(compile(block, "export.md", "exec"), {})
