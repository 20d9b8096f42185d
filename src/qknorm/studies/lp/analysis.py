"""From finished runs to numbers: summaries by p, paired tests over folds, and what they say by rule."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from qknorm.studies.lp.design import ARMS, Arm, make_run
from qknorm.studies.lp.records import Record
from qknorm.studies.statistics import PairedTest, compare_pairs, holm, mean_and_deviation

Measure = Literal["final", "best"]
SIGNIFICANT = 0.05
LP_ARMS: tuple[Arm, Arm] = ("same-scale", "matched")
"""The arms that have a p."""
FEWEST_FOLDS = 3
"""With fewer pairs no verdict is given."""


@dataclass(frozen=True)
class Summary:
    """One arm at one p over its folds; pairs are mean and standard deviation."""

    arm: Arm
    p: float | None
    folds: tuple[int, ...]
    final: tuple[float, float]
    best: tuple[float, float]
    iterations_to_baseline: float
    """Mean over the folds that came down to p = 2's final loss of the first evaluated iteration that did."""
    reached_baseline: int
    with_baseline: int
    """Folds on which p = 2 has a final loss to come down to."""
    milliseconds: tuple[float, float]
    diverged: int
    skipped: int | None
    """Steps left out since their gradients were not finite, in all its runs; None if one of them does not tell."""


@dataclass(frozen=True)
class Compared:
    """Losses against others on the same folds: negative differences are better. `adjusted_*` are Holm's."""

    arm: Arm
    p: float | None
    tested: PairedTest
    adjusted_t: float
    adjusted_wilcoxon: float

    @property
    def outcome(self) -> str:
        """better or worse where the adjusted t-test says so, else undecided; diverged where a run of either did.

        With too few folds it is untested.
        """
        if self.tested.pairs < FEWEST_FOLDS:
            return "untested"
        if math.isnan(self.tested.difference):
            return "diverged"
        if math.isnan(self.adjusted_t) or self.adjusted_t >= SIGNIFICANT:  # no number where all pairs are equal
            return "undecided"
        return "better" if self.tested.difference < 0 else "worse"


class Results:
    """Finished runs by arm, p and fold."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = {record.run: record for record in records}

    def record(self, arm: Arm, p: float | None, fold: int) -> Record | None:
        """A run, if it is finished; at p = 2 the two arms of Lp share theirs."""
        return self._records.get(make_run(arm, p, fold))

    def variants(self) -> list[tuple[Arm, float | None]]:
        """Every arm and p with a finished run, arms in order; p = 2 stands in both arms of Lp."""
        found = dict.fromkeys((run.arm, run.p) for run in self._records)
        if ("same-scale", 2.0) in found and any(arm == "matched" for arm, _ in found):
            found["matched", 2.0] = None
        return sorted(found, key=lambda each: (ARMS.index(each[0]), each[1] or 0.0))

    def arms(self) -> list[Arm]:
        """Those with a finished run."""
        return list(dict.fromkeys(arm for arm, _ in self.variants()))

    def exponents(self, arm: Arm) -> list[float]:
        """The values of p that an arm has."""
        return [p for each, p in self.variants() if each == arm and p is not None]

    def by_fold(self, arm: Arm, p: float | None) -> dict[int, Record]:
        """The finished runs of an arm at a p, folds in order."""
        folds = sorted({run.fold for run in self._records})
        found = {fold: self.record(arm, p, fold) for fold in folds}
        return {fold: record for fold, record in found.items() if record is not None}


def summarise(results: Results) -> list[Summary]:
    """A line for every arm and p."""
    return [_summarise(results, arm, p) for arm, p in results.variants()]


def _summarise(results: Results, arm: Arm, p: float | None) -> Summary:
    records = results.by_fold(arm, p)
    goals = {fold: each.final for fold, each in results.by_fold("same-scale", 2.0).items() if math.isfinite(each.final)}
    first = [record.first_at_or_below(goals[fold]) for fold, record in records.items() if fold in goals]
    reached = [at for at in first if at is not None]
    known = [record.skipped_steps for record in records.values() if record.skipped_steps is not None]
    return Summary(
        arm,
        p,
        tuple(records),
        mean_and_deviation([record.final for record in records.values()]),
        mean_and_deviation([record.best for record in records.values()]),
        mean_and_deviation(reached)[0],
        len(reached),
        len(first),
        mean_and_deviation([record.ms_per_iteration for record in records.values()]),
        sum(math.isinf(record.final) for record in records.values()),
        sum(known) if len(known) == len(records) else None,
    )


def compare_with_baseline(results: Results, arm: Arm, measure: Measure = "final") -> list[Compared]:
    """Every p of an arm but 2 against p = 2, and an arm without p against p = 2; Holm's correction within the arm."""
    exponents = [p for each, p in results.variants() if each == arm and (p != 2 or arm == "learned-p")]
    baseline = results.by_fold("same-scale", 2.0)
    return _compare([(arm, p, results.by_fold(arm, p), baseline) for p in exponents], measure)


def compare_arms(results: Results) -> list[Compared]:
    """matched against same-scale at every p but 2: what the start of the scale alone changes."""
    both = [p for p in results.exponents("matched") if p in results.exponents("same-scale") and p != 2]
    cases = [(p, results.by_fold("matched", p), results.by_fold("same-scale", p)) for p in both]
    return _compare([("matched", *case) for case in cases], "final")


def _compare(
    cases: Sequence[tuple[Arm, float | None, dict[int, Record], dict[int, Record]]], measure: Measure
) -> list[Compared]:
    tested = []
    for _, _, records, baseline in cases:
        folds = [fold for fold in records if fold in baseline]
        losses = [[getattr(each[fold], measure) for fold in folds] for each in (records, baseline)]
        test = compare_pairs(*losses)
        # too few folds are no test, which would have a p and its share in the correction of the others
        tested.append(test if test.pairs >= FEWEST_FOLDS else replace(test, t_p=math.nan, wilcoxon_p=math.nan))
    adjusted_t = holm([each.t_p for each in tested])
    adjusted_wilcoxon = holm([each.wilcoxon_p for each in tested])
    return [
        Compared(arm, p, test, t, w)
        for (arm, p, _, _), test, t, w in zip(cases, tested, adjusted_t, adjusted_wilcoxon, strict=True)
    ]


# ------------------------------------------------------------------ what it says, by rule


@dataclass(frozen=True)
class Verdict:
    """An answer to one question, such as yes, in part, no, not shown or open, and the sentence that says why."""

    question: str
    answer: str
    because: str


def judge(results: Results) -> list[Verdict]:
    """The questions of the study, answered by sign and significance of the paired differences in loss.

    The first four go by the final loss, as the paper does; then come the best one on the way, and how fast it falls.
    """
    return [
        _judge_above_two(
            "Does p > 2 end lower than p = 2 from the same start of the scale, as the paper says?", results, LP_ARMS[0]
        ),
        _judge_above_two("Does p > 2 still end lower when the temperature starts matched?", results, LP_ARMS[1]),
        _judge_control(results),
        _judge_confound(results),
        _judge_best(results),
        _judge_speed(results),
    ]


def _above_two(results: Results, arm: Arm, measure: Measure = "final") -> list[Compared]:
    """Every p > 2 of an arm that has folds enough against p = 2."""
    compared = compare_with_baseline(results, arm, measure)
    return [each for each in compared if each.p is not None and each.p > 2 and each.outcome != "untested"]


def _judge_above_two(question: str, results: Results, arm: Arm, measure: Measure = "final") -> Verdict:
    decided = _above_two(results, arm, measure)
    if not decided:
        return Verdict(question, "open", f"there are not yet {FEWEST_FOLDS} folds of p > 2 and of p = 2 in this arm.")
    groups = {
        said: [each for each in decided if each.outcome == outcome]
        for said, outcome in (
            ("better", "better"),
            ("worse", "worse"),
            ("not told apart", "undecided"),
            ("without a number, since a run diverged,", "diverged"),
        )
    }
    better, worse, _, diverged = groups.values()
    if len(better) == len(decided):
        answer = "yes"
    elif better:
        answer = "mixed" if worse or diverged else "in part"
    else:
        answer = "no" if worse else "not shown"
    parts = ", ".join(f"{said} at p = {_list(group)}" for said, group in groups.items() if group)
    counts = sorted({each.tested.pairs for each in decided})
    folds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    return Verdict(question, answer, f"over {folds} folds the {measure} validation loss is {parts}.")


def _judge_best(results: Results) -> Verdict:
    """The same by the best loss: that of who keeps the best checkpoint, whatever overfitting does to the last."""
    found = _judge_above_two(
        "And by the best loss on the way, from the same start: does p > 2 beat p = 2?", results, LP_ARMS[0], "best"
    )
    baseline = [each for each in results.by_fold("same-scale", 2.0).values() if math.isfinite(each.final)]
    if found.answer == "open" or not baseline:
        return found
    above = mean_and_deviation([each.final - each.best for each in baseline])[0]
    at = mean_and_deviation([each.best_iteration for each in baseline])[0]
    end = baseline[0].curve[-1].iteration
    course = f" p = 2 is best at iteration {at:,.0f} on average and ends, after {end:,}, {above:.4f} above that."
    return Verdict(found.question, found.answer, found.because + course)


def _judge_speed(results: Results) -> Verdict:
    """By the iterations to p = 2's final loss, means over the folds that both have."""
    question = "Does p > 2 come down faster from the same start, as the paper says?"
    baseline = {fold: each for fold, each in results.by_fold("same-scale", 2.0).items() if math.isfinite(each.final)}
    lines = [each for each in summarise(results) if each.arm == "same-scale" and each.with_baseline >= FEWEST_FOLDS]
    above = [each for each in lines if each.p is not None and each.p > 2]
    if not above:
        return Verdict(question, "open", f"there are not yet {FEWEST_FOLDS} folds of p > 2 and of p = 2.")

    def of_baseline(folds: Iterable[int]) -> float:
        own = [baseline[fold] for fold in folds if fold in baseline]
        reached = [each.first_at_or_below(each.final) for each in own]
        return mean_and_deviation([at for at in reached if at is not None])[0]

    faster, told = [], [f"{of_baseline(baseline):,.0f} at p = 2"]
    for each in above:
        own, all_folds = of_baseline(each.folds), set(baseline) <= set(each.folds)
        if each.reached_baseline == each.with_baseline and each.iterations_to_baseline < own:
            faster.append(each)
        needed = f"{each.iterations_to_baseline:,.0f}" if each.reached_baseline else "never"
        told.append(f"{needed} at p = {each.p:g}" + ("" if all_folds else f" ({own:,.0f} at p = 2 on its folds)"))
    answer = "yes" if len(faster) == len(above) else "in part" if faster else "no"
    because = f"iterations to p = 2's final loss, means over the folds that reach it: {', '.join(told)}."
    return Verdict(question, answer, because)


def _judge_control(results: Results) -> Verdict:
    question = "How does dot-product attention, the control, compare with p = 2?"
    compared = compare_with_baseline(results, "dot-product")
    if not compared or compared[0].outcome == "untested":
        return Verdict(question, "open", f"there are not yet {FEWEST_FOLDS} folds of both.")
    if compared[0].outcome == "diverged":
        return Verdict(question, "open", "a run of one of them diverged, so that there is no difference to test.")
    test = compared[0].tested
    facts = f"{test.difference:+.4f} nats on the mean of {test.pairs} folds, p = {test.t_p:.3g} by the paired t-test."
    answers = {"better": "better", "worse": "worse", "undecided": "not told apart"}
    return Verdict(question, answers[compared[0].outcome], facts)


def _judge_confound(results: Results) -> Verdict:
    """What both arms say together, at each p that both have.

    That a gain is significant in one arm and not in the other does not yet say that the arms differ: for that they are
    compared with each other.
    """
    question = "So is it p, or only a sharper start?"
    same, matched = ({each.p: each.outcome for each in _above_two(results, arm)} for arm in LP_ARMS)
    both = [p for p in same if p in matched]
    if not both:
        return Verdict(question, "open", "both arms must be run first, at the same p > 2.")
    if all("diverged" in (same[p], matched[p]) for p in both):
        return Verdict(question, "open", "at every p > 2 that both arms have, a run diverged.")
    gained = [p for p in both if same[p] == "better"]
    kept = [p for p in gained if matched[p] == "better"]
    if len(kept) == len(both):
        return Verdict(
            question, "p", f"with a matched start, too, there is a gain at p = {_several(kept)}: all tested."
        )
    if kept:
        return Verdict(question, "not the start alone", f"with a matched start a gain stays at p = {_several(kept)}.")
    if gained:
        return _judge_lost(question, results, gained)
    only_matched = [p for p in both if matched[p] == "better"]
    if only_matched:
        because = f"at p = {_several(only_matched)} there is one with a matched start, and none with the same start."
        return Verdict(question, "a gain only when matched", because)
    return Verdict(
        question, "neither", "no p > 2 is shown to beat p = 2 in either arm, so that there is no gain to explain."
    )


def _judge_lost(question: str, results: Results, gained: Sequence[float | None]) -> Verdict:
    """Of gains from the same start that a matched one does not show."""
    lost = [each.p for each in compare_arms(results) if each.p in gained and each.outcome == "worse"]
    if lost:
        because = (
            f"at p = {_several(lost)} a matched start shows no gain over p = 2 and ends worse than the same start."
        )
        return Verdict(question, "the start", because)
    because = (
        f"at p = {_several(gained)} the same start shows a gain and a matched one does not, but these two are not told "
        f"apart: more folds are needed."
    )
    return Verdict(question, "not shown", because)


def _several(exponents: Sequence[float | None]) -> str:
    return ", ".join(f"{p:g}" for p in exponents)


def _list(group: Sequence[Compared]) -> str:
    differences = ["" if math.isnan(each.tested.difference) else f" ({each.tested.difference:+.4f})" for each in group]
    return ", ".join(f"{each.p:g}{told}" for each, told in zip(group, differences, strict=True))
