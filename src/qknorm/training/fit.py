"""Training as one call: opens the data, lays out or reopens the run folder, joins the team, trains."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from qknorm.config import AnyTrain, Train, TrainLanguageModel
from qknorm.errors import InputError
from qknorm.text.characters import CharacterText
from qknorm.text.prepared import PreparedData
from qknorm.training.checkpoint import list_steps
from qknorm.training.language_modelling import LanguageModelTask
from qknorm.training.language_run import create_language_run, read_language_run
from qknorm.training.leftovers import alone_in
from qknorm.training.loop import Outcome, Trainer
from qknorm.training.parallel import Team, join_team, leave_team
from qknorm.training.record import Recorder
from qknorm.training.run_folder import (
    LANGUAGE_MODEL,
    SETTINGS,
    TRANSLATOR,
    About,
    Facts,
    create_run,
    is_run,
    is_unborn,
    read_run,
    task_of,
)
from qknorm.training.task import Observer, Task
from qknorm.training.translation import TranslationTask

MOST_FOR_A_CPU = 10_000_000
"""Parameters of a model from which on a CPU trains for hours to days."""
TOO_LARGE = (
    "on a CPU a model of this size takes seconds for a step, and hours to days in all; the presets low-resource-small "
    "(translation) and character-lm-small (plain text) are of a size for it"
)


def train(
    data: str | Path,
    run: str | Path,
    settings: AnyTrain | None = None,
    *,
    resume: bool = False,
    device: str | None = None,
    quiet: bool = False,
    observer: Observer | None = None,
    remark: str = "",
) -> Outcome | None:
    """Trains a translator on a prepared folder, or a language model on a text file; returns how it ended.

    A new run needs `settings`, such as `qknorm.preset("low-resource")` for a folder and `qknorm.preset("character-lm")`
    for a text, the command's defaults; with `resume` a run goes on from its newest checkpoint by its own, exactly as if
    it had never stopped. Processes that do not lead a team get None. An `observer`, such as
    `qknorm.inspection.observer.AttentionObserver`, is shown the model every `training.inspect_every` steps. A
    `remark` is shown once the training begins.
    """
    data, run = Path(data), Path(run)
    kind = _kind_of(data)
    opened = kind.open(data)
    team = join_team(device)
    alone = ExitStack()
    try:
        if team.device.type == "cuda":  # Triton starts kernels on the current GPU
            alone.enter_context(torch.cuda.device(team.device))
        own, facts = _open_run(kind, run, settings, data, opened, team, resume, alone)
        training, task = own.training, kind.task(own, facts, opened)
        recorder = None
        if team.leads:
            recorder = Recorder(run, tensorboard=training.tensorboard, quiet=quiet, criterion=task.criterion)
        try:
            trainer = Trainer(run, training, task, team, recorder, observer)
            if recorder is not None and not resume:
                recorder.truncate_to(-1)  # a training may have died here before its first checkpoint
            if resume:
                for complaint in trainer.resume():
                    if recorder is not None:
                        recorder.message(complaint, "yellow")
            if recorder is not None and not quiet:
                _introduce(recorder, trainer, facts, remark)
            with quick_kernels(team.device, exact=training.precision == "float32"):
                outcome = trainer.fit()
                team.wait()  # who leaves while others still talk can bring them down
        finally:
            if recorder is not None:
                recorder.close()
    finally:
        leave_team()
        alone.close()
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


# ------------------------------------------------------------------ what is trained on what


class Opened(Protocol):
    """Data to train on; its fingerprint tells whether a run goes on with those it began with."""

    @property
    def fingerprint(self) -> str: ...


Data = TypeVar("Data", bound=Opened)
Tree = TypeVar("Tree", Train, TrainLanguageModel)
Known = TypeVar("Known", bound=Facts)


@dataclass(frozen=True)
class Kind(Generic[Data, Tree, Known]):
    """What lies between a path and a task, for one kind of data."""

    form: str
    makes: str
    example: str
    settings: type[Tree]
    open: Callable[[Path], Data]
    create: Callable[[Path, Tree, Data], Known]
    read: Callable[[Path], tuple[Tree, Known]]
    task: Callable[[Tree, Known, Data], Task]


def _open_prepared(folder: Path) -> PreparedData:
    prepared = PreparedData.load(folder)
    if "dev" not in prepared.splits:
        raise InputError(f"{folder} has no dev set to evaluate on; prepare it with --dev, or with more than ten pairs")
    return prepared


_FOLDER: Kind[PreparedData, Train, About] = Kind(
    "prepared folder", TRANSLATOR, "low-resource", Train, _open_prepared, create_run, read_run, TranslationTask
)
_TEXT: Kind[CharacterText, TrainLanguageModel, Facts] = Kind(
    "text file",
    LANGUAGE_MODEL,
    "character-lm",
    TrainLanguageModel,
    CharacterText.load,
    create_language_run,
    read_language_run,
    LanguageModelTask,
)


def _kind_of(data: Path) -> Kind[Any, Any, Any]:
    if not data.exists():
        raise InputError(f"{data} does not exist; name a folder that qknorm prepare wrote, or a text file")
    return _TEXT if data.is_file() else _FOLDER


# ------------------------------------------------------------------ the run folder


def _open_run(
    kind: Kind[Any, Any, Any],
    run: Path,
    settings: AnyTrain | None,
    data: Path,
    opened: Opened,
    team: Team,
    resume: bool,
    alone: ExitStack,
) -> tuple[AnyTrain, Facts]:
    """The settings and facts of the run, laid out anew or as they are; `alone` keeps other trainings out."""
    if settings is not None and not isinstance(settings, kind.settings):
        raise InputError(
            f"{data} is a {kind.form} and trains a {kind.makes}; give its settings, such as the preset {kind.example}"
        )
    if resume:
        found = _reopen(kind, run, settings, data, opened)
        team.lead(lambda: alone.enter_context(alone_in(run)))
        return found
    if settings is None:
        raise InputError(f'{run} would be a new run, which needs settings, such as qknorm.preset("{kind.example}")')
    team.lead(lambda: _lay_out(kind, run, settings, opened, alone))
    own, facts = kind.read(run)
    return own, facts


def _reopen(
    kind: Kind[Any, Any, Any], run: Path, settings: AnyTrain | None, data: Path, opened: Opened
) -> tuple[AnyTrain, Facts]:
    if (is_a := task_of(run)) != kind.makes:
        raise InputError(f"{run} is a {is_a}, which does not go on with the {kind.form} {data}; name its own data")
    own, facts = kind.read(run)
    if settings is not None and settings != own:
        name = _first_difference(settings.model_dump(), own.model_dump())
        change = f"set {name.rpartition('.')[-1]} in {run / SETTINGS}"
        raise InputError(
            f"{run} goes on with its own settings, and by those given {name} would be another; leave them out, or "
            f"{'begin a new run' if name.startswith('model.') else change}"
        )
    if facts.fingerprint != opened.fingerprint:
        raise InputError(
            f"{run} was trained on other data than {data} holds now; name the {kind.form} {facts.data}, or start a "
            f"new run"
        )
    return own, facts


def _lay_out(kind: Kind[Any, Any, Any], run: Path, settings: AnyTrain, opened: Opened, alone: ExitStack) -> None:
    """A new run folder, also where a training died before its first checkpoint."""
    if is_run(run):
        if list_steps(run):
            raise InputError(f"{run} exists already; add --resume to go on with it")
    elif run.exists() and not (run.is_dir() and is_unborn(run)):
        raise InputError(f"{run} exists already; name another --run")
    alone.enter_context(alone_in(run))
    kind.create(run, settings, opened)


def _first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The dotted name of the first setting that two trees do not share."""
    name = next(name for name in one if one[name] != other[name])
    deeper = isinstance(one[name], Mapping)
    return f"{name}.{_first_difference(one[name], other[name])}" if deeper else name


def _introduce(recorder: Recorder, trainer: Trainer, facts: Facts, remark: str) -> None:
    """Says what is trained, and what of it is likely a mistake."""
    parameters = sum(p.numel() for p in trainer.model.parameters())
    scale = f", g starts at {facts.scale_init:.3f} (L = {facts.scale_length:g})" if facts.scale_init else ""
    recorder.message(
        f"{trainer.task.describe()}: {parameters:,} parameters, {facts.vocabulary:,} types{scale}; "
        f"{len(trainer.batches):,} batches an epoch on {trainer.team.device}, "
        f"{str(trainer.stepper.precision).removeprefix('torch.')}"
    )
    if remark:
        recorder.message(remark, "yellow")
    if trainer.team.device.type == "cpu" and parameters > MOST_FOR_A_CPU:
        recorder.message(TOO_LARGE, "yellow")
    steps, warmup = trainer.settings.max_steps, trainer.settings.schedule.warmup
    if steps <= warmup:
        recorder.message(
            f"training.max_steps ({steps:,}) ends within the warm-up ({warmup:,} steps), so that the learning rate "
            f"only rises; lower training.schedule.warmup too",
            "yellow",
        )
