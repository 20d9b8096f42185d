"""What the end-to-end tests share: sentences of made-up words, and the real command in and out of process."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from qknorm.cli import main

WORDS = [a + b for a in ("ba", "de", "fi", "go", "lu", "mo") for b in ("k", "n", "r", "s", "t")]
TINY = """
[model]
width = 16
feed_forward = 32
encoder_layers = 1
decoder_layers = 1
heads = 2
[model.dropout]
residual = 0.1
embedding = 0.1
attention = 0.1
feed_forward = 0.1
word = 0.1
[training]
batch_tokens = 128
max_steps = 20
evaluate_every = 4
dev_sentences = 4
log_every = 3
inspect_every = 6
keep = 2
[training.schedule]
kind = "cosine"
peak = 0.002
warmup = 4
[decoding]
beam = 1
extra_length = 2
"""
"""A training of a second. Dropout is on and logging out of step with saving, so that going on inexactly would show."""


@dataclass(frozen=True)
class Tiny:
    """A small task, settings for it, and a training by them that was never stopped."""

    data: Path
    config: Path
    run: Path


@dataclass(frozen=True)
class Learned:
    """The copy task, learned."""

    data: Path
    text: Path
    run: Path


def sentences(count: int, seed: int = 0, longest: int = 6, words: Sequence[str] = WORDS) -> list[str]:
    """Distinct sentences of random words."""
    rng = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        found[" ".join(rng.choices(words, k=rng.randint(2, longest)))] = None
    return list(found)


def write_pairs(folder: Path, split: str, sources: Sequence[str], change: Callable[[str], str]) -> tuple[str, str]:
    """Writes SPLIT.aa and SPLIT.bb, the second being the first changed; returns their names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = str(folder / f"{split}.aa"), str(folder / f"{split}.bb")
    for name, lines in zip(names, (sources, [change(line) for line in sources]), strict=True):
        Path(name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return names


def upper(line: str) -> str:
    """The copy in a second language: the same words, otherwise written."""
    return line.upper()


def command(*words: object) -> list[str]:
    """The real command as another process starts it."""
    return [sys.executable, "-m", "qknorm", *map(str, words)]


def environment() -> dict[str, str]:
    """One thread, no GPU, whatever the machine has: bytes must repeat."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}


def start(*words: object, prefix: Sequence[str] = ()) -> "subprocess.Popen[str]":
    """Starts the command and returns at once."""
    return subprocess.Popen(
        [*prefix, *command(*words)],
        env=environment(),
        text=True,
        encoding="utf-8",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def call(*words: object, stdin: str | bytes = "", status: int = 0) -> "subprocess.CompletedProcess[str]":
    """Runs the command in a process of its own; it must end with this status."""
    given = stdin.encode() if isinstance(stdin, str) else stdin
    raw = subprocess.run(command(*words), env=environment(), input=given, capture_output=True, check=False)
    done = subprocess.CompletedProcess(raw.args, raw.returncode, raw.stdout.decode(), raw.stderr.decode())
    assert done.returncode == status, done.stdout + done.stderr
    return done


def refuse(capsys: pytest.CaptureFixture[str], *words: object, status: int = 2) -> str:
    """Runs the command in this process; it must fail with this status and one line, which is returned."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert ended.value.code == status
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert len(lines) == 1, lines
    assert lines[0].startswith("qknorm: ")
    return lines[0]


def succeed(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Runs the command in this process and returns what it printed."""
    capsys.readouterr()
    main([str(word) for word in words])
    return capsys.readouterr().out


def prepare_task(folder: Path, change: Callable[[str], str], pairs: int, longest: int, merges: int = 0) -> Path:
    """Prepared data of a task, whose dev and test sets are its own."""
    lines = sentences(pairs + 100, longest=longest)
    given = {"train": lines[:pairs], "dev": lines[pairs : pairs + 50], "test": lines[pairs + 50 :]}
    words: list[object] = []
    for split, part in given.items():
        words += [f"--{split}", *write_pairs(folder / "text", split, part, change)]
    call("prepare", folder / "data", "--source", "aa", "--target", "bb", "--subwords.merges", merges, *words)
    return folder / "data"


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what depends on the clock."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in row.items() if key != "time"} for row in rows]


def checkpoint_bytes(run: Path, step: int) -> dict[str, bytes]:
    """The files of a checkpoint."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def remains(folder: Path) -> list[str]:
    """What a failed command left in a folder and below, temporary names included."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
