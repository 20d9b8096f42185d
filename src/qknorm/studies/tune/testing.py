"""The test set, which only the system that was chosen and the reference translate, once the choice is made."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qknorm import files
from qknorm.scoring.resampling import bootstrap_totals
from qknorm.studies.grid.jobs import JOB, RESULT
from qknorm.studies.grid.scores import PLAIN, RELEASED, Measure, measures_for
from qknorm.studies.grid.work import averaged_weights
from qknorm.studies.paper.comparing import SAMPLES, SEED, combine_seeds
from qknorm.studies.tables import Table
from qknorm.studies.tune.search import Search, Trial
from qknorm.training.checkpoint import list_steps
from qknorm.training.run_folder import load


def best_average(trial: Trial) -> int | None:
    """How many checkpoints make the best mean on dev; None where the best checkpoint is as good."""
    result = trial.result
    if result is None or not result.averaged or not result.scores:
        return None
    count = max(result.averaged, key=lambda each: result.averaged[each])
    return int(count) if result.averaged[count] > next(iter(result.scores.values()))["value"] else None


def forget_without_weights(trials: Sequence[Trial]) -> list[Trial]:
    """Makes those unfinished whose weights were taken away, so that they are trained again; returns them."""
    bare = [trial for trial in trials if not list_steps(trial.job.run)]
    for trial in bare:
        for name in (RESULT, JOB):  # the job too: other code or another place may have planned it
            (trial.job.folder / name).unlink(missing_ok=True)
    return bare


def translate_test(search: Search, device: str | None = None) -> None:
    """Translates the test set with the best system and with the reference, unless they have done it before."""
    for trial in (*search.of_reference(), *search.best()):
        averages = (None,) if trial in search.of_reference() else (None, best_average(trial))
        for count in dict.fromkeys(averages):
            path = translations_of(trial, count)
            if not path.is_file():
                checkpoint = "best" if count is None else averaged_weights(trial.job.run, count)
                base = search.data.base
                lines = load(trial.job.run, checkpoint=checkpoint, device=device).translate(  # type: ignore[arg-type]
                    base.split("test").text(base.source)
                )
                files.write_text(path, "".join(f"{line}\n" for line in lines))


def translations_of(trial: Trial, average: int | None) -> Path:
    """Where a trial's translations of the test set lie, by its best checkpoint or by a mean."""
    return trial.job.folder / ("test.txt" if average is None else f"test-averaged-{average}.txt")


def tabulate_test(search: Search) -> Table | None:
    """The best system's test scores beside the reference's; None before both are translated."""
    base, best, reference = search.data.base, search.best(), search.of_reference()
    paths = {search.reference_name: [translations_of(trial, None) for trial in reference]}
    if best:
        paths[best[0].system] = [translations_of(trial, None) for trial in best]
        counts = [best_average(trial) for trial in best]
        if any(counts):
            averaged = [translations_of(trial, count) for trial, count in zip(best, counts, strict=True)]
            paths[f"{best[0].system}, checkpoints averaged"] = averaged
    known = {name: each for name, each in paths.items() if each and all(path.is_file() for path in each)}
    if len(known) < 2 or search.reference_name not in known:
        return None
    measures = [Measure(name, base.target) for name in measures_for(base.tokenizer.pretokenized)]
    main = next(each for each in measures if each.name in (PLAIN, RELEASED))
    references = base.split("test").text(base.target)
    rows = []
    theirs = [_read(path) for path in known[search.reference_name]]
    for name, each in known.items():
        ours = [_read(path) for path in each]
        means = {one.name: _mean([one.score(lines, references).value for lines in ours]) for one in measures}
        told = ("", "") if ours == theirs else _compare(main, ours, theirs, references)
        rows.append((name, *(f"{value:.2f}" for value in means.values()), *told, str(len(ours))))
    columns = ("system", *(one.name for one in measures), f"difference, {main.name}", "p", "seeds")
    notes = [f"{one.name}: {one.score(theirs[0], references).signature}" for one in measures]
    return Table("Test, after the choice", columns, tuple(rows), frozenset({"system"}), tuple(notes))


def _compare(
    measure: Measure, ours: Sequence[list[str]], theirs: Sequence[list[str]], references: Sequence[str]
) -> tuple[str, str]:
    """The difference of the means, and its p by sentences and seeds drawn anew."""
    means, draws = [], []
    for side in (ours, theirs):
        counts = [measure.count(lines, references) for lines in side]
        means.append(_mean([float(measure.metric.score_total(each.sum(axis=0))) for each in counts]))
        totals = [bootstrap_totals([each], SAMPLES, SEED)[0] for each in counts]
        draws.append(np.stack([measure.metric.score_totals(each) for each in totals]))
    difference = means[0] - means[1]
    return f"{difference:+.2f}", f"{combine_seeds(draws[0], draws[1], difference):.3f}"


def _read(path: Path) -> list[str]:
    return path.read_bytes().decode().removesuffix("\n").split("\n")


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
