"""Trains again and again, killed at one file operation after another and resumed: `python killing.py …`.

One process imports everything and forks for each training, so that a kill costs no start.
"""

import importlib
import json
import os
import signal
import sys
from pathlib import Path

from qknorm.cli import main
from qknorm.training import loop

WATCHED = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.truncate", "shutil.rmtree"}


def train(words: list[str], run: Path, kill_at: int | None) -> tuple[int, int]:
    """Trains in a fork that kills itself before its n-th file operation in the run folder; its status and count."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        count = 0

        def watch(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal count
            if event in WATCHED and any(str(run) in str(each) for each in arguments[:2]):
                count += 1
                os.write(writer, b".")
                if count == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        status = 0
        try:
            main(words)
        except SystemExit as end:
            status = int(end.code or 0)
        finally:
            sys.stdout.flush()
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as events:
        operations = len(events.read())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), operations


def train_with_kills(words: list[str], run: Path, kill_at: list[int]) -> list[int]:
    """Starts, then resumes, one attempt a kill and a last one that nobody kills; their statuses."""
    statuses = []
    for point in [*kill_at, None]:
        resume = ["--resume"] if (run / "run.json").exists() else []
        statuses.append(train([*words, "--run", str(run), *resume], run, point)[0])
    return statuses


if __name__ == "__main__":
    data, config, out, moments = sys.argv[1:]
    for module in ("torch._dynamo", "sacrebleu", "qknorm.training.fit"):
        importlib.import_module(module)
    loop.draw_curves = lambda *_: None  # takes longer than all the rest, and nothing depends on it
    words = ["train", data, "--config", config, "--device", "cpu", "--quiet"]
    _, operations = train([*words, "--run", f"{out}/counted"], Path(out, "counted"), None)
    points = [1 + operations * i // int(moments) for i in range(int(moments))]
    chain = [operations // 7] * 6
    runs = {f"at-{point}": [point] for point in points} | {"again-and-again": chain}
    found = {name: train_with_kills(words, Path(out, name), kills) for name, kills in runs.items()}
    print(json.dumps({"operations": operations, "statuses": found}))
