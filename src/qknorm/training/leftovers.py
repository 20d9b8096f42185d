"""One training in a run folder at a time; what killed writers left there, removed without disturbing a live one."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qknorm.errors import InputError

if sys.platform != "win32":
    import fcntl


@contextmanager
def hold_and_sweep(folder: Path) -> Iterator[None]:
    """For writers: keeps others from sweeping and writing in `folder`, and clears away what dead writers left."""
    with _locked(folder, wait=True):
        _clear(folder)
        yield


@contextmanager
def undisturbed(folder: Path) -> Iterator[None]:
    """For readers: waits for the writer of `folder`, if there is one, and keeps others out until the end."""
    with _locked(folder, wait=True):
        yield


@contextmanager
def alone_in(run: Path) -> Iterator[None]:
    """Keeps other trainings out of a run folder until the end, or the death of this process; refuses where one is.

    A folder made here goes again if nothing came to be in it.
    """
    new = not run.exists()
    with suppress(OSError):  # who lays the run out says what is wrong
        run.mkdir(parents=True, exist_ok=True)
    with _locked(run, wait=False) as got:
        if got is False:
            raise InputError(f"another training is at work in {run}; wait for it, stop it, or name another --run")
        try:
            yield
        finally:
            if new:
                with suppress(OSError):  # it is not empty
                    run.rmdir()


def sweep(folder: Path) -> None:
    """For readers: clears away what dead writers left in `folder`, if nobody is writing there just now."""
    with _locked(folder, wait=False) as nobody_writes:
        if nobody_writes:
            _clear(folder)


def _clear(folder: Path) -> None:
    for retired in folder.glob(".step-*.retired"):
        final = folder / retired.name.split(".")[1]
        if final.exists():
            shutil.rmtree(retired, ignore_errors=True)
        else:  # its writer died between taking the old one away and putting the new one in its place
            with suppress(OSError):  # here and below: a reader may have no right to write
                retired.rename(final)
    for partial in folder.glob(".*.partial"):
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            with suppress(OSError):
                partial.unlink()


@contextmanager
def _locked(folder: Path, *, wait: bool) -> Iterator[bool | None]:
    """Locks `folder` until the end, or the death of this process; yields whether the lock was got.

    It yields None where there are no locks (Windows, some network file systems): there a run has one writer, and only
    that one clears away.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        yield None
        return
    try:
        yield _try_lock(descriptor, wait)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, wait: bool) -> bool | None:
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
