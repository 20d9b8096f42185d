"""A language model by the real command: trained, killed, resumed, and asked to write; what is refused, and how."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tasks import Tiny, call, checkpoint_bytes, environment, metrics, refuse, succeed

CONFIG = """
[model]
width = 16
feed_forward = 32
layers = 1
heads = 2
context = 16
[training]
batch = 4
max_steps = 12
evaluate_every = 4
log_every = 3
keep = 2
[training.schedule]
warmup = 4
[generation]
length = 20
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("language-model")
    (folder / "text.txt").write_text("".join(f"¿{i * 7 % 13} e {i % 5}?\n" for i in range(60)), encoding="utf-8")
    (folder / "small.toml").write_text(CONFIG)
    return folder / "text.txt"


@pytest.fixture(scope="module")
def run(text: Path) -> Path:
    """A training that was never stopped."""
    folder = text.parent / "run"
    done = call("train", text, "--run", folder, "--config", text.parent / "small.toml", "--device", "cpu")
    assert "reached training.max_steps (12)" in done.stdout and "bits/char" in done.stdout
    assert f"Next: qknorm generate {folder}" in done.stdout
    return folder


@pytest.mark.slow
def test_killed_at_any_file_operation(text: Path, run: Path, tmp_path: Path) -> None:
    script = Path(__file__).with_name("killing.py")
    words = [sys.executable, script, text, text.parent / "small.toml", tmp_path, "2"]
    done = subprocess.run(list(map(str, words)), env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name, statuses in json.loads(done.stdout.splitlines()[-1])["statuses"].items():
        assert statuses == [-signal.SIGKILL] * (len(statuses) - 1) + [0], name
        assert checkpoint_bytes(tmp_path / name, 12) == checkpoint_bytes(run, 12)
        assert metrics(tmp_path / name) == metrics(run)


def test_writing_repeats_with_its_seed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", run, "--prompt", "¿1", "--device", "cpu"]
    first, again, other = (succeed(capsys, *words, "--seed", seed) for seed in (0, 0, 1))
    assert first == again != other
    assert first.startswith("¿1") and len(first) == 2 + 20 + 1
    both = succeed(capsys, *words, "--samples", 2)
    assert both == first + "\n---\n" + other
    greedy = [succeed(capsys, *words, "--temperature", 0, "--seed", seed, "--length", 40) for seed in (0, 1)]
    assert greedy[0] == greedy[1] and len(greedy[0]) == 2 + 40 + 1
    assert len(succeed(capsys, *words, "--top-k", 2, "--top-p", 0.5, "--checkpoint", "last")) == len(first)


def test_the_mean_of_checkpoints_writes(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = {row["step"]: row["dev_loss"] for row in metrics(run) if row["kind"] == "evaluation"}
    best = min((8, 12), key=losses.__getitem__)  # it keeps two
    mean = tmp_path / "mean.safetensors"
    told = succeed(capsys, "average", run, "--best", 1, "--out", mean)
    assert told == f"{mean}: the mean of steps {best}\n"
    by_mean, by_step = (
        succeed(capsys, "generate", run, "--checkpoint", which, "--device", "cpu") for which in (mean, best)
    )
    assert by_mean == by_step


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--prompt", "¿x"], "the character 'x' (U+0078) does not occur"),
        (["--temperature", "-1"], "temperature: Input should be greater than or equal to 0"),
        (["--top-k", "0"], "top_k: Input should be greater"),
        (["--top-p", "2"], "top_p: Input should be less"),
        (["--samples", "0"], "--samples is at least 1, not 0"),
        (["--seed", "-3"], "a seed is a whole number"),
        (["--checkpoint", "7"], "holds no checkpoint of step 7"),
    ],
)
def test_bad_wishes(words: list[str], complaint: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint in refuse(capsys, "generate", run, "--device", "cpu", *words)


def test_each_verb_says_which_runs_are_not_for_it(run: Path, tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("translate", "score"):
        told = refuse(capsys, verb, run)
        assert f"{run} is a language model and does not translate; write text with qknorm generate" in told
    told = refuse(capsys, "generate", tiny.run)
    assert f"{tiny.run} is a translator, not a language model; translate with qknorm translate" in told


def test_data_presets_and_runs_that_do_not_go_together(
    run: Path, text: Path, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = ["--run", tmp_path / "new", "--device", "cpu"]
    told = refuse(capsys, "train", text, *new, "--preset", "demo")
    assert f"{text} is a text file, and demo a preset for prepared folders; use character-lm" in told
    told = refuse(capsys, "train", tiny.data, *new, "--preset", "character-lm")
    assert f"{tiny.data} is a prepared folder and trains a translator" in told and "low-resource" in told
    told = refuse(capsys, "train", text, "--run", tiny.run, "--resume")
    assert f"{tiny.run} is a translator, which does not go on with the text file {text}" in told
    told = refuse(capsys, "train", tiny.data, "--run", run, "--resume")
    assert f"{run} is a language model, which does not go on with the prepared folder {tiny.data}" in told
    for words in (["nowhere.txt"], ["nowhere.txt", "--preset", "character-lm"]):
        told = refuse(capsys, "train", *words, *new)
        assert "nowhere.txt does not exist; name a folder that qknorm prepare wrote, or a text file" in told
    assert "exists already; add --resume" in refuse(capsys, "train", text, "--run", run)
    assert not (tmp_path / "new").exists()


def test_settings_of_a_language_model_are_its_own(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "odd.toml").write_text("[model]\nencoder_layers = 2\n")
    told = refuse(capsys, "train", text, "--run", tmp_path / "run", "--config", tmp_path / "odd.toml")
    assert "there is no setting model.encoder_layers" in told
    with pytest.raises(SystemExit):
        succeed(capsys, "train", text, "--help")
    told = capsys.readouterr().out
    assert "--training.held-out" in told and "--model.encoder-layers" not in told


def test_a_finished_training_resumed_changes_nothing(
    text: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "run")
    told = succeed(capsys, "train", text, "--run", tmp_path / "run", "--resume", "--device", "cpu")
    assert "best dev loss" in told and "nats" in told and "bits) a character" in told
    assert metrics(tmp_path / "run") == metrics(run)
    assert checkpoint_bytes(tmp_path / "run", 12) == checkpoint_bytes(run, 12)


@pytest.mark.parametrize("name", ["tokenizer.json", "run.json", "settings.toml"])
def test_a_damaged_run_is_named(name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / name).write_text("{ = [")
    told = refuse(capsys, "generate", tmp_path / "run", "--device", "cpu")
    assert str(tmp_path / "run") in told
