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
def remarks() -> list[str]:
    """What every training of `given` is to remark."""
    return []


@pytest.fixture
def given(remarks: list[str], monkeypatch: pytest.MonkeyPatch) -> list[AnyTrain]:
    """The settings of every training, in place of the training."""
    begun: list[AnyTrain] = []

    def train(data: Path, run: Path, settings: AnyTrain, *, remark: str, **_: Any) -> None:
        begun.append(settings)
        remarks.append(remark)

    monkeypatch.setattr(fit, "train", train)
    return begun


@pytest.mark.parametrize(("name", "small"), [("data", "low-resource-small"), ("text.txt", "character-lm-small")])
def test_on_a_cpu_the_default_is_the_small_preset_and_says_so(
    name: str, small: str, given: list[AnyTrain], remarks: list[str], tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("To be", encoding="utf-8")
    run = ["--run", str(tmp_path / "run"), "--device", "cpu", "--training.seed", "3"]
    main(["train", str(tmp_path / name), *run])
    expected, large = preset(small), small.removesuffix("-small")
    seeded = expected.training.model_copy(update={"seed": 3})
    assert remarks == [f"on a CPU the default is the preset {small}; the one for a GPU is --preset {large}"]
    assert given == [expected.model_copy(update={"training": seeded})]


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (["text.txt", "--run", "run", "--device", "cpu", "--model.width", "64"], {"width": 64}),
        (["--run", "run", "--device", "cpu", "--", "text.txt"], {}),
        (["text.txt", "--run", "run", "--device=cpu", "--config", "my.toml"], {"heads": 2}),
    ],
)
def test_options_and_files_go_over_the_small_preset(
    words: list[str],
    changed: dict[str, int],
    given: list[AnyTrain],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("To be", encoding="utf-8")
    Path("my.toml").write_text("[model]\nheads = 2\n", encoding="utf-8")
    main(["train", *words])
    small = preset("character-lm-small").model
    assert [settings.model for settings in given] == [small.model_copy(update=changed)]


def test_a_preset_that_is_asked_for_is_kept_on_a_cpu_and_a_gpu_has_the_large_one(
    given: list[AnyTrain], remarks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train", str(tmp_path / "data"), "--run", str(tmp_path / "run")]
    for more in (["--preset", "low-resource"], ["--preset=low-resource"]):
        main([*words, "--device", "cpu", *more])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    main([*words, "--device", "cuda"])
    large = preset("low-resource").model
    assert [settings.model for settings in given] == [large, large, large]
    assert remarks == ["", "", ""]
