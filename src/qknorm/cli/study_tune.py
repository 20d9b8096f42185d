"""`qknorm study tune`."""

import functools
import math
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qknorm.cli.display import console, parse, progress_bar, suggest, warn
from qknorm.cli.grid_display import follow, require_finished, show_written, some_finished, tell_failures
from qknorm.config import Train, read_settings
from qknorm.errors import InputError
from qknorm.studies.demo_data import prepare_demo
from qknorm.studies.grid.jobs import Job, unfinished
from qknorm.studies.grid.local import LocalGrid, Slot, make_slots
from qknorm.studies.grid.scores import MOSES, TOKENISED, TREEBANK
from qknorm.studies.kind import require_study
from qknorm.studies.paper.experiments import make_quick
from qknorm.studies.published import nearest_pair
from qknorm.studies.recipes import MERGES, WITHOUT_A_GPU, preset
from qknorm.studies.tune.candidates import NONE, QUICK, check_factors
from qknorm.studies.tune.data import DataByMerges, keep_text, require_same_text
from qknorm.studies.tune.search import RUNS, START_SEEDS, Search, Trial
from qknorm.text.prepared import MANIFEST, PreparedData

AVERAGES = (3, 6)
QUICK_AVERAGES, QUICK_MERGES, QUICK_HELD_OUT, QUICK_STEPS = (2,), 2_000, 60, 60
DATA = "data"
LEFT_TO_THE_PAGE = ("parameters", "steps")
LEFT_NEXT = (TREEBANK, MOSES, TOKENISED, "seconds")
"""In this order, while the terminal is too narrow; the comparison on the test set is by another measure than these."""


@dataclass(frozen=True)
class Arguments:
    """Searches for the settings that translate a corpus best, by BLEU on its dev set.

    One change after another against the start, then the best values joined, then more seeds for those that lead. Every
    finished run is kept by its settings, data and code: the same command goes on where it stopped.

    Examples:

      qknorm study tune --quick

      qknorm study tune --data data/gl-en --parallel 4 --out out/tune

      qknorm study tune --data data/gl-en --only merges dropout bpe-dropout --seeds 3 --test

      qknorm study tune --data data/gl-en --values 1 --max-minutes 25
    """

    data: Path | None = None
    """Prepared folder whose text to use; it is prepared anew for other numbers of merges."""
    preset: str = "low-resource"
    """Settings to start from; on a CPU, low-resource-small takes hours where this one takes days."""
    config: Path | None = None
    """TOML file of settings that go over the preset's, such as best/settings.toml of an earlier search."""
    merges: int | None = None
    """BPE merges to start from; those of the data if not given."""
    against: str | None = None
    """Preset to compare with; the paper's QKNorm recipe for the pair nearest in size if not given."""
    only: tuple[str, ...] = ()
    """Factors to try, all if not given; none for the start and the reference alone."""
    values: int | None = None
    """Values of each factor to try, the likeliest first; all if not given."""
    margin: float = 0.2
    """A change is joined with others if it adds more than this to dev BLEU."""
    seeds: int = 1
    """Runs of the three best systems, the start and the reference, with the seeds 0, 1, and so on."""
    max_steps: int | None = None
    """No training takes more steps than this."""
    test: bool = False
    """In the end translate the test set, with the best system and the reference alone."""
    out: Path = Path("out/tune")
    """Folder of the study: data, runs, tables (report.md, report.html), results.csv, best/settings.toml."""
    parallel: int | None = None
    """Trainings side by side on each GPU, or on the CPU; one if not given, on the CPU one for each core."""
    device: str | None = None
    """cpu or cuda; all GPUs that CUDA_VISIBLE_DEVICES lets us see if not given."""
    any_code: bool = False
    """Keep runs that another version of the code has finished, too."""
    max_minutes: float | None = None
    """Stop after so long, everything saved, to go on another time."""
    report: bool = False
    """Only make tables of what is finished."""
    quick: bool = False
    """A tiny version on the embedded corpus, in under two minutes on two CPU cores."""


def run(words: Sequence[str]) -> None:
    """Parses, trains what is missing stage by stage, and shows what helped."""
    arguments = _check(parse(Arguments, words, "study tune"))
    require_study(arguments.out, "tune")
    words = ["qknorm", "study", "tune", *words]
    if arguments.report:
        require_finished(arguments.out / RUNS, words)
    search = _search(arguments)
    work = _Work(arguments, search.data.base)
    done = all(work.do(stage[0].stage, [trial.job for trial in stage]) for stage in _stages(search))
    if done and arguments.test and not arguments.report:
        done = _test(search, work, arguments.device)
    if arguments.report:
        require_finished(arguments.out / RUNS, words, work.jobs)
    if some_finished(work.jobs):
        from qknorm.studies.tune.report import write_report  # these import PyTorch, which help does without
        from qknorm.studies.tune.testing import TITLE

        written = write_report(search, shlex.join(words))
        show_written(written, LEFT_TO_THE_PAGE, LEFT_NEXT)
        if arguments.test and arguments.report and all(table.title != TITLE for table in written.page.tables):
            warn("--test: the test set is not translated yet, and --report does not do it; leave out --report")
    else:
        warn(f"{arguments.out} has no finished run of what is asked for yet")
    failed = tell_failures(work.jobs)
    if not done and not arguments.report:
        suggest("Go on", *words)
    if work.interrupted:
        raise SystemExit(130)
    if failed and not arguments.report:
        raise SystemExit(1)


def _stages(search: Search) -> Iterator[list[Trial]]:
    """The stages, with a bar while the data of one are prepared."""
    stages, told = search.stages(), False
    while True:
        with progress_bar() as progress:
            search.data.progress = progress
            stage = next(stages, None)
        if stage is None:
            return
        if search.without_effect and not told:
            told = True
            left_out = ", ".join(each.name for each in search.without_effect)
            warn(f"left out, since with --max-steps {search.max_steps} they change nothing: {left_out}")
        yield stage


def _test(search: Search, work: "_Work", device: str | None) -> bool:
    """Translates the test set if every run is finished; whether it was."""
    if any(trial.result is None for trial in search.trials):
        warn("the test set waits until every run is finished: try again, or leave out what fails by --only")
        return False
    from qknorm.studies.tune.testing import jobs_to_repeat, translate_test

    again = jobs_to_repeat([*search.best(), *search.of_reference()])
    if again and (not work.do("again, for the test set", again) or unfinished(again)):
        return False
    translate_test(search, device)
    return True


def _check(parsed: Arguments) -> Arguments:
    check_factors(parsed.only)
    for option in ("parallel", "seeds", "values", "max_minutes", "max_steps", "merges"):
        if (given := getattr(parsed, option)) is not None and not given > 0:
            raise InputError(f"--{option.replace('_', '-')} is {given}; give a number above 0")
    if not math.isfinite(parsed.margin):
        raise InputError(f"--margin is {parsed.margin}; give a number of BLEU")
    if NONE in parsed.only and len(parsed.only) > 1:
        raise InputError("--only: none stands alone; leave it out, or the factors")
    if parsed.quick:
        if parsed.data:
            raise InputError("--quick has data of its own; leave out --data")
        out = Path("out/tune-quick") if parsed.out == Arguments.out else parsed.out
        return replace(
            parsed,
            out=out,
            device=parsed.device or "cpu",
            only=parsed.only or QUICK,
            values=parsed.values or 1,
            max_steps=parsed.max_steps or QUICK_STEPS,
            against=parsed.against or "paper-qknorm-gl-en",
        )
    return parsed


def _search(arguments: Arguments) -> Search:
    base = _open(arguments)
    require_same_text(base, arguments.out)
    data = DataByMerges(base, arguments.out / DATA)
    if arguments.test:
        base.split("test")  # told now, if there is none, and not after hours
    against = arguments.against or f"paper-qknorm-{nearest_pair(len(base.split('train')))}"
    start, reference = _translator(arguments.preset), _translator(against)
    if arguments.config is not None:
        start = read_settings(arguments.config, Train, start)
    if arguments.quick:
        start, reference = make_quick(start), make_quick(reference)
    merges = arguments.merges or data.merges
    own = [number for pair, number in MERGES.items() if against.endswith(pair)]
    return Search(
        data,
        arguments.out,
        start,
        merges,
        reference,
        against,
        own[0] if own and not arguments.quick else merges,
        only=arguments.only,
        values=arguments.values,
        margin=arguments.margin,
        seeds=arguments.seeds,
        start_seeds=1 if arguments.quick else START_SEEDS,
        averages=QUICK_AVERAGES if arguments.quick else AVERAGES,
        max_steps=arguments.max_steps,
        quick=arguments.quick,
        any_code=arguments.any_code,
    )


def _open(arguments: Arguments) -> PreparedData:
    if arguments.data is not None:
        return PreparedData.load(arguments.data)
    demo = arguments.out / DATA / "demo"
    if not arguments.quick:
        if (demo / MANIFEST).is_file():
            raise InputError(f"{arguments.out} holds a quick study; add --quick, or give --data and another --out")
        raise InputError("give the text to search on: --data, a folder that qknorm prepare wrote")
    with progress_bar() as progress:
        prepare_demo(demo, QUICK_MERGES, QUICK_HELD_OUT, progress)
    return PreparedData.load(demo)


def _translator(name: str) -> Train:
    settings = preset(name)
    if not isinstance(settings, Train):
        raise InputError(f"{name} is a preset of a language model; name one of a translator")
    return settings


class _Work:
    """Does one stage after another until the time of them all is up."""

    def __init__(self, arguments: Arguments, text: PreparedData) -> None:
        self._arguments, self._text = arguments, text
        minutes = arguments.max_minutes
        self._end = None if minutes is None else time.monotonic() + 60 * minutes
        self.interrupted = False
        self.jobs: list[Job] = []

    @functools.cached_property
    def _slots(self) -> list[Slot]:
        slots = make_slots(self._arguments.parallel, self._arguments.device)
        small = WITHOUT_A_GPU.get(self._arguments.preset)
        if small and not self._arguments.quick and slots[0].device == "cpu":
            warn(f"on a CPU this takes days; smaller is --preset {small} --against {small}")
        return slots

    def do(self, stage: str, jobs: Sequence[Job]) -> bool:
        """Whether the stage is done, so that the next one can be chosen; what failed does not hold it up."""
        jobs = list({job.folder: job for job in jobs}.values())
        self.jobs += jobs
        left = unfinished(jobs)
        console.print(f"{stage}: {len(jobs)} runs, {len(jobs) - len(left)} finished before", soft_wrap=True)
        if not left or self._arguments.report:
            return not left
        slots = self._slots
        keep_text(self._text, self._arguments.out)  # not before: what cannot be begun is to hold no folder
        minutes = None if self._end is None else max(0.0, self._end - time.monotonic()) / 60
        try:
            with follow(jobs) as show:
                in_time = LocalGrid(jobs, slots, show, max_minutes=minutes).run()
        except KeyboardInterrupt:
            warn("stopped; the same command goes on from what was saved")
            self.interrupted = True
            return False
        if not in_time:
            warn("time is up; what was under way is saved")
        return in_time
