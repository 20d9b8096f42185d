"""The stages of a search: single changes of the start, the winners joined, more seeds for those that lead."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qknorm.config import Train
from qknorm.studies.grid.jobs import Job, Result, read_result
from qknorm.studies.recipes import change
from qknorm.studies.tune.candidates import (
    MERGES,
    NONE,
    START,
    Candidate,
    apply,
    find_winners,
    join,
    single_changes,
)
from qknorm.studies.tune.data import DataByMerges

RUNS = "runs"
START_SEEDS = 3
"""Runs of the start: every gain is told against their mean, and what they differ by is noise."""
FINALISTS = 3
"""Systems that get the further seeds, besides the reference."""


@dataclass(frozen=True)
class Trial:
    """One training of a search."""

    stage: str
    candidate: Candidate
    seed: int
    merges: int
    job: Job

    @property
    def system(self) -> str:
        """What all of its seeds are called."""
        return self.candidate.name

    @property
    def result(self) -> Result | None:
        """How it ended, if it has."""
        return read_result(self.job.folder)

    @property
    def dev(self) -> float | None:
        """The best dev BLEU that the training recorded; None where it is not finished or diverged."""
        result = self.result
        return None if result is None or result.status == "diverged" else result.dev_bleu


@dataclass
class Search:
    """From where to search, on what, how far; `stages` is to be gone through once."""

    data: DataByMerges
    out: Path
    start: Train
    merges: int
    reference: Train
    reference_name: str
    reference_merges: int
    only: Sequence[str] = ()
    values: int | None = None
    margin: float = 0.2
    seeds: int = 1
    start_seeds: int = START_SEEDS
    averages: tuple[int, ...] = ()
    max_steps: int | None = None
    quick: bool = False
    """Whether start and reference are small ones, that say nothing of real text."""
    any_code: bool = False
    trials: list[Trial] = field(default_factory=list)
    """Of the stages so far."""
    without_effect: list[Candidate] = field(default_factory=list)
    """Changes that are not run, since `max_steps` leaves of them what the start is."""

    def stages(self) -> Iterator[list[Trial]]:
        """The trainings of one stage after another; each is chosen by what those before it gave."""
        singles = self._singles()
        starts = [
            self._trial("single", START, seed) for seed in range(max(self.seeds, self.start_seeds if singles else 1))
        ]
        yield self._add([starts[0], self._reference(), *starts[1:], *singles])
        joined = join(self.start, find_winners(self.gains(), self.margin))
        if joined:
            yield self._add([self._trial("joined", each) for each in joined])
        leading = [each for each in self.ranking()[:FINALISTS] if each != START]
        again = [self._trial("seeds", each, seed) for seed in range(1, self.seeds) for each in leading]
        again += [self._reference(seed) for seed in range(1, self.seeds)]
        if again:
            yield self._add(again)

    def gains(self) -> dict[Candidate, float]:
        """What each finished single change adds to the start's mean dev BLEU."""
        start = self.start_dev()
        singles = [trial for trial in self.trials if trial.stage == "single" and trial.candidate.factor]
        found = {trial.candidate: trial.dev for trial in singles}
        return {each: dev - start for each, dev in found.items() if dev is not None and start is not None}

    def start_dev(self) -> float | None:
        """The mean over the start's finished runs; None before there is one."""
        devs = [dev for trial in self.of(START) if (dev := trial.dev) is not None]
        return math.fsum(devs) / len(devs) if devs else None

    def ranking(self) -> list[Candidate]:
        """Finished systems but the reference, those of most seeds first, of these the best mean dev BLEU.

        That the start has more from the beginning does not put it before others.
        """
        devs: dict[Candidate, list[float]] = {}
        for trial in self.trials:
            if trial.system != self.reference_name and (dev := trial.dev) is not None:
                devs.setdefault(trial.candidate, []).append(dev)
        most = max((len(found) for each, found in devs.items() if each != START), default=1)
        return sorted(devs, key=lambda each: (-min(len(devs[each]), most), -math.fsum(devs[each]) / len(devs[each])))

    def best(self) -> list[Trial]:
        """The trainings of the system that leads, one a seed; none before any is finished."""
        leading = self.ranking()[:1]
        return [trial for each in leading for trial in self.of(each) if trial.dev is not None]

    def of_reference(self) -> list[Trial]:
        """The reference's finished trainings."""
        return [trial for trial in self.trials if trial.system == self.reference_name and trial.dev is not None]

    def of(self, candidate: Candidate) -> list[Trial]:
        """The trainings of one system, one a seed."""
        return [trial for trial in self.trials if trial.candidate == candidate]

    def _add(self, trials: Sequence[Trial]) -> list[Trial]:
        self.trials += trials
        return list(trials)

    def _singles(self) -> list[Trial]:
        if NONE in self.only:
            return []
        changes = single_changes(self.start, self.merges, self.only, self.values)
        trials, start = [self._trial("single", each) for each in changes], self._trial("single", START)
        self.without_effect = [each.candidate for each in trials if each.job.folder == start.job.folder]
        return [each for each in trials if each.job.folder != start.job.folder]

    def _reference(self, seed: int = 0) -> Trial:
        stage = "seeds" if seed else "single"
        return self._plan(stage, Candidate(self.reference_name, {}), self.reference, self.reference_merges, seed)

    def _trial(self, stage: str, candidate: Candidate, seed: int = 0) -> Trial:
        merges = candidate.changes.get(MERGES, self.merges)
        assert isinstance(merges, int)
        return self._plan(stage, candidate, apply(self.start, candidate.changes), merges, seed)

    def _plan(self, stage: str, candidate: Candidate, settings: Train, merges: int, seed: int) -> Trial:
        own: Mapping[str, object] = {
            "training.seed": seed,
            "training.keep": max(self.averages, default=1),
            "training.max_steps": min(settings.training.max_steps, self.max_steps or settings.training.max_steps),
        }
        name = f"{candidate.name}, seed {seed}"
        data, settings = self.data.at(merges), change(settings, own)
        options = {"split": "dev", "averages": self.averages, "any_code": self.any_code}
        return Trial(stage, candidate, seed, merges, Job.plan(name, data, settings, self.out / RUNS, **options))  # type: ignore[arg-type]
