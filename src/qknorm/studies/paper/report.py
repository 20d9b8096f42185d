"""The pages of a study: the paper's numbers beside ours, what holds, raw results, how they were made."""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qknorm.studies.grid.jobs import Result, read_device_seconds, read_result
from qknorm.studies.grid.scores import PLAIN, RELEASED, TREEBANK
from qknorm.studies.paper.comparing import SAMPLES, Compared, Comparer
from qknorm.studies.paper.experiments import Experiment
from qknorm.studies.paper.plan import MissingPair, Plan, Planned
from qknorm.studies.published import average_gain
from qknorm.studies.statistics import mean_and_deviation
from qknorm.studies.tables import Page, Table, Written, going_on, write_csv

NOTHING = "–"
RESULTS = "results.csv"
SCORERS = {RELEASED: "Moses scripts", TREEBANK: "SacreBLEU", PLAIN: "SacreBLEU"}
WORDS = frozenset({"pair", "system", "outcome", "settings", "attention"})
CSV_COLUMNS = (
    "experiment", "pair", "system", "seed", "status", "dev_bleu", "bleu", "multi-bleu", "multi-bleu-detok",
    "bleu-moses", "bleu-treebank", "best_step", "steps", "seconds", "device_seconds", "parameters", "device", "qknorm",
    "torch", "commit", "code", "folder", "reason",
)  # fmt: skip


@dataclass(frozen=True)
class Extras:
    """What the page has besides the tables of scores: pictures, and tables of what is seen in the models."""

    pictures: Mapping[str, Path] = field(default_factory=dict)
    tables: tuple[Table, ...] = ()
    quick: bool = False


_NO_EXTRAS = Extras()


def write_report(plan: Plan, out: Path, command: str, extras: Extras = _NO_EXTRAS) -> Written:
    """Writes report.md, report.html and results.csv into the folder, of what is finished so far."""
    groups = _groups(plan.planned)
    comparer = Comparer(tests=not extras.quick)
    compared = {key: comparer.compare(planned) for key, planned in groups.items()}
    tables = (*make_tables(compared), *extras.tables)
    summary = summarise(compared, plan, extras.quick, command)
    write_csv(out / RESULTS, CSV_COLUMNS, _csv_rows(plan.planned))
    sections: dict[str, Sequence[str]] = {"Not here": _fetching(plan.missing)} if plan.missing else {}
    sections |= {"How it was made": _how_made(plan, command), "How to read this": HOW_TO_READ}
    page = Page("The paper's tables, ours beside theirs", summary, tables, extras.pictures, sections)
    return Written(page, *page.write(out), out / RESULTS)


def make_tables(compared: Mapping[tuple[str, str], Sequence[Compared]]) -> list[Table]:
    """A table for each experiment, its pairs one below the other."""
    tables = []
    for _, several in itertools.groupby(compared.items(), key=lambda item: item[0][0]):
        lines = [line for _, each in several for line in each]
        tables.append(_table(lines[0].experiment, lines))
    return tables


def _table(experiment: Experiment, lines: Sequence[Compared]) -> Table:
    of_paper = experiment.where is not None
    elsewhere = of_paper and len(experiment.pairs) == 1 and any(line.pair not in experiment.pairs for line in lines)
    paper = f"paper ({arrow(experiment.pairs[0])})" if elsewhere else "paper"
    columns = ["pair", "system", "settings", *([paper, "paper's difference"] if of_paper else [])]
    columns += ["ours, mean ± sd", "seeds", "difference", "p", "outcome", "dev BLEU", "minutes a run", "device minutes"]
    rows = []
    for line in lines:
        told = [_number(line.published, ".2f"), _number(line.claimed, "+.2f")] if of_paper else []
        rows.append((line.languages, line.system, line.what, *told, *_our_cells(line)))
    title = f"{experiment.where}: {experiment.title}" if experiment.where else f"Beyond the paper: {experiment.title}"
    notes = [f"Compared with {experiment.reference}, unless the line is a pair of systems under one change."]
    if all(line.system == experiment.reference or line.against == experiment.reference for line in lines):
        notes = [f"Compared with {experiment.reference}."]
    if experiment.where in ("Table 2", "Table 3"):
        title += f", {' or '.join(dict.fromkeys(SCORERS[line.measure] for line in lines))}"
        notes += _average_gain(experiment.where, lines)
    if len(experiment.pairs) > 1 and any(line.pair not in experiment.pairs for line in lines):
        notes.append("For a pair that the paper does not have, its difference is the average over its own pairs.")
    plain = ", ".join(dict.fromkeys(line.languages for line in lines if line.measure == PLAIN))
    if of_paper and plain:
        notes.append(
            f"{plain}: text that was never tokenised, scored by SacreBLEU as it is; the paper's numbers beside it are "
            f"of tokens, by another measure."
        )
    signatures = sorted({line.signature for line in lines if line.signature})
    notes += [f"Signature: {signature}" for signature in signatures]
    return Table(title, tuple(columns), tuple(rows), WORDS, tuple(notes))


def _our_cells(line: Compared) -> tuple[str, ...]:
    done = len(line.scores) + line.diverged
    seeds = f"{done}" if done == line.planned else f"{done} of {line.planned}"
    if line.diverged:
        seeds += f" ({line.diverged} diverged)"
    minutes, of_device = ([each / 60 for each in seconds] for seconds in (line.seconds, line.device_seconds))
    return (
        _mean(line.scores, 2),
        seeds,
        _number(line.difference, "+.2f") if line.against else NOTHING,
        _number(line.p, ".3f") if line.against else NOTHING,
        line.outcome if line.against else "",
        _mean(line.dev, 2),
        _mean(minutes, 1),
        _mean(of_device, 1),
    )


def _average_gain(where: str, lines: Sequence[Compared]) -> list[str]:
    gains = [line.difference for line in lines if line.against and line.difference is not None]
    if len(gains) < 2:
        return []
    return [f"Average gain over {len(gains)} pairs: {math.fsum(gains) / len(gains):+.3f} BLEU; the paper's, over five: "
            f"{average_gain(where):+.3f}."]  # fmt: skip


# ------------------------------------------------------------------ words


def summarise(
    compared: Mapping[tuple[str, str], Sequence[Compared]], plan: Plan, quick: bool, command: str
) -> tuple[str, ...]:
    """What holds of the paper's claims, and how much is still to be run."""
    lines = [line for each in compared.values() for line in each if line.against]
    summary = []
    if quick:
        summary.append("A small version on the embedded corpus, to see that all works: it says nothing of the claims.")
    for where in dict.fromkeys(line.experiment.where for line in lines if line.experiment.where):
        claims = [line for line in lines if line.experiment.where == where and line.claimed is not None]
        waits = ("not run yet", "nothing to compare with yet")
        outcomes = Counter(line.outcome or waits[bool(line.scores)] for line in claims)
        told = ", ".join(f"{outcome} {count}" for outcome, count in outcomes.items())
        summary.append(f"{where}, {len(claims)} comparison{'s' * (len(claims) > 1)} of the paper: {told}.")
    for line in lines:
        if not line.experiment.where and line.outcome:
            p, difference = _number(line.p, ".3f"), _number(line.difference, "+.2f")
            told = "" if line.p is None else f" ({difference} to {line.against}, p = {p})"
            summary.append(f"{line.languages}, {line.what}: {line.outcome}{told}.")
    left = sum(read_result(job.folder) is None for job in plan.jobs)
    if left:
        summary.append(f"Not finished: {left} of {len(plan.jobs)} runs. {going_on(command)}")
    if plan.missing:
        summary.append(f"Data not here: {', '.join(arrow(each.pair) for each in plan.missing)}; see below.")
    return tuple(summary)


def _fetching(missing: Sequence[MissingPair]) -> list[str]:
    return [f"{arrow(each.pair)}: {', then '.join(f'`{command}`' for command in each.commands)}" for each in missing]


def _how_made(plan: Plan, command: str) -> list[str]:
    results = _results(plan)
    seconds = math.fsum(result.seconds for result in results)
    told = f"{len(results)} runs, {seconds / 3600:.2f} hours of training in all"
    of_devices = [read_device_seconds(job.folder) for job in plan.jobs if read_result(job.folder) is not None]
    if None not in of_devices:
        told += f", {math.fsum(filter(None, of_devices)) / 3600:.2f} hours of devices"
    lines = [f"Command: `{command}`", f"{told}."]
    for label, key in (("Devices", "device"), ("Code", "code"), ("Commits", "commit")):
        found = sorted({str(result.made_by.get(key)) for result in results if result.made_by.get(key)})
        if found:
            lines.append(f"{label}: {', '.join(found)}")
    torch = sorted({str(result.made_by.get("versions", {}).get("torch")) for result in results})
    return [*lines, *([f"PyTorch: {', '.join(torch)}"] if torch else []), f"Every run: {RESULTS}"]


HOW_TO_READ = (
    "`difference` is our mean less our mean of the system compared with; `p` is one-sided, by paired bootstrap "
    f"resampling on the test set (Koehn 2004, {SAMPLES:,} samples), seeds combined: every sample draws sentences, the "
    "same for all systems, and for each system as many of its seeds, both with replacement. With one seed a system it "
    "knows nothing of how seeds differ, and with few it is too sure: n seeds drawn from n show (n − 1)/n of their "
    "variance. Each line is tested by itself, without a correction for the number of lines.",
    "`holds`: the difference has the sign of the paper's, and p is below 0.01 (Tables 2 and 3, the paper's own level) "
    "or 0.05. `not shown`: p is not below it. `reversed`: significant, in the other direction.",
    "A run that diverged has no score; means are over the others, and the number of those that diverged stands beside "
    "the seeds. `diverged`: all of them did.",
    "Minutes are wall time of training with its evaluations, beside whatever else ran on the device. Device minutes "
    "are what a run took of its device from its start to its scores, the time being shared out among the runs of one "
    "command that were at work on it at once: times the price of a minute, what it cost. On Ray, the share of a GPU "
    "it asked for.",
)


# ------------------------------------------------------------------ raw results


def _csv_rows(planned: Sequence[Planned]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for each in planned:
        known = {"experiment": each.experiment.name, "pair": each.pair, "system": each.system.name, "seed": each.seed}
        result = read_result(each.job.folder)
        if result is None:
            rows.append({**known, "status": "missing", "folder": each.job.folder.name})
            continue
        versions = result.made_by.get("versions", {})
        rows.append(
            {
                **known,
                "status": result.status,
                "dev_bleu": _plain(result.dev_bleu),
                **{name: _plain(score["value"]) for name, score in result.scores.items()},
                "best_step": result.best_step,
                "steps": result.steps,
                "seconds": f"{result.seconds:.1f}",
                "parameters": result.parameters or "",
                **{name: versions.get(name, "") for name in ("qknorm", "torch")},
                "device_seconds": "" if (taken := read_device_seconds(each.job.folder)) is None else f"{taken:.1f}",
                **{name: result.made_by.get(name) or "" for name in ("device", "commit", "code")},
                "folder": each.job.folder.name,
                "reason": result.reason,
            }
        )
    return rows


def _groups(planned: Sequence[Planned]) -> dict[tuple[str, str], list[Planned]]:
    """By experiment and pair, in order."""
    groups: dict[tuple[str, str], list[Planned]] = {}
    for each in planned:
        groups.setdefault((each.experiment.name, each.pair), []).append(each)
    return groups


def _results(plan: Plan) -> list[Result]:
    found = (read_result(job.folder) for job in plan.jobs)
    return [result for result in found if result is not None]


def arrow(pair: str) -> str:
    """One of the paper's pairs as it writes it."""
    return pair.replace("-", "→")


def _mean(values: Sequence[float], digits: int) -> str:
    mean, deviation = mean_and_deviation(values)
    if not math.isfinite(mean):
        return NOTHING
    return f"{mean:.{digits}f}" + (f" ± {deviation:.{digits}f}" if math.isfinite(deviation) else "")


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else format(value, form)


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
