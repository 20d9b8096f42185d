"""Prepared data and trainings that many tests look at; nobody may change them."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tasks import TINY, Learned, Tiny, call, prepare_task, upper


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that one worker makes for all, the others waiting for it, and of which each has a copy of its own."""
    if "PYTEST_XDIST_WORKER" not in os.environ or sys.platform == "win32":
        make(folder := factory.mktemp(name))
        return folder
    import fcntl

    common = factory.getbasetemp().parent
    made, whole = common / name, common / f"{name}-whole"
    with (common / f"{name}-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not whole.exists():
            shutil.rmtree(made, ignore_errors=True)  # of one that failed
            made.mkdir()
            make(made)
            whole.touch()
    return Path(shutil.copytree(made, factory.mktemp(name), dirs_exist_ok=True))


def make_tiny(folder: Path) -> None:
    data = prepare_task(folder, upper, pairs=200, longest=5)
    (folder / "tiny.toml").write_text(TINY, encoding="utf-8")
    call("train", data, "--run", folder / "run", "--config", folder / "tiny.toml", "--device", "cpu")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = made_once(tmp_path_factory, "tiny", make_tiny)
    return Tiny(folder / "data", folder / "tiny.toml", folder / "run")


def make_learned(folder: Path) -> None:
    data = prepare_task(folder, upper, pairs=3000, longest=6, merges=200)
    options = "--model.width 64 --model.feed-forward 128 --model.encoder-layers 1 --model.decoder-layers 1"
    options += " --training.batch-tokens 1024 --training.max-steps 160 --training.evaluate-every 80 --training.keep 2"
    call("train", data, "--run", folder / "run", "--preset", "demo", "--device", "cpu", *options.split())


@pytest.fixture(scope="session")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    folder = made_once(tmp_path_factory, "copy", make_learned)
    return Learned(folder / "data", folder / "text", folder / "run")
