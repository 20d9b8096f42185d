"""Training as one call: opens the data, lays out or reopens the run folder, joins the team, trains."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from qknorm.config import Train
from qknorm.errors import InputError
from qknorm.text.prepared import PreparedData
from qknorm.training.checkpoint import list_steps
from qknorm.training.loop import Outcome, Trainer
from qknorm.training.parallel import Team, join_team, leave_team
from qknorm.training.record import Recorder
from qknorm.training.run_folder import About, create_run, is_run, read_run


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

    With `resume` the run goes on from its newest checkpoint by its own settings, exactly as if it had never stopped.
    """
    data, run = Path(data), Path(run)
    prepared = PreparedData.load(data)
    if "dev" not in prepared.splits:
        raise InputError(f"{data} has no dev set to evaluate on; prepare it with --dev, or with more than ten pairs")
    team = join_team(device)
    try:
        settings, about = _open_run(run, settings or Train(), prepared, team, resume)
        training = settings.training
        recorder = (
            Recorder(run, log_every=training.log_every, tensorboard=training.tensorboard, quiet=quiet)
            if team.leads
            else None
        )
        try:
            trainer = Trainer(run, settings, about, prepared, team, recorder)
            if resume:
                for complaint in trainer.resume():
                    if recorder is not None:
                        recorder.message(complaint, "yellow")
            if recorder is not None and not quiet:
                recorder.message(_describe(trainer, about))
            with quick_kernels(team.device):
                outcome = trainer.fit()
        finally:
            if recorder is not None:
                recorder.close()
    finally:
        leave_team()
    return outcome if team.leads else None


@contextmanager
def quick_kernels(device: torch.device) -> Iterator[None]:
    """On a GPU: TensorFloat-32 where float32 is multiplied, and no cuDNN attention, which plans anew for each shape."""
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def _open_run(run: Path, settings: Train, prepared: PreparedData, team: Team, resume: bool) -> tuple[Train, About]:
    if resume:
        settings, about = read_run(run)
        if about.fingerprint != prepared.fingerprint:
            raise InputError(
                f"{run} was trained on other data than {prepared.folder} holds now; name the folder {about.data}, or "
                f"start a new run"
            )
        return settings, about
    if team.leads:
        if run.exists() and (not run.is_dir() or any(run.iterdir())):
            again = "add --resume to go on with it" if is_run(run) and list_steps(run) else "name another --run"
            if not is_run(run) or list_steps(run):
                raise InputError(f"{run} exists already; {again}")
        create_run(run, settings, prepared)
    team.wait()
    return read_run(run)


def _describe(trainer: Trainer, about: About) -> str:
    parameters = sum(p.numel() for p in trainer.model.parameters())
    batches = trainer.batches
    scale = f", g starts at {about.scale_init:.3f} (L = {about.scale_length:g})" if about.scale_init else ""
    return (
        f"{about.source} → {about.target}: {parameters:,} parameters, {about.vocabulary:,} types{scale}; "
        f"{len(batches.batches):,} batches an epoch on {trainer.team.device}, "
        f"{str(trainer.stepper.precision).removeprefix('torch.')}"
    )
