"""The pages of a search: what every change gave on dev, what helped, the best settings as a file."""

import json
import math
from collections.abc import Sequence

from qknorm.studies.grid.jobs import Result
from qknorm.studies.tables import Page, Table, Written, going_on, write_csv
from qknorm.studies.tune.candidates import FACTORS, START, Candidate, find_winners
from qknorm.studies.tune.search import Search, Trial
from qknorm.studies.tune.testing import tabulate_test
from qknorm.training.run_folder import SETTINGS, write_settings

NOTHING = "–"
BEST, RESULTS = "best", "results.csv"
TITLES = {"single": "One change at a time", "joined": "The best changes joined", "seeds": "More seeds"}
CSV_COLUMNS = (
    "stage", "system", "factor", "changes", "merges", "seed", "status", "dev_bleu", "difference", "float32", "averaged",
    "best_step", "steps", "seconds", "parameters", "device", "torch", "commit", "code", "folder", "reason",
)  # fmt: skip
HOW_TO_READ = (
    "`dev BLEU` is the best that the training recorded, by beam search; it does not depend on the subwords. "
    "`difference` is to the mean of the start's runs. The best of many evaluations, of one seed, of many candidates is "
    "flattered, most where a run evaluates more often, as by a plateau schedule: a few tenths are noise, which more "
    "seeds and the test set show.",
    "`mean of n` is what the mean of the last n checkpoints adds on dev to the best checkpoint, both in float32. On a "
    "GPU checkpoints that are not the best are some seconds apart, so that this depends on its speed.",
    "Seconds are wall time of training with its evaluations, beside whatever else ran on the device.",
)


def write_report(search: Search, command: str) -> Written:
    """Writes report.md, report.html, results.csv and the best settings into the folder, of what is finished so far."""
    test = tabulate_test(search)
    tables = tuple(_table(search, stage) for stage in TITLES if any(each.stage == stage for each in search.trials))
    tables = (*([test] if test else []), *tables)
    summary = summarise(search, command)
    write_csv(search.out / RESULTS, CSV_COLUMNS, [_csv_row(search, trial) for trial in search.trials])
    best = search.best()
    if best:
        write_settings(search.out / BEST, best[0].job.settings)
    sections = {"How it was made": _how_made(search, command), "How to read this": HOW_TO_READ}
    pair = f"{search.data.base.source}→{search.data.base.target}"
    page = Page(f"Settings for {pair}, chosen on dev", summary, tables, sections=sections)
    return Written(page, *page.write(search.out), search.out / RESULTS)


def summarise(search: Search, command: str) -> tuple[str, ...]:
    """The best system, what helped and what did not, and how much is still to be run."""
    best, summary = search.best(), []
    if search.quick:
        summary.append("A small version on the embedded corpus, to see that all works: it says nothing of real text.")
    if best:
        dev, merges = _mean_dev(best), best[0].merges
        others = {"the start": search.of(START), search.reference_name: search.of_reference()}
        means = {name: _mean_dev(each) for name, each in others.items()}
        beside = ", ".join(f"{dev - each:+.2f} to {name}" for name, each in means.items() if math.isfinite(each))
        summary.append(f"Best of the search on dev: {best[0].system}, {dev:.2f} BLEU ({beside}); seeds: {len(best)}.")
        if (reference := means[search.reference_name]) > dev:
            summary.append(f"The reference, {search.reference_name}, is better: {reference:.2f} BLEU.")
        fresh, fresh_start = (_mean_dev([each for each in of if each.seed]) for of in (best, search.of(START)))
        if best[0].candidate != START and math.isfinite(fresh - fresh_start):
            told = "By the further seeds alone, which finalists were not chosen by"
            summary.append(f"{told}: {fresh - fresh_start:+.2f} to the start.")
        changes = ", ".join(f"{setting} {value}" for setting, value in best[0].candidate.changes.items())
        summary.append(f"It changes of the start: {changes or 'nothing'}.")
        told = f"Its settings: `--config {search.out / BEST / SETTINGS}` for `qknorm train`"
        summary.append(f"{told}, on data of {merges:,} merges (`qknorm prepare --subwords.merges {merges}`).")
        gain, count = max(((_mean_gain(best, each), each) for each in search.averages), default=(0.0, 0))
        if gain > search.margin:
            told = f"The mean of its last {count} checkpoints is {gain:.2f} better on dev"
            summary.append(f"{told}; seeds: {len(best)} (`qknorm average --last {count}`).")
    summary += _what_helped(search)
    left = sum(trial.result is None for trial in search.trials)
    if left:
        summary.append(f"Not finished: {left} of {len(search.trials)} runs. {going_on(command)}")
    return tuple(summary)


def _what_helped(search: Search) -> list[str]:
    gains = search.gains()
    winners = find_winners(gains, search.margin)
    lines = []
    noise = [dev for trial in search.of(START) if (dev := trial.dev) is not None]
    if gains and len(noise) > 1:
        told = f"The start's {len(noise)} seeds lie {max(noise) - min(noise):.2f} BLEU apart"
        lines.append(f"{told}: what one run of a change gives is as uncertain.")
    if winners:
        told = ", ".join(f"{each.name} ({gains[each]:+.2f})" for each in winners)
        lines.append(f"Helped by more than {search.margin:g} BLEU: {told}.")
    helped = {each.factor for each in winners}
    rest = []
    for factor in (factor for factor in FACTORS if factor not in helped):
        tried: list[Candidate] = [each for each in gains if each.factor == factor]
        if tried:
            nearest = max(tried, key=lambda each: gains[each])
            rest.append(f"{nearest.name} ({gains[nearest]:+.2f})")
    if rest:
        lines.append(f"Did not, by the best value of each: {', '.join(rest)}.")
    return lines


def _table(search: Search, stage: str) -> Table:
    start = search.start_dev()
    rows = []
    for trial in (each for each in search.trials if each.stage == stage):
        result = trial.result
        name = f"{trial.system}, seed {trial.seed}" if trial.seed else trial.system
        if result is None:
            rows.append((name, *[NOTHING] * (5 + len(search.averages))))
            continue
        dev = trial.dev
        difference = f"{dev - start:+.2f}" if dev is not None and start is not None else NOTHING
        means = [_gain(result, count) for count in search.averages]
        rows.append(
            (
                name,
                "diverged" if dev is None else f"{dev:.2f}",
                difference,
                *(f"{mean:+.2f}" if math.isfinite(mean) else NOTHING for mean in means),
                f"{result.steps:,}",
                f"{result.seconds:,.0f}",
                f"{result.parameters:,}" if result.parameters else NOTHING,
            )
        )
    averages = (f"mean of {count}" for count in search.averages)
    columns = ("system", "dev BLEU", "difference", *averages, "steps", "seconds", "parameters")
    winners = ", ".join(each.name for each in find_winners(search.gains(), search.margin))
    notes = (f"The best changes, in this order: {winners}.",) if stage == "joined" else ()
    return Table(TITLES[stage], columns, tuple(rows), frozenset({"system"}), notes)


def _csv_row(search: Search, trial: Trial) -> dict[str, object]:
    changes = json.dumps(dict(trial.candidate.changes))
    known = {"stage": trial.stage, "system": trial.system, "factor": trial.candidate.factor, "changes": changes}
    known |= {"merges": str(trial.merges), "seed": str(trial.seed), "folder": trial.job.folder.name}
    result, start = trial.result, search.start_dev()
    if result is None:
        return {**known, "status": "missing"}
    dev = trial.dev
    return {
        **known,
        "status": result.status,
        "dev_bleu": "" if dev is None else f"{dev:.4f}",
        "difference": f"{dev - start:.4f}" if dev is not None and start is not None else "",
        "float32": next(iter(result.scores.values()), {}).get("value", ""),  # what the means are to be compared with
        "averaged": json.dumps(dict(result.averaged)),
        **{name: getattr(result, name) for name in ("best_step", "steps", "reason")},
        "seconds": f"{result.seconds:.1f}",
        "parameters": result.parameters or "",
        "torch": result.made_by.get("versions", {}).get("torch", ""),
        **{name: result.made_by.get(name) or "" for name in ("device", "commit", "code")},
    }


def _how_made(search: Search, command: str) -> list[str]:
    results = [result for trial in search.trials if (result := trial.result) is not None]
    hours = math.fsum(result.seconds for result in results) / 3600
    devices, codes = (sorted({str(each.made_by.get(name)) for each in results}) for name in ("device", "code"))
    return [
        f"Command: `{command}`",
        f"{len(results)} runs, {hours:.2f} hours of training in all, on {', '.join(devices) or 'nothing yet'}.",
        f"Code: {', '.join(codes) or 'none yet'}.",
        f"Start: {search.merges:,} merges; reference: {search.reference_name}, {search.reference_merges:,} merges.",
        f"Every run: {RESULTS}",
    ]


def _gain(result: Result, count: int) -> float:
    """What the mean of the last checkpoints adds on dev to the best one, both in float32; NaN where it was not made."""
    first = next(iter(result.scores.values()), {}).get("value", math.nan)
    return float(result.averaged.get(str(count), math.nan) - first)


def _mean_gain(trials: Sequence[Trial], count: int) -> float:
    """Over all seeds, since one may prefer its mean by chance; endlessly bad where one has no such mean."""
    gains = [_gain(result, count) for trial in trials if (result := trial.result) is not None]
    return math.fsum(gains) / len(gains) if all(map(math.isfinite, gains)) else -math.inf


def _mean_dev(trials: Sequence[Trial]) -> float:
    devs = [dev for trial in trials if (dev := trial.dev) is not None]
    return math.fsum(devs) / len(devs) if devs else math.nan
