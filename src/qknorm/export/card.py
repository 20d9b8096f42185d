"""The small JSON file beside an exported model: what a runtime needs to know that the model itself does not say."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from qknorm import files
from qknorm.errors import InputError
from qknorm.specials import END, PAD, START, UNKNOWN
from qknorm.version import __version__

FORMAT_VERSION = 1
CARD, TOKENIZER = "translator.json", "tokenizer.json"


@dataclass(frozen=True)
class Card:
    """The facts of an exported translator."""

    engine: str
    source: str
    target: str
    vocabulary: int
    longest: int
    """Tokens of the longest sentence in training; longer ones are translated in parts."""
    beam: int
    length_penalty: float
    extra_length: int
    no_repeat_ngram: int
    forbidden_types: list[int]
    """Types that are never produced: they do not occur in the target side of the training text."""
    batch_tokens: int | None = None
    """Source tokens times beam translated at a time; up to the engine if not given."""
    precision: str = "float32"
    ids: dict[str, int] = field(default_factory=lambda: {"pad": PAD, "unknown": UNKNOWN, "start": START, "end": END})
    details: dict[str, Any] = field(default_factory=dict)
    """What the engine in question wants to remember."""
    made_by: str = f"qknorm {__version__}"


def write_card(folder: Path, card: Card) -> None:
    """Writes translator.json."""
    files.write_json(folder / CARD, {"format_version": FORMAT_VERSION, **asdict(card)})


def read_card(folder: Path, engine: str) -> Card:
    """What translator.json says; refuses folders that are no export, damaged, or for another engine."""
    path, again = folder / CARD, f"write it again with qknorm export RUN --to {engine}"
    if not path.is_file():
        raise InputError(f"{folder} is no exported translator (it has no {CARD}); {again}")
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        version = facts.pop("format_version")
        card = Card(**facts) if version == FORMAT_VERSION else None
        _check(card)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(f"{path} is damaged; {again}") from None
    if card is None:
        raise InputError(f"{path} has format {version}, this version reads {FORMAT_VERSION}; {again}")
    if card.engine != engine:
        raise InputError(f"{folder} was exported for {card.engine}, not {engine}; {again}")
    return card


def _check(card: Card | None) -> None:
    """Raises `ValueError` where a fact that engines count on is of the wrong kind or out of bounds."""
    if card is None:
        return
    least = {"vocabulary": 1, "longest": 1, "beam": 1, "extra_length": 1, "no_repeat_ngram": 0}
    numbers = {name: getattr(card, name) for name in least}
    if card.batch_tokens is not None:
        numbers["batch_tokens"] = card.batch_tokens
    for name, number in numbers.items():
        if type(number) is not int or number < least.get(name, 1):
            raise ValueError(name)
    if type(card.length_penalty) not in (int, float) or not card.length_penalty >= 0:
        raise ValueError("length_penalty")
    for name in ("engine", "source", "target", "precision"):
        if not isinstance(getattr(card, name), str):
            raise ValueError(name)


def engine_of(folder: Path) -> str | None:
    """The engine that an exported folder is for; None of any other folder."""
    try:
        return str(json.loads((folder / CARD).read_text(encoding="utf-8"))["engine"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
