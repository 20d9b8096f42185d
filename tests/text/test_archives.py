"""Archives of every kind are unpacked, and hostile ones refused as a whole."""

import gzip
import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from qknorm.errors import InputError
from qknorm.text import archives


def everything(name: str) -> bool:
    return True


def make_tar(path: Path, *members: tuple[tarfile.TarInfo, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as tar:
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.parametrize("mode", ["w:gz", "w"])
def test_tar_gives_the_wanted_files_and_no_others(tmp_path: Path, mode: str) -> None:
    archive = make_tar(tmp_path / "a", (member("./x/wanted.txt"), b"yes"), (member("x/other.txt"), b"no"), mode=mode)
    seen: list[tuple[str, int, int | None]] = []
    names: list[str] = []

    def wanted(name: str) -> bool:
        names.append(name)
        return name == "x/wanted.txt"

    files = archives.extract(archive, tmp_path / "out", wanted, progress=lambda *report: seen.append(report))
    assert files == [tmp_path / "out/x/wanted.txt"]
    assert files[0].read_bytes() == b"yes"
    assert names == ["x/wanted.txt", "x/other.txt"]
    assert [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()] == ["wanted.txt"]
    assert seen == [("unpack a", 3, None)]


def test_zip_gives_the_wanted_files(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/wanted.txt", "yes" * 1000)
        archive.writestr("y.txt", "no")
    files = archives.extract(tmp_path / "a.zip", tmp_path / "out", lambda name: name.startswith("x/"))
    assert [file.read_text() for file in files] == ["yes" * 1000]


HOSTILE = {
    "absolute": (member("/tmp/evil"), b"x"),
    "climbing": (member("x/../../evil"), b"x"),
    "backslash": (member("..\\evil"), b"x"),
    "drive": (member("C:evil"), b"x"),
    "symlink out": (member("evil", tarfile.SYMTYPE, "../../evil"), b""),
    "symlink absolute": (member("evil", tarfile.SYMTYPE, "/etc/passwd"), b""),
    "hard link out": (member("evil", tarfile.LNKTYPE, "../evil"), b""),
    "device": (member("evil", tarfile.CHRTYPE), b""),
    "pipe": (member("evil", tarfile.FIFOTYPE), b""),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_tar_is_refused_even_where_the_member_is_not_wanted(tmp_path: Path, kind: str) -> None:
    archive = make_tar(tmp_path / "a.tgz", HOSTILE[kind])
    out = tmp_path / "deep" / "out"
    with pytest.raises(InputError, match=r"a\.tgz holds .* is refused"):
        archives.extract(archive, out, lambda name: False)
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith("evil")]


def test_writing_through_a_link_inside_the_archive_is_impossible(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    members = (member("x", tarfile.SYMTYPE, "y"), b""), (member("x/evil"), b"x")
    files = archives.extract(make_tar(tmp_path / "a.tgz", *members), tmp_path / "out", everything)
    assert files == [tmp_path / "out/x/evil"]
    assert not (tmp_path / "out/x").is_symlink()
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("name", ["../evil", "/evil", "x/../../evil"])
def test_hostile_zip_is_refused(tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(name, "x")
    with pytest.raises(InputError, match="outside its folder"):
        archives.extract(tmp_path / "a.zip", tmp_path / "out", everything)


def test_link_in_a_zip_is_refused(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("evil")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(InputError, match="link or device"):
        archives.extract(tmp_path / "a.zip", tmp_path / "out", everything)


def test_plain_files_packed_on_unix_are_no_links(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("hello")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.write(tmp_path / "x.txt", "folder/x.txt")
        archive.mkdir("empty")
    assert archives.extract(tmp_path / "a.zip", tmp_path / "out", everything) == [tmp_path / "out/folder/x.txt"]


def make_bomb_tar(path: Path) -> None:
    make_tar(path, (member("zeros"), bytes(10_000_000)))


def make_bomb_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("one", bytes(600_000))
        archive.writestr("two", bytes(600_000))


@pytest.mark.parametrize(("make", "wanted"), [(make_bomb_tar, False), (make_bomb_tar, True), (make_bomb_zip, True)])
def test_bomb_is_refused(tmp_path: Path, make: Callable[[Path], None], wanted: bool) -> None:
    make(tmp_path / "bomb")
    assert (tmp_path / "bomb").stat().st_size < 20_000
    with pytest.raises(InputError, match="more than 1,000,000 bytes"):
        archives.extract(tmp_path / "bomb", tmp_path / "out", lambda name: wanted, limit=1_000_000)


def test_limit_allows_exactly_what_it_says(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("x", bytes(1000))
    assert archives.extract(tmp_path / "a.zip", tmp_path / "out", everything, limit=1000)
    with pytest.raises(InputError, match="more than 999 bytes"):
        archives.extract(tmp_path / "a.zip", tmp_path / "out2", everything, limit=999)


def test_too_many_members_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_MEMBERS", 3)
    archive = make_tar(tmp_path / "a.tgz", *((member(f"{number}"), b"") for number in range(4)))
    with pytest.raises(InputError, match="more than 3 members"):
        archives.extract(archive, tmp_path / "out", everything)


def test_two_members_of_one_name_are_refused(tmp_path: Path) -> None:
    archive = make_tar(tmp_path / "a.tgz", (member("x"), b"1"), (member("x"), b"2"))
    with pytest.raises(InputError, match="two members of one name"):
        archives.extract(archive, tmp_path / "out", everything)


def test_damaged_archives_are_named(tmp_path: Path) -> None:
    whole = make_tar(tmp_path / "whole", (member("x"), bytes(range(256)) * 400)).read_bytes()
    for name, content in {"cut": whole[: len(whole) // 2], "page": b"<html>gone</html>", "empty": b""}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=f"{name} is damaged or no archive"):
            archives.extract(tmp_path / name, tmp_path / f"out-{name}", everything)


def test_gunzip(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"text\n" * 100))
    archives.gunzip(tmp_path / "a.gz", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"text\n" * 100
    with pytest.raises(InputError, match="more than 499 bytes"):
        archives.gunzip(tmp_path / "a.gz", tmp_path / "b", limit=499)
    (tmp_path / "c.gz").write_bytes(b"<html>")
    with pytest.raises(InputError, match=r"c\.gz is damaged or not gzipped"):
        archives.gunzip(tmp_path / "c.gz", tmp_path / "c")
