"""Who does a job: a file beside it that names a living process, so that nobody does it a second time.

On the machine of its holder a claim ends with its process; seen from another machine, or where the system does not tell
when a process began, it ends when its holder has not touched the file for some time, by the clock of the file system
that both see.
"""

import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

from qknorm import files

CLAIM, GUARD, PROBE = "claim.json", ".claim-guard", ".claim-probe"
BEAT_SECONDS = 10.0
STALE_SECONDS = 90.0
BEATS_MISSING = 2
"""A claim that cannot be read at so many beats in a row is lost; at one, the disk may be away for a moment."""
PROC = Path("/proc")
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Holder:
    """The process that holds a claim."""

    host: str
    machine: str
    pid: int
    began: str
    """When the process began, by its machine: a number that is given again does not make it the same process.

    `UNKNOWN` where the machine does not tell.
    """
    token: str

    @classmethod
    def here(cls) -> "Holder":
        """This process, with a token of its own."""
        pid = os.getpid()
        return cls(socket.gethostname(), _machine(), pid, _began(pid), uuid.uuid4().hex)


class Claim:
    """A claim that is held; as a context it is given back at the end, also by an error."""

    def __init__(self, folder: Path, holder: Holder, on_loss: Callable[[], None]) -> None:
        self.folder, self.holder = folder, holder
        self._on_loss = on_loss
        self._ended = threading.Event()
        self._beat = threading.Thread(target=self._touch, daemon=True)
        self._beat.start()

    def held(self) -> bool:
        """Whether it is still ours: someone may have taken it while this process slept."""
        found = _read(self.folder)
        return found is not None and found.token == self.holder.token

    def release(self) -> None:
        """Gives the job back; a second call does nothing."""
        self._ended.set()
        with _guard(self.folder):
            if self.held():
                (self.folder / CLAIM).unlink(missing_ok=True)

    def _touch(self) -> None:
        missing, told = 0, False
        while not self._ended.wait(BEAT_SECONDS):
            found = _read(self.folder)
            if found is not None and found.token == self.holder.token:
                missing = 0
                with suppress(OSError):  # a file system that is away for a moment; the next beat tries again
                    os.utime(self.folder / CLAIM)
                continue
            missing = missing + 1 if found is None else BEATS_MISSING
            if missing >= BEATS_MISSING and not told and not self._ended.is_set():
                told = True
                self._on_loss()  # if it returns we go on: a disk that comes back may bring the claim with it

    def __enter__(self) -> "Claim":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def take(folder: Path, on_loss: Callable[[], None] | None = None) -> Claim | None:
    """A claim on the folder, or None if a living process has one.

    `on_loss` is called, once, if another takes it over or it stays away. If not given, that ends this process, which
    says why on standard error: two must not write.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _guard(folder):
        if find_holder(folder) is not None:
            return None
        holder = Holder.here()
        files.write_json(folder / CLAIM, asdict(holder))
    return Claim(folder, holder, on_loss or partial(end_process, folder))


def find_holder(folder: Path) -> Holder | None:
    """The living process that holds the folder; None where it is free, or its holder is gone."""
    holder = _read(folder)
    if holder is None:
        return None
    if holder.machine == _machine() and (began := _began(holder.pid)) != UNKNOWN:
        return holder if began == holder.began else None
    return None if _age(folder) > STALE_SECONDS else holder


def _read(folder: Path) -> Holder | None:
    try:
        return Holder(**json.loads((folder / CLAIM).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # written whole or not at all, so that a damaged one is nobody's
        return None


def _age(folder: Path) -> float:
    """Seconds since the claim was touched, by the clock of the file system."""
    probe = folder / PROBE
    try:
        touched = (folder / CLAIM).stat().st_mtime
        probe.touch()
        return probe.stat().st_mtime - touched
    except OSError:
        return 0.0


@contextmanager
def _guard(folder: Path) -> Iterator[None]:
    """Keeps looking and taking together; where the system has no such locks, the beat still finds out a double."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    try:
        file = (folder / GUARD).open("a")
    except OSError:  # who writes next says what is wrong
        yield
        return
    with file:
        with suppress(OSError):  # some network file systems refuse it
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _machine() -> str:
    """What tells processes of one numbering from those of another: the machine since it started, the container."""
    parts = [socket.gethostname()]
    for path in (PROC / "sys/kernel/random/boot_id", PROC / "self/ns/pid"):
        try:
            parts.append(str(path.readlink()) if path.is_symlink() else path.read_text(encoding="ascii").strip())
        except OSError:
            continue
    return " ".join(parts)


def _began(pid: int) -> str:
    """When a process began, in the system's ticks; empty if it is gone, `UNKNOWN` if the system does not tell."""
    if sys.platform == "win32":  # os.kill(pid, 0) would send it Ctrl-C there
        return UNKNOWN
    if (PROC / "self/stat").is_file():
        try:
            stat = PROC / f"{pid}/stat"
            state, *fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except (OSError, ValueError):
            return ""
        return "" if state in ("Z", "X") else fields[18]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return UNKNOWN


def find_other(folder: Path) -> Holder | None:
    """Another process than this one that the folder's claim names."""
    found = _read(folder)
    return None if found is None or (found.machine, found.pid) == (_machine(), os.getpid()) else found


def explain_loss(folder: Path) -> str:
    """Why a process that lost its claim on the folder ends, and what to do."""
    other = find_other(folder)
    if other is not None:
        return (
            f"{folder / CLAIM} is now held by process {other.pid} on {other.host}, so this one ended, lest both write "
            f"there; wait for the other"
        )
    return (
        f"{folder / CLAIM} was gone or could not be read for {BEATS_MISSING * BEAT_SECONDS:g} s, so its process ended, "
        f"lest another write there too; see that the disk answers and that nothing removes the file, then run the same "
        f"command again"
    )


def end_process(folder: Path, status: int = 1) -> None:
    """Says on standard error that the claim on the folder is lost, and ends this process at once."""
    with suppress(OSError, ValueError):  # where that cannot be written either, the status is all there is
        print(f"qknorm: {explain_loss(folder)}", file=sys.stderr, flush=True)
    os._exit(status)


def wait_until_free(folder: Path, poll: float = 1.0) -> None:
    """Returns when nobody holds the folder."""
    while find_holder(folder) is not None:
        time.sleep(poll)
