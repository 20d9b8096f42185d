"""Corpora are found by name, listed, and downloaded whole or not at all."""

import dataclasses
import gzip
import hashlib
import io
import json
import os
import tarfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from qknorm.errors import InputError
from qknorm.text import corpora, download
from qknorm.text.catalogue import CORPORA, find
from qknorm.text.download import Source


@pytest.fixture(autouse=True)
def nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QKNORM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "RETRY_SECONDS", ())


def put(folder: Path, *names: str, lines: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("line\n" * lines)
    return folder


# ------------------------------------------------------------------ the catalogue


def test_catalogue_is_whole() -> None:
    assert list(CORPORA) == [
        *("ted-gl-en", "ted-sk-en", "ted-ar-en", "ted-en-he", "iwslt15-en-vi", "iwslt14-de-en"),
        *("multi30k-en-de", "flores", "tinyshakespeare"),
    ]
    for corpus in CORPORA.values():
        assert corpus.what and corpus.licence and corpus.citation and corpus.sources
        for source in corpus.sources:
            assert all(address.startswith("https://") for address in source.addresses) or source.checksum
            algorithm, _, value = (source.checksum or "sha256:" + "0" * 64).partition(":")
            assert len(value) == hashlib.new(algorithm).digest_size * 2
            int(value, 16)


def test_names_of_downloads_do_not_collide() -> None:
    for corpus in CORPORA.values():
        names = [source.file_name for source in corpus.sources]
        assert len(set(names)) == len(names) and all(names)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("ted-gl-em", "did you mean 'ted-gl-en'"),
        ("flore", "'flores'"),
        ("zzz", "known are flores"),
        ("../x", "known are"),
    ],
)
def test_unknown_name_suggests_the_nearest(name: str, sentence: str) -> None:
    for call in (
        find,
        corpora.local_folder,
        corpora.text_file,
        corpora.download,
        partial(corpora.split_files, split="x"),
    ):
        with pytest.raises(InputError, match=sentence):
            call(name)


# ------------------------------------------------------------------ where it lies


def test_given_folder_comes_before_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert corpora.local_folder("ted-gl-en") is None
    cached = put(tmp_path / "cache/qknorm/corpora/ted-gl-en", "train.gl", "train.en")
    assert corpora.local_folder("ted-gl-en") == cached
    monkeypatch.setenv("QKNORM_DATA", str(tmp_path / "given"))
    (tmp_path / "given/ted-gl-en").mkdir(parents=True)
    assert corpora.local_folder("ted-gl-en") == cached, "an empty folder is no copy"
    given = put(tmp_path / "given/ted-gl-en", "train.gl", "train.en")
    assert corpora.local_folder("ted-gl-en") == given
    assert corpora.split_files("ted-gl-en", "train") == (given / "train.gl", given / "train.en")


def test_folder_argument_replaces_the_cache(tmp_path: Path) -> None:
    here = put(tmp_path / "mine/multi30k-en-de", "test2017.en", "test2017.de")
    assert corpora.local_folder("multi30k-en-de") is None
    assert corpora.local_folder("multi30k-en-de", tmp_path / "mine") == here
    assert corpora.split_files("multi30k-en-de", "test2017", ("de", "en"), tmp_path / "mine")[0].name == "test2017.de"


def test_relative_cache_home_is_ignored_as_its_standard_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert corpora.cache_folder() == Path.home() / ".cache/qknorm/corpora"


def test_given_folder_that_is_none_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKNORM_DATA", str(tmp_path / "typo"))
    with pytest.raises(InputError, match=r"QKNORM_DATA names '.*typo', which is not a folder"):
        corpora.state()


def test_missing_parts_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"ted-gl-en is not here: run `qknorm corpora download ted-gl-en`.*QKNORM_DATA"
    ):
        corpora.split_files("ted-gl-en", "train")
    put(tmp_path / "ted-gl-en", "train.gl", "dev.gl", "dev.en")
    with pytest.raises(InputError, match=r"ted-gl-en has no file train\.en"):
        corpora.split_files("ted-gl-en", "train", folder=tmp_path)
    with pytest.raises(InputError, match="the split is missing"):
        corpora.split_files("ted-gl-en", "test", folder=tmp_path)
    with pytest.raises(InputError, match="no split called 'tset': did you mean 'test'"):
        corpora.split_files("ted-gl-en", "tset", folder=tmp_path)


def test_flores_by_short_and_long_codes(tmp_path: Path) -> None:
    here = put(tmp_path / "flores", "dev.glg_Latn", "dev.eng_Latn", "dev.eus_Latn")
    pair = corpora.split_files("flores", "dev", ("gl", "eng_Latn"), tmp_path)
    assert pair == (here / "dev.glg_Latn", here / "dev.eng_Latn")
    assert corpora.split_files("flores", "dev", ("eus_Latn", "en"), tmp_path)[0] == here / "dev.eus_Latn"
    with pytest.raises(InputError, match="name two of them"):
        corpora.split_files("flores", "dev", folder=tmp_path)
    with pytest.raises(InputError, match="did you mean 'glg_Latn'"):
        corpora.split_files("flores", "dev", ("gal_Latn", "en"), tmp_path)
    with pytest.raises(InputError, match="has no file"):
        corpora.split_files("flores", "dev", ("../../x", "en"), tmp_path)


def test_text_of_one_language(tmp_path: Path) -> None:
    here = put(tmp_path / "tinyshakespeare", "input.txt")
    assert corpora.text_file("tinyshakespeare", tmp_path) == here / "input.txt"
    with pytest.raises(InputError, match="use text_file"):
        corpora.split_files("tinyshakespeare", "input", folder=tmp_path)
    with pytest.raises(InputError, match="use split_files"):
        corpora.text_file("ted-gl-en", tmp_path)


def test_state_tells_what_is_here(tmp_path: Path) -> None:
    put(tmp_path / "ted-gl-en", "train.gl", "train.en", lines=5)
    put(tmp_path / "ted-gl-en", "test.gl", "test.en", lines=2)
    put(tmp_path / "tinyshakespeare", "input.txt", lines=3)
    states = {state.name: state for state in corpora.state(tmp_path)}
    assert list(states) == list(CORPORA)
    assert states["ted-gl-en"].pairs == {"train": 5, "test": 2}
    assert states["ted-gl-en"].folder == tmp_path / "ted-gl-en"
    assert states["ted-gl-en"].languages == ("gl", "en")
    assert states["tinyshakespeare"].pairs == {"input": 3}
    assert states["flores"].folder is None and states["flores"].pairs == {}


@pytest.mark.corpus
def test_given_corpora_are_found(monkeypatch: pytest.MonkeyPatch, given_data: str) -> None:
    monkeypatch.setenv("QKNORM_DATA", given_data)
    here = [state for state in corpora.state() if state.folder]
    assert here and all(state.pairs for state in here)


DATA = os.environ.get("QKNORM_DATA", "")


@pytest.fixture
def given_data() -> str:
    if not DATA:
        pytest.skip("QKNORM_DATA is not set")
    return DATA


# ------------------------------------------------------------------ how it comes here


class Handler(SimpleHTTPRequestHandler):
    asked: list[str]

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.asked.append(self.path)
        super().do_GET()


@dataclasses.dataclass
class Site:
    """A web site: files in `folder` are served as if they lay at their published addresses."""

    folder: Path
    base_urls: dict[str, str]
    asked: list[str]
    trust: Callable[[str], None]

    def publish(self, address: str, content: bytes) -> None:
        path = self.folder / address.partition("://")[2]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    (tmp_path / "site").mkdir()
    asked: list[str] = []
    handler = type("BoundHandler", (Handler,), {"asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(tmp_path / "site"))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        base = f"http://127.0.0.1:{server.server_address[1]}/"

        def trust(name: str) -> None:
            """Takes what the site serves for this corpus as the published files."""

            def trusted(source: Source) -> Source:
                content = (tmp_path / "site" / source.addresses[0].partition("://")[2]).read_bytes()
                return Source(source.addresses, "sha256:" + hashlib.sha256(content).hexdigest(), len(content))

            sources = tuple(trusted(source) for source in CORPORA[name].sources)
            monkeypatch.setitem(CORPORA, name, dataclasses.replace(CORPORA[name], sources=sources))  # type: ignore[arg-type]

        yield Site(tmp_path / "site", {"https://": base, "http://": base}, asked, trust)
        server.shutdown()
        thread.join()


def ted_archive(rows: int) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for split in ("train", "dev", "test"):
            lines = ["talk_name\ten\tgl\tsk\tar\the"] + [f"t\ten{n}\tgl{n}\tsk{n}\tar{n}\the{n}" for n in range(rows)]
            content = "\n".join(lines).encode() + b"\n"
            info = tarfile.TarInfo(f"all_talks_{split}.tsv")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def test_ted_corpora_share_one_download(tmp_path: Path, site: Site) -> None:
    address = CORPORA["ted-gl-en"].sources[0].addresses[0]
    site.publish(address, ted_archive(4))
    for name in ("ted-gl-en", "ted-en-he"):
        site.trust(name)
    stages: list[str] = []
    here = corpora.download("ted-gl-en", tmp_path / "c", lambda stage, *_: stages.append(stage), site.base_urls)
    assert here == tmp_path / "c/ted-gl-en"
    assert (here / "train.gl").read_text() == "gl0\ngl1\ngl2\ngl3\n"
    corpora.download("ted-en-he", tmp_path / "c", base_urls=site.base_urls)
    assert corpora.split_files("ted-en-he", "dev", folder=tmp_path / "c")[1].read_text().startswith("he0\n")
    assert len(site.asked) == 1
    assert {"download ted_talks.tar.gz", "unpack ted_talks.tar.gz"} == set(stages)
    origin = json.loads((here / "origin.json").read_text())
    assert origin["licence"].startswith("CC BY-NC-ND") and list(origin["sha256"]) == [address]


def test_whole_corpus_is_not_downloaded_again(tmp_path: Path, site: Site) -> None:
    put(tmp_path / "c/tinyshakespeare", "input.txt")
    assert (
        corpora.download("tinyshakespeare", tmp_path / "c", base_urls=site.base_urls) == tmp_path / "c/tinyshakespeare"
    )
    assert site.asked == []


def test_multi30k_is_unpacked_and_leaves_no_archives(tmp_path: Path, site: Site) -> None:
    for source in CORPORA["multi30k-en-de"].sources:
        site.publish(source.addresses[0], gzip.compress(source.file_name.encode() + b"\n"))
    site.trust("multi30k-en-de")
    here = corpora.download("multi30k-en-de", tmp_path / "c", base_urls=site.base_urls)
    assert (here / "dev.de").read_text() == "val.de.gz\n"
    assert (here / "test2017.en").read_text() == "test_2017_flickr.en.gz\n"
    assert sorted(path.name for path in here.iterdir()) == sorted([*CORPORA["multi30k-en-de"].files, "origin.json"])
    assert not list((tmp_path / "c/downloads").iterdir())


def test_wrong_checksum_leaves_nothing(tmp_path: Path, site: Site) -> None:
    site.publish(CORPORA["tinyshakespeare"].sources[0].addresses[0], b"To be, or so\n")
    with pytest.raises(
        InputError, match=r"tinyshakespeare could not .*not the published one, so it was removed; .*QKNORM_DATA"
    ):
        corpora.download("tinyshakespeare", tmp_path / "c", base_urls=site.base_urls)
    assert not [path for path in (tmp_path / "c").rglob("*") if path.is_file() and path.name != ".lock"]


def test_no_network_names_the_address_and_the_manual_way(tmp_path: Path, site: Site) -> None:
    dead = {"https://": "http://127.0.0.1:9/"}
    with pytest.raises(InputError, match=r"127\.0\.0\.1:9/.*no connection.*tinyshakespeare/: input\.txt$"):
        corpora.download("tinyshakespeare", tmp_path / "c", base_urls=dead)


def iwslt14_archive(mark: str) -> bytes:
    packed = io.BytesIO()
    sets = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
    files = {f"IWSLT14.{name}.de-en.{side}.xml": "<seg id='1'>x</seg>\n" for name in sets for side in ("de", "en")}
    files |= {f"train.tags.de-en.{side}": f"{side} {mark}\n" * 30 for side in ("de", "en")}
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(f"de-en/{name}")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return packed.getvalue()


def test_first_download_is_trusted_and_later_ones_compared(tmp_path: Path, site: Site) -> None:
    address = CORPORA["iwslt14-de-en"].sources[0].addresses[0]
    site.publish(address, b"<html>log in to the hotel network</html>")
    with pytest.raises(InputError, match="damaged or no archive"):
        corpora.download("iwslt14-de-en", tmp_path / "c", base_urls=site.base_urls)
    site.publish(address, iwslt14_archive("first"))
    here = corpora.download("iwslt14-de-en", tmp_path / "c", base_urls=site.base_urls)
    assert len((here / "train.de").read_text().splitlines()) == 29
    recorded = json.loads((tmp_path / "c/checksums.json").read_text())
    assert recorded == {address: hashlib.sha256(iwslt14_archive("first")).hexdigest()}

    here.rename(tmp_path / "aside")
    site.publish(address, iwslt14_archive("second"))
    with pytest.raises(InputError, match=r"the first download had .*checksums\.json"):
        corpora.download("iwslt14-de-en", tmp_path / "c", base_urls=site.base_urls)
    assert not here.exists()
    site.publish(address, iwslt14_archive("first"))
    corpora.download("iwslt14-de-en", tmp_path / "c", base_urls=site.base_urls)
    assert (here / "train.de").exists()


def test_damaged_record_of_checksums_is_named(tmp_path: Path, site: Site) -> None:
    site.publish(CORPORA["iwslt14-de-en"].sources[0].addresses[0], iwslt14_archive("x"))
    (tmp_path / "c").mkdir()
    (tmp_path / "c/checksums.json").write_text("[")
    with pytest.raises(InputError, match=r"checksums\.json is damaged"):
        corpora.download("iwslt14-de-en", tmp_path / "c", base_urls=site.base_urls)


def test_sides_of_different_length_are_refused(tmp_path: Path, site: Site) -> None:
    for source in CORPORA["iwslt15-en-vi"].sources:
        site.publish(source.addresses[0], b"line\n" * (2 if source.file_name == "tst2013.vi" else 1))
    site.trust("iwslt15-en-vi")
    with pytest.raises(InputError, match=r"sides of test .*'en': 1, 'vi': 2"):
        corpora.download("iwslt15-en-vi", tmp_path / "c", base_urls=site.base_urls)
    assert not (tmp_path / "c/iwslt15-en-vi").exists()


def test_folder_with_other_files_is_left_alone(tmp_path: Path, site: Site) -> None:
    put(tmp_path / "c/ted-gl-en", "my-own-work.txt")
    with pytest.raises(InputError, match=r"holds other files but no train\.gl"):
        corpora.download("ted-gl-en", tmp_path / "c", base_urls=site.base_urls)
    assert (tmp_path / "c/ted-gl-en/my-own-work.txt").exists()
    assert site.asked == []


def test_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        InputError, match=r"could not be written to .*: (Not a directory|File exists); .*another folder"
    ):
        corpora.download("tinyshakespeare", tmp_path / "file")


def test_two_downloads_at_once_do_not_mix(tmp_path: Path, site: Site) -> None:
    fcntl = pytest.importorskip("fcntl")
    (tmp_path / "c").mkdir()
    with (tmp_path / "c/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match=r"another download to .* is running"):
            corpora.download("tinyshakespeare", tmp_path / "c", base_urls=site.base_urls)
