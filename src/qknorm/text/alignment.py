"""Do two sides belong together? Lengths, numbers and question marks tell without knowing the languages."""

import math
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_DIGITS = re.compile(r"\d+")
_QUESTION = re.compile(r"[?？؟՞፧]")
_MOST_STEPS = 20  # a larger difference of line counts is looked at as one block
_TOO_FEW = 8  # lines; fewer prove nothing
_FEW = 30  # lines; fewer need not prove anything by themselves
_SURE = 5.0  # standard errors; a parting or a disorder is told of only beyond this
_ENOUGH_PAIRS = 500
_ENOUGH_ANCHORS = 300
_MOST_PAIRS = 200_000
_ENOUGH_FOR_WORDS = 100
_FEW_WORDS = 10
_ASIDE = 11  # lines, beyond the parts of a text that lines far apart are taken at
_NEAR = (-3, -2, -1, 1, 2, 3)  # lines by which one side may be off throughout

Floats = NDArray[np.float64]
Column = NDArray[np.int64] | Floats


class Traits(NamedTuple):
    """What of a text's lines survives translation, an entry a line."""

    lengths: NDArray[np.int64]
    numbers: NDArray[np.int64]
    questions: NDArray[np.int64]

    def rows(self, start: int, stop: int) -> "Traits":
        return Traits(*(column[start:stop] for column in self))

    def rolled(self, by: int) -> "Traits":
        return Traits(*(np.roll(column, by) for column in self))


class TraitGatherer:
    """Gathers the traits of lines one at a time."""

    def __init__(self) -> None:
        self._columns = (array("q"), array("q"), array("q"))

    def add(self, line: str) -> None:
        self._columns[0].append(len(line.strip()))
        self._columns[1].append(_number_signature(line))
        self._columns[2].append(_QUESTION.search(line) is not None)

    def __len__(self) -> int:
        return len(self._columns[0])

    def traits(self) -> Traits:
        return Traits(*(np.array(column, dtype=np.int64) for column in self._columns))


def _number_signature(line: str) -> int:
    """0 without numbers; else the same for the same numbers in any order and any script's digits."""
    runs = _DIGITS.findall(line)
    if not runs:
        return 0
    return hash(tuple(sorted(int(run[:18]) for run in runs))) or 1


# ------------------------------------------------------------------ where two files of different length part


def find_parting(shorter: Iterable[str], longer: Iterable[str]) -> int | None:
    """The line (1-based) of `longer` at which lines begin that `shorter` lacks, or None where it cannot be told."""
    short, long = _gather(shorter), _gather(longer)
    extra = len(long.lengths) - len(short.lengths)
    by_empty_lines = _first_empty_line_too_many(short.lengths == 0, long.lengths == 0)
    if by_empty_lines is not None or not len(short.lengths):
        return by_empty_lines
    shifts = list(range(extra + 1)) if extra <= _MOST_STEPS else [0, extra]
    scores = _scores(short, long, shifts)
    entries = _best_entries(scores)
    unrelated = _scores(short, long.rolled(len(long.lengths) // 2), shifts)
    best_by_chance = _followed(unrelated, _best_entries(unrelated))
    return entries[1] + 1 if _is_convincing(scores, entries, best_by_chance) else None


def _gather(lines: Iterable[str]) -> Traits:
    gatherer = TraitGatherer()
    for line in lines:
        gatherer.add(line)
    return gatherer.traits()


def _first_empty_line_too_many(short: NDArray[np.bool_], long: NDArray[np.bool_]) -> int | None:
    """The first unmatched empty line, if empty lines account for the whole difference."""
    if int(long.sum()) - int(short.sum()) != len(long) - len(short):
        return None
    unmatched = np.flatnonzero(long[: len(short)] & ~short)
    return int(unmatched[0]) + 1 if len(unmatched) else len(short) + 1


def _scores(short: Traits, long: Traits, shifts: list[int]) -> Floats:
    """For each shift, how well each line of `short` fits the line so much further on in `long`."""
    count = len(short.lengths)
    usual = math.log((short.lengths.sum() + 1) / (long.lengths.sum() + 1))
    return np.stack([_score(short, long.rows(shift, shift + count), usual) for shift in shifts])


def _score(a: Traits, b: Traits, usual: float) -> Floats:
    """How well each line pair fits, higher is better; `usual` is the log ratio of the languages' lengths."""
    off = np.abs(np.log((a.lengths + 5) / (b.lengths + 5)) - usual)
    score = -np.minimum(off, 1.5)
    score = score - 3.0 * ((a.lengths == 0) != (b.lengths == 0))
    numbered = (a.numbers != 0) | (b.numbers != 0)
    score = score + np.where(numbered, np.where(a.numbers == b.numbers, 2.0, -1.0), 0.0)
    asking = (a.questions != 0) | (b.questions != 0)
    fitted: Floats = score + np.where(asking, np.where(a.questions == b.questions, 1.0, -0.5), 0.0)
    return fitted


def _best_entries(scores: Floats) -> list[int]:
    """Dynamic programme over non-decreasing shifts: the line at which the best path enters each shift."""
    sums = np.concatenate([np.zeros((len(scores), 1)), np.cumsum(scores, axis=1)], axis=1)
    best = sums[0]
    arrivals = []
    for total in sums[1:]:
        gain = best - total
        record = np.maximum.accumulate(gain)
        arrivals.append(np.maximum.accumulate(np.where(gain == record, np.arange(len(gain)), 0)))
        best = total + record
    entries = [len(scores[0])]
    for arrival in reversed(arrivals):
        entries.append(int(arrival[entries[-1]]))
    return [0, *reversed(entries[1:])]


def _followed(scores: Floats, entries: list[int]) -> Floats:
    """The score of each line along a path."""
    lines = np.arange(scores.shape[1])
    along: Floats = scores[np.searchsorted(np.array(entries), lines, side="right") - 1, lines]
    return along


def _is_convincing(scores: Floats, entries: list[int], by_chance: Floats) -> bool:
    """Lines fit better than the best path through unrelated lines, and from the parting on better than unshifted."""
    parting = entries[1]
    along = _followed(scores, entries)
    before = _standard_errors_above_zero((along - by_chance)[:parting])
    after = min(
        _standard_errors_above_zero((along - by_chance)[parting:]),
        _standard_errors_above_zero((along - scores[0])[parting:]),
    )
    lines = parting, len(along) - parting
    return max(before, after) > _SURE and all(
        errors > _SURE or count < _FEW for errors, count in zip((before, after), lines, strict=True)
    )


def _standard_errors_above_zero(values: Floats) -> float:
    if len(values) < _TOO_FEW:
        return 0.0
    mean, spread = float(values.mean()), float(values.std())
    if spread == 0:
        return math.copysign(math.inf, mean) if mean else 0.0
    return mean / spread * math.sqrt(len(values))


# ------------------------------------------------------------------ sides in different orders, sides exchanged


class OrderCheck:
    """Watches pairs go by, and tells whether the two sides seem to be in different orders."""

    def __init__(self) -> None:
        self._sides = (TraitGatherer(), TraitGatherer())
        self._seen: set[int] = set()

    def add(self, source: str, target: str) -> None:
        if not source.strip() or not target.strip():
            return  # what has not been translated says nothing of the order
        key = hash((source, target))
        if len(self._sides[0]) < _MOST_PAIRS and key not in self._seen:  # a copy would make lines far apart agree
            self._seen.add(key)
            self._sides[0].add(source)
            self._sides[1].add(target)

    def is_disordered(self) -> bool:
        """True only on overwhelming evidence: lengths and all usable anchors agree no better than by chance."""
        anchors = self._anchors_fit()
        return self._lengths_fit() is False and bool(anchors) and not any(anchors)

    def is_doubtful(self) -> bool:
        """True where one kind of evidence speaks against the order and none or another one for it."""
        anchors = self._anchors_fit()
        return self._lengths_fit() is False or (bool(anchors) and not any(anchors))

    def _lengths_fit(self) -> bool | None:
        """Whether lengths correlate better than those of unrelated lines; None where there is too little to tell."""
        a, b = (np.log1p(side.traits().lengths) for side in self._sides)
        if len(a) < _ENOUGH_PAIRS or min(a.std(), b.std()) < 0.1:
            return None
        here, chance, near = _compare(a, b, lambda x, y: float(np.corrcoef(x, y)[0, 1]))
        return here > max(chance, 0.0) + _SURE / math.sqrt(len(a)) and here > near - 0.2

    def _anchors_fit(self) -> list[bool]:
        """For numbers and question marks, where there are enough: do they agree more often than by chance?"""
        a, b = (side.traits() for side in self._sides)
        fits = []
        for x, y in ((a.numbers, b.numbers), (a.questions, b.questions)):
            if min(np.count_nonzero(x), np.count_nonzero(y)) >= _ENOUGH_ANCHORS:
                here, chance, near = _compare(x, y, lambda x, y: float(np.count_nonzero((x == y) & (x != 0))))
                fits.append(here > chance + _SURE * math.sqrt(chance + 1) and here > near / 2)
        return fits


def _compare(x: Column, y: Column, measure: Callable[[Column, Column], float]) -> tuple[float, float, float]:
    """The measure for lines side by side, the most it reaches for lines far apart, and for lines a little apart."""
    # aside: in a text that is followed by itself in other capitals, lines half of it apart do belong together
    far = [_ASIDE + part for part in (len(x) // 7, len(x) // 3, len(x) // 2, 4 * len(x) // 5)]
    chance, near = (max(measure(x, np.roll(y, by)) for by in offsets) for offsets in (far, _NEAR))
    return measure(x, y), chance, near


class WordSample:
    """The most frequent words of both sides, to tell sides that are exchanged between two sets of pairs."""

    lines = 5_000
    words = 200

    def __init__(self) -> None:
        self._counts: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        self._seen = 0

    def add(self, source: str, target: str) -> None:
        if self._seen < self.lines:
            self._seen += 1
            self._counts[0].update(source.split())
            self._counts[1].update(target.split())

    def looks_swapped_against(self, other: "WordSample") -> bool:
        """Whether each side shares far more frequent words with the other side of `other` than with its own."""
        if min(self._seen, other._seen) < _ENOUGH_FOR_WORDS:
            return False
        (a, b), (x, y) = self._frequent(), other._frequent()
        return len(a & y) > 2 * len(a & x) + _FEW_WORDS and len(b & x) > 2 * len(b & y) + _FEW_WORDS

    def _frequent(self) -> tuple[set[str], set[str]]:
        source, target = ({word for word, _ in counts.most_common(self.words)} for counts in self._counts)
        return source, target
