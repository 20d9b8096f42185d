"""`qknorm study lp`."""

import os
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from pydantic import ValidationError
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text as Words

from qknorm.cli.display import console, drawn, errors, parse, suggest, warn
from qknorm.cli.grid_display import draw_table, tell_page
from qknorm.config import explain_validation
from qknorm.errors import InputError
from qknorm.studies.grid.claims import CLAIM
from qknorm.studies.kind import require_study
from qknorm.studies.lp.design import (
    MAIN_ARMS,
    QUICK_EXPONENTS,
    STREAMS,
    LpStudy,
    Run,
    parse_arms,
    parse_exponents,
    parse_folds,
    plan_runs,
    quick_study,
    resolve_precision,
)
from qknorm.studies.published import LP_EXPONENTS
from qknorm.studies.tables import Table

if TYPE_CHECKING:  # these import PyTorch and Matplotlib; so do those that functions import below
    import torch

    from qknorm.studies.lp.records import StudyFolder
    from qknorm.studies.lp.report import Report
    from qknorm.studies.lp.stack import Layers
    from qknorm.studies.lp.work import News, OnNews

GPU_STACK = 3


@dataclass(frozen=True)
class Arguments:
    """Trains character models with Lp-normalised attention over folds of a text, and says whether p > 2 helps.

    Three arms: the paper's, where the scale starts alike for every p; one where it starts so that the temperature does;
    and dot products. Every finished run is kept: the same command goes on where it stopped.

    Examples:

      qknorm study lp --quick

      qknorm study lp --out runs/lp --text shakespeare.txt

      qknorm study lp --out runs/lp --folds 0-2 --p 2,3 --arms matched

      qknorm study lp --out runs/lp --merge other/lp
    """

    out: Path = Path("out/lp")
    """Folder of the study: a file for every finished run, tables (report.md, report.html), pictures, curves.csv."""
    quick: bool = False
    """A small version, for two CPU cores and five minutes: a small model, three folds, three values of p."""
    text: Path | None = None
    """Text to study; Tiny Shakespeare where it is here (QKNORM_DATA, or downloaded), else sentences of our own."""
    arms: str = ",".join(MAIN_ARMS)
    """Arms to run; besides these there are learned-p and infinity."""
    p: str = ",".join(f"{p:g}" for p in LP_EXPONENTS)
    """Values of p to run in the first two arms."""
    folds: str | None = None
    """Folds to run, such as 0-2,5; all if not given."""
    merge: tuple[Path, ...] = ()
    """Take the finished runs of these folders too, and train nothing."""
    report: bool = False
    """Only make the tables and pictures of what is finished."""
    max_minutes: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """Begin no stack of runs that would probably not end within this."""
    device: str | None = None
    """cpu or cuda; a GPU where there is one if not given."""
    stack: int | None = None
    """Models trained together in one program; by the device if not given."""
    streams: int = STREAMS
    """Models at a time on a GPU."""
    workers: int | None = None
    """Processes at a time; on the CPU one for each core if not given."""
    layers: Literal["plain", "fused"] | None = None
    """How layers run: by PyTorch's kernels, or by our own (the default on a GPU with Triton)."""
    settings: Annotated[LpStudy, tyro.conf.arg(name="")] = field(default_factory=LpStudy)


def run(words: Sequence[str]) -> None:
    """Parses, trains what is missing, and shows tables, pictures and what holds up."""
    arguments = _parse(list(words))
    from qknorm.studies.lp.report import write_report

    if arguments.merge or arguments.report:
        folder = _gather(arguments) if arguments.merge or (arguments.out / "study.json").exists() else None
        if folder is None or (arguments.report and not folder.records()):
            again = shlex.join(["qknorm", "study", "lp", *(word for word in words if word != "--report")])
            raise InputError(f"--report: nothing is finished in {arguments.out}; run it first: {again}")
        _show(write_report(folder, []), folder)
        return
    try:
        folder, runs, left = _train(arguments)
    except KeyboardInterrupt:
        warn("stopped; every run that ended is kept, and the same command goes on with the others")
        suggest("Go on", "qknorm", "study", "lp", *words)
        raise SystemExit(130) from None
    report = write_report(folder, folder.missing(runs))
    _show(report, folder)
    if left:
        warn(f"--max-minutes: another stack would probably not end in time; {len(left)} runs are left")
        suggest("Go on", "qknorm", "study", "lp", *words)


def _parse(words: list[str]) -> Arguments:
    """--quick is a set of defaults that the options go over, so it is looked for first."""
    defaults = Arguments()
    if "--quick" in words:
        defaults = Arguments(
            out=Path("out/lp-quick"), p=",".join(f"{p:g}" for p in QUICK_EXPONENTS), settings=quick_study()
        )
    try:
        parsed: Arguments = parse(Arguments, words, "study lp", default=defaults)
    except ValidationError as error:
        raise InputError(explain_validation(error, "settings of the study", LpStudy)) from None
    numbers = {"--stack": parsed.stack, "--workers": parsed.workers, "--streams": parsed.streams}
    for option, number in {**numbers, "--max-minutes": parsed.max_minutes}.items():
        if number is not None and not number > 0:
            raise InputError(f"{option} is {number}; give a number above 0")
    return parsed


def _train(arguments: Arguments) -> tuple["StudyFolder", list[Run], list[Run]]:
    """The folder, the runs asked for, and those that time did not allow."""
    from qknorm.studies.lp.corpus import find_text
    from qknorm.studies.lp.folds import make_folds
    from qknorm.studies.lp.records import StudyFolder
    from qknorm.studies.lp.training import Execution
    from qknorm.studies.lp.work import Plan, run_missing
    from qknorm.training.parallel import choose_device

    device = choose_device(arguments.device)
    study = resolve_precision(arguments.settings, device)
    runs = plan_runs(
        parse_arms(arguments.arms), parse_exponents(arguments.p), parse_folds(arguments.folds, study.fold_count)
    )
    text = find_text(arguments.text, study.characters)
    make_folds(len(text.ids), study.fold_count, study.model.context)  # a text too short must leave no folder behind
    folder = StudyFolder.create_or_open(arguments.out, study, text)
    missing = folder.missing(runs)
    cuda = device.type == "cuda"
    plan = Plan(
        stack_size=arguments.stack or (GPU_STACK if cuda else 1),
        workers=arguments.workers or (1 if cuda else max(1, min(os.cpu_count() or 1, len(missing)))),
        max_minutes=arguments.max_minutes,
    )
    execution = Execution(str(device), _layers(arguments, device), arguments.streams)
    console.print(
        f"{len(runs)} runs on {escape(text.name)}, {len(runs) - len(missing)} finished before, on {device}",
        soft_wrap=True,
    )
    if not missing:
        return folder, runs, []
    started = time.monotonic()
    with folder.claim(lambda: _tell_loss(folder)), _progress(len(runs), len(runs) - len(missing)) as on_news:
        left = run_missing(folder, runs, text, execution, plan, on_news)
    console.print(f"{len(missing) - len(left)} runs in {time.monotonic() - started:,.0f} s")
    return folder, runs, left


def _tell_loss(folder: "StudyFolder") -> None:
    warn(
        f"{folder.path / CLAIM} is gone, cannot be read, or is another study's: this one goes on and keeps what it "
        f"finishes, but another may be training the same there"
    )


def _gather(arguments: Arguments) -> "StudyFolder":
    """The folder with what --merge brings to it; a new one becomes what the first of those is."""
    from qknorm.studies.lp.records import StudyFolder, read_about

    require_study(arguments.out, "lp")
    if arguments.merge and not (arguments.out / "study.json").exists():
        StudyFolder(arguments.out, read_about(arguments.merge[0])).write_about()
    folder = StudyFolder.open(arguments.out)
    if arguments.merge:
        taken = folder.merge(arguments.merge)
        console.print(f"{taken} runs taken from {len(arguments.merge)} folders", soft_wrap=True)
    return folder


def _layers(arguments: Arguments, device: "torch.device") -> "Layers":
    """As asked for; else our own kernels where they run."""
    from qknorm.attention.availability import OLDEST_WITH_KERNELS
    from qknorm.models.fused_run import kernels_apply

    able = device.type == "cuda" and kernels_apply(device)
    if arguments.layers == "fused" and not able:
        raise InputError(
            f"--layers fused needs a GPU since Ampere, Triton and PyTorch {OLDEST_WITH_KERNELS} or newer; "
            f"{device} lacks one of them here; give plain"
        )
    return arguments.layers or ("fused" if able else "plain")


# ------------------------------------------------------------------ the terminal


@contextmanager
def _progress(total: int, before: int) -> Iterator["OnNews"]:
    """A bar for all runs and one for every stack in training; without a terminal, a line for every stack that ends."""
    bars = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}", markup=False),
        TimeElapsedColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    )
    tasks: dict[str, TaskID] = {}
    with drawn(bars):
        whole = bars.add_task("runs", total=total, completed=before, loss="")

        def show(news: "News") -> None:
            if news.stack not in tasks:
                tasks[news.stack] = bars.add_task(news.stack, total=news.total, loss="")
            task = tasks[news.stack]
            loss = {} if news.validation is None else {"loss": f"loss {news.validation:.3f}"}
            bars.update(task, completed=news.done, **loss)  # type: ignore[arg-type]
            if news.finished:
                bars.remove_task(task)
                bars.advance(whole, news.runs)
                console.print(f"{escape(news.stack)}: {news.seconds:,.0f} s", style="dim", soft_wrap=True)

        yield show


def _some_skipped(table: Table) -> bool:
    """Whether steps were skipped, which a narrow terminal is to show too."""
    from qknorm.studies.lp.report import NOTHING, SKIPPED

    counts = {row[table.columns.index(SKIPPED)] for row in table.rows} if SKIPPED in table.columns else set()
    return not counts <= {"0", NOTHING}


def _show(report: "Report | None", folder: "StudyFolder") -> None:
    from qknorm.studies.lp.report import MILLISECONDS, SKIPPED

    if report is None:
        warn(f"{folder.path} has no finished run yet")
        return
    for table in report.tables:
        console.print(draw_table(table, () if _some_skipped(table) else (SKIPPED,), (MILLISECONDS,)))
    for verdict in report.verdicts:
        console.print(Words.assemble(f"{verdict.question} ", (verdict.answer, "bold"), f": {verdict.because}"))
    console.print()
    for what, path in {**report.pictures, "Every evaluation": report.curves}.items():
        console.print(Words.assemble(f"{what}: ", (str(path), "bold")), soft_wrap=True)
    tell_page(report.markdown, report.html)
