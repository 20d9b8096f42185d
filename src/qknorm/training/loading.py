"""A trained model by one call, whatever it was trained for."""

from pathlib import Path
from typing import Any

from qknorm.training.checkpoint import Which
from qknorm.training.language_run import load_generator
from qknorm.training.run_folder import LANGUAGE_MODEL, task_of
from qknorm.training.run_folder import load as load_translator


def load(
    run: str | Path, *, checkpoint: Which | Path = "best", device: str | None = None, precision: str = "float32"
) -> Any:
    """A trained model from its run folder: a `TextTranslator`, or of a language model a `TextGenerator`.

    `checkpoint` is best, last, a step, or a file of weights that `qknorm average` wrote; `precision` is float32 or
    bfloat16, faster where the processor has instructions for it.
    """
    load_this = load_generator if task_of(Path(run)) == LANGUAGE_MODEL else load_translator
    return load_this(run, checkpoint=checkpoint, device=device, precision=precision)
