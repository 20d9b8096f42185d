"""From what is asked for to jobs: experiments, pairs whose data are here, systems, seeds."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qknorm.errors import InputError
from qknorm.studies.grid.jobs import Job
from qknorm.studies.paper.experiments import Experiment, System, make_quick
from qknorm.studies.published import nearest_pair
from qknorm.studies.recipes import CORPORA, MERGES, PAIRS, PRETOKENIZED
from qknorm.text.catalogue import suggestion
from qknorm.text.corpora import local_folder
from qknorm.text.prepared import MANIFEST, PreparedData

RUNS = "runs"


@dataclass(frozen=True)
class Planned:
    """A job, and what it is in which experiment."""

    experiment: Experiment
    pair: str
    system: System
    seed: int
    job: Job
    data: PreparedData

    @property
    def languages(self) -> str:
        """The pair as tables show it."""
        return f"{self.data.source}→{self.data.target}"


@dataclass(frozen=True)
class MissingPair:
    """A pair that was asked for and whose prepared data are not here, with the commands that bring them."""

    pair: str
    commands: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """All that was asked for."""

    planned: tuple[Planned, ...]
    missing: tuple[MissingPair, ...]

    @property
    def jobs(self) -> list[Job]:
        """Every job once, in the order they are to be begun: all systems of the first seed first.

        A run that several tables share has the name that the first of them gives it.
        """
        jobs: dict[Path, Job] = {}
        for each in sorted(self.planned, key=lambda each: each.seed):
            jobs.setdefault(each.job.folder, each.job)
        return list(jobs.values())


def find_data(pair: str, data: Path) -> Path | None:
    """The prepared folder of a pair: `data` itself, or the folder of the pair's name in it; None if it is not here."""
    if (data / MANIFEST).is_file():
        return data
    return data / pair if (data / pair / MANIFEST).is_file() else None


def pairs_for(experiment: Experiment, pair: str | None, data: Path) -> tuple[str, ...]:
    """The pair that is asked for; else the one that `data` holds, or the paper's own."""
    if pair is not None:
        return (pair,)
    if (data / MANIFEST).is_file():
        prepared = PreparedData.load(data)
        return (f"{prepared.source}-{prepared.target}",)
    return experiment.pairs or tuple(each for each in PAIRS if find_data(each, data)) or ("gl-en",)


def how_to_get(pair: str, data: Path) -> MissingPair:
    """The commands that fetch and prepare a pair as the paper did."""
    if pair not in CORPORA:
        raise InputError(
            f"--pair {pair}: no data set is known for it; prepare your own with qknorm prepare {data / pair} and name "
            f"it with --data{suggestion(pair, CORPORA)}"
        )
    corpus = CORPORA[pair]
    words = [
        "qknorm",
        "prepare",
        str(data if data.name == pair else data / pair),
        "--corpus",
        corpus,
        "--subwords.merges",
        str(MERGES.get(pair, 8_000)),
    ]
    if pair in PRETOKENIZED:
        words.append("--subwords.pretokenized")
    download = () if local_folder(corpus) else (f"qknorm corpora download {corpus}",)
    return MissingPair(pair, (*download, shlex.join(words)))


def make_plan(
    experiments: Sequence[Experiment],
    out: Path,
    data: Path,
    *,
    pair: str | None = None,
    seeds: int = 1,
    recipe: str | None = None,
    quick: bool = False,
    any_code: bool = False,
) -> Plan:
    """The jobs of all experiments, and the pairs that cannot be run since their data are not here.

    A pair that the paper does not have runs by the recipe of its pair that is nearest in size, or of `recipe`.
    """
    if seeds < 1:
        raise InputError(f"--seeds is {seeds}; give 1 or more")
    if recipe is not None and recipe not in PAIRS:
        raise InputError(f"--recipe: the paper has none for {recipe}{suggestion(recipe, PAIRS)}")
    planned: list[Planned] = []
    missing: dict[str, MissingPair] = {}
    opened: dict[Path, PreparedData] = {}
    for experiment in experiments:
        for each in pairs_for(experiment, pair, data):
            folder = find_data(each, data)
            if folder is None:
                missing[each] = how_to_get(each, data)
                continue
            prepared = opened.setdefault(folder, PreparedData.load(folder))
            _check_pair(each, prepared)
            planned += _plan_pair(experiment, each, prepared, out, seeds, recipe, quick, any_code)
    return Plan(tuple(planned), tuple(missing.values()))


def _plan_pair(
    experiment: Experiment,
    pair: str,
    data: PreparedData,
    out: Path,
    seeds: int,
    recipe: str | None,
    quick: bool,
    any_code: bool,
) -> list[Planned]:
    by = recipe or (pair if pair in PAIRS else nearest_pair(len(data.split("train"))))
    planned = []
    for system in experiment.systems:
        for seed in range(seeds):
            settings = system.settings(by, seed)
            if quick:
                settings = make_quick(settings)
            name = f"{pair} {system.name}, seed {seed}"
            job = Job.plan(name, data, settings, out / RUNS, any_code=any_code)
            planned.append(Planned(experiment, pair, system, seed, job, data))
    return planned


def _check_pair(pair: str, data: PreparedData) -> None:
    found = f"{data.source}-{data.target}"
    if found != pair:
        raise InputError(f"{data.folder} holds {found}, not {pair}; name another folder with --data, or --pair {found}")
