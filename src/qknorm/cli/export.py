"""`qknorm export`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from qknorm.cli.display import console, parse, suggest
from qknorm.cli.translate import refuse_exported, which_checkpoint
from qknorm.errors import InputError
from qknorm.export import ENGINES, Target, export_run
from qknorm.export.card import CARD


@dataclass(frozen=True)
class Arguments:
    """Writes a trained translator as a folder that another runtime loads.

    Examples:

      qknorm export runs/gl-en --to onnx

      qknorm export runs/gl-en --to onnx --quantize int8 --output gl-en-int8

      qknorm translate gl-en-int8 --engine onnx --input news.gl --output news.en
    """

    run: tyro.conf.Positional[Path]
    """Run folder that `qknorm train` wrote."""
    to: Target
    """What the folder is for: ONNX Runtime, Hugging Face transformers, or CTranslate2."""
    output: Path | None = None
    """Folder to write; the run's name with that of the target behind it if not given."""
    checkpoint: str = "best"
    """best, last, a step, or a .safetensors file that `qknorm average` wrote."""
    quantize: Literal["int8"] | None = None
    """Write linear layers in 8-bit integers: smaller and faster, at a small loss; not for huggingface."""


def run(words: Sequence[str]) -> None:
    """Parses and leaves the rest to the module of the target."""
    arguments: Arguments = parse(Arguments, words, "export")
    refuse_exported(arguments.run)
    out = arguments.output or _beside(arguments.run, arguments.to)
    _check(out)
    checkpoint = which_checkpoint(arguments.checkpoint)
    export_run(arguments.to, arguments.run, out, checkpoint=checkpoint, quantize=arguments.quantize)
    console.print(f"{out}: written for {arguments.to}", markup=False, soft_wrap=True)
    if arguments.to in ENGINES:
        suggest("Translate with it", "qknorm", "translate", out, "--engine", arguments.to)


def _beside(run_folder: Path, target: str) -> Path:
    """Where an export goes by default."""
    named = run_folder if run_folder.name not in ("", "..") else run_folder.resolve()  # `.` has no name of its own
    return named.with_name(f"{named.name}-{target}")


def _check(out: Path) -> None:
    """An export takes the place of another one, and of nothing else."""
    if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or (out / CARD).is_file())):
        raise InputError(f"{out} exists and is no exported translator; name another --output")
