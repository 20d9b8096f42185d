"""Two processes train as one does that takes as many batches a step: whole models (ddp) and shares of one (fsdp)."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tasks import Tiny, environment, metrics, succeed

from qknorm.training.parallel import OLDEST_WITH_FSDP

STEPS = 40
OPTIONS = ["--device=cpu", "--training.max-steps=40", "--training.evaluate-every=10", "--training.log-every=4"]
OPTIONS += [f"--model.dropout.{kind}=0" for kind in ("residual", "embedding", "attention", "feed-forward", "word")]


@pytest.fixture(scope="module")
def alone(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What one process measures with the batches of two to a step."""
    from qknorm.cli import main

    run = tmp_path_factory.mktemp("alone") / "run"
    words = ["train", tiny.data, "--run", run, "--config", tiny.config, "--training.accumulate", 2, *OPTIONS]
    main([str(word) for word in words])
    return metrics(run)


def launch(tiny: Tiny, run: Path, *more: str) -> "subprocess.Popen[str]":
    """Two processes by torchrun, whose own name is torch.distributed.run."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["-m", "qknorm", "train", str(tiny.data), "--run-folder", str(run), *more]
    return subprocess.Popen(
        [*torchrun, *words], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: "subprocess.Popen[str]") -> tuple[str, str]:
    try:
        return process.communicate(timeout=120)
    finally:
        process.kill()


def assert_close(measured: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The same numbers, but for what attention did, which is measured on the batch that the leader happens to have."""
    measured, expected = ([row for row in rows if row["kind"] != "attention"] for rows in (measured, expected))
    assert [(row["kind"], row["step"], row["epoch"]) for row in measured] == [
        (row["kind"], row["step"], row["epoch"]) for row in expected
    ]
    for row, other in zip(measured, expected, strict=True):
        for name in ("loss", "perplexity", "dev_loss", "dev_bleu", "learning_rate", "scales"):
            if name in other:
                assert row[name] == pytest.approx(other[name], abs=1e-5, rel=1e-5), (row["step"], name)


@pytest.mark.slow
def test_ddp_stopped_and_resumed_equals_one_process(tiny: Tiny, alone: list[dict[str, Any]], tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = launch(tiny, run, "--config", str(tiny.config), *OPTIONS)
    deadline = time.monotonic() + 60
    while not list(run.glob("checkpoints/step-*")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, err = finish(process)
    assert "stopped by SIGTERM at step" in out, out + err
    assert out.count("--resume") == 1
    assert not (run / f"checkpoints/step-{STEPS:08d}").exists()

    out, err = finish(process := launch(tiny, run, "--resume", "--device", "cpu"))
    assert process.returncode == 0, out + err
    assert out.count("reached training.max_steps (40)") == 1
    assert_close(metrics(run), alone)


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < OLDEST_WITH_FSDP, reason="PyTorch is too old for fsdp")
def test_fsdp_resumed_equals_one_process(
    tiny: Tiny, alone: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shares = ["--config", str(tiny.config), "--training.parallel", "fsdp"]
    out, err = finish(process := launch(tiny, run, *shares, *OPTIONS))
    assert process.returncode == 0, out + err
    assert_close(metrics(run), alone)
    for step in (30, STEPS):
        shutil.rmtree(run / f"checkpoints/step-{step:08d}")
    out, err = finish(process := launch(tiny, run, "--resume", "--device", "cpu"))
    assert process.returncode == 0, out + err
    assert_close(metrics(run), alone)

    source = tmp_path / "source"
    source.write_text("bak den\n", encoding="utf-8")
    assert len(succeed(capsys, "translate", run, "--input", source, "--device", "cpu").splitlines()) == 1


@pytest.mark.slow
def test_a_mistake_is_told_once(tiny: Tiny) -> None:
    out, err = finish(process := launch(tiny, tiny.run, "--device", "cpu"))
    assert process.returncode != 0
    assert not out
    told = [line for line in err.splitlines() if line.startswith("qknorm: ")]
    assert told == [f"qknorm: {tiny.run} exists already; add --resume to go on with it"]
    assert "[rank" not in err  # where torch shows a traceback of a process
