"""Does jobs by processes of this machine: several side by side on every GPU, or on the CPU."""

import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qknorm.errors import InputError
from qknorm.studies.grid.jobs import (
    EXIT_STATUS,
    FAILURE,
    LOG,
    Job,
    View,
    end_count,
    is_free,
    look,
    read_log,
    read_result,
    unfinished,
    write_failure,
)

OnChange = Callable[[Sequence[View]], None]
POLL_SECONDS = 0.2
LOOK_SECONDS = 1.0
MOST_DEATHS = 3
"""A process that was killed leaves checkpoints to go on from; one that dies so often in one grid has failed."""


@dataclass
class Slot:
    """Room for one process at a time."""

    device: str
    gpu: str | None = None
    job: Job | None = None
    process: subprocess.Popen[bytes] | None = None


def make_slots(parallel: int | None, device: str | None = None) -> list[Slot]:
    """`parallel` slots on every GPU that this process may use, or on the CPU; by default one a GPU or CPU core.

    GPUs are those of CUDA_VISIBLE_DEVICES where it is set.
    """
    if parallel is not None and parallel < 1:
        raise InputError(f"--parallel is {parallel}; give 1 or more")
    import torch  # here and below, since a command's help does without

    from qknorm.training.translation import count_cores

    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cpu":
        return [Slot("cpu") for _ in range(parallel or count_cores())]
    if kind != "cuda":
        raise InputError(f"--device {kind} is no device of a grid; use cpu or cuda, with CUDA_VISIBLE_DEVICES for some")
    if not torch.cuda.is_available():
        raise InputError("--device cuda was asked for, but PyTorch sees no GPU; use --device cpu")
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]
    return [Slot("cuda", gpu) for _ in range(parallel or 1) for gpu in gpus]


@dataclass
class LocalGrid:
    """Works through jobs until all are done or have failed, or time is up."""

    jobs: Sequence[Job]
    slots: list[Slot]
    on_change: OnChange
    max_minutes: float | None = None
    waiting: list[Job] = field(default_factory=list)
    deaths: Counter[str] = field(default_factory=Counter)
    _looked_at: float = 0.0
    _counted_at: float = 0.0
    _spent: dict[Path, float] = field(default_factory=dict)
    """Seconds of its device that each job at work has taken."""

    def run(self) -> bool:
        """Does every job that is not done, and returns whether it came to their end in time.

        An interrupt, as the end of time, lets each process save and leave; it is passed on.
        """
        end = math.inf if self.max_minutes is None else time.monotonic() + 60 * self.max_minutes
        self.waiting = unfinished(self.jobs)
        for job in self.waiting:
            job.write()
        self._counted_at = time.monotonic()
        try:
            with _terminate_as_interrupt():
                while self.waiting or any(slot.process for slot in self.slots):
                    if time.monotonic() > end:
                        return False
                    self._count()
                    self._gather()
                    self._launch()
                    self._show()
                    time.sleep(POLL_SECONDS)
            return True
        finally:
            try:
                self._stop()
            finally:
                self._count()
                for folder in list(self._spent):
                    self._book(folder)
            self._show(now=True)

    def _launch(self) -> None:
        """Begins jobs that nobody else is at; those of others are looked at again later, for they may die."""
        self.waiting = [job for job in self.waiting if read_result(job.folder) is None]
        for slot in self.slots:
            if slot.process is not None:
                continue
            free = next(filter(is_free, self.waiting), None)
            if free is None:
                return
            self.waiting.remove(free)
            (free.folder / FAILURE).unlink(missing_ok=True)
            slot.job, slot.process = free, _start(free, slot, len(self.slots))

    def _count(self) -> None:
        """Shares the time since the last count out among those at work on one device."""
        now = time.monotonic()
        passed, self._counted_at = now - self._counted_at, now
        busy = [slot for slot in self.slots if slot.process is not None]
        sharing = Counter(slot.gpu for slot in busy)
        for slot in busy:
            assert slot.job is not None
            self._spent[slot.job.folder] = self._spent.get(slot.job.folder, 0.0) + passed / sharing[slot.gpu]

    def _book(self, folder: Path) -> None:
        end_count(folder, self._spent.pop(folder, 0.0))

    def _gather(self) -> None:
        for slot in list(self.slots):
            if slot.process is None or slot.process.poll() is None:
                continue
            job, status = slot.job, slot.process.returncode
            slot.job = slot.process = None
            assert job is not None
            if status == EXIT_STATUS["taken"]:  # the account is the other's, too
                self._spent.pop(job.folder, None)
                self.waiting.append(job)
                continue
            self._book(job.folder)
            if status == EXIT_STATUS["out of memory"]:
                self._make_room(slot, job)
            elif status not in (EXIT_STATUS["done"], EXIT_STATUS["failed"]):
                self._bury(job, status)

    def _make_room(self, slot: Slot, job: Job) -> None:
        """Fewer side by side on a GPU that is full; alone on it, a job that does not fit has failed."""
        if sum(other.gpu == slot.gpu for other in self.slots) > 1:
            self.slots.remove(slot)
            self.waiting.append(job)

    def _bury(self, job: Job, status: int) -> None:
        self.deaths[str(job.folder)] += 1
        if self.deaths[str(job.folder)] < MOST_DEATHS:
            self.waiting.insert(0, job)
        elif not (job.folder / FAILURE).is_file():
            died = f"signal {-status}" if status < 0 else f"status {status}"
            write_failure(job.folder, f"its process ended with {died} {MOST_DEATHS} times: {read_log(job.folder)}")

    def _show(self, now: bool = False) -> None:
        if now or time.monotonic() - self._looked_at >= LOOK_SECONDS:
            self._looked_at = time.monotonic()
            self.on_change([look(job) for job in self.jobs])

    def _stop(self) -> None:
        """Has every process save and leave, and waits for them."""
        processes = [slot.process for slot in self.slots if slot.process is not None]
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        try:
            for process in processes:
                process.wait()
        except KeyboardInterrupt:
            for process in processes:
                process.kill()
            raise


def _start(job: Job, slot: Slot, slots: int) -> subprocess.Popen[bytes]:
    with (job.folder / LOG).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "qknorm.studies.grid.work", str(job.folder), slot.device],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_environment(job, slot, slots)},
            start_new_session=True,  # a terminal's Ctrl-C reaches it through us alone, so once
        )


def _environment(job: Job, slot: Slot, slots: int) -> Mapping[str, str]:
    """Gives a process its GPU, and its share of the cores: for its threads, and for those who cut its text ahead."""
    import torch

    from qknorm.training.translation import CORES, choose_workers, count_cores

    cores = max(1, count_cores() // slots)
    workers = choose_workers(torch.device(slot.device), cores) if job.settings.training.bpe_dropout else 0
    threads = os.environ.get("OMP_NUM_THREADS") or str(cores - workers)
    return {CORES: str(cores), "OMP_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": slot.gpu or ""}


class _terminate_as_interrupt:
    """Makes SIGTERM an interrupt, so that both end a grid in the same way."""

    def __enter__(self) -> None:
        try:
            self._former = signal.signal(signal.SIGTERM, signal.default_int_handler)
        except ValueError:  # not the main thread: whoever runs us there handles signals
            self._former = None

    def __exit__(self, *_: object) -> None:
        if self._former is not None:
            signal.signal(signal.SIGTERM, self._former)
