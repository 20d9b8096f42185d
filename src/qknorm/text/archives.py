"""Unpacking archives so that nothing escapes, whatever they hold."""

import gzip
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO, Protocol, cast

from qknorm.errors import InputError
from qknorm.progress import Progress
from qknorm.text.download import CHUNK_BYTES

MAX_UNPACKED_BYTES = 8 << 30
MAX_MEMBERS = 100_000


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Limited:
    """A stream that refuses to give more than `limit` bytes, however small the archive that holds them."""

    def __init__(self, stream: _Readable, limit: int, archive: Path, given: int = 0):
        self.stream, self.limit, self.archive, self.given = stream, limit, archive, given

    def read(self, size: int) -> bytes:
        chunk = self.stream.read(size)
        self.given += len(chunk)
        if self.given > self.limit:
            raise InputError(f"{self.archive} unpacks to more than {self.limit:,} bytes and is refused")
        return chunk


def extract(
    archive: Path,
    folder: Path,
    wanted: Callable[[str], bool],
    progress: Progress | None = None,
    limit: int = MAX_UNPACKED_BYTES,
) -> list[Path]:
    """Unpacks the wanted files of a zip, tar or tar.gz into `folder`; returns where they are.

    An archive with a member that points outside, a device, or too much in it is refused as a whole.
    """
    unpack = _unpack_zip if zipfile.is_zipfile(archive) else _unpack_tar
    try:
        return unpack(archive, folder, wanted, progress, limit)
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as fault:
        raise InputError(f"{archive} holds two members of one name and is refused") from fault
    except (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError, RuntimeError) as fault:
        raise InputError(f"{archive} is damaged or no archive of a known kind ({fault})") from fault


def gunzip(archive: Path, path: Path, limit: int = MAX_UNPACKED_BYTES) -> None:
    """Unpacks a single gzipped file to `path`."""
    try:
        with gzip.open(archive) as packed:
            _write(_Limited(packed, limit, archive), path, "", None)
    except (gzip.BadGzipFile, zlib.error, EOFError) as fault:
        raise InputError(f"{archive} is damaged or not gzipped ({fault})") from fault


def _unpack_tar(
    archive: Path, folder: Path, wanted: Callable[[str], bool], progress: Progress | None, limit: int
) -> list[Path]:
    unpacked = []
    with archive.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
    # Decompressed here and read as a stream, so that the limit holds for headers and skipped files too.
    with gzip.open(archive) if zipped else archive.open("rb") as packed:
        limited = _Limited(packed, limit, archive)
        with tarfile.open(fileobj=cast(IO[bytes], limited), mode="r|") as tar:
            for number, member in enumerate(tar):
                target = _checked_target(archive, folder, member.name, number)
                _check_tar_member(archive, folder, member)
                if not member.isfile() or not wanted(_plain_name(member.name)):
                    continue
                content = tar.extractfile(member)
                if content is not None:
                    _write(content, target, f"unpack {archive.name}", progress)
                    unpacked.append(target)
    return unpacked


def _check_tar_member(archive: Path, folder: Path, member: tarfile.TarInfo) -> None:
    """Refuses devices, links that lead outside, and sparse files, whose holes would slip through the limit."""
    data_filter = getattr(tarfile, "data_filter", None)  # came with 3.11.4
    if member.issparse() or (data_filter is None and not (member.isfile() or member.isdir())):
        raise InputError(f"{archive} holds {member.name!r}, which is no plain file, and is refused")
    if data_filter is not None:
        try:
            data_filter(member, str(folder))
        except tarfile.FilterError as fault:
            raise InputError(f"{archive} holds {member.name!r}, a link or device, and is refused ({fault})") from fault


def _unpack_zip(
    archive: Path, folder: Path, wanted: Callable[[str], bool], progress: Progress | None, limit: int
) -> list[Path]:
    unpacked = []
    with zipfile.ZipFile(archive) as packed:
        given = 0
        for number, member in enumerate(packed.infolist()):
            target = _checked_target(archive, folder, member.filename, number)
            kind = member.external_attr >> 28
            if kind not in (0, 0o4, 0o10):  # what Unix calls a folder and a plain file; 0 where Unix did not pack it
                raise InputError(f"{archive} holds {member.filename!r}, a link or device, and is refused")
            if member.is_dir() or not wanted(_plain_name(member.filename)):
                continue
            with packed.open(member) as content:
                limited = _Limited(content, limit, archive, given)
                _write(limited, target, f"unpack {archive.name}", progress)
            given = limited.given
            unpacked.append(target)
    return unpacked


def _plain_name(name: str) -> str:
    return str(PurePosixPath(name))


def _checked_target(archive: Path, folder: Path, name: str, number: int) -> Path:
    if number >= MAX_MEMBERS:
        raise InputError(f"{archive} holds more than {MAX_MEMBERS:,} members and is refused")
    inside = PurePosixPath(name)
    if inside.is_absolute() or ".." in inside.parts or any(sign in name for sign in "\\:\0"):
        raise InputError(f"{archive} holds {name!r}, which may point outside its folder, and is refused")
    return folder.joinpath(*inside.parts)


def _write(content: _Readable | IO[bytes], path: Path, stage: str, progress: Progress | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    with path.open("xb") as file:
        while chunk := content.read(CHUNK_BYTES):
            file.write(chunk)
            written += len(chunk)
            if progress is not None:
                progress(stage, written, None)
