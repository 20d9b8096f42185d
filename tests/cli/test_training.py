"""Which settings `qknorm train` trains with."""

from pathlib import Path
from typing import Any

import pytest
import torch

from qknorm.cli import main
from qknorm.config import AnyTrain
from qknorm.studies.recipes import preset
from qknorm.training import fit


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[AnyTrain]:
    """The settings of every training, in place of the training."""
    begun: list[AnyTrain] = []

    def train(data: Path, run: Path, settings: AnyTrain, **_: Any) -> None:
        begun.append(settings)

    monkeypatch.setattr(fit, "train", train)
    return begun


@pytest.mark.parametrize(("name", "small"), [("data", "low-resource-small"), ("text.txt", "character-lm-small")])
def test_on_a_cpu_the_default_is_the_small_preset_and_says_so(
    name: str, small: str, given: list[AnyTrain], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("To be", encoding="utf-8")
    run = ["--run", str(tmp_path / "run"), "--device", "cpu", "--training.seed", "3"]
    main(["train", str(tmp_path / name), *run])
    expected, large = preset(small), small.removesuffix("-small")
    seeded = expected.training.model_copy(update={"seed": 3})
    note = f"note: on a CPU the default is the preset {small}; the one for a GPU is --preset {large}\n"
    assert capsys.readouterr().err == note
    main(["train", str(tmp_path / name), *run, "--quiet"])
    assert not capsys.readouterr().err
    assert given == [expected.model_copy(update={"training": seeded})] * 2


def test_a_preset_that_is_asked_for_or_a_file_is_kept_on_a_cpu_and_a_gpu_has_the_large_one(
    given: list[AnyTrain], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.toml").write_text("[model]\nheads = 8\n", encoding="utf-8")
    words = ["train", str(tmp_path / "data"), "--run", str(tmp_path / "run")]
    for more in (["--preset", "low-resource"], ["--preset=low-resource"], ["--config", str(tmp_path / "my.toml")]):
        main([*words, "--device", "cpu", *more])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    main([*words, "--device", "cuda"])
    large = preset("low-resource").model
    assert [settings.model for settings in given] == [large, large, large.model_copy(update={"heads": 8}), large]
    assert not capsys.readouterr().err
