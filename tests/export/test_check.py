"""Whether a model can be exported is known before it is trained."""

import math
import re
import shlex
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from export_cases import write_run

from foreign_models import library
from qknorm.cli import main
from qknorm.config import Attention, Model, Prepare, Train
from qknorm.errors import InputError
from qknorm.export import Target, check
from qknorm.export import ctranslate2 as ctranslate2_exporter
from qknorm.text.demo_corpus import generate
from qknorm.text.prepare import prepare
from qknorm.text.prepared import PreparedData

PACKAGES = {"onnx": "onnxruntime", "huggingface": "transformers", "ctranslate2": "ctranslate2"}
SHAPE = {"width": 24, "feed_forward": 32, "encoder_layers": 1, "decoder_layers": 2, "heads": 4}
PER_HEAD = Train(model=Model(**SHAPE))
WIDTH = Train(model=Model(**SHAPE, attention=Attention(cross_query_norm="width")))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    folder = tmp_path_factory.mktemp("check")
    pairs = folder / "pairs.tsv"
    pairs.write_text("".join(f"{gl}\t{en}\n" for gl, en in generate(120)), encoding="utf-8")
    prepare(Prepare(source="gl", target="en", train=(pairs,)), folder / "data")
    return PreparedData.load(folder / "data")


def need(target: str) -> Any:
    return library(PACKAGES[target]) if target == "huggingface" else pytest.importorskip(PACKAGES[target])


@pytest.mark.parametrize("target", get_args(Target))
def test_settings_that_can_be_exported_pass(target: str, data: PreparedData) -> None:
    need(target)
    assert 0 <= check.check_export(target, WIDTH, data) < 1e-4


@pytest.mark.parametrize("target", ["onnx", "huggingface"])
def test_every_kind_of_attention_can_be_exported_to_these(target: str, data: PreparedData) -> None:
    need(target)
    attention = Attention(p=3.0, p_learned=True, scale_per_head=True, normalize_values=True)
    settings = Train(model=Model(**SHAPE, attention=attention, norm="none", logit_mask=False))
    assert check.check_export(target, settings, data) < 1e-4


def test_settings_that_cannot_be_exported_are_refused(data: PreparedData) -> None:
    need("ctranslate2")
    with pytest.raises(InputError, match=r"head by head; train with --model.attention.cross-query-norm width"):
        check.check_export("ctranslate2", PER_HEAD, data)


def test_an_export_that_computes_something_else_is_found_out(
    data: PreparedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("ctranslate2")
    monkeypatch.setattr(ctranslate2_exporter, "refusal", lambda settings: None)
    with pytest.raises(InputError, match="cannot be exported to ctranslate2: log-probabilities differ by"):
        check.check_export("ctranslate2", PER_HEAD, data)


def test_the_random_model_is_the_same_every_time_and_disturbs_no_other(data: PreparedData) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second = (check.random_translator(WIDTH, data).model.state_dict() for _ in range(2))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(first[name], value) for name, value in second.items())
    assert all(value.unique().numel() > 1 for name, value in first.items() if value.numel() > 1 and name != "allowed")
    assert first["allowed"][3]


def test_differences_count_where_a_token_may_be_produced() -> None:
    assert check.largest_difference([[-1.0, -math.inf]], [[-1.5, -1e4]]) == 0.5
    assert check.largest_difference([[-1.0, -2.0]], [[-1.0, math.nan]]) == math.inf
    assert check.largest_difference([], []) == 0.0


def test_the_command_checks_before_it_makes_a_run(
    data: PreparedData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need("ctranslate2")
    small = ["--preset", "demo", "--model.width", "24", "--model.feed-forward", "32", "--training.max-steps", "1"]
    call = ["train", str(data.folder), "--run", str(tmp_path / "run"), "--device", "cpu", *small]
    with pytest.raises(SystemExit) as stopped:
        main([*call, "--for", "ctranslate2"])
    assert stopped.value.code == 2
    assert "head by head" in capsys.readouterr().err and not (tmp_path / "run").exists()
    main([*call, "--for=ctranslate2", "--model.attention.cross-query-norm", "width"])
    assert "Can be exported to ctranslate2" in capsys.readouterr().out
    assert (tmp_path / "run" / "run.json").is_file()


def test_a_run_that_goes_on_is_checked_by_its_own_settings(
    data: PreparedData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need("ctranslate2")
    small = ["--preset", "demo", "--model.width", "24", "--model.feed-forward", "32", "--training.max-steps", "1"]
    main(["train", str(data.folder), "--run", str(tmp_path / "run"), "--device", "cpu", *small])
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["train", str(data.folder), "--run", str(tmp_path / "run"), "--resume", "--for", "ctranslate2"])
    assert "head by head" in capsys.readouterr().err


def test_an_unknown_target_is_refused(data: PreparedData, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", str(data.folder), "--run", str(tmp_path / "run"), "--for", "pickle"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("part", ["Hugging Face transformers", "CTranslate2"])
def test_the_guide_does_what_it_says(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command but training, and the Python of its parts on the two, as they stand."""
    need("huggingface" if part.startswith("Hugging") else "ctranslate2")
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "export.md").read_text(encoding="utf-8")
    text = guide.split(f"\n## {part}\n")[1].split("\n## ")[0]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    write_run(tmp_path, WIDTH).rename(tmp_path / "runs" / "gl-en")
    (tmp_path / "news.gl").write_text("O gato dorme.\nUn can\n", encoding="utf-8")
    commands = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    assert commands
    for command in commands:
        if "qknorm train" in command:
            continue
        main(shlex.split(command)[1:])
        if "--output news.en" in command:
            assert len(Path("news.en").read_text(encoding="utf-8").splitlines()) == 2
            Path("news.en").unlink()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "export.md", "exec"), {})
