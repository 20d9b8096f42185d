"""A trained translator for other runtimes: what writes a folder for each of them, and what translates with it."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qknorm.export.texts import EngineTranslator

EXPORTERS = {
    "onnx": "qknorm.export.onnx",
    "huggingface": "qknorm.export.huggingface",
    "ctranslate2": "qknorm.export.ctranslate2",
}
"""Targets and the modules whose `export(run, out, **options)` writes a folder for them."""

ENGINES = {
    "onnx": ("qknorm.export.engine", "OnnxTranslator"),
    "ctranslate2": ("qknorm.export.ctranslate2_engine", "CTranslate2Translator"),
}
"""Runtimes that translate without PyTorch, and the class `(folder, *, threads)` that does so with each."""


def load_engine(name: str, folder: str | Path, *, threads: int | None = None) -> "EngineTranslator":
    """A translator that runs an exported folder; it imports the runtime and not PyTorch."""
    module, kind = ENGINES[name]
    translator: EngineTranslator = getattr(import_module(module), kind)(Path(folder), threads=threads)
    return translator
