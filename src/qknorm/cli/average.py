"""`qknorm average`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from qknorm.cli.display import console, parse
from qknorm.errors import InputError
from qknorm.training.checkpoint import average_checkpoints, list_steps, save_weights
from qknorm.training.record import read_metrics
from qknorm.training.run_folder import read_run


@dataclass(frozen=True)
class Arguments:
    """Writes the mean of several checkpoints of a run as a file of weights.

    Examples:

      qknorm average runs/gl-en --last 3

      qknorm translate runs/gl-en --checkpoint runs/gl-en/averaged.safetensors --input news.gl
    """

    run: tyro.conf.Positional[Path]
    """Run folder; training.keep says how many checkpoints it keeps."""
    last: int | None = None
    """Take the last so many checkpoints."""
    best: int | None = None
    """Take the so many with the best dev BLEU among those kept."""
    out: Path | None = None
    """File to write; averaged.safetensors in the run folder if not given."""


def run(words: Sequence[str]) -> None:
    """Parses, chooses, averages."""
    arguments: Arguments = parse(Arguments, words, "average")
    read_run(arguments.run)
    steps = choose_steps(arguments.run, arguments.last, arguments.best)
    out = arguments.out or arguments.run / "averaged.safetensors"
    save_weights(out, average_checkpoints(arguments.run, steps), {"steps": " ".join(map(str, steps))})
    console.print(f"{out}: the mean of steps {', '.join(f'{step:,}' for step in steps)}", soft_wrap=True)


def choose_steps(run: Path, last: int | None, best: int | None) -> list[int]:
    """The checkpoints asked for; all that are kept if nothing is said."""
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
        bleu = {row["step"]: row["dev_bleu"] for row in read_metrics(run) if row["kind"] == "evaluation"}
        steps = sorted(sorted(steps, key=lambda step: -(bleu.get(step) or 0.0))[:count])
    return steps[-count:]
