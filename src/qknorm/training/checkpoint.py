"""Checkpoints of a run: safetensors and JSON, whole or absent, and checked against their digests when read.

A run folder holds `checkpoints/step-00001200/` with `model.safetensors`, `training.safetensors` and `state.json`,
and `checkpoints/best.json` with the step of the best one.
"""

import hashlib
import json
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from qknorm.errors import InputError
from qknorm.files import atomic_folder, atomic_path, write_json
from qknorm.training.leftovers import hold_and_sweep, sweep, undisturbed

FORMAT = 1
MODEL_FILE = "model.safetensors"
TRAINING_FILE = "training.safetensors"
STATE_FILE = "state.json"
BEST_FILE = "best.json"

Which = int | Literal["last", "best"]
Content = TypeVar("Content")


@dataclass(frozen=True)
class Checkpoint:
    """Everything a training needs to go on from `step`."""

    step: int
    model: dict[str, Tensor]
    training: dict[str, Tensor]
    state: dict[str, Any]
    folder: Path


class DamagedCheckpoint(InputError):
    """A checkpoint that is not what was written; `what` says which file of it and how."""

    def __init__(self, folder: Path, what: str) -> None:
        super().__init__(f"{folder} is damaged ({what}); use another checkpoint of this run, or delete this one")
        self.folder = folder
        self.what = what


# ------------------------------------------------------------------ writing


def save_checkpoint(
    run: Path, step: int, model: Mapping[str, Tensor], training: Mapping[str, Tensor], state: Mapping[str, Any]
) -> Path:
    """Writes a checkpoint, whole or not at all, and returns its folder; `state` is JSON with string keys.

    Tensors may be tied, on any device and of any strides; a checkpoint of the same step is replaced.
    """
    folder = _folder(run, step)
    with _explained(f"write the checkpoint {folder}"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with hold_and_sweep(folder.parent), atomic_folder(folder) as partial:
            save_file(_storable(model), partial / MODEL_FILE)
            save_file(_storable(training), partial / TRAINING_FILE)
            files = {name: _fingerprint(partial / name) for name in (MODEL_FILE, TRAINING_FILE)}
            record = {"format": FORMAT, "step": step, "files": files, "state": dict(state)}
            record = json.loads(json.dumps(record))  # the digest is of what a reader will see: no tuples, string keys
            record["digest"] = _digest_of(record)
            (partial / STATE_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return folder


def mark_best(run: Path, step: int) -> None:
    """Names the checkpoint of `step` the best one of the run."""
    if step not in list_steps(run):
        raise InputError(f"{_folder(run, step)} does not exist, so it cannot be marked as the best checkpoint")
    with _explained(f"write {_checkpoints(run) / BEST_FILE}"), hold_and_sweep(_checkpoints(run)):
        write_json(_checkpoints(run) / BEST_FILE, {"step": step})


def prune(run: Path, keep: int, every: int = 1) -> list[int]:
    """Removes all checkpoints but the best one and the last `keep`; returns the steps removed.

    One that a signal left between multiples of `every` goes with the next, so that it costs no other its place.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    steps = list_steps(run)
    regular = [step for step in steps if step % every == 0 or step == steps[-1]]
    kept = {best_step(run), *regular[-keep:]}
    return _remove(run, [step for step in steps if step not in kept])


def discard_after(run: Path, step: int) -> list[int]:
    """Removes the checkpoints later than `step`, for a run that goes on from there; returns the steps removed.

    Otherwise damaged or outdated later ones would count as the last when `prune` chooses what to keep.
    """
    best = best_step(run)
    if best is not None and best > step:
        with _explained(f"remove {_checkpoints(run) / BEST_FILE}"):
            (_checkpoints(run) / BEST_FILE).unlink(missing_ok=True)
    return _remove(run, [later for later in list_steps(run) if later > step])


def save_weights(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes one safetensors file, atomically; the same weights and metadata give the same bytes."""
    content = _with_sorted_metadata(save(_storable(tensors), metadata=dict(metadata) or None))
    with _explained(f"write {path}"), atomic_path(path) as partial:
        partial.write_bytes(content)


# ------------------------------------------------------------------ reading


def list_steps(run: Path) -> list[int]:
    """The steps of the run's checkpoints, ascending."""
    if steps := _listed_steps(run):
        return steps
    with undisturbed(_checkpoints(run)):  # while we looked, a training may have added one and removed another
        return _listed_steps(run)


def best_step(run: Path) -> int | None:
    """The step marked as the best one; None if none is marked."""
    path = _checkpoints(run) / BEST_FILE
    try:
        step = json.loads(path.read_bytes())["step"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError):
        step = None
    if not isinstance(step, int):
        raise InputError(f'{path} does not name a step as {{"step": 1200}} does; mend it, or delete it to use the last')
    return step


def load_checkpoint(run: Path, step: Which) -> Checkpoint:
    """Reads and verifies a checkpoint. Where no best one is marked, "best" means the last sound one."""
    return _load(run, step, _read_checkpoint)


def load_model_weights(run: Path, which: Which) -> dict[str, Tensor]:
    """Reads and verifies a checkpoint's model tensors, and nothing of the optimiser."""
    return _load(run, which, _read_model)


def load_newest_sound(run: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, and a sentence for each damaged one passed over; None where there is none.

    Refuses a run whose checkpoints are all damaged: what is left of them may be worth more than a new start.
    """
    sweep(_checkpoints(run))
    found, damaged = _first_sound(run, list_steps(run)[::-1], _read_checkpoint)
    told = [f"checkpoints/{one.folder.name} is damaged ({one.what})" for one in damaged]
    if damaged and found is None:
        raise InputError(
            f"no checkpoint of {run} can be read: {', '.join(told)}; restore one from a copy, move them away to train "
            f"this run from its start, or start a new run"
        )
    return found, [f"{one}; going on from step {found.step}" for one in told] if found else []


def average_checkpoints(run: Path, steps: Sequence[int]) -> dict[str, Tensor]:
    """The mean of the models at `steps`, taken in float64; what is not floating point is that of the newest."""
    if not steps:
        raise InputError(f"no checkpoint of {run} to average: name at least one step")
    ordered = sorted(set(steps), reverse=True)
    newest = load_model_weights(run, ordered[0])
    sums = {name: tensor.to(torch.float64, copy=True) for name, tensor in newest.items() if tensor.is_floating_point()}
    for step in ordered[1:]:
        model = load_model_weights(run, step)
        _check_same_shapes(run, ordered[0], newest, step, model)
        for name, total in sums.items():
            total += model[name].double()
    means = {name: (total / len(ordered)).to(newest[name].dtype) for name, total in sums.items()}
    return {name: means.get(name, tensor) for name, tensor in newest.items()}


def _load(run: Path, which: Which, read: Callable[[Path], Content]) -> Content:
    sweep(_checkpoints(run))
    found, damaged = _first_sound(run, _candidates(run, which), read)
    if found is not None:
        return found
    if not damaged[0].folder.exists():  # a training removed it while we read: ask again what is the last or best
        return _load(run, which, read)
    raise damaged[0]


def _candidates(run: Path, which: Which) -> list[int]:
    """The steps to try in turn for `which`."""
    best = best_step(run) if which == "best" else None
    steps = list_steps(run)
    if not steps:
        raise InputError(f"{run} holds no checkpoint; train it first, or name another run folder")
    if which == "last":
        return steps[-1:]
    if which == "best":
        if best is None:
            return steps[::-1]
        if best not in steps and best_step(run) != best:  # a training has just marked another and removed this one
            return _candidates(run, which)
        if best not in steps:
            best_file = _checkpoints(run) / BEST_FILE
            raise InputError(f"{best_file} names step {best}, which is not there; delete it to use the last checkpoint")
        return [best]
    if which not in steps:
        raise InputError(f"{run} holds no checkpoint of step {which}; it has {', '.join(map(str, steps))}")
    return [which]


def _first_sound(
    run: Path, steps: Iterable[int], read: Callable[[Path], Content]
) -> tuple[Content | None, list[DamagedCheckpoint]]:
    damaged: list[DamagedCheckpoint] = []
    for step in steps:
        try:
            return read(_folder(run, step)), damaged
        except DamagedCheckpoint as error:
            damaged.append(error)
    return None, damaged


def _read_checkpoint(folder: Path) -> Checkpoint:
    record = _read_record(folder)
    model, training = (_read_tensors(folder, name, record) for name in (MODEL_FILE, TRAINING_FILE))
    return Checkpoint(record["step"], model, training, record["state"], folder)


def _read_model(folder: Path) -> dict[str, Tensor]:
    return _read_tensors(folder, MODEL_FILE, _read_record(folder))


def _read_record(folder: Path) -> dict[str, Any]:
    with _verifying(folder, STATE_FILE):
        try:
            record = json.loads((folder / STATE_FILE).read_bytes())
        except (ValueError, RecursionError):
            raise DamagedCheckpoint(folder, f"{STATE_FILE} is not JSON") from None
    if not isinstance(record, dict) or record.pop("digest", None) != _digest_of(record):
        raise DamagedCheckpoint(folder, f"{STATE_FILE} does not match its digest")
    if record["format"] != FORMAT:
        raise InputError(
            f"{folder} was written by another version of qknorm (format {record['format']}, this one reads {FORMAT}); "
            "use that version"
        )
    if folder.name != f"step-{record['step']:08d}":
        raise DamagedCheckpoint(folder, f"{STATE_FILE} is of step {record['step']}")
    return record


def _read_tensors(folder: Path, name: str, record: dict[str, Any]) -> dict[str, Tensor]:
    with _verifying(folder, name):
        expected, size = record["files"][name], (folder / name).stat().st_size
        if size != expected["bytes"]:
            raise DamagedCheckpoint(folder, f"{name} has {size} bytes instead of {expected['bytes']}")
        if _fingerprint(folder / name) != expected:
            raise DamagedCheckpoint(folder, f"{name} does not match its digest")
        # load_file maps the file; copies are ours alone, aligned as any tensor, and let the file be deleted
        return {key: tensor.clone() for key, tensor in load_file(folder / name).items()}


def _check_same_shapes(run: Path, step: int, model: dict[str, Tensor], other: int, others: dict[str, Tensor]) -> None:
    if unshared := model.keys() ^ others.keys():
        name = min(unshared)
        has, lacks = (step, other) if name in model else (other, step)
        raise InputError(f"cannot average checkpoints of {run}: step {has} has a tensor {name}, step {lacks} has none")
    for name, tensor in model.items():
        if tensor.shape != others[name].shape:
            shapes = f"{list(tensor.shape)} at step {step} and {list(others[name].shape)} at step {other}"
            raise InputError(f"cannot average checkpoints of {run}: {name} is {shapes}")


# ------------------------------------------------------------------ names, digests, failures


def _checkpoints(run: Path) -> Path:
    return run / "checkpoints"


def _listed_steps(run: Path) -> list[int]:
    if not _checkpoints(run).is_dir():
        return []
    found = (re.fullmatch(r"step-(\d{8,})", entry.name) for entry in _checkpoints(run).iterdir() if entry.is_dir())
    steps = (int(match[1]) for match in found if match)
    return sorted({step for step in steps if _folder(run, step).is_dir()})


def _folder(run: Path, step: int) -> Path:
    if step < 0:
        raise ValueError(f"a step is not negative, got {step}")
    return _checkpoints(run) / f"step-{step:08d}"


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "blake2b": hashlib.file_digest(file, "blake2b").hexdigest()}


def _digest_of(record: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU and contiguous; tied ones are stored under each of their names."""
    stored: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().to("cpu").contiguous()
        if plain.untyped_storage().data_ptr() in storages:
            plain = plain.clone()
        storages.add(plain.untyped_storage().data_ptr())
        stored[name] = plain
    return stored


def _with_sorted_metadata(content: bytes) -> bytes:
    """The same safetensors file with its metadata in order: the library writes it in a random one."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    if "__metadata__" not in header:
        return content
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[end:]


def _remove(run: Path, steps: list[int]) -> list[int]:
    """Removes checkpoints, each first renamed so that a crash leaves no half one under its name."""
    if not steps:
        return []
    with _explained(f"remove old checkpoints of {run}"), hold_and_sweep(_checkpoints(run)):
        for step in steps:
            folder = _folder(run, step)
            doomed = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.partial")
            folder.rename(doomed)
            shutil.rmtree(doomed)
    return steps


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Tells a full disk, a read-only folder and the like in one sentence."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"cannot {what}: {reason}; make room or get write access, then try again") from error


@contextmanager
def _verifying(folder: Path, name: str) -> Iterator[None]:
    """Tells a file that cannot be read as damage, unless only the permission is missing."""
    try:
        yield
    except FileNotFoundError:
        raise DamagedCheckpoint(folder, f"{name} is missing") from None
    except PermissionError as error:
        raise InputError(f"cannot read {folder / name}: permission denied; ask its owner for access") from error
    except (OSError, SafetensorError) as error:
        raise DamagedCheckpoint(folder, f"{name} cannot be read: {error}") from error
