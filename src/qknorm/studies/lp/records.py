"""The folder of a study: one small JSON file for every finished run, so that parts made anywhere merge by copying."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from qknorm import files
from qknorm.errors import InputError
from qknorm.studies.grid.claims import Claim, find_holder, take
from qknorm.studies.kind import ABOUT, require_study
from qknorm.studies.lp.corpus import Text
from qknorm.studies.lp.design import ARMS, LpStudy, Run, fingerprint
from qknorm.studies.tables import write_csv

FORMAT_VERSION = 1
RUNS = "runs"
CURVE_COLUMNS = ("arm", "p", "fold", "iteration", "validation", "training", "ms_per_iteration")


@dataclass(frozen=True)
class Point:
    """One evaluation. `training` is the mean loss since the one before; lists are by layer, empty if not measured."""

    iteration: int
    validation: float
    training: float
    scales: tuple[float, ...] = ()
    entropy: tuple[float, ...] = ()
    saturation: tuple[float, ...] = ()
    p: tuple[float, ...] = ()


@dataclass(frozen=True)
class Record:
    """A finished run: its curve, its time, and what made it.

    `ms_per_iteration` is the time of its stack's steps, evaluations left out, shared among the stack's models.
    """

    run: Run
    fingerprint: str
    curve: tuple[Point, ...]
    ms_per_iteration: float
    made_by: Mapping[str, Any]
    skipped_steps: int | None = None
    """Steps left out since their gradients were not finite; None in records that are older than this count."""

    @property
    def final(self) -> float:
        """The last validation loss; infinite where it is no number."""
        return _or_infinity(self.curve[-1].validation)

    @property
    def best(self) -> float:
        """The lowest validation loss."""
        return min(_or_infinity(point.validation) for point in self.curve)

    @property
    def best_iteration(self) -> int:
        """The first evaluated iteration with that loss."""
        return min(self.curve, key=lambda point: _or_infinity(point.validation)).iteration

    def first_at_or_below(self, loss: float) -> int | None:
        """The first evaluated iteration with a validation loss of at most `loss`."""
        return next((point.iteration for point in self.curve if point.validation <= loss), None)


@dataclass(frozen=True)
class About:
    """What all runs of a folder share."""

    study: LpStudy
    text: Mapping[str, Any]
    fingerprint: str


class StudyFolder:
    """Finished runs of one study; runs of another study are refused."""

    def __init__(self, path: Path, about: About) -> None:
        self.path, self.about = path, about

    @classmethod
    def create_or_open(cls, path: Path, study: LpStudy, text: Text) -> "StudyFolder":
        """The folder for these settings; one that holds a study with others is refused with what differs."""
        facts = {
            "name": text.name, "sha256": text.digest, "characters": len(text.ids), "vocabulary": text.vocabulary
        }  # fmt: skip
        wanted = About(study, facts, fingerprint(study, text.digest))
        require_study(path, "lp")
        if (path / ABOUT).exists():
            there = read_about(path)
            if there.fingerprint != wanted.fingerprint:
                raise InputError(f"{path} holds a study with {_difference(there, wanted)}; name another --out")
            return cls(path, there)
        cls(path, wanted).write_about()
        return cls(path, wanted)

    @classmethod
    def open(cls, path: Path) -> "StudyFolder":
        """A folder that holds a study."""
        return cls(path, read_about(path))

    def write_about(self) -> None:
        """Writes what all runs share."""
        content = {
            "format_version": FORMAT_VERSION,
            "settings": self.about.study.model_dump(mode="json"),
            "text": dict(self.about.text),
            "fingerprint": self.about.fingerprint,
        }
        files.write_json(self.path / ABOUT, content)

    def file_of(self, run: Run) -> Path:
        """Where a run is or will be kept."""
        return self.path / RUNS / f"{run.name}.json"

    def add(self, record: Record) -> None:
        """Keeps a finished run."""
        file = self.file_of(record.run)
        try:
            files.write_json(file, _to_json(record))
        except OSError as error:
            raise InputError(f"cannot write {file} ({error.strerror}); make room, then run the same again") from None

    def missing(self, runs: Iterable[Run]) -> list[Run]:
        """Those that are not finished yet."""
        return [run for run in runs if not self.file_of(run).is_file()]

    def records(self) -> list[Record]:
        """All finished runs, in order of arm, p and fold."""
        found = [_read_record(file, self.about.fingerprint) for file in sorted((self.path / RUNS).glob("*.json"))]
        return sorted(found, key=lambda each: (ARMS.index(each.run.arm), each.run.p or 0.0, each.run.fold))

    def claim(self, on_loss: Callable[[], None]) -> Claim:
        """Keeps others from training here while it is held; refused where another process does.

        `on_loss` is called if it is lost, which need not end the study: two that train the same write the same files.
        """
        held = take(self.path, on_loss)
        if held is None:
            holder = find_holder(self.path)
            who = f" ({holder.host}, process {holder.pid})" if holder else ""
            raise InputError(
                f"another study is at work in {self.path}{who}; wait for it, or give each its own --folds and --out, "
                f"then --merge"
            )
        return held

    def merge(self, others: Sequence[Path]) -> int:
        """Takes the runs of other folders of the same study that are not here; says how many."""
        taken = 0
        for other in map(StudyFolder.open, others):
            if other.about.fingerprint != self.about.fingerprint:
                raise InputError(
                    f"{other.path} cannot be merged into {self.path}: it holds a study with "
                    f"{_difference(other.about, self.about)}"
                )
            for record in other.records():
                if self.missing([record.run]):
                    self.add(record)
                    taken += 1
        return taken


def write_curves(records: Sequence[Record], path: Path) -> None:
    """Every evaluation of every run as a compact CSV."""
    rows = []
    for record in records:
        run, p = record.run, "" if record.run.p is None else f"{record.run.p:g}"
        for point in record.curve:
            losses = f"{point.validation:.5f}", f"{point.training:.5f}"
            cells = run.arm, p, run.fold, point.iteration, *losses, f"{record.ms_per_iteration:.3f}"
            rows.append(dict(zip(CURVE_COLUMNS, cells, strict=True)))
    write_csv(path, CURVE_COLUMNS, rows)


def read_about(path: Path) -> About:
    """What a folder says of its study; refuses what is none, or damaged."""
    file = path / ABOUT
    require_study(path, "lp")
    if not file.is_file():
        raise InputError(f"{path} holds no study (it has no {ABOUT}); run qknorm study lp --out {path} first")
    content = _load(file)
    try:
        study = LpStudy.model_validate(content["settings"])
        about = About(study, content["text"], content["fingerprint"])
    except (KeyError, TypeError, ValidationError) as error:
        raise InputError(f"{file} is damaged or of another version ({type(error).__name__}); move it away") from None
    return about


def _read_record(file: Path, expected: str) -> Record:
    content = _load(file)
    try:
        run = Run(content["arm"], _number(content["p"]), content["fold"])
        curve = tuple(Point(**{name: _from_json(value) for name, value in point.items()}) for point in content["curve"])
        milliseconds, skipped = _from_json(content["ms_per_iteration"]), content.get("skipped_steps")
        record = Record(run, content["fingerprint"], curve, milliseconds, content["made_by"], skipped)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{file} is damaged ({type(error).__name__}: {error}); delete it to run it again") from None
    if record.fingerprint != expected:
        raise InputError(f"{file} was made with other settings or another text than {file.parents[1] / ABOUT}; move it")
    if not curve or file.stem != run.name or run.arm not in ARMS:
        raise InputError(f"{file} does not hold the run that its name says; delete it to run it again")
    return record


def _load(file: Path) -> Any:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise InputError(f"{file} is damaged ({error}); delete it to run it again") from None
    version = content.get("format_version", FORMAT_VERSION) if isinstance(content, dict) else FORMAT_VERSION
    if version != FORMAT_VERSION:
        raise InputError(f"{file} has format {version}, this version of qknorm reads {FORMAT_VERSION}; move it away")
    return content


def _to_json(record: Record) -> dict[str, Any]:
    p = record.run.p
    return {
        "format_version": FORMAT_VERSION,
        "arm": record.run.arm,
        "p": "infinity" if p == math.inf else p,
        "fold": record.run.fold,
        "fingerprint": record.fingerprint,
        "ms_per_iteration": record.ms_per_iteration,
        "skipped_steps": record.skipped_steps,
        "made_by": dict(record.made_by),
        "curve": [{name: _strict(value) for name, value in asdict(point).items()} for point in record.curve],
    }


def _strict(value: Any) -> Any:
    """JSON knows no NaN: null stands for it. Six digits are enough."""
    if isinstance(value, list | tuple):
        return [_strict(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_from_json, value))
    return math.nan if value is None else value


def _number(p: Any) -> float | None:
    return math.inf if p == "infinity" else None if p is None else float(p)


def _or_infinity(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def _difference(there: About, wanted: About) -> str:
    """The first settings that two studies differ in."""
    if there.text["sha256"] != wanted.text["sha256"]:
        return f"the text {there.text['name']!r} of {there.text['characters']:,} characters"
    theirs, ours = (dict(flatten(each.study.model_dump(mode="json"))) for each in (there, wanted))
    parts = [f"{name} = {theirs[name]} instead of {ours[name]}" for name in theirs if theirs[name] != ours.get(name)]
    return ", ".join(parts[:3]) or "other settings"


def flatten(group: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Settings by their dotted names."""
    for name, value in group.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
