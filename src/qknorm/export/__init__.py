"""A trained translator for other runtimes: what writes a folder for each of them, and what translates with it."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from qknorm.errors import InputError

if TYPE_CHECKING:
    from qknorm.export.texts import EngineTranslator
    from qknorm.training.checkpoint import Which

Target = Literal["onnx", "huggingface", "ctranslate2"]
"""What a folder can be for: `write_folder` of the module of that name fills it."""
ENGINES = {"onnx": "OnnxTranslator", "ctranslate2": "CTranslate2Translator"}
"""Those that translate without PyTorch, and the class `(folder, *, threads)` in the module NAME_engine that does so."""


def export_run(
    target: Target, run: Path, out: Path, *, checkpoint: "Which | Path" = "best", quantize: str | None = None
) -> None:
    """Writes a run as a folder for another runtime; what cannot be exported leaves nothing."""
    from qknorm.files import atomic_folder  # here and not above: engines do without PyTorch
    from qknorm.training.run_folder import check_quantize, load_translator

    check_quantize(quantize)
    if quantize and target == "huggingface":
        raise InputError("--quantize is for onnx and ctranslate2; leave it out, or export to one of these")
    translator = load_translator(run, checkpoint=checkpoint, device="cpu")
    options = {"quantize": quantize} if quantize else {}
    with atomic_folder(out) as folder:
        import_module(f"qknorm.export.{target}").write_folder(translator, folder, **options)


def load_engine(name: str, folder: str | Path, *, threads: int | None = None) -> "EngineTranslator":
    """A translator that runs an exported folder; it imports the runtime and not PyTorch."""
    kind = getattr(import_module(f"qknorm.export.{name}_engine"), ENGINES[name])
    translator: EngineTranslator = kind(Path(folder), threads=threads)
    return translator
