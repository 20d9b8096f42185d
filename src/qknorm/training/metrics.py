"""What a training measured, kept in its run folder: metrics.jsonl, and the same for TensorBoard."""

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qknorm.errors import InputError
from qknorm.files import atomic_path

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class Criterion:
    """The number of an evaluation that says which model is the best, and how it is shown."""

    name: str
    higher_is_better: bool
    in_words: Callable[[float], str]
    column: str
    """Head of its column in the table of evaluations."""
    field: str
    """What that column shows of an evaluation."""
    digits: int

    @property
    def worst(self) -> float:
        """What any value is better than."""
        return -math.inf if self.higher_is_better else math.inf

    def score(self, value: float) -> float:
        """The value as a number that is higher for the better."""
        return value if self.higher_is_better else -value

    @property
    def stagnation(self) -> str:
        """What has happened when the best is long ago."""
        return f"dev {self.name} has not {'risen' if self.higher_is_better else 'fallen'}"


BLEU = Criterion("BLEU", True, "{:.2f}".format, "BLEU", "dev_bleu", 2)
NATS = Criterion(
    "loss",
    False,
    lambda loss: f"{loss:.4f} nats ({loss / math.log(2):.4f} bits) a character",
    "bits/char",
    "dev_bits",
    3,
)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, in order; a half-written last one is left out."""
    if not run.is_dir():
        raise InputError(f"there is no run folder {run}; check the path")
    path = run / METRICS_FILE
    return [_parse(path, number, line) for number, line in _whole_lines(path)]


class MetricsFile:
    """One JSON object a line; a line is whole or absent."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise self._failure(error) from error

    def append(self, row: dict[str, Any], durable: bool) -> None:
        """Hands the line to the operating system, and on to the disk itself if `durable`."""
        line = json.dumps(row, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n"
        size = os.fstat(self._descriptor).st_size
        try:
            written = 0
            while written < len(line):  # a full disk takes a part first, and fails at the next call
                written += os.write(self._descriptor, line[written:])
            if durable:
                os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, size)
            raise self._failure(error) from error

    def truncate_to(self, step: int) -> None:
        """Drops the lines of later steps."""
        kept = [
            line
            for number, line in _whole_lines(self._path)
            if _parse(self._path, number, line).get("step", step) <= step
        ]
        self.close()
        try:
            with atomic_path(self._path) as partial:
                partial.write_bytes(b"".join(kept))
            self._open()
        except OSError as error:
            raise self._failure(error) from error

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _open(self) -> None:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        whole = sum(len(line) for _, line in _all_lines(self._path) if line.endswith(b"\n"))
        os.ftruncate(self._descriptor, whole)  # a killed training may have left half a line

    def _failure(self, error: OSError) -> InputError:
        return InputError(f"cannot write {self._path}: {error.strerror}; make room or get write access, then resume")


class TensorBoardFile:
    """The same numbers for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InputError(
                "TensorBoard is not installed; install it with pip install 'qknorm[tensorboard]'"
            ) from error
        self._make = SummaryWriter
        self._folder = folder
        self._writer: Any = None
        self._purge_step: int | None = None

    def append(self, row: dict[str, Any]) -> None:
        if self._writer is None:
            self._writer = self._make(str(self._folder), purge_step=self._purge_step)
        kind = "dev" if row["kind"] == "evaluation" else "train"
        for name, value in _numbers(kind, {key: row[key] for key in row if key not in ("kind", "step")}).items():
            self._writer.add_scalar(name, value, row["step"])

    def truncate_to(self, step: int) -> None:
        """Has TensorBoard hide what it was given for later steps."""
        self.close()
        self._purge_step = step + 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None


def to_strict_json(value: Any) -> Any:
    """`value` as strict JSON can hold it: numbers of numpy and torch as numbers, nan and the infinities as null."""
    if isinstance(value, Mapping):
        return {str(key): to_strict_json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [to_strict_json(part) for part in value]
    if hasattr(value, "tolist"):
        return to_strict_json(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def scale_numbers(scale: Any) -> list[float]:
    """The numbers of a recorded scale: one, or one a head; what was not finite is left out."""
    plain = to_strict_json(scale)
    return [float(number) for number in (plain if isinstance(plain, list) else [plain]) if number is not None]


def _all_lines(path: Path) -> list[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            return list(enumerate(file, start=1))
    except FileNotFoundError:
        return []


def _whole_lines(path: Path) -> list[tuple[int, bytes]]:
    return [(number, line) for number, line in _all_lines(path) if line.endswith(b"\n") and line.strip()]


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) or not isinstance(row.get("step", 0), int):
        raise InputError(f"{path}, line {number} is not a JSON object with a whole step; mend or delete that line")
    return row


def _numbers(prefix: str, row: Mapping[str, Any]) -> dict[str, float]:
    """All numbers of a row by their path, such as dev/scales/encoder.0.self."""
    found: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            found |= _numbers(f"{prefix}/{key}", value)
        elif isinstance(value, int | float):
            found[f"{prefix}/{key}"] = float(value)
    return found
