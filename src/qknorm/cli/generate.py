"""`qknorm generate`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from qknorm.cli.display import parse
from qknorm.cli.translate import which_checkpoint
from qknorm.errors import InputError

BETWEEN_SAMPLES = "\n---\n"


@dataclass(frozen=True)
class Arguments:
    """Writes text with a language model that `qknorm train` made of a text file, character by character.

    Examples:

      qknorm generate runs/shakespeare

      qknorm generate runs/shakespeare --prompt "ROMEO:" --length 1000 --temperature 0.7 --top-k 20

      qknorm generate runs/shakespeare --samples 3 --seed 7 --top-p 0.9
    """

    run: tyro.conf.Positional[Path]
    """Run folder that `qknorm train` wrote."""
    prompt: str = ""
    """What the text begins with; without it, as after the end of a line."""
    length: int | None = None
    """How many characters to write; that of the run's settings if not given."""
    temperature: float | None = None
    """Below 1 the likely grows likelier, 0 always takes the likeliest; that of the run's settings if not given."""
    top_k: int | None = None
    """Choose among so many of the likeliest characters alone."""
    top_p: float | None = None
    """Choose among the likeliest characters that together have at least this probability."""
    seed: int = 0
    """The same seed writes the same text; sample n has this seed plus n − 1."""
    samples: int = 1
    """How many texts to write, one after another."""
    checkpoint: str = "best"
    """best, last, a step, or a .safetensors file that `qknorm average` wrote."""
    device: str | None = None
    """cpu or cuda; a GPU where there is one if not given."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What to compute in; bfloat16 is faster where the processor has instructions for it."""


def run(words: Sequence[str]) -> None:
    """Parses, loads, writes."""
    arguments: Arguments = parse(Arguments, words, "generate")
    if arguments.samples < 1:
        raise InputError(f"--samples is at least 1, not {arguments.samples}")
    from qknorm.training.language_run import load_generator  # it imports PyTorch, which help does without

    generator = load_generator(
        arguments.run,
        checkpoint=which_checkpoint(arguments.checkpoint),
        device=arguments.device,
        precision=arguments.precision,
    )
    sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
    for number in range(arguments.samples):
        written = generator.stream(
            arguments.prompt,
            length=arguments.length,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            seed=arguments.seed + number,
        )
        sys.stdout.write((BETWEEN_SAMPLES if number else "") + arguments.prompt)
        for character in written:
            sys.stdout.write(character)
            sys.stdout.flush()
        sys.stdout.write("\n")
