"""Run folders: laid out whole, read with care, and used by one call."""

import json
from pathlib import Path

import pytest

from qknorm.attention import initial_scale
from qknorm.config import Attention, Model, Prepare, Train, Training
from qknorm.errors import InputError
from qknorm.text.prepare import prepare
from qknorm.text.prepared import PreparedData
from qknorm.training.checkpoint import save_checkpoint, save_weights
from qknorm.training.run_folder import build_model, create_run, is_run, is_unborn, load_translator, read_run

SETTINGS = Train(
    model=Model(width=16, feed_forward=16, encoder_layers=1, decoder_layers=1, heads=2),
    training=Training(max_minutes=1.5, betas=(0.8, 0.9), stop_after=None),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    folder = tmp_path_factory.mktemp("data")
    pairs = [(f"word{i} and{i % 7}", f"WORD{i} AND{i % 7}") for i in range(40)]
    (folder / "pairs.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    prepare(Prepare(source="aa", target="bb", train=(folder / "pairs.tsv",)), folder / "data")
    return PreparedData.load(folder / "data")


@pytest.fixture
def run(data: PreparedData, tmp_path: Path) -> Path:
    """A run with a checkpoint, though nothing was trained."""
    about = create_run(tmp_path / "run", SETTINGS, data)
    save_checkpoint(tmp_path / "run", 5, build_model(SETTINGS, about).state_dict(), {}, {})
    return tmp_path / "run"


def test_an_unknown_precision_is_refused(run: Path) -> None:
    with pytest.raises(InputError, match="precision float16 is not known; use float32 or bfloat16"):
        load_translator(run, precision="float16")


def test_what_is_written_is_read(run: Path, data: PreparedData) -> None:
    settings, about = read_run(run)
    assert settings == SETTINGS
    assert (about.source, about.target, about.vocabulary) == ("aa", "bb", data.tokenizer.size)
    assert about.fingerprint == data.fingerprint
    assert about.versions.keys() >= {"qknorm", "python", "torch"}
    assert about.scale_init == pytest.approx(initial_scale(about.scale_length))


def test_the_scale_of_the_settings_goes_first(data: PreparedData, tmp_path: Path) -> None:
    model = SETTINGS.model.model_copy(update={"attention": Attention(scale_init=3.5)})
    assert create_run(tmp_path / "run", SETTINGS.model_copy(update={"model": model}), data).scale_init == 3.5


@pytest.mark.parametrize("name", ["run.json", "settings.toml", "tokenizer.json"])
def test_a_damaged_file_is_named(name: str, run: Path) -> None:
    (run / name).write_text("{ = [")
    with pytest.raises(InputError, match=rf"{name}|run is damaged"):
        load_translator(run, device="cpu")


def test_a_missing_settings_file_is_told(run: Path) -> None:
    (run / "settings.toml").unlink()
    with pytest.raises(InputError, match="is damaged"):
        read_run(run)


def test_another_version_and_unknown_facts_are_refused(run: Path) -> None:
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**about, "colour": "blue"}))
    with pytest.raises(InputError, match="colour"):
        read_run(run)
    (run / "run.json").write_text(json.dumps({**about, "format_version": 2}))
    with pytest.raises(InputError, match="another version of qknorm"):
        read_run(run)


def test_a_layout_that_was_killed_can_be_laid_out_again(run: Path, data: PreparedData) -> None:
    assert not is_unborn(run)
    unborn = run.parent / "unborn"
    create_run(unborn, SETTINGS, data)
    (unborn / "run.json").rename(unborn / ".run.json.abcd.partial")
    assert is_unborn(unborn) and not is_run(unborn)
    create_run(unborn, SETTINGS, data)
    assert is_run(unborn)
    assert not list(unborn.glob(".*"))
    (unborn / "run.json").unlink()
    (unborn / "notes").write_text("mine")
    assert not is_unborn(unborn)


def test_load_takes_a_step_or_a_file(run: Path, tmp_path: Path) -> None:
    texts = ["word1 and2", ""]
    by_step = load_translator(run, checkpoint=5, device="cpu").translate(texts)
    assert by_step == load_translator(run, device="cpu").translate(texts)
    model = load_translator(run, device="cpu").model
    save_weights(tmp_path / "w.safetensors", model.state_dict(), {})
    assert load_translator(run, checkpoint=tmp_path / "w.safetensors", device="cpu").translate(texts) == by_step
    for checkpoint, complaint in ((7, "no checkpoint of step 7"), (tmp_path / "none", "does not exist")):
        with pytest.raises(InputError, match=complaint):
            load_translator(run, checkpoint=checkpoint, device="cpu")


def test_load_refuses_what_is_no_device(run: Path) -> None:
    for device in ("banana", "cuda:x", "cuda:99"):
        with pytest.raises(InputError, match="--device"):
            load_translator(run, device=device)
