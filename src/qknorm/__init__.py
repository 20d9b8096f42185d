"""Attention whose logits cannot saturate the softmax, from the formula to a deployed translator."""

from importlib import import_module
from typing import TYPE_CHECKING

from qknorm.errors import InputError
from qknorm.version import __version__

if TYPE_CHECKING:
    from qknorm.attention import (
        KeyValueCache,
        MultiheadAttention,
        QKNorm,
        attend,
        attend_with_weights,
        initial_scale,
        lp_normalize,
        matched_scale,
    )
    from qknorm.attention.adopt import Adoption, adopt
    from qknorm.config import Prepare, Train, TrainLanguageModel
    from qknorm.decoding.generate import TextGenerator
    from qknorm.decoding.translate import TextTranslator
    from qknorm.inspection.measures import Measures, measure
    from qknorm.inspection.monitor import AttentionMonitor, capture
    from qknorm.scoring import ScoringOptions, compare, score, score_report
    from qknorm.studies.recipes import preset
    from qknorm.text.prepare import prepare
    from qknorm.text.prepared import PreparedData
    from qknorm.text.subwords import Tokenizer
    from qknorm.training.averaging import average
    from qknorm.training.fit import train
    from qknorm.training.loading import load

__all__ = [
    "Adoption",
    "AttentionMonitor",
    "InputError",
    "KeyValueCache",
    "Measures",
    "MultiheadAttention",
    "Prepare",
    "PreparedData",
    "QKNorm",
    "ScoringOptions",
    "TextGenerator",
    "TextTranslator",
    "Tokenizer",
    "Train",
    "TrainLanguageModel",
    "__version__",
    "adopt",
    "attend",
    "attend_with_weights",
    "average",
    "capture",
    "compare",
    "initial_scale",
    "load",
    "lp_normalize",
    "matched_scale",
    "measure",
    "prepare",
    "preset",
    "score",
    "score_report",
    "train",
]

# imported when first asked for: whoever wants attention alone waits for torch and nothing else, and engines without
# PyTorch do not even wait for that
_HOMES = {
    "qknorm.attention": (
        "KeyValueCache",
        "MultiheadAttention",
        "QKNorm",
        "attend",
        "attend_with_weights",
        "initial_scale",
        "lp_normalize",
        "matched_scale",
    ),
    "qknorm.attention.adopt": ("Adoption", "adopt"),
    "qknorm.config": ("Prepare", "Train", "TrainLanguageModel"),
    "qknorm.decoding.generate": ("TextGenerator",),
    "qknorm.decoding.translate": ("TextTranslator",),
    "qknorm.inspection.measures": ("Measures", "measure"),
    "qknorm.inspection.monitor": ("AttentionMonitor", "capture"),
    "qknorm.scoring": ("ScoringOptions", "compare", "score", "score_report"),
    "qknorm.studies.recipes": ("preset",),
    "qknorm.text.prepare": ("prepare",),
    "qknorm.text.prepared": ("PreparedData",),
    "qknorm.text.subwords": ("Tokenizer",),
    "qknorm.training.averaging": ("average",),
    "qknorm.training.fit": ("train",),
    "qknorm.training.loading": ("load",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
