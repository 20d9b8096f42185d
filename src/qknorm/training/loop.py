"""The training loop: step, evaluate, save, stop, and go on exactly where it stopped."""

import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from qknorm.config import Optimisation
from qknorm.errors import InputError
from qknorm.training import checkpoint, parallel
from qknorm.training.curves import draw_curves
from qknorm.training.diagnosis import name_first_bad_part
from qknorm.training.fast import choose_fast
from qknorm.training.interruption import CalledOff, Interruption
from qknorm.training.metrics import BLEU, Criterion
from qknorm.training.parallel import Team
from qknorm.training.place import Place
from qknorm.training.record import Recorder, read_metrics
from qknorm.training.run_folder import clear_half_written
from qknorm.training.schedule import LearningRate
from qknorm.training.snapshot import Snapshot, take_snapshot
from qknorm.training.step import BatchTensors, Sums, TrainingStep
from qknorm.training.task import STOPPED, Measured, Observer, Task
from qknorm.training.writer import Writer

SECONDS_BETWEEN_SIGNS = 1.0
SECONDS_BETWEEN_SAVES = 10.0
"""On a GPU, where evaluations may follow each other faster than checkpoints are written; best ones are always saved."""


@dataclass(frozen=True)
class Outcome:
    """How a training ended."""

    reason: str
    step: int
    best_step: int
    best_score: float
    seconds: float
    interrupted: bool = False
    criterion: Criterion = BLEU
    """What the score is."""


class TrainingDiverged(InputError):
    """The loss is no number any more."""


@dataclass
class Trainer:
    """One training from its start or a checkpoint to its end; every process of a team has one."""

    run: Path
    settings: Optimisation
    task: Task
    team: Team
    recorder: Recorder | None
    observer: Observer | None = None
    place: Place = field(default_factory=Place)

    def __post_init__(self) -> None:
        settings, device = self.settings, self.team.device
        self.criterion = self.task.criterion
        self.place.best_score = self.criterion.worst
        torch.manual_seed(settings.seed)
        self.model = self.task.build_model(device)
        self.spread = parallel.spread(self.model, self.team, settings.parallel)
        self.stepper = TrainingStep(
            self.spread.module, self.model, settings, device, self.task.objective(), choose_fast(self.model, settings)
        )
        self.group = self.team.size * settings.accumulate
        self.batches = self.task.batches(device, self.group)
        self.rate = LearningRate(settings.schedule, self.model.settings.width, settings.max_steps)
        self._interruption = Interruption(self.recorder.tell_of_signal if self.recorder else None)
        self._writer = Writer()
        self._saved_step = self._evaluated_step = -1
        self._saved_at = -math.inf
        self._latest: BatchTensors
        self._seconds_before = 0.0
        self._began = self._logged_at = self._shown_at = time.perf_counter()

    # ------------------------------------------------------------------ steps

    def fit(self) -> Outcome:
        """Trains until a reason to stop; a signal saves and leaves."""
        with closing(self.batches):
            self.model.train()
            self.stepper.prepare(self.batches.shapes)
            self._began = self._logged_at = time.perf_counter()
            return self._go_on()

    def _go_on(self) -> Outcome:
        # left by an error too, nobody may write to a run folder that others then take up
        with self._interruption, self._writer:
            while True:
                if self.place.evaluation_due:
                    if not self._evaluate():
                        reason = None
                        break
                    self._save_if_due()
                reason = self._reason_to_stop()
                called_off = self._agreed(self._interruption.name is not None)
                if reason or called_off:
                    break
                self._take_step()
                self.place.evaluation_due = self.place.step % self.settings.evaluate_every == 0
            if reason and self._evaluated_step != self.place.step:
                self.place.evaluation_due = True
                reason = reason if self._evaluate() else None
            if self._saved_step != self.place.step:
                self._save()
            self._end_writing()
        if self.recorder is not None and read_metrics(self.run):
            draw_curves(self.run, self.run / "curves.png")
        place = self.place
        return Outcome(
            reason or f"stopped by {self._interruption.name or 'a signal'}",
            place.step,
            place.best_step,
            place.best_score,
            self._elapsed(),
            interrupted=reason is None,
            criterion=self.criterion,
        )

    def _take_step(self) -> None:
        place, training = self.place, self.settings
        self.batches.start_epoch(place.epoch)  # first: after a resume the order at hand is that of epoch 0
        if place.position + self.group > len(self.batches):  # what is left over makes no whole step
            place.epoch, place.position = place.epoch + 1, 0
            self.batches.start_epoch(place.epoch)
        # an epoch that is cut anew may have fewer batches than the first: then a step takes some of them twice
        chosen = [at % len(self.batches) for at in range(place.position, place.position + self.group)]
        place.position += self.group
        place.step += 1
        # dropout depends on seed, step and process alone, so that going on from a checkpoint needs no more than these
        torch.manual_seed((training.seed * 1_000_003 + place.step) * 1_009 + self.team.rank)
        tokens = sum(self.batches.tokens(position) for position in chosen)
        tensors = [self.batches.tensors(position) for position in chosen[self.team.rank :: self.team.size]]
        self._latest = tensors[-1]
        self.stepper(tensors, tokens, self.rate.at(place.step), self.team.size)
        if self.team.device.type == "cpu" and self.stepper.sums[4] > 0:
            self._give_up(float(self.stepper.sums[0]))
        if self.observer is not None and training.inspect_every and place.step % training.inspect_every == 0:
            self._observe(self.observer)
        if place.step % training.log_every == 0:
            self._log()
        else:
            self._show_sign_of_life()

    def _log(self) -> None:
        self.team.pool(self.stepper.sums)
        sums = self.stepper.read_sums()
        self.place.loss = sums.smoothed / max(1, sums.tokens)
        if self.team.agree(sums.bad_steps > 0):
            self._give_up(sums.smoothed)
        now = time.perf_counter()
        seconds, self._logged_at, self._shown_at = now - self._logged_at, now, now
        if self.recorder is not None:
            self.recorder.log_step(**self._row_of(sums, seconds))

    def _observe(self, observer: Observer) -> None:
        if self.team.device.type == "cuda":
            torch.cuda.synchronize(self.team.device)  # the steps under way are not the observer's time
        began = time.perf_counter()
        if self.team.leads or self._jointly:
            with self.stepper.autocast():
                heads, means, warnings = observer(self.place.step, self.model, *self._latest[:-1])
            if self.recorder is not None:
                self.recorder.log_attention(self.place.step, heads, means)
                for text in warnings:
                    self.recorder.message(text, "yellow")
        self._logged_at += time.perf_counter() - began

    def _show_sign_of_life(self) -> None:
        """The step between two logs, now and then; its loss on the CPU alone, since a GPU would be waited for."""
        now = time.perf_counter()
        if self.recorder is None or now - self._shown_at < SECONDS_BETWEEN_SIGNS:
            return
        self._shown_at = now
        place, sums = self.place, self.stepper.sums
        loss = float(sums[0] / sums[2].clamp(min=1)) if self.team.device.type == "cpu" else None
        self.recorder.show_step(place.step, place.epoch, self.rate.at(place.step), loss)

    def _row_of(self, sums: Sums, seconds: float) -> dict[str, Any]:
        place = self.place
        plain = sums.plain / max(1, sums.tokens)
        return {
            "step": place.step,
            "epoch": place.epoch,
            "loss": place.loss,
            "perplexity": math.exp(min(plain, 700.0)),
            "tokens_per_second": sums.tokens / seconds,
            "learning_rate": self.rate.at(place.step),
            "seconds_left": self._seconds_left(seconds * self.team.size / max(1, sums.steps)),
            "time": {"elapsed": self._elapsed()},
        }

    def _elapsed(self) -> float:
        return self._seconds_before + time.perf_counter() - self._began

    def _seconds_left(self, seconds_a_step: float) -> float | None:
        """To the last step that the settings allow; a plateau or early stopping may end it sooner."""
        training = self.settings
        steps = [training.max_steps]
        if training.max_evaluations is not None:
            steps.append(training.max_evaluations * training.evaluate_every)
        left = (min(steps) - self.place.step) * seconds_a_step
        return left if training.max_minutes is None else min(left, 60 * training.max_minutes - self._elapsed())

    # ------------------------------------------------------------------ evaluating and stopping

    def _evaluate(self) -> bool:
        """Whether it came to its end, and no signal stopped it."""
        place, began = self.place, time.perf_counter()
        result = self._measure() if self.team.leads or self._jointly else None
        result = self.team.share(result)
        if result is None:
            self._give_up(math.nan)
        if not result.numbers:
            return False
        place.evaluations, place.evaluation_due, self._evaluated_step = place.evaluations + 1, False, place.step
        score = self.criterion.score(result.value)
        better = score > self.criterion.score(place.best_score)
        if better:
            place.best_score, place.best_step, place.since_best = result.value, place.step, 0
        else:
            place.since_best += 1
        rate = self.rate.at(place.step)
        self.rate.evaluated(place.step, score)
        scales = self.spread.scales()
        if self.recorder is not None:
            self.recorder.log_evaluation(
                {
                    "step": place.step,
                    "epoch": place.epoch,
                    "loss": place.loss,
                    **result.numbers,
                    "learning_rate": rate,
                    "best": better,
                    "scales": scales,
                    "seconds": time.perf_counter() - began,
                    "time": {"elapsed": self._elapsed()},
                }
            )
        self._logged_at += time.perf_counter() - began  # tokens a second are of training alone
        return True

    @property
    def _jointly(self) -> bool:
        """Whether every process holds a share of the model, so that only all of them together can run it."""
        return self.settings.parallel == "fsdp" and self.team.size > 1

    def _measure(self) -> Measured | None:
        """An evaluation on dev; None where it gives no numbers, STOPPED where a signal came before its last batch."""
        try:
            self._leave_if_asked()
            measured = self.task.evaluate(self._show_progress)
        except FloatingPointError:
            return None
        except CalledOff:
            return STOPPED
        return measured if all(map(math.isfinite, measured.numbers.values())) else None

    def _show_progress(self, stage: str, done: int, total: int | None) -> None:
        if self.recorder is not None:
            self.recorder.show_progress(stage, done, total)
        self._leave_if_asked()

    def _leave_if_asked(self) -> None:
        if self._interruption.name is not None and not self._jointly:  # together, none may leave before the others
            raise CalledOff

    def _reason_to_stop(self) -> str | None:
        place, training = self.place, self.settings
        if place.step >= training.max_steps:
            return f"reached training.max_steps ({training.max_steps:,})"
        if training.max_evaluations is not None and place.evaluations >= training.max_evaluations:
            return f"reached training.max_evaluations ({training.max_evaluations:,})"
        if self.rate.ended(place.step):
            return f"the learning rate fell under its floor ({training.schedule.floor:g})"
        if training.stop_after is not None and place.since_best >= training.stop_after:
            return f"{self.criterion.stagnation} for {training.stop_after} evaluations"
        if training.max_minutes is not None and self._agreed(self._elapsed() >= 60 * training.max_minutes):
            return f"reached training.max_minutes ({training.max_minutes:g})"
        return None

    def _agreed(self, flag: bool) -> bool:
        """Whether any process says yes, asked at few steps, since asking everybody costs a message."""
        return self.team.agree(flag) if self.team.size == 1 or self.place.step % 10 == 0 else False

    def _give_up(self, loss: float) -> NoReturn:
        """Says what went wrong; saves the weights, which no bad step has touched, if their loss was still a number."""
        with self.stepper.autocast():
            culprit = name_first_bad_part(self.model, *self._latest[:-1])
        self.stepper.sums[4] = 0  # who resumes is to be stopped by new bad steps alone
        if not self.team.agree(not math.isfinite(loss)):
            self._save()
        self._end_writing()
        steps = checkpoint.list_steps(self.run)
        kept = f"the last good weights are those of step {steps[-1]} in {self.run}" if steps else "no step was good"
        raise TrainingDiverged(
            f"step {self.place.step}: the loss is not finite; {culprit}; {kept}; lower training.schedule.peak or "
            f"lengthen training.schedule.warmup"
        )

    # ------------------------------------------------------------------ checkpoints

    @property
    def _saves_beside(self) -> bool:
        """Whether checkpoints are written while training goes on."""
        return self.team.device.type != "cpu" and self.team.size == 1

    def _save_if_due(self) -> None:
        soon = self._writer.busy or time.perf_counter() - self._saved_at < SECONDS_BETWEEN_SAVES
        if not (self._saves_beside and soon and self.place.best_step != self.place.step):
            self._save()

    def _save(self) -> None:
        began = time.perf_counter()
        if self.place.best_step != self.place.step:
            self._end_writing()  # the best, which may not be written yet, keeps its place in the queue
        self.team.pool(self.stepper.sums)
        if self.team.agree(bool(self.stepper.sums[4] > 0)):  # on a GPU nobody has looked since the last log
            self._give_up(float(self.stepper.sums[0]))
        snapshot = take_snapshot(self.spread, self.stepper.optimizer, self.stepper.sums, self._saves_beside)
        place = asdict(self.place)
        if place["best_score"] == self.criterion.worst:
            place["best_score"] = None  # JSON has no infinity
        state = {"place": place, "rate": {"factor": self.rate.factor, "scores": list(self.rate.scores)}}

        def write() -> None:
            self._write(place["step"], place["best_step"], snapshot.on_cpu(), state)

        self.team.lead(lambda: self._writer.submit(write, wait=self.team.device.type == "cpu"))
        self._saved_step, self._saved_at = self.place.step, time.perf_counter()
        self._logged_at += time.perf_counter() - began

    def _end_writing(self) -> None:
        """Returns when nothing is left to write; where that went wrong, it goes wrong for all of the team."""
        self.team.lead(self._writer.wait)

    def _write(self, step: int, best_step: int, snapshot: Snapshot, state: dict[str, Any]) -> None:
        checkpoint.save_checkpoint(self.run, step, snapshot.model, snapshot.training, state)
        if best_step == step:
            checkpoint.mark_best(self.run, step)
        self._prune()

    def _prune(self) -> None:
        checkpoint.prune(self.run, self.settings.keep, self.settings.evaluate_every)

    def resume(self) -> Sequence[str]:
        """Goes back to the newest sound checkpoint; returns a sentence for each damaged one passed over."""
        found, complaints = checkpoint.load_newest_sound(self.run)
        if self.team.leads:
            self._tidy(found)
        if found is None:
            self.team.wait()
            return complaints
        self.spread.restore(found.model, found.training, self.stepper.optimizer)
        sums = found.training["sums"]
        if self.team.leads and sums.isfinite().all() and sums[4] == 0:  # bad steps of the past must not stop us again
            self.stepper.sums.copy_(sums)
        place = found.state["place"]
        place["best_score"] = self.criterion.worst if place["best_score"] is None else place["best_score"]
        self.place = Place(**place)
        if self.place.evaluation_due:  # then it is saved anew; a batch is there to look into if it gives no number
            self.batches.start_epoch(self.place.epoch)
            self._latest = self.batches.tensors(0)
        else:
            self._saved_step = self._evaluated_step = found.step
        self.rate.factor, self.rate.scores = found.state["rate"]["factor"], list(found.state["rate"]["scores"])
        self.team.wait()
        self._seconds_before = _seconds_so_far(self.run)
        if self.observer is not None:
            self.observer.recall(read_metrics(self.run))
        return complaints

    def _tidy(self, found: checkpoint.Checkpoint | None) -> None:
        """Makes the run folder what it was right after the checkpoint: its training may have died before or after."""
        step = found.step if found else -1
        clear_half_written(self.run)
        checkpoint.discard_after(self.run, step)
        if found and found.state["place"]["best_step"] in checkpoint.list_steps(self.run):
            checkpoint.mark_best(self.run, found.state["place"]["best_step"])
        if found:
            self._prune()
        if self.recorder is not None:
            self.recorder.truncate_to(step)


def _seconds_so_far(run: Path) -> float:
    times = [row["time"].get("elapsed", 0.0) for row in read_metrics(run) if "time" in row]
    return float(max(times, default=0.0))
