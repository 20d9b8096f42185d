"""Does one job: claims it, trains or goes on training, translates its split, scores it, keeps the result."""

import sys
import traceback
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from qknorm import files
from qknorm.errors import InputError
from qknorm.studies.grid.claims import Claim, end_process, explain_loss, find_holder, find_other, take
from qknorm.studies.grid.jobs import (
    EXIT_STATUS,
    GIVEN_OUT,
    LOG,
    Ending,
    Job,
    Result,
    begin_count,
    code_version,
    read_result,
    write_failure,
)
from qknorm.studies.grid.scores import Measure, measures_for
from qknorm.text.prepared import PreparedData
from qknorm.text.subwords import Tokenizer
from qknorm.training.averaging import average
from qknorm.training.checkpoint import DamagedCheckpoint, best_step, discard_after, list_steps, load_checkpoint, prune
from qknorm.training.fit import train
from qknorm.training.loop import Outcome, TrainingDiverged
from qknorm.training.metrics import read_metrics
from qknorm.training.parallel import choose_device
from qknorm.training.run_folder import TOKENIZER, commit, is_run, load_translator, read_run, versions


def do(folder: Path, device: str | None = None, *, given_out: bool = False) -> Ending:
    """Does the job of a folder unless it is done or another is at it; what fails is written down there.

    A job that was given to a cluster is left to that; `given_out` says that this process is of it. If the claim on the
    job is lost, this process ends.
    """
    claim = take(folder, partial(_leave, folder))
    if claim is None:
        return "taken"
    with claim:
        if not given_out and find_holder(folder / GIVEN_OUT) is not None:
            return "taken"
        if read_result(folder) is not None:
            return "done"
        if not given_out:
            begin_count(folder)  # by whoever holds the claim; the grid that waits for this process ends it
        try:
            return _do_claimed(claim, Job.read(folder), device)
        except InputError as error:
            write_failure(folder, str(error))
        except Exception as error:
            trace = traceback.format_exc()
            if type(error).__name__ == "OutOfMemoryError" or "out of memory" in str(error).lower():
                write_failure(folder, "the GPU has no memory left for it; lower --parallel, or the batches", trace)
                return "out of memory"
            write_failure(folder, f"{type(error).__name__}: {error}", trace)
        return "failed"


def _leave(folder: Path) -> None:
    """Ends this process, whose claim is lost; where no other has it now, that is a failure, and written down."""
    if find_other(folder) is not None:
        end_process(folder, EXIT_STATUS["taken"])
    with suppress(OSError):  # of a disk that is away, the log or the grid tells
        if folder.is_dir():
            write_failure(folder, explain_loss(folder))
    end_process(folder)


def do_given_out(folder: Path, device: str | None = None) -> Ending:
    """`do` by a process of the cluster that the job was given to."""
    return do(folder, device, given_out=True)


def _do_claimed(claim: Claim, job: Job, device: str | None) -> Ending:
    if job.code != code_version():
        raise InputError(
            f"the job was planned by qknorm {job.code}, and the code here is {code_version()}: it changed since, or "
            f"another is installed; run the same command again"
        )
    data = PreparedData.load(job.data)
    if data.fingerprint != job.fingerprint:
        raise InputError(f"{job.data} holds other data than when the job was planned; plan it again")
    note = _clear_unreadable(job)
    try:
        outcome = _train(job, device)
    except TrainingDiverged as error:
        result = _diverged(job, str(error), device)
    else:
        if outcome.interrupted:
            return "interrupted"
        result = _score(job, data, outcome, device)
    if note:
        result = replace(result, made_by={**result.made_by, "note": note})
    if not claim.held():  # slept too long: whoever has it now writes its own
        return "taken"
    result.write(job.folder)
    _keep_best_alone(job.run)
    return "done"


def _keep_best_alone(run: Path) -> None:
    """Of a done job's checkpoints, the one that was scored: a grid has many runs, and each holds the optimiser too."""
    best = best_step(run)
    if best is not None:
        discard_after(run, best)
        prune(run, 1)


def _clear_unreadable(job: Job) -> str:
    """Removes checkpoints of which none can be read, as where a folder came without its large files; returns a note.

    What the settings and data make can be made again, so that the job begins anew in place of failing.
    """
    damaged = []
    for step in reversed(list_steps(job.run)):
        try:
            load_checkpoint(job.run, step)
        except DamagedCheckpoint as error:
            if isinstance(error.__cause__, OSError):  # a disk that does not answer now may have it whole
                return ""
            damaged.append(f"{error.folder.name}: {error.what}")
        else:
            return ""
    if not damaged:
        return ""
    discard_after(job.run, -1)
    note = f"begun anew, since no checkpoint could be read ({', '.join(damaged)})"
    with (job.folder / LOG).open("a", encoding="utf-8") as log:
        log.write(f"{note}\n")
    return note


def _train(job: Job, device: str | None) -> Outcome:
    begun = is_run(job.run) and bool(list_steps(job.run))
    if begun:
        _require_readable(job.run)
    outcome = train(job.data, job.run, None if begun else job.settings, resume=begun, device=device, quiet=True)
    if outcome is None:
        raise InputError("a job is done by one process; run it without torchrun")
    return outcome


def _require_readable(run: Path) -> None:
    """Refuses a run with a damaged file, by which every try would fail, with what helps."""
    try:
        read_run(run)
        Tokenizer.load(run / TOKENIZER, "copy it from the prepared folder")
    except InputError as error:
        raise InputError(f"{error}; or remove {run} to begin it anew") from None


def _score(job: Job, data: PreparedData, outcome: Outcome, device: str | None) -> Result:
    split = data.split(job.split)
    translator = load_translator(job.run, device=device)
    translations = translator.translate(split.text(data.source))
    references = split.text(data.target)
    scores: dict[str, dict[str, Any]] = {}
    for name in measures_for(data.tokenizer.pretokenized):
        score = Measure(name, data.target).score(translations, references)
        scores[name] = {"value": score.value, "signature": score.signature}
    files.write_text(job.folder / f"{job.split}.txt", "".join(f"{line}\n" for line in translations))
    return Result(
        "finished",
        outcome.reason,
        outcome.seconds,
        outcome.step,
        outcome.best_step,
        outcome.best_score,
        sum(weights.numel() for weights in translator.model.parameters()),
        scores,
        _made_by(job, device),
        _score_averages(job, data, next(iter(scores.values()))["value"], device),
    )


def averaged_weights(run: Path, count: int) -> Path:
    """Where a job leaves the mean of its last checkpoints, if that is better than its best one."""
    return run / f"averaged-{count}.safetensors"


def _score_averages(job: Job, data: PreparedData, best: float, device: str | None) -> dict[str, float]:
    """Scores the means that are asked for, as far as there are checkpoints; keeps the weights of what beats `best`."""
    split, found = data.split(job.split), {}
    for count in job.averages:
        if count > len(list_steps(job.run)):
            continue
        path = averaged_weights(job.run, count)
        average(job.run, last=count, out=path)
        translations = load_translator(job.run, checkpoint=path, device=device).translate(split.text(data.source))
        measure = Measure(measures_for(data.tokenizer.pretokenized)[0], data.target)
        found[str(count)] = measure.score(translations, split.text(data.target)).value
        if found[str(count)] <= best:
            path.unlink()
    return found


def _diverged(job: Job, reason: str, device: str | None) -> Result:
    rows = read_metrics(job.run)
    steps = max((row["step"] for row in rows), default=0)
    seconds = max((row["time"].get("elapsed", 0.0) for row in rows), default=0.0)
    evaluated = [row for row in rows if row.get("dev_bleu") is not None]
    best = max(evaluated, key=lambda row: row["dev_bleu"], default=None)
    step, bleu = (best["step"], best["dev_bleu"]) if best else (0, None)
    return Result("diverged", reason, seconds, steps, step, bleu, made_by=_made_by(job, device))


def _made_by(job: Job, device: str | None) -> dict[str, object]:
    place = choose_device(device)
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu"
    return {"device": name, "versions": versions(), "commit": commit(), "code": job.code}


if __name__ == "__main__":
    sys.exit(EXIT_STATUS[do(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)])
