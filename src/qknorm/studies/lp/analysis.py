"""From finished runs to numbers: summaries by p, paired tests over folds, and what they say by rule."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from qknorm.studies.lp.design import ARMS, Arm, make_run
from qknorm.studies.lp.records import Record
from qknorm.studies.statistics import PairedTest, compare_pairs, holm, mean_and_deviation

Measure = Literal["final", "best"]
SIGNIFICANT = 0.05
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
    milliseconds: tuple[float, float]
    diverged: int


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
        """better or worse where the adjusted t-test says so; else undecided; untested with too few folds."""
        if self.tested.pairs < FEWEST_FOLDS or math.isnan(self.adjusted_t):
            return "untested"
        if self.adjusted_t >= SIGNIFICANT:
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
    baseline = results.by_fold("same-scale", 2.0)
    reached = [
        at
        for fold, record in records.items()
        if fold in baseline and (at := record.first_at_or_below(baseline[fold].final)) is not None
    ]
    return Summary(
        arm,
        p,
        tuple(records),
        mean_and_deviation([record.final for record in records.values()]),
        mean_and_deviation([record.best for record in records.values()]),
        mean_and_deviation(reached)[0],
        len(reached),
        mean_and_deviation([record.ms_per_iteration for record in records.values()]),
        sum(math.isinf(record.final) for record in records.values()),
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
        tested.append(compare_pairs(*losses))
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
    """The questions of the study, answered by sign and significance of the paired differences in final loss."""
    verdicts = [
        _judge_above_two("Does p > 2 beat p = 2 from the same start of the scale, as the paper says?", results, arm)
        if arm == "same-scale"
        else _judge_above_two("Does p > 2 still beat p = 2 when the temperature starts matched?", results, arm)
        for arm in ("same-scale", "matched")
    ]
    return [*verdicts, _judge_control(results), _judge_confound(verdicts[0], verdicts[1])]


def _judge_above_two(question: str, results: Results, arm: Arm) -> Verdict:
    compared = [each for each in compare_with_baseline(results, arm) if each.p is not None and each.p > 2]
    decided = [each for each in compared if each.outcome != "untested"]
    if not decided:
        return Verdict(question, "open", f"there are not yet {FEWEST_FOLDS} folds of p > 2 and of p = 2 in this arm.")
    better, worse, undecided = (
        [each for each in decided if each.outcome == outcome] for outcome in ("better", "worse", "undecided")
    )
    parts = [
        f"{name} at p = {_list(group)}"
        for name, group in (("better", better), ("worse", worse), ("not told apart", undecided))
        if group
    ]
    if len(better) == len(decided):
        answer = "yes"
    elif better:
        answer = "in part" if not worse else "mixed"
    else:
        answer = "no" if worse else "not shown"
    folds = min(each.tested.pairs for each in decided)
    return Verdict(question, answer, f"over {folds} folds the final validation loss is {', '.join(parts)}.")


def _judge_control(results: Results) -> Verdict:
    question = "How does dot-product attention, the control, compare with p = 2?"
    compared = compare_with_baseline(results, "dot-product")
    if not compared or compared[0].outcome == "untested":
        return Verdict(question, "open", f"there are not yet {FEWEST_FOLDS} folds of both.")
    test = compared[0].tested
    facts = f"{test.difference:+.4f} nats on the mean of {test.pairs} folds, p = {test.t_p:.3g} by the paired t-test."
    answers = {"better": "better", "worse": "worse", "undecided": "not told apart"}
    return Verdict(question, answers[compared[0].outcome], facts)


def _judge_confound(same_scale: Verdict, matched: Verdict) -> Verdict:
    """What the first two answers say together."""
    question = "So is it p, or only a sharper start?"
    gains = {"yes", "in part", "mixed"}
    if "open" in (same_scale.answer, matched.answer):
        return Verdict(question, "open", "both arms must be run first.")
    if same_scale.answer not in gains and matched.answer not in gains:
        return Verdict(question, "neither", "no p > 2 beats p = 2 in either arm, so that there is no gain to explain.")
    if same_scale.answer not in gains:
        return Verdict(question, "p, but only when matched", "a gain shows only once the temperature is matched.")
    if matched.answer not in gains:
        return Verdict(question, "the start", "no p > 2 beats p = 2 any more once the temperature starts matched.")
    if same_scale.answer == matched.answer == "yes":
        return Verdict(question, "p", "every p > 2 keeps a gain over p = 2 with a matched start.")
    return Verdict(question, "not the start alone", "some p > 2 keep a gain over p = 2 with a matched start.")


def _list(group: Sequence[Compared]) -> str:
    return ", ".join(f"{each.p:g} ({each.tested.difference:+.4f})" for each in group)
