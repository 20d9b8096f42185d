"""`qknorm study paper`."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich.markup import escape

from qknorm.cli.display import console, parse, progress_bar, suggest, warn
from qknorm.cli.grid_display import follow, require_finished, show_written, some_finished, tell_failures
from qknorm.errors import InputError
from qknorm.studies.demo_data import prepare_demo
from qknorm.studies.grid.jobs import unfinished
from qknorm.studies.grid.local import LocalGrid, make_slots
from qknorm.studies.kind import mark, require_study
from qknorm.studies.paper.experiments import (
    BEYOND,
    EXPERIMENTS,
    TABLES,
    Experiment,
    check_systems,
    find_experiment,
)
from qknorm.studies.paper.plan import RUNS, Plan, make_plan

QUICK_PAIR, QUICK_MERGES, QUICK_SEEDS = "gl-en", 1_000, 2
QUICK_TEST = 150
QUICK_DATA = "data"
LEFT_TO_THE_PAGE = frozenset(
    {"settings", "paper's difference", "dev BLEU", "minutes a run", "device minutes", "effective keys"}
)

End = Literal["done", "interrupted", "time is up"]


@dataclass(frozen=True)
class Arguments:
    """Trains what a table of the paper compares, and shows the paper's numbers, ours, and whether its claims hold.

    Every finished run is kept by its settings, data and code: the same command goes on where it stopped, also beside
    another that is at work in the same folder.

    Examples:

      qknorm study paper --quick

      qknorm study paper --table 2 --pair gl-en --seeds 3 --data data/gl-en --parallel 3

      qknorm study paper --table 4 5 6 --beyond control norms --pair gl-en --data data --out studies/paper

      qknorm study paper --table 6 --pair gl-en --systems without-g values-normalised --ray auto

      qknorm study paper --figure 1 2 --pair gl-en --data data/gl-en
    """

    table: tuple[str, ...] = ()
    """Tables of the paper: 2, 3, 4, 5, 6; the second if nothing else is asked for."""
    figure: tuple[Literal["1", "2"], ...] = ()
    """Figures of the paper, drawn from our own models of Table 2: 1 is dot-product attention, 2 QKNorm."""
    beyond: tuple[str, ...] = ()
    """Experiments beyond the paper: control, norms, width-query, lp, warmup, bpe-dropout, learning-rate, depth."""
    pair: str | None = None
    """Language pair, such as gl-en; the paper's own for each table if not given."""
    systems: tuple[str, ...] = ()
    """Run these systems alone, with those they are compared with."""
    seeds: int = 1
    """Runs of every system, with the seeds 0, 1, and so on."""
    data: Path = Path("data")
    """Prepared folder of the pair, or a folder that holds one for every pair by its name."""
    recipe: str | None = None
    """The paper's pair whose recipe to use for a pair of your own; by the size of the data if not given."""
    out: Path = Path("out/paper")
    """Folder of the study: runs, tables (report.md, report.html), pictures, results.csv."""
    parallel: int | None = None
    """Trainings side by side on each GPU, or on the CPU; one if not given, on the CPU one for each core."""
    device: str | None = None
    """cpu or cuda; all GPUs that CUDA_VISIBLE_DEVICES lets us see if not given."""
    ray: str | None = None
    """Do the runs on a Ray cluster: auto, or its address."""
    any_code: bool = False
    """Keep runs that another version of the code has finished, too."""
    max_minutes: float | None = None
    """Stop after so long, everything saved, to go on another time; not with --ray."""
    report: bool = False
    """Only make tables and pictures of what is finished."""
    quick: bool = False
    """A tiny version on the embedded corpus: Table 2 takes under a minute on two CPU cores."""


def run(words: Sequence[str]) -> None:
    """Parses, trains what is missing, and shows tables, pictures and what holds."""
    arguments: Arguments = _parse(list(words))
    experiments = _experiments(arguments)
    words = ["qknorm", "study", "paper", *words]
    if arguments.report:
        require_finished(arguments.out / RUNS, words)
    study = "paper --quick" if arguments.quick else "paper"
    require_study(arguments.out, study)
    if arguments.quick:
        _prepare_demo(arguments.data)
    plan = make_plan(
        experiments,
        arguments.out,
        arguments.data,
        pair=arguments.pair,
        seeds=arguments.seeds,
        recipe=arguments.recipe,
        quick=arguments.quick,
        any_code=arguments.any_code,
    )
    for each in plan.missing:
        warn(f"the data of {each.pair} are not here; bring them with {' && '.join(each.commands)}")
    if not plan.planned:
        raise InputError(f"nothing can be run: {arguments.data} holds no prepared data of what is asked for")
    if arguments.report:
        require_finished(arguments.out / RUNS, words, plan.jobs)
    end: End = "done" if arguments.report else _work(arguments, plan, study)
    if some_finished(plan.jobs):
        from qknorm.studies.paper.figures import look_inside  # it imports PyTorch and Matplotlib
        from qknorm.studies.paper.report import write_report

        asked = arguments.figure, arguments.out, arguments.device, arguments.quick
        mark(arguments.out, study)
        with progress_bar() as progress:
            extras = look_inside(plan, *asked, progress, warn)
        show_written(write_report(plan, arguments.out, shlex.join(words), extras), LEFT_TO_THE_PAGE)
    else:
        warn(f"{arguments.out} has no finished run of what is asked for yet")
    failed = tell_failures(plan.jobs)
    if end != "done":
        suggest("Go on", *words)
    if end == "interrupted":
        raise SystemExit(130)
    if failed and not arguments.report:
        raise SystemExit(1)


def _parse(words: list[str]) -> Arguments:
    """--quick is a set of defaults that the options go over, so it is looked for first."""
    defaults = Arguments()
    if "--quick" in words:
        out = Path("out/paper-quick")
        defaults = Arguments(out=out, pair=QUICK_PAIR, seeds=QUICK_SEEDS, data=out / QUICK_DATA, device="cpu")
    parsed: Arguments = parse(Arguments, words, "study paper", default=defaults)
    if parsed.parallel is not None and parsed.parallel < 1:
        raise InputError(f"--parallel is {parsed.parallel}; give 1 or more")
    if parsed.max_minutes is not None and (parsed.ray is not None or not parsed.max_minutes > 0):
        raise InputError("--max-minutes takes a number above 0, and a grid of this machine; leave it out with --ray")
    if parsed.quick:
        if parsed.data != defaults.data or parsed.pair != QUICK_PAIR:
            raise InputError("--quick has data of its own; leave out --data and --pair")
        return replace(parsed, data=parsed.out / QUICK_DATA)
    return parsed


def _experiments(arguments: Arguments) -> list[Experiment]:
    for option, names, known in (("table", arguments.table, TABLES), ("beyond", arguments.beyond, BEYOND)):
        for name in names:
            if name not in known:
                raise InputError(f"--{option} {name}: give some of {', '.join(known)}")
    wanted = {*arguments.table, *arguments.beyond}
    if arguments.figure or not wanted:
        wanted.add("2")  # the figures are of the models of that table
    chosen = [find_experiment(name) for name in EXPERIMENTS if name in wanted]
    check_systems(arguments.systems, chosen)
    return [kept for each in chosen if (kept := each.choose(arguments.systems)).systems]


def _prepare_demo(folder: Path) -> None:
    with progress_bar() as progress:
        prepare_demo(folder, QUICK_MERGES, QUICK_TEST, progress)


# ------------------------------------------------------------------ the work


def _work(arguments: Arguments, plan: Plan, study: str) -> End:
    """Does what is not done; returns how it ended."""
    left = unfinished(plan.jobs)
    told = f"{len(plan.jobs)} runs, {len(plan.jobs) - len(left)} finished before"
    if not left:
        console.print(told, soft_wrap=True)
        return "done"
    try:
        if arguments.ray is not None:
            from qknorm.studies.grid.on_ray import run_on_ray

            console.print(f"{told}; the others on Ray, {escape(arguments.ray)}", soft_wrap=True)
            root, parallel = arguments.out / RUNS, arguments.parallel or 1
            with follow(plan.jobs) as show:
                run_on_ray(plan.jobs, root, arguments.ray, show, parallel=parallel, device=arguments.device)
        else:
            slots = make_slots(arguments.parallel, arguments.device)
            if slots[0].device == "cpu" and not arguments.quick:
                warn("on a CPU each run takes half a day or more; --quick shows in a minute that all works")
            mark(arguments.out, study)
            console.print(f"{told}; {len(slots)} at a time on {slots[0].device}", soft_wrap=True)
            with follow(plan.jobs) as show:
                in_time = LocalGrid(plan.jobs, slots, show, max_minutes=arguments.max_minutes).run()
            if not in_time:
                warn("time is up; what was under way is saved")
                return "time is up"
    except KeyboardInterrupt:
        warn("stopped; the same command goes on from what was saved")
        return "interrupted"
    return "done"
