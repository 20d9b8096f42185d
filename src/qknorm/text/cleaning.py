"""Which pairs to train on: text is normalised, small named rules drop pairs, a report says how many and why."""

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from qknorm.text.readers import Pair

if TYPE_CHECKING:  # whoever only cleans a line needs no settings
    from qknorm.config import Cleaning

Rule = Callable[[Pair], bool]
"""Says of a pair whether it is to be dropped."""

OVERLAP = "overlap with dev or test"
SPOILED = "not two columns"

_CONTROLS = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\ud800-\udfff\ufeff]")
_EXAMPLES = 3
_EXAMPLE_LENGTH = 80
_RATIO_PADDING = 15


def clean_line(line: str) -> str:
    """The line in NFC, without control characters, and with single spaces; cleaning twice changes nothing.

    Joiners and direction marks are kept: scripts need them. The block that subwords use for a space becomes `_`.
    """
    line = _CONTROLS.sub("", line).replace("▁", "_")
    return " ".join(unicodedata.normalize("NFC", line).split())


def clean_pair(pair: Pair) -> Pair:
    """Both sides through `clean_line`."""
    return Pair(clean_line(pair.source), clean_line(pair.target))


def hash_text(text: str) -> int:
    """Eight bytes that stand for a text, the same on every machine."""
    return int.from_bytes(blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def hash_pair(pair: Pair) -> int:
    """Eight bytes that stand for a pair; a cleaned side has no tab, so two pairs never read the same."""
    return hash_text(f"{pair.source}\t{pair.target}")


class HeldOut:
    """The sentences of dev and test sets, by hash."""

    def __init__(self) -> None:
        self._sources: set[int] = set()
        self._targets: set[int] = set()

    def add(self, pair: Pair) -> None:
        self._sources.add(hash_text(pair.source))
        self._targets.add(hash_text(pair.target))

    def overlaps(self, pair: Pair) -> bool:
        """Whether the source or the target sentence is held out."""
        return hash_text(pair.source) in self._sources or hash_text(pair.target) in self._targets


@dataclass
class Dropped:
    """How many pairs a rule dropped, with a few of them, shortened."""

    pairs: int = 0
    examples: list[Pair] = field(default_factory=list)


@dataclass
class CleaningReport:
    """Pairs read, kept for training, split off as dev and test, and what each rule dropped; these add up."""

    read: int = 0
    kept: int = 0
    held_out: int = 0
    dropped: dict[str, Dropped] = field(default_factory=dict)

    def note_spoiled(self, pair: Pair) -> None:
        """Counts a line that is no pair among what was read and dropped."""
        self.read += 1
        self.note_drop(SPOILED, clean_pair(pair))

    def note_drop(self, rule: str, pair: Pair) -> None:
        dropped = self.dropped.setdefault(rule, Dropped())
        dropped.pairs += 1
        if len(dropped.examples) < _EXAMPLES:
            dropped.examples.append(Pair(_shorten(pair.source), _shorten(pair.target)))

    def as_json(self) -> dict[str, Any]:
        """The report as plain lists and dictionaries."""
        dropped = {
            rule: {"pairs": entry.pairs, "examples": [list(pair) for pair in entry.examples]}
            for rule, entry in self.dropped.items()
        }
        return {"read": self.read, "kept": self.kept, "held_out": self.held_out, "dropped": dropped}


def rules_for(settings: "Cleaning", held_out: HeldOut) -> dict[str, Rule]:
    """The rules that these settings ask for, in the order in which they are applied."""
    rules: dict[str, Rule] = {
        "empty": is_empty,
        "too short": lambda pair: is_shorter(pair, settings.min_characters),
        "too long": lambda pair: is_longer(pair, settings.max_characters),
        "length ratio": lambda pair: is_lopsided(pair, settings.max_ratio),
    }
    if settings.drop_identical:
        rules["identical sides"] = is_identical
    if settings.drop_duplicates:
        rules["duplicate"] = DuplicateRule()
    if settings.drop_overlap:
        rules[OVERLAP] = held_out.overlaps
    return rules


def drop_pairs(pairs: Iterable[Pair], rules: dict[str, Rule], report: CleaningReport) -> Iterator[Pair]:
    """Streams the cleaned pairs that no rule drops, counting in the report; the first rule that fits is the reason."""
    for rule in rules:
        report.dropped.setdefault(rule, Dropped())
    for raw in pairs:
        report.read += 1
        pair = clean_pair(raw)
        reason = next((name for name, drops in rules.items() if drops(pair)), None)
        if reason is None:
            report.kept += 1
            yield pair
        else:
            report.note_drop(reason, pair)


def is_empty(pair: Pair) -> bool:
    return not pair.source or not pair.target


def is_shorter(pair: Pair, characters: int) -> bool:
    return min(len(pair.source), len(pair.target)) < characters


def is_longer(pair: Pair, characters: int) -> bool:
    return max(len(pair.source), len(pair.target)) > characters


def is_lopsided(pair: Pair, ratio: float) -> bool:
    """Whether one side is too many times as long as the other, both padded so that short pairs may differ."""
    short, long = sorted((len(pair.source) + _RATIO_PADDING, len(pair.target) + _RATIO_PADDING))
    return long > ratio * short


def is_identical(pair: Pair) -> bool:
    return pair.source == pair.target


class DuplicateRule:
    """Drops a pair that came by before; remembers eight bytes a pair."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def __call__(self, pair: Pair) -> bool:
        key = hash_pair(pair)
        if key in self._seen:
            return True
        self._seen.add(key)
        return False


def _shorten(text: str) -> str:
    return text if len(text) <= _EXAMPLE_LENGTH else text[: _EXAMPLE_LENGTH - 1] + "…"
