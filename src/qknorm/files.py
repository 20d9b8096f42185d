"""Writing files so that a crash or a full disk never leaves half of one under its final name."""

import errno
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""How a system says that a disk, or a user's share of it, is full; it does not say which file was written."""
_MOST_LINKS = 10


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yields a temporary name beside `path` to write to; on success it is synced and renamed, on failure removed.

    A link stays, and what it points at is replaced. A device or a pipe is yielded itself, and /dev/stdout or another
    file that this process has open already gets what was written in the end: no file may take their place.
    """
    number = _descriptor(path)
    if number is not None or is_device(path):
        try:
            with _into(number) if number is not None else nullcontext(path) as place:
                yield place
        except OSError as error:
            _name(path, error)
            raise
        return
    path = _behind(path) if path.is_symlink() else path
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        # mkstemp makes it private; the finished file has the mode of the one it replaces, or an ordinary one
        partial.chmod(stat.S_IMODE(path.stat().st_mode) if path.is_file() else 0o666 & ~_umask())
        partial.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        _name(path, error)
        raise
    finally:
        partial.unlink(missing_ok=True)


def is_device(path: Path) -> bool:
    """Whether it is written to but is no file to be replaced: /dev/null, a terminal, a pipe, /dev/stdout."""
    return _descriptor(path) is not None or (path.exists() and not path.is_file() and not path.is_dir())


def takes_what_is_written(path: Path) -> bool:
    """Whether a device, a pipe or an open file of this process can be written to."""
    number = _descriptor(path)
    if number is None:
        return os.access(path, os.W_OK)
    import fcntl  # whoever has such numbers has it

    try:
        return fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    except (OSError, OverflowError):  # no file is open under this number, or none can be
        return False


def _descriptor(path: Path) -> int | None:
    """The number of an open file of this process, for /dev/stdout, /dev/fd/3 and links to such; else None."""
    own = Path("/dev/fd"), Path(f"/proc/{os.getpid()}/fd")
    for _ in range(_MOST_LINKS):
        if path.name.isdecimal() and _behind(path.parent) in own:
            return int(path.name)
        if not path.is_symlink():
            return None
        path = path.parent / path.readlink()
    return None


@contextmanager
def _into(number: int) -> Iterator[Path]:
    """Yields a file to write to, which goes to an open file after what that has already."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "content"
        with (Path(folder) / "content").open("rb") as content, os.fdopen(os.dup(number), "wb") as place:
            shutil.copyfileobj(content, place)


def _behind(path: Path) -> Path:
    """What a link leads to in the end, be it there or not; the last one of a circle of links."""
    return Path(os.path.realpath(path))


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yields a temporary folder beside `path`; on success it takes the place of `path`, on failure it is removed.

    A link stays, and what it points at is replaced.
    """
    path = _behind(path) if path.is_symlink() else path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
    try:
        yield partial
        mask = _umask()
        for file in partial.rglob("*"):
            if file.is_file() and not file.is_symlink():
                with file.open("rb+") as opened:
                    os.fsync(opened.fileno())
                file.chmod(stat.S_IMODE(file.stat().st_mode) | (0o444 & ~mask))  # safetensors lets its owner read alone
        partial.chmod(0o777 & ~mask)
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
