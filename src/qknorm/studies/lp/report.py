"""The page of a study: its tables, its pictures, and what holds up, stated by rule from the numbers."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qknorm.studies.lp.analysis import (
    FEWEST_FOLDS,
    LP_ARMS,
    SIGNIFICANT,
    Compared,
    Measure,
    Results,
    Summary,
    Verdict,
    compare_arms,
    compare_with_baseline,
    judge,
    summarise,
)
from qknorm.studies.lp.corpus import CORPUS, OWN_TEXT
from qknorm.studies.lp.design import (
    ARM_MEANINGS,
    MAIN_ARMS,
    QUICK_EXPONENTS,
    Arm,
    LpStudy,
    Run,
    quick_study,
)
from qknorm.studies.lp.figures import draw_all
from qknorm.studies.lp.records import StudyFolder, flatten, write_curves
from qknorm.studies.lp.work import describe
from qknorm.studies.published import LP_EXPONENTS
from qknorm.studies.tables import Page, Table

CURVES = "curves.csv"
NOTHING = "–"
WORDS = frozenset({"arm", "outcome"})
MILLISECONDS, SKIPPED = "ms / iteration", "skipped"
MEASURES: tuple[Measure, ...] = ("final", "best")


@dataclass(frozen=True)
class Report:
    """What was made of the finished runs."""

    tables: tuple[Table, ...]
    verdicts: tuple[Verdict, ...]
    pictures: dict[str, Path]
    markdown: Path
    html: Path
    curves: Path


def write_report(folder: StudyFolder, missing: Sequence[Run]) -> Report | None:
    """Writes report.md, report.html, pictures and the curves as CSV into the folder; None if no run is finished."""
    records = folder.records()
    if not records:
        return None
    results = Results(records)
    tables = tuple(make_tables(results))
    verdicts = tuple(judge(results))
    pictures = draw_all(results, folder.path, folder.about.study.iterations)
    write_curves(records, folder.path / CURVES)
    sections = {"What was run": _what_was_run(folder, results, missing), "How to read this": HOW_TO_READ}
    answers = tuple(map(_answer, verdicts))
    page = Page("Does p > 2 help, or does it only start sharper?", answers, tables, pictures, sections)
    markdown, html = page.write(folder.path)
    return Report(tables, verdicts, pictures, markdown, html, folder.path / CURVES)


def make_tables(results: Results) -> list[Table]:
    """Losses by p; every p against p = 2; matched against same-scale."""
    summaries = summarise(results)
    tables = [_losses(summaries, results)]
    for arm in results.arms():
        for measure in MEASURES if arm in LP_ARMS else MEASURES[:1]:
            compared = compare_with_baseline(results, arm, measure)
            if compared:
                tables.append(_differences(f"{measure.capitalize()} loss against p = 2: {arm}", compared))
    between = compare_arms(results)
    if between:
        tables.append(_differences("Final loss of matched against same-scale, at each p", between))
    return tables


def _losses(summaries: Sequence[Summary], results: Results) -> Table:
    columns = (
        "arm", "p", "folds", "final loss", "best loss", "iterations to p = 2's final loss", MILLISECONDS, SKIPPED
    )  # fmt: skip
    with_learned_p = [
        (each, _learned_p(results, each.arm) if each.arm == "learned-p" else _p(each.p)) for each in summaries
    ]
    rows = tuple(
        (
            each.arm,
            p,
            str(len(each.folds)) + (f" ({each.diverged} diverged)" if each.diverged else ""),
            _mean(each.final, 4),
            _mean(each.best, 4),
            _reached(each),
            _mean(each.milliseconds, 2),
            NOTHING if each.skipped is None else f"{each.skipped:,}",
        )
        for each, p in with_learned_p
    )
    return Table("Validation loss (nats per character), mean ± sd over folds", columns, rows, WORDS)


def _differences(title: str, compared: Sequence[Compared]) -> Table:
    columns = ("p", "folds", "difference", "t-test p", "by Holm", "Wilcoxon p", "by Holm", "outcome")
    rows = tuple(
        (
            "learned" if each.arm == "learned-p" else _p(each.p),
            str(each.tested.pairs),
            _number(each.tested.difference, "+.4f"),
            _number(each.tested.t_p, ".3g"),
            _number(each.adjusted_t, ".3g"),
            _number(each.tested.wilcoxon_p, ".3g"),
            _number(each.adjusted_wilcoxon, ".3g"),
            each.outcome,
        )
        for each in compared
    )
    return Table(title, columns, rows, WORDS)


# ------------------------------------------------------------------ words


def _answer(verdict: Verdict) -> str:
    return f"{verdict.question} **{verdict.answer[0].upper()}{verdict.answer[1:]}**: {verdict.because}"


def _what_was_run(folder: StudyFolder, results: Results, missing: Sequence[Run]) -> list[str]:
    study, text = folder.about.study, folder.about.text
    made = sorted({str(record.made_by.get("device")) for record in folder.records()})
    versions = sorted({str(record.made_by.get("versions", {}).get("torch")) for record in folder.records()})
    lines = [
        f"Characters of {text['name']} ({text['characters']:,}, {text['vocabulary']} types), {study.fold_count} folds "
        f"of contiguous blocks with a gap of {study.model.context} characters on both sides of the one held out, the "
        f"loss on all of it.",
        f"The model and its training: {describe(study)}. The scale starts at "
        f"{study.first_scale:.2f} at p = 2. The paper gives neither the learning rate, nor the iterations, nor the "
        f"scale's start: nanoGPT's for characters, and log2(L² − L) of the context, are the defaults here and our "
        f"assumption.",
        *(f"`{arm}`: {ARM_MEANINGS[arm]}." for arm in results.arms()),
        f"Made on {', '.join(made)}, PyTorch {', '.join(versions)}, by `{shlex.join(command_of(folder, results))}`, "
        f"whole or in parts.",
    ]
    if missing:
        names = ", ".join(dict.fromkeys(run.variant for run in missing))
        lines.append(f"Not run yet: {len(missing)} runs of {names}. The same command goes on with them.")
    return lines


def command_of(folder: StudyFolder, results: Results) -> list[str]:
    """The command that makes these runs, without the places of files."""
    study, text = folder.about.study, folder.about.text
    quick = study.characters == quick_study().characters
    usual = dict(flatten((quick_study() if quick else LpStudy()).model_dump(mode="json")))
    changes = [(name, value) for name, value in flatten(study.model_dump(mode="json")) if usual.get(name) != value]
    words = ["qknorm", "study", "lp", *(["--quick"] if quick else [])]
    if text["name"] not in (CORPUS, OWN_TEXT):
        words.extend(["--text", text["name"]])
    if set(results.arms()) != set(MAIN_ARMS):
        words.extend(["--arms", ",".join(results.arms())])
    exponents = sorted({p for arm in results.arms() if arm in LP_ARMS for p in results.exponents(arm)})
    if exponents and tuple(exponents) != (QUICK_EXPONENTS if quick else LP_EXPONENTS):
        words.extend(["--p", ",".join(f"{p:g}" for p in exponents)])
    for name, value in changes:
        words.extend(_option(name, value))
    return words


def _option(name: str, value: Any) -> list[str]:
    """A setting as it is typed."""
    group, dot, last = name.replace("_", "-").rpartition(".")
    if isinstance(value, bool):
        return [f"--{group}{dot}{'' if value else 'no-'}{last}"]
    return [f"--{group}{dot}{last}", *map(str, value if isinstance(value, list) else [value])]


HOW_TO_READ = (
    f"Runs on one fold share their start, data order and held-out windows; they differ in arm and p alone, so that "
    f"differences are paired. `better` and `worse` need an adjusted p below {SIGNIFICANT} of the paired t-test (Holm's "
    f"correction within each table) over at least {FEWEST_FOLDS} folds; the exact Wilcoxon test stands beside it and "
    f"cannot fall below 2/2ⁿ for n folds. The first four answers go by the final loss.",
    "Folds share most of their training text, so that their losses are not independent and tests over folds are "
    "somewhat too sure of themselves.",
    "At p = 2 the matched scale is the same scale: one run serves both arms.",
    "A matched start is matched at the start only: Adam moves every scale by about the same amount a step, which is "
    "more of a small scale (p > 2, matched) than of a large one.",
    "Times of runs trained together are equal shares of their stack's time, evaluations left out.",
    f"`{SKIPPED}` counts the steps of all folds that were left out since their gradients were not finite. Our own "
    f"kernels leave such steps out; by PyTorch's the run diverges.",
    f"Entropy is relative (1: uniform over the keys seen); a query is saturated where one key has over 99% of its "
    f"weight. Both on a few held-out windows. The curves of all runs: {CURVES}",
)


def _learned_p(results: Results, arm: Arm) -> str:
    """Where learned values of p ended: the mean over layers and folds."""
    ends = [value for record in results.by_fold(arm, 2.0).values() for value in record.curve[-1].p]
    return f"2 → {math.fsum(ends) / len(ends):.2f}" if ends else "2 → ?"


def _reached(each: Summary) -> str:
    if not each.with_baseline:
        return NOTHING
    if not each.reached_baseline:
        return f"never (0 of {each.with_baseline} folds)"
    some = f" ({each.reached_baseline} of {each.with_baseline} folds)"
    some = "" if each.reached_baseline == len(each.folds) else some
    return f"{each.iterations_to_baseline:,.0f}{some}"


def _mean(pair: tuple[float, float], digits: int) -> str:
    mean, deviation = pair
    if not math.isfinite(mean):
        return NOTHING
    return f"{mean:.{digits}f}" + (f" ± {deviation:.{digits}f}" if math.isfinite(deviation) else "")


def _p(p: float | None) -> str:
    return NOTHING if p is None else "∞" if math.isinf(p) else f"{p:g}"


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else NOTHING
