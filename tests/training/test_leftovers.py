"""Checkpoints survive kills, full disks, read-only folders and readers beside a writer."""

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from qknorm.errors import InputError
from qknorm.training import checkpoint
from qknorm.training.checkpoint import (
    list_steps,
    load_checkpoint,
    load_model_weights,
    load_newest_sound,
    mark_best,
    prune,
    save_checkpoint,
    save_weights,
)


def save(run: Path, *steps: int) -> None:
    for step in steps:
        save_checkpoint(run, step, {"weight": torch.full((4, 3), float(step))}, {"moment": torch.ones(3)}, {})


def folder_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def names_in(run: Path) -> list[str]:
    return sorted(entry.name for entry in (run / "checkpoints").iterdir())


def test_a_crash_while_pruning_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, 2, 3)

    def stop_at_once(path: Path, **_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.shutil, "rmtree", stop_at_once)
        with pytest.raises(KeyboardInterrupt):
            prune(tmp_path, 1)
    assert list_steps(tmp_path) == [2, 3]
    assert load_checkpoint(tmp_path, 2).step == 2
    assert names_in(tmp_path) == ["step-00000002", "step-00000003"], "loading swept the leftovers away"


SAVE_FOR_EVER = """
import itertools, sys, torch
from pathlib import Path
from qknorm.training.checkpoint import list_steps, mark_best, prune, save_checkpoint
torch.set_num_threads(1)
run = Path(sys.argv[1])
for step in itertools.count(max(list_steps(run), default=-1)):  # the newest step is written again, too
    step = max(step, 0)
    tensors = {str(i): torch.full((20_000,), float(step)) for i in range(20)}
    save_checkpoint(run, step, tensors, tensors, {"step": step})
    mark_best(run, step)
    prune(run, 2)
    print("saved", flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    choose = random.Random(0)
    save(tmp_path, 0)
    newest = 0
    for _ in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path)],
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert child.stdout is not None
        assert [child.stdout.readline() for _ in range(2)] == [b"saved\n"] * 2
        time.sleep(choose.uniform(0.0, 0.15))
        child.kill()
        child.communicate()
        assert child.returncode == -signal.SIGKILL
        found, damaged = load_newest_sound(tmp_path)
        assert found is not None and damaged == []
        assert found.step >= newest
        newest = found.step
        for step in list_steps(tmp_path):
            assert load_checkpoint(tmp_path, step).step == step
        assert not [name for name in names_in(tmp_path) if name.startswith(".")]
        assert load_checkpoint(tmp_path, "best").step in (newest - 1, newest)
    assert newest >= 4, "every child wrote the newest again, and then a newer one"


def test_an_old_checkpoint_comes_back_if_its_replacement_never_came(tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder_of(tmp_path, 1).rename(tmp_path / "checkpoints" / ".step-00000001.abc.retired")
    assert load_checkpoint(tmp_path, "last").step == 1
    shutil.copytree(folder_of(tmp_path, 1), tmp_path / "checkpoints" / ".step-00000001.abc.retired")
    assert load_checkpoint(tmp_path, "last").step == 1
    assert names_in(tmp_path) == ["step-00000001"]


def test_leftovers_are_swept_by_a_save(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "checkpoints" / ".step-00000002.abc.partial").mkdir()
    (tmp_path / "checkpoints" / ".best.json.abc.partial").write_text("{")
    save(tmp_path, 2)
    assert names_in(tmp_path) == ["step-00000001", "step-00000002"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs locks on folders")
def test_readers_never_sweep_what_a_living_writer_writes(tmp_path: Path) -> None:
    save(tmp_path, 0)
    failures: list[BaseException] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            try:
                load_model_weights(tmp_path, "last")
                load_checkpoint(tmp_path, "best")
            except BaseException as error:
                failures.append(error)
                return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for step in range(1, 40):
            save(tmp_path, step)
            mark_best(tmp_path, step)
            prune(tmp_path, 1)
    finally:
        stop.set()
        reader.join()
    assert failures == []
    assert list_steps(tmp_path) == [39]


def test_a_look_at_the_folder_that_falls_between_a_save_and_a_removal_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 2)
    look = checkpoint._listed_steps
    monkeypatch.setattr(checkpoint, "_listed_steps", lambda run: looks.pop(0) if looks else look(run))
    looks: list[list[int]] = [[]]  # it missed 2, not there yet when it passed, and 1, gone when it looked again
    assert load_checkpoint(tmp_path, "last").step == 2
    shutil.rmtree(folder_of(tmp_path, 2))
    assert list_steps(tmp_path) == []


def test_a_best_checkpoint_replaced_while_being_looked_up_is_looked_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, 2)
    mark_best(tmp_path, 1)

    def train_on_then_list(run: Path) -> list[int]:
        monkeypatch.setattr(checkpoint, "list_steps", list_steps)
        mark_best(run, 2)
        prune(run, 1)
        return list_steps(run)

    monkeypatch.setattr(checkpoint, "list_steps", train_on_then_list)
    assert load_checkpoint(tmp_path, "best").step == 2
    assert list_steps(tmp_path) == [2]


FILL_THE_DISK = """
import resource, sys, torch
from pathlib import Path
from qknorm.errors import InputError
from qknorm.training.checkpoint import save_checkpoint, save_weights
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
tensors = {"large": torch.zeros(100_000)}
for write in (
    lambda: save_checkpoint(Path(sys.argv[1]), 2, tensors, {}, {}),
    lambda: save_checkpoint(Path(sys.argv[1]), 2, {}, tensors, {}),
    lambda: save_checkpoint(Path(sys.argv[1]), 2, {}, {}, {"history": [0.5] * 10_000}),
    lambda: save_weights(Path(sys.argv[1]) / "weights.safetensors", tensors, {}),
):
    try:
        write()
    except InputError as error:
        print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on the size of files")
def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    done = subprocess.run(
        [sys.executable, "-c", FILL_THE_DISK, str(tmp_path)], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert all("cannot write" in line and "File too large" in line for line in lines)
    assert names_in(tmp_path) == ["step-00000001", "step-00000002"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoints"]
    assert torch.equal(load_checkpoint(tmp_path, 2).model["weight"], torch.full((4, 3), 2.0))


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(InputError, match=r"cannot write the checkpoint .*: Not a directory"):
        save(tmp_path / "file", 1)
    with pytest.raises(InputError, match=r"cannot write .*w\.safetensors"):
        save_weights(tmp_path / "file" / "w.safetensors", {}, {})


def test_a_read_only_run_can_be_read_but_not_added_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    mark_best(tmp_path, 1)
    (tmp_path / "checkpoints" / ".step-00000002.abc.partial").mkdir()
    (tmp_path / "checkpoints" / ".step-00000003.abc.retired").mkdir()

    open_really = os.open

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    def open_to_read(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        return refuse() if flags & (os.O_WRONLY | os.O_RDWR) else open_really(path, flags, *rest, **named)

    # the superuser, as whom tests often run, may write anywhere: so the calls themselves refuse
    for call in ("mkdir", "rename", "unlink", "rmdir", "replace"):
        monkeypatch.setattr(os, call, refuse)
    monkeypatch.setattr(os, "open", open_to_read)
    assert load_checkpoint(tmp_path, "best").step == 1
    with pytest.raises(InputError, match=r"cannot write the checkpoint .*: Permission denied"):
        save(tmp_path, 2)
    with pytest.raises(InputError, match=r"cannot write .*best\.json: Permission denied"):
        mark_best(tmp_path, 1)
