"""A trained model by one call, whatever it was trained for."""

from pathlib import Path
from typing import Any

from qknorm.errors import InputError
from qknorm.training.checkpoint import Which
from qknorm.training.language_run import load_generator
from qknorm.training.run_folder import LANGUAGE_MODEL, load_translator, task_of


def load(
    run: str | Path,
    *,
    checkpoint: Which | Path = "best",
    device: str | None = None,
    precision: str = "float32",
    quantize: str | None = None,
) -> Any:
    """A trained model from its run folder: a `TextTranslator`, or of a language model a `TextGenerator`.

    `checkpoint` is best, last, a step, or a file of weights that `qknorm average` wrote; `precision` is float32 or
    bfloat16, faster where the processor has instructions for it; `quantize` is int8, for translators on a CPU.
    """
    if task_of(Path(run)) != LANGUAGE_MODEL:
        return load_translator(run, checkpoint=checkpoint, device=device, precision=precision, quantize=quantize)
    if quantize is not None:
        raise InputError(f"{run} holds a language model, and only translators compute in {quantize}; leave it out")
    return load_generator(run, checkpoint=checkpoint, device=device, precision=precision)
