"""The text of coming epochs, cut by BPE-dropout in processes beside the training, so that nobody waits for it.

A process is this module run by itself: it is told the words of the text once, then gets lines and answers with ids,
all as plain arrays through its standard input and output. It ends with its input, so also with whoever started it.
What it says of its troubles goes to a file without a name, whose last line tells why where it ended too early.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qknorm.text.cutting import Cutter, Lines, Longs, Rules, TokenIds, Words, starts_of

PIECE = 2_048
"""Lines that are cut at once; random numbers depend on it, but not on who cuts."""
EPOCHS_AHEAD = 2
PATIENCE = 5.0
"""Seconds without news after which a job that a process has begun is done here too: that process may sleep."""
LAST_WORDS, LONGEST_LINE = 300, 1 << 16
"""Characters of a last line that a warning has room for, and bytes in which its beginning is looked for."""

Cut = tuple[TokenIds, Longs]


class Job(NamedTuple):
    """A piece of a side's text to be cut for an epoch."""

    epoch: int
    side: int
    piece: int


class CutEpochs:
    """Every epoch's text, cut anew; with `workers` the epochs that follow are cut meanwhile by so many processes.

    What comes out depends on the seed and the epoch alone. Where processes die it is cut here, which is slower. One
    thread at a time may ask.
    """

    def __init__(self, cutter: Cutter, sides: Sequence[Lines], seed: int, workers: int) -> None:
        self._board = Board(cutter, [side.pieces(PIECE) for side in sides], seed)
        # the threads know the board alone, so that whoever drops these epochs unclosed leaves nobody running either
        self._end = weakref.finalize(self, self._board.close)
        self._board.start(workers)

    def cut(self, epoch: int) -> list[tuple[TokenIds, Longs]]:
        """Of each side the ids of all sentences, and where each begins and the last one ends."""
        return self._board.take(epoch)

    @property
    def processes(self) -> list[int]:
        """The ids of the processes that cut ahead."""
        return self._board.processes

    def close(self) -> None:
        """Ends all processes; what is asked for later is cut here."""
        self._end()


class Board:
    """The jobs that are left, and what has been done, for threads that each pass jobs on to a process."""

    def __init__(self, cutter: Cutter, sides: list[list[Lines]], seed: int) -> None:
        self._cutter, self._sides, self._seed = cutter, sides, seed
        self._jobs: deque[Job] = deque()
        self._done: dict[int, dict[Job, Cut]] = {}
        self._changed = threading.Condition()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._complaint: str | None = None
        self._complained = False

    @property
    def processes(self) -> list[int]:
        with self._changed:
            return list(self._processes)

    def start(self, workers: int) -> None:
        for _ in range(workers):
            try:
                process = start_process()
            except OSError as error:
                self._complaint = str(error)
                return
            thread = threading.Thread(target=self._attend, args=(process,), name="cutting", daemon=True)
            self._processes[process.pid] = process
            try:
                thread.start()
            except RuntimeError as error:  # the system lets us have no more of them
                del self._processes[process.pid]
                _leave(process)
                self._complaint = str(error)
                return
            self._threads.append(thread)

    def take(self, epoch: int) -> list[tuple[TokenIds, Longs]]:
        """What this epoch's jobs give, with our own hands where they are not done; has the next epochs begun."""
        self.ask_for(range(epoch, epoch + 1 + EPOCHS_AHEAD * bool(self._processes)))
        due = self._jobs_of(epoch)
        while (job := self._next_of(epoch, len(due))) is not None:
            try:
                self._put(job, self._cutter.cut(self._lines(job), self._key(job)))
            except BaseException:  # who is interrupted may ask again
                self._give_back(job)
                raise
        with self._changed:
            done = self._done.pop(epoch)
        self._complain_once()
        sides: list[list[Cut]] = [[] for _ in self._sides]
        for job in due:
            sides[job.side].append(done[job])
        return [_join(side) for side in sides]

    def ask_for(self, epochs: range) -> None:
        """Puts up what is not done of these epochs, and forgets all others."""
        with self._changed:
            self._done = {epoch: done for epoch, done in self._done.items() if epoch in epochs}
            jobs = [job for job in self._jobs if job.epoch in epochs]
            for epoch in epochs:
                if epoch not in self._done:
                    self._done[epoch] = {}
                    jobs += self._jobs_of(epoch)
            self._jobs = deque(sorted(jobs))
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._done.clear()
            self._changed.notify_all()
            for process in self._processes.values():
                process.kill()  # it holds nothing that could be lost
        if threading.current_thread() not in self._threads:  # where garbage may be collected too, by one in a wait
            for thread in self._threads:
                thread.join()

    def _jobs_of(self, epoch: int) -> list[Job]:
        return [Job(epoch, side, piece) for side, pieces in enumerate(self._sides) for piece in range(len(pieces))]

    def _lines(self, job: Job) -> Lines:
        return self._sides[job.side][job.piece]

    def _key(self, job: Job) -> tuple[int, ...]:
        return self._seed, *job, 1  # trailing zeros would not count, and the order of batches has a stream too

    def _next_of(self, epoch: int, count: int) -> Job | None:
        """A job of this epoch that nobody has begun; waits for those begun, and gives None when all are done.

        Not without end: whoever has begun one may never answer. Done twice it is the same.
        """
        with self._changed:
            while len(self._done[epoch]) < count:
                if self._jobs and self._jobs[0].epoch == epoch:
                    return self._jobs.popleft()
                if not self._changed.wait(PATIENCE):
                    return next(job for job in self._jobs_of(epoch) if job not in self._done[epoch])
        return None

    def _next(self) -> Job | None:
        """The next job of all; waits for one, and gives None at the end."""
        with self._changed:
            while not self._jobs and not self._closed:
                self._changed.wait()
            return None if self._closed else self._jobs.popleft()

    def _put(self, job: Job, found: Cut) -> None:
        with self._changed:
            if job.epoch in self._done:
                self._done[job.epoch][job] = found
            self._changed.notify_all()

    def _attend(self, process: "subprocess.Popen[bytes]") -> None:
        """Passes jobs on to a process until the end, its or ours."""
        assert process.stdin is not None and process.stdout is not None
        job: Job | None = None
        trouble = ""
        try:
            cutter = self._cutter
            send(process.stdin, (np.array([cutter.dropout]), *cutter.rules, *cutter.words))
            while (job := self._next()) is not None:
                send(process.stdin, (np.array(self._key(job)), *self._lines(job)))
                ids, lengths = receive(process.stdout)
                _forget_words(process)
                self._put(job, (ids, lengths))
        except Exception as error:  # whatever it was: a job that nobody has would be waited for without end
            self._give_back(job)
            if not isinstance(error, (EOFError, OSError)):  # which say no more than that it has ended
                trouble = _last_line("".join(traceback.format_exception_only(error)))
        finally:
            ended = _leave(process)
            with self._changed:
                del self._processes[process.pid]
                if not self._closed:
                    what = f"was given up: {trouble}" if trouble else f"ended with {ended}"
                    self._complaint = self._complaint or f"a process that cut ahead {what}"

    def _give_back(self, job: Job | None) -> None:
        """Puts up a job again that was not done, at its place."""
        with self._changed:
            if job is not None and job.epoch in self._done:
                self._jobs = deque(sorted([*self._jobs, job]))
            self._changed.notify_all()

    def _complain_once(self) -> None:
        if self._complaint is not None and not self._complained:
            self._complained = True
            warnings.warn(
                f"{self._complaint}; BPE-dropout goes on with {len(self.processes)} beside the training, with the same "
                f"result, but training may wait for it",
                stacklevel=4,
            )


def start_process() -> "subprocess.Popen[bytes]":
    """This module as a process of its own, which shares neither the terminal's signals nor our threads.

    Its `stderr` is a file, if there is room for one: nobody needs to empty it, as a pipe, for the process to go on.
    """
    if getattr(sys, "frozen", False) or not sys.executable:
        raise OSError("there is no Python interpreter beside this program")
    # not by the name of the script that runs, whatever it may be, nor from the folder where it runs
    home = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    words: IO[bytes] | None = None
    with suppress(OSError):
        words = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words or subprocess.DEVNULL,
            env={**os.environ, **threads, "PYTHONPATH": path, "PYTHON_COLORS": "0"},
            start_new_session=True,  # a terminal's Ctrl-C is for the training, which ends us
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
            | getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
    except OSError:
        if words is not None:
            words.close()
        raise
    process.stderr = words
    return process


def send(stream: IO[bytes], arrays: Sequence[NDArray[Any]]) -> None:
    """Writes arrays of one dimension: a line that says what they are, then their content."""
    stream.write(json.dumps([(array.dtype.str, len(array)) for array in arrays]).encode() + b"\n")
    for array in arrays:
        stream.write(np.ascontiguousarray(array).view(np.uint8).data)
    stream.flush()


def receive(stream: IO[bytes]) -> list[NDArray[Any]]:
    """Reads what `send` wrote; an EOFError where there is nothing more."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    arrays = [np.empty(length, dtype=kind) for kind, length in json.loads(line)]
    for array in arrays:
        if stream.readinto(array.view(np.uint8).data) != array.nbytes:  # type: ignore[attr-defined]
            raise EOFError
    return arrays


def serve(questions: IO[bytes], answers: IO[bytes]) -> None:
    """Cuts what comes in until nothing more does."""
    try:
        (dropout,), *rest = receive(questions)
        cutter = Cutter(Rules(*rest[: len(Rules._fields)]), Words(*rest[len(Rules._fields) :]), float(dropout))
        while True:
            key, *lines = receive(questions)
            ids, lengths = cutter.cut(Lines(*lines), key.tolist())
            send(answers, (ids, lengths))
    except (EOFError, BrokenPipeError):
        return


def _join(pieces: Sequence[Cut]) -> tuple[TokenIds, Longs]:
    ids: TokenIds = np.concatenate([ids for ids, _ in pieces])
    return ids, starts_of(np.concatenate([lengths for _, lengths in pieces]))


def _leave(process: "subprocess.Popen[bytes]") -> str:
    """Ends a process and closes its files; returns its status, of its own or by us, and its last words if any."""
    try:
        process.wait(timeout=0.1)  # it may be about to
    except subprocess.TimeoutExpired:
        process.kill()
    status = f"status {process.wait()}"
    words = _last_words(process)
    for stream in (process.stdin, process.stdout, process.stderr):
        with suppress(OSError):  # what was not sent yet is not wanted any more
            if stream is not None:
                stream.close()
    return f"{status}: {words}" if words else status


def _forget_words(process: "subprocess.Popen[bytes]") -> None:
    """Empties the file of a process that goes on: what it said so far is not why it may end, and must not pile up."""
    if process.stderr is not None:
        with suppress(OSError):
            process.stderr.seek(0)  # for the process too, with which we share the place in the file
            process.stderr.truncate()


def _last_words(process: "subprocess.Popen[bytes]") -> str:
    """The last line that a process has left, which has ended; nothing where there is none."""
    if process.stderr is None:
        return ""
    try:
        process.stderr.seek(max(0, process.stderr.seek(0, os.SEEK_END) - LONGEST_LINE))
        return _last_line(process.stderr.read().decode(errors="replace"))
    except OSError:
        return ""


def _last_line(text: str) -> str:
    """The last line that says something, as part of a sentence."""
    line = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    line = "".join(letter if letter.isprintable() else " " for letter in line).strip().rstrip(".")
    return line if len(line) <= LAST_WORDS else f"{line[:LAST_WORDS]}…"


if __name__ == "__main__":
    # a buffer of our own: with PYTHONUNBUFFERED there is none, and a write may leave off in the middle
    serve(sys.stdin.buffer, open(sys.stdout.fileno(), "wb", closefd=False))  # noqa: SIM115
    os._exit(0)  # whoever read the answers may be gone, which is no matter for a last word
