"""Whole files or none: what a failure leaves behind, and what it must not touch."""

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from qknorm.files import atomic_folder, atomic_path, is_device, write_json, write_text


def everything_under(folder: Path) -> dict[str, str | None]:
    return {str(path.relative_to(folder)): path.read_text() if path.is_file() else None for path in folder.rglob("*")}


def fail_after_writing(path: Path, kind: type[BaseException]) -> None:
    with atomic_path(path) as partial:
        partial.write_text("half")
        raise kind


def fail_after_filling(path: Path, kind: type[BaseException]) -> None:
    with atomic_folder(path) as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "file").write_text("half")
        raise kind


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("fail", [fail_after_writing, fail_after_filling])
def test_a_failure_leaves_nothing_behind(tmp_path, fail, kind):
    with pytest.raises(kind):
        fail(tmp_path / "new", kind)
    assert everything_under(tmp_path) == {}


def test_a_failure_leaves_what_was_there(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("old")
    before = everything_under(tmp_path)
    with pytest.raises(ZeroDivisionError):
        fail_after_writing(tmp_path / "file", ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        fail_after_filling(tmp_path / "folder", ZeroDivisionError)
    assert everything_under(tmp_path) == before


@pytest.mark.parametrize("write", [atomic_path, atomic_folder])
def test_a_full_disk_is_told_of_by_the_final_name(tmp_path, write):
    with pytest.raises(OSError, match="No space") as full, write(tmp_path / "new"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert full.value.filename == str(tmp_path / "new")
    with pytest.raises(OSError, match="reset") as other, write(tmp_path / "new"):
        raise OSError(errno.ECONNRESET, "Connection reset by peer")
    assert other.value.filename is None, "what is read meanwhile may have failed"


def test_a_folder_that_cannot_take_its_place_leaves_the_old_one(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("old")
    rename = Path.rename

    def rename_all_but_the_new(self: Path, target: Path) -> Path:
        if self.suffix == ".partial":
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", rename_all_but_the_new)
    with pytest.raises(OSError, match="no"), atomic_folder(tmp_path / "folder") as partial:
        (partial / "file").write_text("new")
    assert everything_under(tmp_path) == {"folder": None, "folder/file": "old"}


def test_nothing_stands_under_the_final_name_before_the_end(tmp_path):
    with atomic_path(tmp_path / "a" / "file") as partial:
        partial.write_text("whole")
        assert not (tmp_path / "a" / "file").exists()
    assert everything_under(tmp_path) == {"a": None, "a/file": "whole"}
    with atomic_folder(tmp_path / "b" / "folder") as partial:
        (partial / "file").write_text("whole")
        assert not (tmp_path / "b" / "folder").exists()
    assert everything_under(tmp_path / "b") == {"folder": None, "folder/file": "whole"}


def test_a_new_folder_replaces_all_of_the_old_one(tmp_path):
    for content in ("old", "new"):
        with atomic_folder(tmp_path / "folder") as partial:
            (partial / content).write_text(content)
    assert everything_under(tmp_path) == {"folder": None, "folder/new": "new"}


def test_a_file_is_never_replaced_by_a_folder_nor_a_folder_by_a_file(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    with pytest.raises(NotADirectoryError), atomic_folder(tmp_path / "file"):
        pass
    with pytest.raises(IsADirectoryError), atomic_path(tmp_path / "folder"):
        pass
    assert everything_under(tmp_path) == {"file": "old", "folder": None}


def test_a_link_to_a_folder_stays_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "old").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with atomic_folder(tmp_path / "link") as partial:
        (partial / "new").write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert everything_under(tmp_path / "elsewhere") == {"new": "new"}


def test_a_link_to_a_file_stays_a_link(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "ahead").symlink_to(tmp_path / "elsewhere" / "new")
    write_text(tmp_path / "link", "new")
    write_text(tmp_path / "ahead", "made")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "ahead").is_symlink()
    assert (tmp_path / "file").read_text() == "new" and (tmp_path / "elsewhere" / "new").read_text() == "made"


@pytest.mark.skipif(os.name != "posix", reason="devices and pipes with names are a matter of POSIX")
def test_no_file_takes_the_place_of_a_pipe_or_a_device(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "through")
        assert os.read(reading, 100) == b"through"
    finally:
        os.close(reading)
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="this system has no /dev/stdout")
@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link"])
def test_what_is_written_to_an_open_file_goes_after_what_it_has(tmp_path, name):
    """As in `(echo before; qknorm … --output /dev/stdout; echo after) >> log`."""
    (tmp_path / "link").symlink_to("/dev/stdout")
    if not (tmp_path / name).exists():
        pytest.skip(f"this system has no {name}")
    script = f"""
import os, pathlib
from qknorm.files import is_device, write_text
os.write(1, b"before\\n")
assert is_device(pathlib.Path("{tmp_path / name}"))
write_text(pathlib.Path("{tmp_path / name}"), "written\\n")
os.write(1, b"after\\n")
"""
    log = tmp_path / "log"
    for mode, kept in (("ab", "old\n"), ("wb", "")):
        log.write_text("old\n")
        with log.open(mode) as out:
            subprocess.run([sys.executable, "-c", script], stdout=out, check=True)
        assert log.read_text() == f"{kept}before\nwritten\nafter\n"
    piped = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True)
    assert piped.stdout == b"before\nwritten\nafter\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "log"]


def test_a_circle_of_links_is_no_reason_to_crash(tmp_path):
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    assert not is_device(tmp_path / "circle")
    write_text(tmp_path / "circle", "made")
    assert (tmp_path / "circle").read_text() == "made"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_device_is_named():
    with pytest.raises(OSError, match="/dev/full"):
        write_text(Path("/dev/full"), "x")


@pytest.mark.skipif(os.name != "posix", reason="modes are a matter of POSIX")
def test_what_is_replaced_keeps_its_mode_and_what_is_linked_keeps_its_own(tmp_path):
    for name, mode in (("private", 0o600), ("program", 0o755)):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    (tmp_path / "link").symlink_to(tmp_path / "private")
    write_text(tmp_path / "link", "new")
    with atomic_folder(tmp_path / "folder") as partial:
        shutil.copy(tmp_path / "program", partial / "copy")
        (partial / "link").symlink_to(tmp_path / "private")
    modes = {name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("private", "folder/copy")}
    assert modes == {"private": 0o600, "folder/copy": 0o755}


@pytest.mark.skipif(os.name != "posix", reason="modes are a matter of POSIX")
def test_finished_files_and_folders_have_ordinary_modes(tmp_path):
    mask = os.umask(0o027)
    try:
        write_text(tmp_path / "file", "x")
        with atomic_folder(tmp_path / "folder") as partial:
            (partial / "private").touch(0o600)
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o750
    assert stat.S_IMODE((tmp_path / "folder" / "private").stat().st_mode) == 0o640


def test_text_and_json_are_written_as_they_are(tmp_path):
    write_text(tmp_path / "text", "liña\n\u2028x\n")
    assert (tmp_path / "text").read_bytes() == "liña\n\u2028x\n".encode()
    write_json(tmp_path / "json", {"lingua": "galego ñ", "n": [1, 2.5, None]})
    assert json.loads((tmp_path / "json").read_text()) == {"lingua": "galego ñ", "n": [1, 2.5, None]}
    assert "ñ" in (tmp_path / "json").read_text()
