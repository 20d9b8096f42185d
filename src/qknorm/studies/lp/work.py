"""Goes through the runs that are missing: stack by stack in this process, or by several processes side by side."""

import collections
import itertools
import math
import multiprocessing
import os
import queue
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from qknorm.errors import InputError
from qknorm.studies.lp.corpus import Text
from qknorm.studies.lp.design import LpStudy, Run
from qknorm.studies.lp.records import StudyFolder
from qknorm.studies.lp.training import Execution, train_stack


@dataclass(frozen=True)
class News:
    """How far a stack has come; `validation` is its models' mean loss, where it has just been measured."""

    stack: str
    done: int
    total: int
    validation: float | None
    runs: int
    finished: bool = False
    seconds: float = 0.0


OnNews = Callable[[News], None]
STACKS_TO_JUDGE_BY = 3
"""How many of the stacks that have ended tell how long the next one takes."""


@dataclass(frozen=True)
class Plan:
    """How the work is shared out."""

    stack_size: int = 1
    workers: int = 1
    max_minutes: float | None = None
    """No stack is begun that would probably not end within this."""


def make_stacks(runs: Sequence[Run], size: int) -> list[list[Run]]:
    """Runs in stacks of at most `size`, each of one p: its models share its time, which the study tells by p.

    Stacks of one p are as even as can be: a last one of a single model would leave the device half idle, and where time
    is short, shorter stacks fill it better.
    """
    stacks: list[list[Run]] = []
    for _, alike in itertools.groupby(runs, key=lambda run: (run.p, run.arm == "learned-p")):
        same = list(alike)
        count = -(-len(same) // size)
        edges = [len(same) * number // count for number in range(count + 1)]
        stacks.extend(same[first:last] for first, last in itertools.pairwise(edges))
    return stacks


def name_stack(runs: Sequence[Run]) -> str:
    """What a stack trains, in a few words."""
    if len(runs) == 1:
        return runs[0].name
    variants = " + ".join(dict.fromkeys(run.variant for run in runs))
    folds = ",".join(map(str, sorted({run.fold for run in runs})))
    return f"{variants} folds {folds}"


def run_missing(
    folder: StudyFolder, runs: Sequence[Run], text: Text, execution: Execution, plan: Plan, on_news: OnNews
) -> list[Run]:
    """Trains what is missing of `runs`, keeping every stack as it ends; returns what time did not allow."""
    stacks = make_stacks(folder.missing(runs), plan.stack_size)
    clock = _Clock(plan.max_minutes, [] if plan.max_minutes is None else _seconds_before(folder, execution))
    if plan.workers == 1:
        left = _work_here(folder, stacks, text, execution, clock, on_news)
    else:
        left = _Crew(folder, text, execution, min(plan.workers, len(stacks))).work(stacks, clock, on_news)
    return [run for stack in left for run in stack]


def _seconds_before(folder: StudyFolder, execution: Execution) -> list[float]:
    """What each run that is there took of this device, the newest last, its evaluations left out."""
    facts, iterations = execution.facts(), folder.about.study.iterations
    alike = [record for record in folder.records() if facts.items() <= record.made_by.items()]
    alike.sort(key=lambda record: folder.file_of(record.run).stat().st_mtime)
    return [record.ms_per_iteration * iterations / 1_000 for record in alike]


class _Clock:
    """Whether one more stack probably ends in time, judged by the slowest model of the newest stacks.

    Older ones are forgotten, for the first has compiled what the others use. `before` are the seconds of models that
    were trained earlier.
    """

    def __init__(self, minutes: float | None, before: Sequence[float] = ()) -> None:
        self._end = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self._newest = collections.deque(before, maxlen=STACKS_TO_JUDGE_BY)

    def allows(self, stack: Sequence[Run]) -> bool:
        return time.monotonic() + max(self._newest, default=0.0) * len(stack) <= self._end

    def note(self, news: News) -> None:
        if news.finished:
            self._newest.append(news.seconds / news.runs)


def _work_here(
    folder: StudyFolder,
    stacks: Sequence[Sequence[Run]],
    text: Text,
    execution: Execution,
    clock: _Clock,
    on_news: OnNews,
) -> list[Sequence[Run]]:
    def tell(news: News) -> None:
        clock.note(news)
        on_news(news)

    for place, stack in enumerate(stacks):
        if not clock.allows(stack):
            return list(stacks[place:])
        _train_and_keep(stack, folder, text, execution, tell)
    return []


def _train_and_keep(
    stack: Sequence[Run], folder: StudyFolder, text: Text, execution: Execution, on_news: OnNews
) -> None:
    """Trains a stack in this process and writes its runs down."""
    name, started, study = name_stack(stack), time.monotonic(), folder.about.study
    on_news(News(name, 0, study.iterations, None, len(stack)))
    records = train_stack(
        stack, study, text, execution, lambda done, total, loss: on_news(News(name, done, total, loss, len(stack)))
    )
    for record in records:
        folder.add(record)
    seconds = time.monotonic() - started
    on_news(News(name, study.iterations, study.iterations, None, len(stack), finished=True, seconds=seconds))


# ------------------------------------------------------------------ several processes


SECONDS_BETWEEN_LOOKS = 0.5
"""How often processes look whether the others still live while they wait."""


@dataclass(frozen=True)
class _Failure:
    """What went wrong in a worker: the user's to mend, or ours."""

    sentence: str
    users: bool


class _Crew:
    """Processes that each train one stack at a time and tell of it."""

    def __init__(self, folder: StudyFolder, text: Text, execution: Execution, count: int) -> None:
        context = multiprocessing.get_context("spawn")  # a fork cannot use CUDA
        self._tasks: Any = context.Queue()
        self._news: Any = context.Queue()
        threads = max(1, (os.cpu_count() or 1) // max(1, count))
        facts = (text.name, text.ids.numpy(), text.vocabulary, text.digest)
        words = (folder.path, facts, execution, threads, self._tasks, self._news)
        self._processes: list[BaseProcess] = [
            context.Process(target=_serve, args=words, daemon=True) for _ in range(count)
        ]

    def work(self, stacks: Sequence[Sequence[Run]], clock: _Clock, on_news: OnNews) -> list[Sequence[Run]]:
        """Hands out stacks one by one as workers become free; returns those that time did not allow."""
        waiting, busy = list(stacks), 0
        try:
            for process in self._processes:
                if clock.allows(waiting[0]):
                    process.start()
                    self._tasks.put(waiting.pop(0))
                    busy += 1
            while busy:
                news = self._next_news()
                clock.note(news)
                on_news(news)
                if news.finished:
                    busy -= 1
                    if waiting and clock.allows(waiting[0]):
                        self._tasks.put(waiting.pop(0))
                        busy += 1
        finally:
            self._dismiss()
        return waiting

    def _next_news(self) -> News:
        while True:
            try:
                news = self._news.get(timeout=SECONDS_BETWEEN_LOOKS)
            except queue.Empty:
                fallen = [process.exitcode for process in self._processes if process.exitcode]
                if fallen:
                    raise InputError(
                        f"a worker process ended with status {fallen[0]}, often for want of memory; lower --workers"
                    ) from None
                continue
            if isinstance(news, _Failure):
                raise InputError(news.sentence) if news.users else RuntimeError(news.sentence)
            assert isinstance(news, News)
            return news

    def _dismiss(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.terminate()
        for process in self._processes:
            if process.pid is not None:
                process.join()


def _serve(
    path: Path, facts: tuple[str, NDArray[Any], int, str], execution: Execution, threads: int, tasks: Any, news: Any
) -> None:
    """A worker: stacks in, news out, until it is dismissed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    torch.set_num_threads(threads)
    folder = StudyFolder.open(path)
    text = Text(facts[0], torch.from_numpy(facts[1]), *facts[2:])

    def tell(each: News) -> None:
        _leave_if_alone()
        news.put(each)

    for stack in _endlessly(tasks):
        try:
            _train_and_keep(stack, folder, text, execution, tell)
        except InputError as error:
            news.put(_Failure(str(error), users=True))
        except Exception:
            news.put(_Failure(traceback.format_exc(), users=False))


def _endlessly(tasks: Any) -> Iterator[list[Run]]:
    while True:
        try:
            stack = tasks.get(timeout=SECONDS_BETWEEN_LOOKS)
        except queue.Empty:
            _leave_if_alone()
            continue
        yield stack


def _leave_if_alone() -> None:
    """Ends a worker whose parent was killed and could not dismiss it."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)  # whoever read our queues has left, and Python's own way out would wait for them


def describe(study: LpStudy) -> str:
    """The model and training of a study in a line."""
    model = study.model
    return (
        f"{model.layers} layers, {model.heads} heads, width {model.width}, context {model.context}, dropout "
        f"{model.dropout.residual:g}; {study.iterations:,} iterations of {study.batch} windows, AdamW, learning rate "
        f"{study.learning_rate:g} → {study.final_learning_rate:g} by a cosine after {study.warmup} of warm-up, weight "
        f"decay {study.weight_decay:g}, {study.precision}"
    )
