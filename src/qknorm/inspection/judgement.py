"""What measures say, in words: entropy that collapses, logits that grow without end, saturation."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from qknorm.inspection.measures import Measures

COLLAPSED = 0.05
"""Relative entropy under which a head attends to hardly more than one key."""
SATURATED = 0.5
"""Share of saturated queries above which a head learns little: softmax passes them almost no gradient."""
LARGE = 50.0
"""Logits below this are no reason to worry, however fast they grow."""
SATURATES = "softmax saturates, one key takes nearly everything for {:.0%} of queries"
SLOWER = "lower the learning rate"
CURE = f"{SLOWER}, or bound the logits with qknorm.adopt(model, length={{}})"
ANY_LENGTH = CURE.format("…") + ", … being the tokens of a typical sequence"


Cure = str | Callable[[str], str]


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


def judge(history: Iterable[tuple[int, str, Measures]], cure: Cure = ANY_LENGTH) -> list[str]:
    """Sentences on what is wrong with the attentions in a history as it ends: which heads, since when, what helps.

    What helps may depend on the name of the attention.
    """
    return [finding.text for finding in find(history, cure)]


def find(history: Iterable[tuple[int, str, Measures]], cure: Cure = ANY_LENGTH) -> list[Finding]:
    """The same with kind, attention and heads, at most one of a kind for an attention."""
    by_name: dict[str, list[Sample]] = {}
    for step, name, measures in history:
        by_name.setdefault(name, []).append(Sample(step, name, measures))
    findings = []
    for name, samples in by_name.items():
        broken = _find_broken(name, samples)
        checks = [broken] if broken else [check(name, samples) for check in (_find_collapse, _find_growth, _find_full)]
        helps = cure if isinstance(cure, str) else cure(name)
        findings += [finding._replace(text=f"{finding.text}; {helps}") for finding in checks if finding is not None]
    return findings


def judge_once(name: str, measures: Mapping[str, Sequence[float | None]]) -> list[str]:
    """Sentences on one attention where the course of its measures is not known; None is no finite number."""
    effective = measures.get("effective_keys", ())
    broken = [
        head
        for head, value in enumerate(measures.get("largest_logit", ()))
        if value is None and not (head < len(effective) and effective[head] == 0)
    ]
    if broken:
        return [f"{_who(name, broken)}: logits are no finite numbers; look at an earlier checkpoint"]
    checks: list[tuple[str, Callable[[float], bool], Callable[[Iterable[float]], float], str]] = [
        ("relative_entropy", lambda value: value < COLLAPSED, min, "entropy is {:.3f} of its largest possible"),
        ("largest_logit", lambda value: value > LARGE, max, "logits reach {:.3g}; bound them with qknorm.adopt"),
        ("saturation", lambda value: value > SATURATED, max, SATURATES),
    ]
    sentences = []
    for measure, is_bad, worst, words in checks:
        known = {head: value for head, value in enumerate(measures.get(measure, ())) if value is not None}
        bad = {head: value for head, value in known.items() if is_bad(value)}
        if bad:
            sentences.append(f"{_who(name, list(bad))}: {words.format(worst(bad.values()))}")
    return sentences


def _find_broken(name: str, samples: Sequence[Sample]) -> Finding | None:
    """Logits that are no numbers; nothing else can be said then."""
    curves = _curves(samples, "largest_logit")
    heads = [head for head, curve in curves.items() if not math.isfinite(curve.last)]
    if not heads:
        return None
    since = min(curves[head].since(lambda value: not math.isfinite(value)) for head in heads)
    text = f"{_who(name, heads)}: logits are no finite numbers any more, since step {since:,}"
    return Finding("broken", name, tuple(heads), text)


def _find_collapse(name: str, samples: Sequence[Sample]) -> Finding | None:
    """Low entropy alone is no fault, since heads that look at one place do well; a head that fell to it is."""
    curves = _curves(samples, "relative_entropy")

    def has_collapsed(curve: _Curve) -> bool:
        return len(curve.values) > 1 and curve.last < COLLAPSED and curve.last <= max(curve.values) / 4

    heads = [head for head, curve in curves.items() if has_collapsed(curve)]
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

    heads = [head for head, curve in curves.items() if grows(curve)]
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
    heads = [head for head, curve in curves.items() if curve.last > SATURATED]
    if not heads:
        return None
    worst = max((curves[head] for head in heads), key=lambda curve: curve.last)
    since = worst.since(lambda value: value > SATURATED)
    text = f"{_who(name, heads)}: {SATURATES.format(worst.last)}, for more than {SATURATED:.0%} since step {since:,}"
    return Finding("saturation", name, tuple(heads), text)


def _curves(samples: Sequence[Sample], measure: str) -> dict[int, _Curve]:
    """One curve for every head that saw anything.

    Samples of another number of heads than the last, from before a change, are left out, and those in which no query of
    the head saw a key: they say nothing, and least of all that something broke.
    """
    heads = samples[-1].measures.heads
    alike = [sample for sample in samples if sample.measures.heads == heads]
    points: dict[int, list[tuple[int, float]]] = {}
    for sample in alike:
        numbers = sample.measures.numbers
        for head, (value, keys, logit) in enumerate(
            zip(numbers[measure], numbers["effective_keys"], numbers["largest_logit"], strict=True)
        ):
            if not (keys == 0 and math.isnan(logit)):
                points.setdefault(head, []).append((sample.step, value))
    return {head: _Curve(*zip(*points[head], strict=True)) for head in sorted(points)}


def _who(name: str, heads: Sequence[int]) -> str:
    """Heads in words are counted from 1, as in pictures."""
    *most, last = (str(head + 1) for head in heads)
    return f"{name}, heads {', '.join(most)} and {last}" if most else f"{name}, head {last}"
