"""The test set, which only the system that was chosen and the reference translate, once the choice is made."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np

from qknorm import files
from qknorm.scoring.resampling import bootstrap_totals
from qknorm.studies.grid.jobs import RESULT, TRANSLATIONS, Job, code_version, read_result, read_translations
from qknorm.studies.grid.scores import PLAIN, RELEASED, Measure, measures_for
from qknorm.studies.grid.work import averaged_weights
from qknorm.studies.paper.comparing import SAMPLES, SEED, combine_seeds
from qknorm.studies.tables import Table
from qknorm.studies.tune.search import Search, Trial
from qknorm.training.checkpoint import MODEL_FILE
from qknorm.training.run_folder import load_translator

AGAIN = "again"
AVERAGED = "checkpoints averaged where a seed's dev BLEU prefers it"
TITLE = "Test, after the choice"


def best_average(job: Job) -> int | None:
    """How many checkpoints make the best mean on dev; None where the best checkpoint is as good."""
    result = read_result(job.folder)
    if result is None or not result.averaged or not result.scores:
        return None
    count = max(result.averaged, key=lambda each: result.averaged[each])
    return int(count) if result.averaged[count] > next(iter(result.scores.values()))["value"] else None


def job_for_test(trial: Trial) -> Job:
    """The trial's own job; where its weights were taken away before the test, a second one in its folder.

    A second training differs a little on a GPU. It is for the test alone: the choice stays with the first result.
    """
    job = trial.job
    if _has_weights(job) or (job.folder / TRANSLATIONS).is_file():
        return job
    return replace(job, folder=job.folder / AGAIN, code=code_version())


def jobs_to_repeat(trials: Sequence[Trial]) -> list[Job]:
    """What is to be trained again, since its weights are needed and gone."""
    jobs = [job for job in map(job_for_test, trials) if not (job.folder / TRANSLATIONS).is_file()]
    for job in jobs:
        if not _has_weights(job):
            (job.folder / RESULT).unlink(missing_ok=True)
    return [job for job in jobs if read_result(job.folder) is None]


def _has_weights(job: Job) -> bool:
    """Whether all is there that translates: a folder may have come with everything but its large files."""
    average = best_average(job)
    kept = any(job.run.glob(f"checkpoints/*/{MODEL_FILE}"))
    return kept and (average is None or averaged_weights(job.run, average).is_file())


def translate_test(search: Search, device: str | None = None) -> None:
    """Translates the test set with the best system and with the reference, unless they have done it before."""
    base, best = search.data.base, search.best()
    for trial in (*search.of_reference(), *best):
        job = job_for_test(trial)
        if (job.folder / TRANSLATIONS).is_file():
            continue
        # the best checkpoint last: its translations tell that all is done
        for count in dict.fromkeys((best_average(job) if trial in best else None, None)):
            checkpoint = "best" if count is None else averaged_weights(job.run, count)
            translator = load_translator(job.run, checkpoint=checkpoint, device=device)  # type: ignore[arg-type]
            lines = translator.translate(base.split("test").text(base.source))
            files.write_text(_translations(job, count), "".join(f"{line}\n" for line in lines))


def _translations(job: Job, average: int | None) -> Path:
    return job.folder / (TRANSLATIONS if average is None else f"test-averaged-{average}.txt")


def tabulate_test(search: Search) -> Table | None:
    """The best system's test scores beside the reference's; None before both are translated."""
    base, best, reference = search.data.base, search.best(), search.of_reference()
    paths = {search.reference_name: [_translations(job_for_test(trial), None) for trial in reference]}
    if best:
        jobs = [job_for_test(trial) for trial in best]
        paths[best[0].system] = [_translations(job, None) for job in jobs]
        if any(map(best_average, jobs)):
            averaged = [_translations(job, best_average(job)) for job in jobs]
            paths[f"{best[0].system}, {AVERAGED}"] = averaged
    known = {name: each for name, each in paths.items() if each and all(path.is_file() for path in each)}
    if len(known) < 2 or search.reference_name not in known:
        return None
    measures = [Measure(name, base.target) for name in measures_for(base.tokenizer.pretokenized)]
    main = next(each for each in measures if each.name in (PLAIN, RELEASED))
    references = base.split("test").text(base.target)
    rows = []
    count = len(references)
    theirs = [read_translations(path, count, remove=path) for path in known[search.reference_name]]
    for name, each in known.items():
        ours = [read_translations(path, count, remove=path) for path in each]
        means = {one.name: fmean(one.score(lines, references).value for lines in ours) for one in measures}
        told = ("", "") if ours == theirs else _compare(main, ours, theirs, references, tests=not search.quick)
        rows.append((name, *(f"{value:.2f}" for value in means.values()), *told, str(len(ours))))
    columns = ("system", *(one.name for one in measures), f"difference, {main.name}", "p", "seeds")
    notes = [f"{one.name}: {one.score(theirs[0], references).signature}" for one in measures]
    return Table(TITLE, columns, tuple(rows), frozenset({"system"}), tuple(notes))


def _compare(
    measure: Measure, ours: Sequence[list[str]], theirs: Sequence[list[str]], references: Sequence[str], *, tests: bool
) -> tuple[str, str]:
    """The difference of the means, and its p by sentences and seeds drawn anew; a quick study tests nothing."""
    means, draws = [], []
    for side in (ours, theirs):
        counts = [measure.count(lines, references) for lines in side]
        means.append(fmean(float(measure.metric.score_total(each.sum(axis=0))) for each in counts))
        totals = [bootstrap_totals([each], SAMPLES, SEED)[0] for each in counts]
        draws.append(np.stack([measure.metric.score_totals(each) for each in totals]))
    difference = means[0] - means[1]
    return f"{difference:+.2f}", f"{combine_seeds(draws[0], draws[1], difference):.3f}" if tests else ""
