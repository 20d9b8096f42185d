"""A training with its scores, as a folder on disk: the folder is the truth about how far it has come."""

import contextlib
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from qknorm import files
from qknorm.config import Train
from qknorm.errors import InputError
from qknorm.studies.grid.claims import Holder, find_holder
from qknorm.text.prepared import PreparedData
from qknorm.training.metrics import METRICS_FILE
from qknorm.version import __version__

JOB, RESULT, FAILURE, LOG, RUN, TRANSLATIONS, GIVEN_OUT, DEVICE_TIME = (
    "job.json", "result.json", "failure.json", "log.txt", "run", "test.txt", "given-out", "device-time.json"
)  # fmt: skip
DECIDING = (
    "attention", "config", "decoding", "models", "scoring", "studies/grid/scores.py", "text", "training", "specials.py"
)  # fmt: skip
"""The parts of the code that decide what a training gives; the rest may change without making runs old."""
TAIL_BYTES = 8_192

State = Literal["waiting", "running", "finished", "diverged", "failed"]
Ending = Literal["done", "failed", "interrupted", "taken", "out of memory"]

EXIT_STATUS: dict[Ending, int] = {"done": 0, "failed": 3, "interrupted": 130, "taken": 76, "out of memory": 77}
"""How a process that does a job tells its grid what became of it."""


@functools.cache
def code_version() -> str:
    """The version of qknorm and a digest of the source that decides what a training gives."""
    package = Path(__file__).parents[2]
    total = hashlib.blake2b(digest_size=8)
    for part in DECIDING:
        place = package / part
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            total.update(f"{file.relative_to(package).as_posix()}\n".encode())
            total.update(file.read_bytes())
    return f"{__version__}+{total.hexdigest()}"


@dataclass(frozen=True)
class Job:
    """What to train on what; equal settings, data and code are the same job, whatever it is called."""

    name: str
    data: Path
    settings: Train
    fingerprint: str
    folder: Path
    code: str
    split: str = "test"
    """What is translated and scored in the end."""
    averages: tuple[int, ...] = ()
    """Means of the last so many checkpoints to score beside the best checkpoint."""

    @classmethod
    def plan(
        cls,
        name: str,
        data: PreparedData,
        settings: Train,
        root: Path,
        *,
        split: str = "test",
        averages: tuple[int, ...] = (),
        any_code: bool = False,
    ) -> "Job":
        """The job of these settings under `root`; with `any_code` one that other code has finished counts as well."""
        for needed in ("dev", split):
            if needed not in data.splits:
                raise InputError(f"{data.folder} has no {needed} set; prepare it with --{needed}, or with more pairs")
        # defaults are left out, so that a setting which newer code adds does not make every run another
        own = settings.model_dump(mode="json", exclude_defaults=True)
        ending = _ending(split, averages)
        content = _digest({"settings": own, "data": data.fingerprint, **ending})
        code = code_version()
        folder = root / f"{content}-{_digest(code)[:8]}"
        if any_code and not (folder / RESULT).is_file():
            finished = sorted(root.glob(f"{content}-*/{RESULT}"), key=lambda path: path.stat().st_mtime)
            alike = [path.parent for path in finished if _agrees(path.parent, settings)]
            folder = alike[-1] if alike else folder
        return cls(name, data.folder.resolve(), settings, data.fingerprint, folder, code, split, averages)

    def write(self) -> None:
        """Lays out the folder, for whoever comes to do the job; anew where the data lie elsewhere than they did."""
        with contextlib.suppress(InputError):
            known = Job.read(self.folder)
            if (known.data, known.code) == (self.data, self.code):
                return
        plain = {"name": self.name, "data": str(self.data), "fingerprint": self.fingerprint, "code": self.code}
        ending = _ending(self.split, self.averages)
        files.write_json(self.folder / JOB, {**plain, **ending, "settings": self.settings.model_dump(mode="json")})

    @classmethod
    def read(cls, folder: Path) -> "Job":
        """The job that a folder was laid out for."""
        plain = _load(folder / JOB)
        try:
            settings = Train.model_validate(plain["settings"])
            facts = plain["name"], Path(plain["data"]), settings, plain["fingerprint"], folder, plain["code"]
            return cls(*facts, plain.get("split", "test"), tuple(plain.get("averages", ())))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{folder / JOB} is damaged ({type(error).__name__}); remove {folder}") from None

    @property
    def run(self) -> Path:
        """Its run folder, as `qknorm train` writes it."""
        return self.folder / RUN


@dataclass(frozen=True)
class Result:
    """How a job ended; a diverged one has no scores."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    status: Literal["finished", "diverged"]
    reason: str
    seconds: float
    steps: int
    best_step: int
    dev_bleu: float | None
    parameters: int | None = None
    scores: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By measure: value and signature."""
    made_by: Mapping[str, Any] = field(default_factory=dict)
    averaged: Mapping[str, float] = field(default_factory=dict)
    """By the number of checkpoints in a mean: its score, by the first measure of `scores`."""

    def write(self, folder: Path) -> None:
        """Keeps it: from now on the job is done."""
        (folder / FAILURE).unlink(missing_ok=True)
        files.write_json(folder / RESULT, asdict(self))


_RESULT = TypeAdapter(Result)


def read_result(folder: Path) -> Result | None:
    """The result of a job that is done, else None."""
    path = folder / RESULT
    if not path.is_file():
        return None
    try:
        result = _RESULT.validate_python(_load(path))
    except ValidationError:
        result = None
    if result is None or not all(map(_is_score, result.scores.values())):
        raise InputError(f"{path} is damaged, or of another version of qknorm; remove {folder} to run it again")
    return result


def _is_score(score: Mapping[str, Any]) -> bool:
    return isinstance(score.get("value"), float | int) and isinstance(score.get("signature"), str)


def begin_count(folder: Path) -> None:
    """Opens the account of what a job takes of its device.

    Where one was left open, or a run was begun without one, what was taken before is not known, so neither is the sum.
    """
    account = _account(folder)
    fresh = not account and not (folder / RUN).is_dir()
    before = 0.0 if fresh else None if account.get("open") else account.get("device_seconds")
    with contextlib.suppress(OSError):  # no training is to end for that
        (folder / DEVICE_TIME).unlink(missing_ok=True)  # first: what cannot be written is not known
        files.write_json(folder / DEVICE_TIME, {"device_seconds": before, "open": True})


def end_count(folder: Path, seconds: float) -> None:
    """Adds what a job took since its account was opened, and closes that."""
    account = _account(folder)
    if not account:  # its process ended before it came to its job
        return
    before = account.get("device_seconds")
    with contextlib.suppress(OSError):
        files.write_json(folder / DEVICE_TIME, {"device_seconds": None if before is None else before + seconds})


def read_device_seconds(folder: Path) -> float | None:
    """What a job took of its device: where two shared that, half of the time; None where not all was counted."""
    account = _account(folder)
    return None if account.get("open") else account.get("device_seconds")


def _account(folder: Path) -> dict[str, Any]:
    try:
        account = _load(folder / DEVICE_TIME)
    except InputError:
        return {}
    return account if isinstance(account.get("device_seconds"), float | int | None) else {}


def read_translations(path: Path, sentences: int, remove: Path) -> list[str]:
    """A file with a translation of each of so many sentences; `remove` is what to remove to have it made again."""
    try:
        text = path.read_bytes().decode()
        lines = text.removesuffix("\n").split("\n") if text else []
        fault = "" if len(lines) == sentences else f"has {len(lines):,} lines for {sentences:,} sentences"
    except OSError as error:
        fault = f"cannot be read ({error.strerror})"
    except UnicodeDecodeError:
        fault = "is damaged, and no UTF-8"
    if fault:
        raise InputError(f"{path} {fault}; remove {remove} and run the same again")
    return lines


@dataclass(frozen=True)
class View:
    """How far a job has come."""

    job: Job
    state: State
    step: int = 0
    total: int | None = None
    """Steps until its settings end it; a plateau or early stopping may end it sooner."""
    dev_bleu: float | None = None
    """Of its newest evaluation, or its best where it is done."""
    seconds: float | None = None
    note: str = ""
    holder: Holder | None = None


def look(job: Job) -> View:
    """What the job's folder tells."""
    result = read_result(job.folder)
    if result is not None:
        note = str(result.made_by.get("note", ""))
        return View(job, result.status, result.steps, None, result.dev_bleu, result.seconds, note)
    step, dev, seconds = _progress(job.run / METRICS_FILE)
    holder = find_holder(job.folder)
    state: State = "running" if holder else "waiting"
    note = f"stopped at step {step:,}" if step and not holder else ""
    if not holder and find_holder(job.folder / GIVEN_OUT) is not None:
        note = "on the cluster"
    elif not holder and (failure := read_failure(job.folder)) is not None:
        state, note = "failed", failure
    return View(job, state, step, _last_step(job.settings), dev, seconds, note, holder)


def is_free(job: Job) -> bool:
    """Whether nobody is at the job, and no cluster has it."""
    return find_holder(job.folder) is None and find_holder(job.folder / GIVEN_OUT) is None


def unfinished(jobs: Sequence[Job]) -> list[Job]:
    """Without those that are done, and each but once: systems of two tables may be the same."""
    distinct = {job.folder: job for job in jobs}
    return [job for job in distinct.values() if read_result(job.folder) is None]


def write_failure(folder: Path, error: str, trace: str = "") -> None:
    """Keeps why a job failed, and where in the code if that was a mistake of ours, until it is tried again."""
    files.write_json(folder / FAILURE, {"error": error, "trace": trace.splitlines()})


def read_failure(folder: Path) -> str | None:
    """Why a job failed; None where it has not, or someone has just begun it again."""
    try:
        return str(json.loads((folder / FAILURE).read_text(encoding="utf-8"))["error"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return f"{folder / FAILURE} cannot be read"


def read_log(folder: Path) -> str:
    """The end of what a job's process wrote."""
    return " / ".join(_tail(folder / LOG).decode(errors="replace").strip().splitlines()[-3:])


def _ending(split: str, averages: tuple[int, ...]) -> dict[str, Any]:
    """What a job tells of how it ends; nothing where it is as usual, so that jobs keep their names."""
    return {"split": split, "averages": list(averages)} if split != "test" or averages else {}


def _agrees(folder: Path, settings: Train) -> bool:
    """Whether a job was done with these settings, as far as its code knew them: a default may have changed since."""
    theirs = _load(folder / JOB).get("settings")
    return bool(theirs) and _same_where_known(theirs, settings.model_dump(mode="json"))


def _same_where_known(theirs: Any, ours: Any) -> bool:
    if not (isinstance(theirs, dict) and isinstance(ours, dict)):
        return bool(theirs == ours)
    return all(_same_where_known(theirs[name], ours[name]) for name in theirs.keys() & ours.keys())


def _last_step(settings: Train) -> int:
    training = settings.training
    evaluated = (training.max_evaluations or training.max_steps) * training.evaluate_every
    return min(training.max_steps, evaluated) if training.max_evaluations else training.max_steps


def _progress(path: Path) -> tuple[int, float | None, float | None]:
    """Step, newest dev BLEU and seconds, from the last lines of the metrics: the file of a long run is long."""
    known: Sequence[float | None] = (0, None, None)
    for line in _tail(path).splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # the first line of the tail is cut, the last may still be in writing
            continue
        if isinstance(row, dict):
            time = row.get("time")
            told = row.get("step"), row.get("dev_bleu"), time.get("elapsed") if isinstance(time, dict) else None
            known = [new if isinstance(new, int | float) else old for new, old in zip(told, known, strict=True)]
    step, dev, seconds = known
    return int(step or 0), dev, seconds


def _tail(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return file.read()
    except OSError:
        return b""


def _load(path: Path) -> dict[str, Any]:
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from None
    except ValueError:
        raise InputError(f"{path} is damaged; remove {path.parent} to run it again") from None
    if not isinstance(plain, dict):
        raise InputError(f"{path} is damaged; remove {path.parent} to run it again")
    return plain


def _digest(content: Any) -> str:
    plain = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(plain.encode(), digest_size=8).hexdigest()
