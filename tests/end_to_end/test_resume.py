"""A training that was killed, stopped or damaged and then resumed ends as one that never stopped, byte for byte."""

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tasks import Tiny, checkpoint_bytes, environment, metrics, refuse, start, succeed

from qknorm.training.step import TrainingStep

LAST = 20


def assert_same_end(run: Path, straight: Path) -> None:
    assert checkpoint_bytes(run, LAST) == checkpoint_bytes(straight, LAST)
    assert metrics(run) == metrics(straight)
    best = "checkpoints/best.json"
    assert (run / best).read_bytes() == (straight / best).read_bytes()
    left = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert left == sorted(path.name for path in (straight / "checkpoints").iterdir())


@pytest.mark.slow
def test_killed_at_any_file_operation(tiny: Tiny, tmp_path: Path) -> None:
    script = Path(__file__).with_name("killing.py")
    words = [sys.executable, script, tiny.data, tiny.config, tmp_path, "6"]
    done = subprocess.run(list(map(str, words)), env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["operations"] > 100
    for name, statuses in found["statuses"].items():
        assert statuses == [-signal.SIGKILL] * (len(statuses) - 1) + [0], name
        assert_same_end(tmp_path / name, tiny.run)
        assert not list((tmp_path / name).rglob("*.partial")), name


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_and_leaves(
    sent: signal.Signals, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    process = start("train", tiny.data, "--run", run, "--config", tiny.config, "--device", "cpu")
    try:
        wait_for(run / "metrics.jsonl", process)
        process.send_signal(sent)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, out + err
    assert f"stopped by {sent.name} at step" in out
    assert f"qknorm train {tiny.data} --run {run} --resume" in out
    assert err == f"{sent.name}: the training saves and leaves; a second signal leaves at once, without saving\n"
    assert LAST not in steps_of(run)
    succeed(capsys, "train", tiny.data, "--run", run, "--resume", "--device", "cpu")
    assert_same_end(run, tiny.run)


def wait_for(metrics_file: Path, process: "subprocess.Popen[str]") -> None:
    """Until the training has written its first line."""
    deadline = time.monotonic() + 60
    while not (metrics_file.exists() and metrics_file.stat().st_size):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)


def steps_of(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("damage", ["truncate", "flip"])
def test_damaged_newest_checkpoint(damage: str, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny.run, run)
    weights = run / "checkpoints" / f"step-{LAST:08d}" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content[:-8] if damage == "truncate" else content)
    out = succeed(capsys, "train", tiny.data, "--run", run, "--resume", "--device", "cpu")
    assert f"checkpoints/step-{LAST:08d} is damaged (model.safetensors" in out
    assert "going on from step 16" in out
    assert_same_end(run, tiny.run)


def test_all_checkpoints_damaged_are_left_alone(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny.run, run)
    for state in run.glob("checkpoints/*/state.json"):
        state.write_text("{}")
    told = refuse(capsys, "train", tiny.data, "--run", run, "--resume", "--device", "cpu")
    for step in steps_of(tiny.run):
        assert f"checkpoints/step-{step:08d} is damaged (state.json" in told
    assert "move them away" in told
    assert steps_of(run) == steps_of(tiny.run)
    assert metrics(run) == metrics(tiny.run)
    (run / "checkpoints").rename(tmp_path / "away")
    succeed(capsys, "train", tiny.data, "--run", run, "--resume", "--device", "cpu")
    assert_same_end(run, tiny.run)


def test_resuming_a_finished_training_changes_nothing(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny.run, run)
    assert "reached training.max_steps (20)" in succeed(
        capsys, "train", tiny.data, "--run", run, "--resume", "--device", "cpu"
    )
    assert_same_end(run, tiny.run)


def finite(run: Path) -> bool:
    weights = [load_file(path) for path in run.glob("checkpoints/*/model.safetensors")]
    return bool(weights) and all(bool(tensor.isfinite().all()) for each in weights for tensor in each.values())


@pytest.mark.parametrize("evaluate_every", [1, 50])
def test_absurd_learning_rate(
    evaluate_every: int, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    absurd = ["--training.schedule.peak", "1e37", "--training.evaluate-every", str(evaluate_every)]
    told = refuse(capsys, "train", tiny.data, "--run", run, "--config", tiny.config, "--device", "cpu", *absurd)
    assert "the loss is not finite; the activations of " in told
    assert "coder" in told  # of which layer
    assert "no step was good; lower training.schedule.peak" in told
    assert steps_of(run) == []


def test_infinite_weight(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = 0
    take_step = TrainingStep.__call__

    def spoil(self: TrainingStep, *given: object) -> None:
        nonlocal taken
        taken += 1
        if taken == 10:
            self.model.encoder[0].feed_forward.widen.weight.data[0, 0] = math.inf
        take_step(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(TrainingStep, "__call__", spoil)
    run = tmp_path / "run"
    told = refuse(capsys, "train", tiny.data, "--run", run, "--config", tiny.config, "--device", "cpu")
    assert "step 10: the loss is not finite; the activations of encoder.0.feed_forward" in told
    assert "the last good weights are those of step 8" in told
    assert steps_of(run)[-1] == 8
    assert finite(run)
    monkeypatch.undo()
    succeed(capsys, "train", tiny.data, "--run", run, "--resume", "--device", "cpu")
    assert_same_end(run, tiny.run)
