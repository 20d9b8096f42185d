"""Trains one stack of runs from start to end and measures it at fixed intervals."""

import math
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qknorm.models.language_model import LanguageModel
from qknorm.studies.lp.corpus import Text
from qknorm.studies.lp.design import STREAMS, LpStudy, Run, fingerprint, run_seed
from qknorm.studies.lp.evaluation import Evaluator
from qknorm.studies.lp.folds import cover, draw_starts, make_folds
from qknorm.studies.lp.records import Point, Record
from qknorm.studies.lp.stack import FusedStack, Layers, Stack
from qknorm.training.run_folder import versions

OnProgress = Callable[[int, int, float | None], None]
"""Told the iterations done, all of them, and the mean validation loss of the stack where it has just been measured."""


@dataclass(frozen=True)
class Execution:
    """How stacks are run; nothing here changes what is learned, but for the order of additions and what is dropped."""

    device: str = "cpu"
    layers: Layers = "plain"
    streams: int = STREAMS

    def facts(self) -> dict[str, str]:
        """What a run's record says of it: runs that agree in this take about as long."""
        device = torch.device(self.device)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        return {"device": f"{device.type} ({name})", "layers": self.layers}


def train_stack(
    runs: Sequence[Run], study: LpStudy, text: Text, execution: Execution, on_progress: OnProgress | None = None
) -> list[Record]:
    """Trains these runs together; `study.precision` must be resolved. The caller's random numbers are left alone."""
    device = torch.device(execution.device)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), _current(device):
        stack = make_stack(runs, study, text, execution)
        evaluators = [_make_evaluator(run, study, text, device) for run in runs]
        curves: list[list[Point]] = [[] for _ in runs]
        seconds, done = 0.0, 0
        for goal in evaluation_points(study):
            seconds += _timed_steps(stack, goal - done, device)
            means = [loss / (goal - done) if goal > done else math.nan for loss in stack.read_losses()]
            done = goal
            for number, (evaluator, curve) in enumerate(zip(evaluators, curves, strict=True)):
                curve.append(_measure(evaluator, stack.state(number), done, means[number]))
            if on_progress is not None:
                on_progress(done, study.iterations, math.fsum(curve[-1].validation for curve in curves) / len(curves))
        skipped = stack.skipped_steps()
    milliseconds = 1_000 * seconds / study.iterations / len(runs)
    maker = {"versions": versions(), **execution.facts(), "models_in_stack": len(runs)}
    mark = fingerprint(study, text.digest)
    return [
        Record(run, mark, tuple(curve), milliseconds, maker, left_out)
        for run, curve, left_out in zip(runs, curves, skipped, strict=True)
    ]


def evaluation_points(study: LpStudy) -> list[int]:
    """The iterations after which runs are measured: before the first, at every interval, and at the end."""
    return sorted({*range(0, study.iterations, study.evaluate_every), study.iterations})


def make_stack(runs: Sequence[Run], study: LpStudy, text: Text, execution: Execution) -> Stack:
    """The models of these runs at their start, ready to take steps together."""
    device = torch.device(execution.device)
    folds = make_folds(len(text.ids), study.fold_count, study.model.context)
    models, random_states = [], []
    starts: list[Tensor] = []
    for run in runs:
        seed = run_seed(study, run.fold)
        starts.append(draw_starts(folds[run.fold], study.model.context, study.iterations, study.batch, seed))
        torch.manual_seed(seed)
        models.append(_new_model(run, study, text))
        random_states.append(torch.get_rng_state())
    if device.type == "cuda":
        torch.cuda.manual_seed(run_seed(study, runs[0].fold))
    kind = FusedStack if execution.layers == "fused" else Stack
    return kind(study, models, text.ids, starts, random_states, device, execution.streams)


def _new_model(run: Run, study: LpStudy, text: Text) -> LanguageModel:
    return LanguageModel(text.vocabulary, run.model_settings(study), scale_init=run.scale_start(study))


def _make_evaluator(run: Run, study: LpStudy, text: Text, device: torch.device) -> Evaluator:
    fold = make_folds(len(text.ids), study.fold_count, study.model.context)[run.fold]
    return Evaluator(study, _new_model(run, study, text), cover(text.ids, fold.held_out, study.model.context), device)


def _timed_steps(stack: Stack, steps: int, device: torch.device) -> float:
    """Seconds until the device has ended so many steps."""
    _wait_for(device)
    started = time.perf_counter()
    stack.run(steps)
    _wait_for(device)
    return time.perf_counter() - started


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Within it streams, recordings and Triton's kernels, which ask for no device, are those of this one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _measure(evaluator: Evaluator, state: dict[str, Tensor], iteration: int, training: float) -> Point:
    by_layer = {name: tuple(values) for name, values in evaluator.attention(state).items()}
    return Point(iteration, evaluator.validation_loss(state), training, **by_layer)
