"""The mean of several checkpoints of a run, as a file of weights."""

import math
from pathlib import Path

from qknorm.errors import InputError
from qknorm.training.checkpoint import average_checkpoints, list_steps, save_weights
from qknorm.training.metrics import BLEU, NATS, Criterion, read_metrics
from qknorm.training.run_folder import LANGUAGE_MODEL, task_of


def average(
    run: str | Path, *, last: int | None = None, best: int | None = None, out: str | Path | None = None
) -> tuple[Path, list[int]]:
    """Writes the mean of the last, or of the best, so many checkpoints; returns the file and the steps in it.

    `load(run, checkpoint=file)` uses it. Without a number all checkpoints that the run keeps are averaged.
    """
    run = Path(run)
    steps = choose_steps(run, last, best, NATS if task_of(run) == LANGUAGE_MODEL else BLEU)
    path = run / "averaged.safetensors" if out is None else Path(out)
    save_weights(path, average_checkpoints(run, steps), {"steps": " ".join(map(str, steps))})
    return path, steps


def choose_steps(run: Path, last: int | None, best: int | None, criterion: Criterion) -> list[int]:
    """The checkpoints asked for, the best by `criterion`; all that are kept if nothing is said."""
    steps = list_steps(run)
    if last is not None and best is not None:
        raise InputError("give --last or --best, not both")
    count = next((given for given in (last, best) if given is not None), len(steps))
    if not steps:
        raise InputError(f"{run} has no checkpoint yet; train it first")
    if count < 1:
        raise InputError(f"{'--last' if best is None else '--best'} is at least 1, not {count}")
    if count > len(steps):
        raise InputError(f"{run} keeps {len(steps)} checkpoints, not {count}; train with a larger --training.keep")
    if best:
        found = {row["step"]: row[criterion.field] for row in read_metrics(run) if row["kind"] == "evaluation"}
        scores = {step: criterion.score(value) for step, value in found.items() if value is not None}
        steps = sorted(sorted(steps, key=lambda step: -scores.get(step, -math.inf))[:count])
    return steps[-count:]
