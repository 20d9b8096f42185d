"""Systems of several seeds on one test set: means, and whether a difference is more than chance.

Seeds are combined in one test, paired bootstrap resampling (Koehn 2004) with one draw more: every sample takes
sentences of the test set with replacement, the same for all systems, and for each system as many of its seeds with
replacement; a system's score is the mean over the seeds drawn. So p speaks of another test set and of other seeds. With
one seed a system it is Koehn's test, which knows nothing of seeds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qknorm.scoring.paired_tests import koehn_p
from qknorm.scoring.resampling import bootstrap_totals
from qknorm.studies.grid.jobs import TRANSLATIONS, Result, read_device_seconds, read_result, read_translations
from qknorm.studies.grid.scores import PLAIN, RELEASED, TREEBANK, Measure, measures_for
from qknorm.studies.paper.experiments import Experiment, System
from qknorm.studies.paper.plan import Planned

SAMPLES, SEED = 1_000, 12_345
TOO_SMALL = "too small to say"

Draws = NDArray[np.float64]  # (seeds, samples): the score of each seed on each resampled test set


@dataclass(frozen=True)
class Compared:
    """A system beside the one it is compared with, on one pair; what is not known yet is None."""

    experiment: Experiment
    pair: str
    languages: str
    """The pair as tables show it: a language's own name may have a hyphen."""
    system: str
    what: str
    against: str | None
    published: float | None
    claimed: float | None
    """The difference that the paper found, on this pair or, where it lacks that, on the average of its own."""
    scores: tuple[float, ...]
    """Test BLEU of every finished seed."""
    dev: tuple[float, ...]
    seconds: tuple[float, ...]
    device_seconds: tuple[float, ...]
    """Less where trainings shared a device; of those runs alone of which that is known."""
    planned: int
    diverged: int
    difference: float | None = None
    p: float | None = None
    """None beside a difference, too, where nothing is tested."""
    signature: str = ""
    measure: str = ""
    """What the scores are of, by its name in grid/scores.py."""

    @property
    def outcome(self) -> str:
        """What the test says: of the paper's claim where there is one, else of the difference itself."""
        if self.difference is None:
            return "diverged" if self.diverged == self.planned else ""
        if self.p is None:
            return TOO_SMALL
        sure = self.p < self.experiment.significance
        if self.claimed is None:
            return ("better" if self.difference > 0 else "worse") if sure else "no difference shown"
        if not sure:
            return "not shown"
        return "holds" if (self.difference > 0) == (self.claimed > 0) else "reversed"


def measure_name(experiment: Experiment, available: Sequence[str]) -> str:
    """The measure of an experiment; text that never was in tokens has one alone."""
    if PLAIN in available:
        return PLAIN
    # the paper's numbers are those of multi-bleu-detok.perl on tokenised text: its notebook shows that for en→vi, and
    # for the TED pairs both of its scorers give one number, but for a hundredth in one, as they do on tokens alone
    return TREEBANK if experiment.scorer == "sacrebleu" else RELEASED


def combine_seeds(ours: Draws, theirs: Draws, difference: float) -> float:
    """The share of samples in which the system that won does not win, seeds drawn anew in each; never 0."""
    generator = np.random.default_rng(SEED)
    return koehn_p(_mean_of_drawn(ours, generator) - _mean_of_drawn(theirs, generator), difference)


def _mean_of_drawn(draws: Draws, generator: np.random.Generator) -> Draws:
    seeds, samples = draws.shape
    chosen = generator.integers(seeds, size=(seeds, samples))
    mean: Draws = np.take_along_axis(draws, chosen, axis=0).mean(axis=0)
    return mean


@dataclass
class Comparer:
    """Compares what is finished of a plan; keeps the draws of every run, which several tables may need."""

    tests: bool = True
    """Whether differences are tested: what says nothing is to have no p and no outcome that says something."""
    _draws: dict[tuple[str, str], Draws] = field(default_factory=dict)

    def compare(self, planned: Sequence[Planned]) -> list[Compared]:
        """A line for every system of one experiment on one pair, in order."""
        experiment = planned[0].experiment
        by_system: dict[str, list[tuple[Planned, Result]]] = {each.system.name: [] for each in planned}
        for each in planned:
            result = read_result(each.job.folder)
            if result is not None:
                by_system[each.system.name].append((each, result))
        systems = {each.system.name: each.system for each in planned}
        measure = measure_name(experiment, measures_for(planned[0].data.tokenizer.pretokenized))
        lines = []
        for name, system in systems.items():
            against = system.against or experiment.reference
            count = sum(each.system.name == name for each in planned)
            line = _summarise(planned[0], system, against, by_system[name], count)
            lines.append(self._test(replace(line, measure=measure), by_system[name], by_system.get(against, [])))
        return lines

    def _test(
        self, line: Compared, own: Sequence[tuple[Planned, Result]], other: Sequence[tuple[Planned, Result]]
    ) -> Compared:
        own, other = ([each for each in side if each[1].scores] for side in (own, other))
        if line.against is None or not own or not other:
            return line
        means = [fmean(_score(each) for each in side) for side in (own, other)]
        difference = means[0] - means[1]
        if not self.tests:
            return replace(line, difference=difference)
        same = {each.job.folder for each, _ in own} == {each.job.folder for each, _ in other}
        p = 1.0 if same else combine_seeds(self._draws_of(own), self._draws_of(other), difference)
        return replace(line, difference=difference, p=p)

    def _draws_of(self, finished: Sequence[tuple[Planned, Result]]) -> Draws:
        return np.stack([self._draws_of_run(each, result) for each, result in finished])

    def _draws_of_run(self, each: Planned, result: Result) -> Draws:
        name = measure_name(each.experiment, tuple(result.scores))
        key = (str(each.job.folder), name)
        if key not in self._draws:
            measure = Measure(name, each.data.target)
            references = each.data.split("test").text(each.data.target)
            folder = each.job.folder
            translations = read_translations(folder / TRANSLATIONS, len(references), remove=folder)
            counts = measure.count(translations, references)
            totals = bootstrap_totals([counts], SAMPLES, SEED)[0]
            self._draws[key] = measure.metric.score_totals(totals)
        return self._draws[key]


def _summarise(
    any_of_pair: Planned, system: System, against: str, finished: Sequence[tuple[Planned, Result]], planned: int
) -> Compared:
    experiment, pair = any_of_pair.experiment, any_of_pair.pair
    scored = [each for each in finished if each[1].scores]
    ended = [result for _, result in finished if result.status != "diverged"]
    folders = [each.job.folder for each, result in finished if result.status != "diverged"]
    signatures = {_entry(each)["signature"] for each in scored}
    return Compared(
        experiment,
        pair,
        any_of_pair.languages,
        system.name,
        system.what,
        against if against != system.name else None,
        _shown(experiment, pair, system.name),
        _claimed(experiment, pair, system.name, against),
        tuple(_score(each) for each in scored),
        tuple(result.dev_bleu for result in ended if result.dev_bleu is not None),
        tuple(result.seconds for result in ended),
        tuple(seconds for folder in folders if (seconds := read_device_seconds(folder)) is not None),
        planned,
        sum(result.status == "diverged" for _, result in finished),
        signature=", ".join(sorted(signatures)),
    )


def _shown(experiment: Experiment, pair: str, system: str) -> float | None:
    """The paper's number: of this pair, or of the only one that the table is of."""
    only = experiment.pairs[0] if len(experiment.pairs) == 1 else pair
    return experiment.published(only, system)


def _claimed(experiment: Experiment, pair: str, system: str, against: str) -> float | None:
    if not experiment.pairs or system == against:
        return None
    places = (pair,) if pair in experiment.pairs else experiment.pairs
    found = [tuple(experiment.published(place, name) for name in (system, against)) for place in places]
    gains = [ours - theirs for ours, theirs in found if ours is not None and theirs is not None]
    return fmean(gains) if gains else None


def _entry(each: tuple[Planned, Result]) -> Mapping[str, Any]:
    planned, result = each
    return result.scores[measure_name(planned.experiment, tuple(result.scores))]


def _score(each: tuple[Planned, Result]) -> float:
    return float(_entry(each)["value"])
