"""Training as one call: opens the data, lays out or reopens the run folder, joins the team, trains."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from qknorm.config import Train
from qknorm.errors import InputError
from qknorm.text.prepared import PreparedData
from qknorm.training.checkpoint import list_steps
from qknorm.training.loop import Outcome, Trainer
from qknorm.training.parallel import Team, join_team, leave_team
from qknorm.training.record import Recorder
from qknorm.training.run_folder import SETTINGS, About, create_run, is_run, is_unborn, read_run


def train(
    data: str | Path,
    run: str | Path,
    settings: Train | None = None,
    *,
    resume: bool = False,
    device: str | None = None,
    quiet: bool = False,
) -> Outcome | None:
    """Trains a translator on prepared data; returns how it ended (None in processes that do not lead a team).

    A new run needs `settings`, such as `qknorm.preset("low-resource")`, the command's default; with `resume` a run goes
    on from its newest checkpoint by its own, exactly as if it had never stopped.
    """
    data, run = Path(data), Path(run)
    prepared = PreparedData.load(data)
    if "dev" not in prepared.splits:
        raise InputError(f"{data} has no dev set to evaluate on; prepare it with --dev, or with more than ten pairs")
    team = join_team(device)
    try:
        settings, about = _open_run(run, settings, prepared, team, resume)
        training = settings.training
        recorder = Recorder(run, tensorboard=training.tensorboard, quiet=quiet) if team.leads else None
        try:
            trainer = Trainer(run, settings, about, prepared, team, recorder)
            if recorder is not None and not resume:
                recorder.truncate_to(-1)  # a training may have died here before its first checkpoint
            if resume:
                for complaint in trainer.resume():
                    if recorder is not None:
                        recorder.message(complaint, "yellow")
            if recorder is not None and not quiet:
                recorder.message(_describe(trainer, about))
            with quick_kernels(team.device, exact=training.precision == "float32"):
                outcome = trainer.fit()
                team.wait()  # who leaves while others still talk can bring them down
        finally:
            if recorder is not None:
                recorder.close()
    finally:
        leave_team()
    return outcome if team.leads else None


@contextmanager
def quick_kernels(device: torch.device, *, exact: bool = False) -> Iterator[None]:
    """On a GPU: no cuDNN attention, which plans anew for each shape, and, unless `exact`, TensorFloat-32."""
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if exact else "high")
    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def _open_run(
    run: Path, settings: Train | None, prepared: PreparedData, team: Team, resume: bool
) -> tuple[Train, About]:
    if resume:
        own, about = read_run(run)
        if settings is not None and settings != own:
            name = _first_difference(settings.model_dump(), own.model_dump())
            raise InputError(
                f"{run} goes on with its own settings, and {name} is another there; leave it out, or change it in "
                f"{run / SETTINGS}"
            )
        if about.fingerprint != prepared.fingerprint:
            raise InputError(
                f"{run} was trained on other data than {prepared.folder} holds now; name the folder {about.data}, or "
                f"start a new run"
            )
        return own, about
    if settings is None:
        raise InputError(f'{run} would be a new run, which needs settings, such as qknorm.preset("low-resource")')
    team.lead(lambda: _lay_out(run, settings, prepared))
    return read_run(run)


def _lay_out(run: Path, settings: Train, prepared: PreparedData) -> None:
    """A new run folder, also where a training died before its first checkpoint."""
    if is_run(run):
        if list_steps(run):
            raise InputError(f"{run} exists already; add --resume to go on with it")
    elif run.exists() and not (run.is_dir() and is_unborn(run)):
        raise InputError(f"{run} exists already; name another --run")
    create_run(run, settings, prepared)


def _first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The dotted name of the first setting that two trees do not share."""
    name = next(name for name in one if one[name] != other[name])
    deeper = isinstance(one[name], Mapping)
    return f"{name}.{_first_difference(one[name], other[name])}" if deeper else name


def _describe(trainer: Trainer, about: About) -> str:
    parameters = sum(p.numel() for p in trainer.model.parameters())
    batches = trainer.batches
    scale = f", g starts at {about.scale_init:.3f} (L = {about.scale_length:g})" if about.scale_init else ""
    return (
        f"{about.source} → {about.target}: {parameters:,} parameters, {about.vocabulary:,} types{scale}; "
        f"{len(batches.batches):,} batches an epoch on {trainer.team.device}, "
        f"{str(trainer.stepper.precision).removeprefix('torch.')}"
    )
