"""Writing files so that a crash or a full disk never leaves half of one under its final name."""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""How a system says that a disk, or a user's share of it, is full; it does not say which file was written."""


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yields a temporary name beside `path` to write to; on success it is synced and renamed, on failure removed.

    A link stays, and what it points at is replaced. A device or a pipe is yielded itself: no file may take its place.
    """
    if is_device(path):
        yield path
        return
    path = path.resolve() if path.is_symlink() else path
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.chmod(0o666 & ~_umask())  # mkstemp makes it private; the finished file is an ordinary one
        partial.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        _name(path, error)
        raise
    finally:
        partial.unlink(missing_ok=True)


def is_device(path: Path) -> bool:
    """Whether something stands there that is written to but holds nothing: /dev/null, a terminal, a pipe."""
    return path.exists() and not path.is_file() and not path.is_dir()


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yields a temporary folder beside `path`; on success it takes the place of `path`, on failure it is removed.

    A link stays, and what it points at is replaced.
    """
    path = path.resolve() if path.is_symlink() else path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
    try:
        yield partial
        for file in partial.rglob("*"):
            if file.is_file():
                with file.open("rb+") as opened:
                    os.fsync(opened.fileno())
                file.chmod(0o666 & ~_umask())  # safetensors makes files that only their owner can read
        partial.chmod(0o777 & ~_umask())
        _take_the_place(partial, path)
        _sync_folder(path.parent)
    except OSError as error:
        _name(path, error)
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _name(path: Path, error: OSError) -> None:
    """Lets an error of a full disk say what was to be written; others may be of a file that is read meanwhile."""
    if error.errno in NO_ROOM:
        error.filename = str(path)


def _take_the_place(partial: Path, path: Path) -> None:
    if not path.is_dir():
        partial.rename(path)
        return
    retired = partial.with_suffix(".retired")
    path.rename(retired)
    try:
        partial.rename(path)
    except BaseException:
        retired.rename(path)
        raise
    shutil.rmtree(retired)


def write_text(path: Path, text: str) -> None:
    """Writes `text` as UTF-8, atomically."""
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: Path, content: Any) -> None:
    """Writes `content` as readable JSON, atomically."""
    write_text(path, json.dumps(content, ensure_ascii=False, indent=2) + "\n")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return  # only POSIX lets a folder be opened and synced
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
