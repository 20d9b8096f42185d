"""Small data, settings and finished jobs for the tests of the grid and of the paper's tables."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from qknorm import files
from qknorm.config import Prepare, Subwords, Train
from qknorm.studies.grid.jobs import TRANSLATIONS, Job, Result, View, begin_count, end_count, look
from qknorm.studies.grid.scores import Measure, measures_for
from qknorm.studies.grid.work import do
from qknorm.studies.recipes import change
from qknorm.text.prepare import prepare
from qknorm.text.prepared import PreparedData

WORDS = ("un", "dous", "tres", "catro", "cinco", "seis")


def prepare_copy(
    folder: Path, *, pairs: int = 80, pretokenized: bool = False, source: str = "gl", target: str = "en"
) -> PreparedData:
    """Lines of words and the same in capitals, prepared in folder/data."""
    chooser = random.Random(7)
    lines: dict[str, None] = {}
    while len(lines) < pairs + 20:
        lines[" ".join(chooser.choices(WORDS, k=chooser.randint(4, 7)))] = None
    splits = {"train": list(lines)[20:], "dev": list(lines)[:10], "test": list(lines)[10:20]}
    paths = {}
    for split, chosen in splits.items():
        paths[split] = (folder / f"{split}.{source}", folder / f"{split}.{target}")
        files.write_text(paths[split][0], "".join(f"{line}\n" for line in chosen))
        files.write_text(paths[split][1], "".join(f"{line.upper()}\n" for line in chosen))
    subwords = Subwords(merges=30, pretokenized=pretokenized)
    prepare(Prepare(source=source, target=target, subwords=subwords, **paths), folder / "data")
    return PreparedData.load(folder / "data")


def tiny(**changes: object) -> Train:
    """Settings that train in a second."""
    small = {
        "model.width": 16,
        "model.feed_forward": 16,
        "model.encoder_layers": 1,
        "model.decoder_layers": 1,
        "model.heads": 2,
        "training.batch_tokens": 256,
        "training.max_steps": 8,
        "training.evaluate_every": 4,
        "training.log_every": 2,
        "training.schedule.warmup": 2,
        "training.schedule.peak": 1e-2,
        "training.precision": "float32",
        "decoding.beam": 1,
        "decoding.extra_length": 4,
    }
    return change(Train(), {**small, **changes})


def finish(job: Job, data: PreparedData, wrong: int, seconds: float = 60.0, of_device: float | None = 30.0) -> None:
    """Writes what a job leaves whose translations are right but for `wrong` of the test sentences."""
    references = data.split("test").text(data.target)
    translations = ["X Y Z W V" if place < wrong else line for place, line in enumerate(references)]
    scores = {}
    for name in measures_for(data.tokenizer.pretokenized):
        score = Measure(name, data.target).score(translations, references)
        scores[name] = {"value": score.value, "signature": score.signature}
    job.write()
    files.write_text(job.folder / TRANSLATIONS, "".join(f"{line}\n" for line in translations))
    made_by = {"device": "cpu", "versions": {"torch": "2", "qknorm": "0"}, "commit": None, "code": job.code}
    if of_device is not None:
        begin_count(job.folder)
        end_count(job.folder, of_device)
    Result("finished", "the end", seconds, 100, 50, 90.0 - wrong, 1_000, scores, made_by).write(job.folder)


class GridInThisProcess:
    """In the place of `LocalGrid`: does one job after another."""

    def __init__(
        self, jobs: Sequence[Job], slots: object, on_change: Callable[[list[View]], None], max_minutes: object = None
    ) -> None:
        self._jobs, self._on_change = jobs, on_change

    def run(self) -> bool:
        for job in self._jobs:
            job.write()
            assert do(job.folder, "cpu") == "done"
        self._on_change([look(job) for job in self._jobs])
        return True
