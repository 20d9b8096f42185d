"""`qknorm average`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from qknorm.cli.display import console, parse


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
    """Take the so many with the best dev BLEU, or lowest loss of a language model, among those kept."""
    out: Path | None = None
    """File to write; averaged.safetensors in the run folder if not given."""


def run(words: Sequence[str]) -> None:
    """Parses, chooses, averages."""
    arguments: Arguments = parse(Arguments, words, "average")
    from qknorm.training.averaging import average  # it imports PyTorch, which help does without

    out, steps = average(arguments.run, last=arguments.last, best=arguments.best, out=arguments.out)
    told = f"{out}: the mean of steps {', '.join(f'{step:,}' for step in steps)}"
    console.print(told, markup=False, soft_wrap=True)
