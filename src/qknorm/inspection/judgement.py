"""What measures over a training say, in words: entropy that collapses, logits that grow without end, saturation."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from qknorm.inspection.measures import Measures

COLLAPSED = 0.05
"""Relative entropy under which a head attends to hardly more than one key."""
SATURATED = 0.5
"""Share of saturated queries above which a head learns little: softmax passes them almost no gradient."""
LARGE = 50.0
"""Logits below this are no reason to worry, however fast they grow."""
CURE = "lower the learning rate, or bound the logits with qknorm.adopt(model)"


class Sample(NamedTuple):
    """One attention as it was measured at a step."""

    step: int
    name: str
    measures: Measures


class Finding(NamedTuple):
    """Something to worry about: of what kind, in which attention and heads, and in words."""

    kind: str
    name: str
    heads: tuple[int, ...]
    text: str


class _Curve(NamedTuple):
    """One number of one head over the steps."""

    steps: Sequence[int]
    values: Sequence[float]

    @property
    def last(self) -> float:
        return self.values[-1]

    def since(self, holds: Callable[[float], bool]) -> int:
        """The step from which on it has held without a break up to now."""
        start = len(self.values)
        while start and holds(self.values[start - 1]):
            start -= 1
        return self.steps[min(start, len(self.steps) - 1)]


def judge(history: Iterable[tuple[int, str, Measures]], cure: str = CURE) -> list[str]:
    """Sentences on what is wrong with the attentions in a history as it ends: which heads, since when, what helps."""
    return [finding.text for finding in find(history, cure)]


def find(history: Iterable[tuple[int, str, Measures]], cure: str = CURE) -> list[Finding]:
    """The same with kind, attention and heads, at most one of a kind for an attention."""
    by_name: dict[str, list[Sample]] = {}
    for step, name, measures in history:
        by_name.setdefault(name, []).append(Sample(step, name, measures))
    findings = []
    for name, samples in by_name.items():
        broken = _find_broken(name, samples)
        checks = [broken] if broken else [check(name, samples) for check in (_find_collapse, _find_growth, _find_full)]
        findings += [finding._replace(text=f"{finding.text}; {cure}") for finding in checks if finding is not None]
    return findings


def _find_broken(name: str, samples: Sequence[Sample]) -> Finding | None:
    """Logits that are no numbers; nothing else can be said then."""
    curves = _curves(samples, "largest_logit")
    heads = [head for head, curve in enumerate(curves) if not math.isfinite(curve.last)]
    if not heads:
        return None
    since = min(curves[head].since(lambda value: not math.isfinite(value)) for head in heads)
    text = f"{_who(name, heads)}: logits are no finite numbers any more, since step {since:,}"
    return Finding("broken", name, tuple(heads), text)


def _find_collapse(name: str, samples: Sequence[Sample]) -> Finding | None:
    """Low entropy alone is no fault, since heads that look at one place do well; a head that fell to it is."""
    curves = _curves(samples, "relative_entropy")

    def has_collapsed(curve: _Curve) -> bool:
        if len(curve.values) < 2 or not curve.last < COLLAPSED:
            return False
        return curve.last <= curve.values[-2] and curve.last <= max(curve.values) / 4

    heads = [head for head, curve in enumerate(curves) if has_collapsed(curve)]
    if not heads:
        return None
    worst = min((curves[head] for head in heads), key=lambda curve: curve.last)
    since = worst.since(lambda value: value < COLLAPSED)
    text = (
        f"{_who(name, heads)}: entropy collapses, to {worst.last:.3f} of its largest possible (from "
        f"{max(worst.values):.2f}), under {COLLAPSED:g} since step {since:,}"
    )
    return Finding("collapse", name, tuple(heads), text)


def _find_growth(name: str, samples: Sequence[Sample]) -> Finding | None:
    """Large logits that rise from each of the last samples to the next, and doubled in the last half of them."""
    curves = _curves(samples, "largest_logit")

    def grows(curve: _Curve) -> bool:
        if len(curve.values) < 4 or not curve.last > LARGE:
            return False
        *_, a, b, c = curve.values
        return a < b < c and c >= 2 * curve.values[len(curve.values) // 2 - 1]

    heads = [head for head, curve in enumerate(curves) if grows(curve)]
    if not heads:
        return None
    worst = max((curves[head] for head in heads), key=lambda curve: curve.last)
    since = worst.since(lambda value: value > LARGE)
    text = (
        f"{_who(name, heads)}: logits grow without end, to {worst.last:.3g} (from {worst.values[0]:.3g} at step "
        f"{worst.steps[0]:,}), over {LARGE:g} since step {since:,}"
    )
    return Finding("growth", name, tuple(heads), text)


def _find_full(name: str, samples: Sequence[Sample]) -> Finding | None:
    curves = _curves(samples, "saturation")
    heads = [head for head, curve in enumerate(curves) if curve.last > SATURATED]
    if not heads:
        return None
    worst = max((curves[head] for head in heads), key=lambda curve: curve.last)
    since = worst.since(lambda value: value > SATURATED)
    text = (
        f"{_who(name, heads)}: softmax saturates, one key takes nearly everything for {worst.last:.0%} of queries, for "
        f"more than {SATURATED:.0%} since step {since:,}"
    )
    return Finding("saturation", name, tuple(heads), text)


def _curves(samples: Sequence[Sample], measure: str) -> list[_Curve]:
    """One curve a head; samples of another number of heads than the last, from before a change, are left out."""
    heads = samples[-1].measures.heads
    alike = [sample for sample in samples if sample.measures.heads == heads]
    steps = [sample.step for sample in alike]
    columns = zip(*(sample.measures.numbers[measure] for sample in alike), strict=True)
    return [_Curve(steps, column) for column in columns]


def _who(name: str, heads: Sequence[int]) -> str:
    """Heads in words are counted from 1, as in pictures."""
    *most, last = (str(head + 1) for head in heads)
    return f"{name}, heads {', '.join(most)} and {last}" if most else f"{name}, head {last}"
