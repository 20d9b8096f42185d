"""Downloads against a real server that resumes, breaks off, ignores ranges, changes its mind, or lies."""

import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qknorm.errors import InputError
from qknorm.text import download
from qknorm.text.download import Source, fetch

CONTENT = bytes(range(256)) * 4096  # a megabyte, in several chunks
SHA256 = "sha256:" + hashlib.sha256(CONTENT).hexdigest()


@dataclass
class Behaviour:
    """What the server does, and what it was asked."""

    content: bytes = CONTENT
    etag: str | None = '"one"'
    modified: str | None = None
    ranges: bool = True
    break_after: list[int] = field(default_factory=list)  # bytes to send before breaking off, one entry a request
    status: list[int] = field(default_factory=list)  # answers instead of the file, one entry a request
    claimed_length: int | None = None
    tell_length: bool = True
    asked: list[tuple[str | None, str | None]] = field(default_factory=list)  # Range, If-Range


class Handler(BaseHTTPRequestHandler):
    behaviour: Behaviour

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        behaviour = self.behaviour
        wanted, condition = self.headers.get("Range"), self.headers.get("If-Range")
        behaviour.asked.append((wanted, condition))
        if behaviour.status and (status := behaviour.status.pop(0)):
            self.send_error(status)
            return
        start, total = 0, len(behaviour.content)
        same = condition in (None, behaviour.etag, behaviour.modified)
        if wanted and behaviour.ranges and same:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= total:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{total}")
                self.end_headers()
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        else:
            self.send_response(200)
        if behaviour.etag:
            self.send_header("ETag", behaviour.etag)
        if behaviour.modified:
            self.send_header("Last-Modified", behaviour.modified)
        if behaviour.tell_length:
            self.send_header("Content-Length", str(behaviour.claimed_length or total - start))
        self.end_headers()
        body = behaviour.content[start:]
        if behaviour.break_after:
            body = body[: behaviour.break_after.pop(0)]
        self.wfile.write(body)


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[str]:
    handler = type("BoundHandler", (Handler,), {"behaviour": behaviour})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def quick_and_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "RETRY_SECONDS", (0.0, 0.0, 0.0))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_whole_download_reports_progress_and_is_not_repeated(tmp_path: Path) -> None:
    behaviour, seen = Behaviour(), list[tuple[str, int, int | None]]()
    with serving(behaviour) as base:
        source = Source((f"{base}/data/file.bin?x=1",), SHA256, len(CONTENT))
        first = fetch(source, tmp_path / "deep/file.bin", progress=lambda *report: seen.append(report))
        again = fetch(source, tmp_path / "deep/file.bin")
    assert first == again == SHA256.removeprefix("sha256:")
    assert (tmp_path / "deep/file.bin").read_bytes() == CONTENT
    assert behaviour.asked == [(None, None)]
    assert leftovers(tmp_path / "deep") == ["file.bin"]
    assert seen[-1] == ("download file.bin", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_connection_that_breaks_is_continued_where_it_broke(tmp_path: Path) -> None:
    behaviour = Behaviour(break_after=[300_000, 200_000, 1])
    with serving(behaviour) as base:
        fetch(Source((f"{base}/file",), SHA256), tmp_path / "file")
    assert behaviour.asked == [
        (None, None),
        ("bytes=300000-", '"one"'),
        ("bytes=500000-", '"one"'),
        ("bytes=500001-", '"one"'),
    ]
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_many_breaks_do_not_matter_while_there_is_headway(tmp_path: Path) -> None:
    behaviour = Behaviour(break_after=[100_000] * 10)
    with serving(behaviour) as base:
        fetch(Source((f"{base}/file",), SHA256), tmp_path / "file")
    assert len(behaviour.asked) == 11


def test_interrupt_keeps_the_partial_file_and_the_next_call_continues(tmp_path: Path) -> None:
    def interrupt(stage: str, done: int, total: int | None) -> None:
        if done > 100_000:
            raise KeyboardInterrupt

    behaviour = Behaviour()
    with serving(behaviour) as base:
        source = Source((f"{base}/file",), SHA256)
        with pytest.raises(KeyboardInterrupt):
            fetch(source, tmp_path / "file", progress=interrupt)
        kept = (tmp_path / "file.partial").read_bytes()
        assert 0 < len(kept) < len(CONTENT) and CONTENT.startswith(kept)
        assert not (tmp_path / "file").exists()
        fetch(source, tmp_path / "file")
    assert behaviour.asked[1] == (f"bytes={len(kept)}-", '"one"')
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert leftovers(tmp_path) == ["file"]


def test_server_that_ignores_ranges_starts_anew(tmp_path: Path) -> None:
    behaviour = Behaviour(ranges=False, break_after=[300_000])
    with serving(behaviour) as base:
        fetch(Source((f"{base}/file",), SHA256), tmp_path / "file")
    assert len(behaviour.asked) == 2
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_server_that_ignores_ranges_and_always_breaks_is_given_up(tmp_path: Path) -> None:
    behaviour = Behaviour(ranges=False, break_after=[300_000] * 50)
    with serving(behaviour) as base, pytest.raises(InputError, match="broke after 300,000 of 1,048,576 bytes"):
        fetch(Source((f"{base}/file",), SHA256), tmp_path / "file")
    assert len(behaviour.asked) == 4
    assert (tmp_path / "file.partial").stat().st_size == 300_000


@pytest.mark.parametrize(
    ("etag", "modified", "new_etag", "new_modified"),
    [
        ('"one"', None, '"two"', None),
        ('W/"one"', None, 'W/"two"', None),
        (None, "Mon, 01 Jan 2024 00:00:00 GMT", None, "Tue, 02 Jan 2024 00:00:00 GMT"),
        (None, None, None, None),
    ],
)
def test_file_that_changed_meanwhile_is_fetched_whole(
    tmp_path: Path, etag: str | None, modified: str | None, new_etag: str | None, new_modified: str | None
) -> None:
    behaviour = Behaviour(content=b"old" * 1000, etag=etag, modified=modified, break_after=[1000, 0, 0, 0])
    with serving(behaviour) as base:
        source = Source((f"{base}/file",))
        with pytest.raises(InputError, match="broke after"):
            fetch(source, tmp_path / "file")
        assert (tmp_path / "file.partial").stat().st_size == 1000
        behaviour.content, behaviour.etag, behaviour.modified = b"new version" * 1000, new_etag, new_modified
        fetch(source, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"new version" * 1000


def test_partial_file_that_was_whole_already_is_used(tmp_path: Path) -> None:
    behaviour = Behaviour()
    with serving(behaviour) as base:
        (tmp_path / "file.partial").write_bytes(CONTENT)
        notes = {"address": f"{base}/file", "etag": '"one"', "modified": None, "total": len(CONTENT)}
        (tmp_path / "file.partial.json").write_text(json.dumps(notes))
        fetch(Source((f"{base}/file",), SHA256), tmp_path / "file")
    assert behaviour.asked == [(f"bytes={len(CONTENT)}-", '"one"')]
    assert leftovers(tmp_path) == ["file"]


@pytest.mark.parametrize("notes", ["", "[]", "{", '{"address": "http://elsewhere/"}'])
def test_partial_file_of_unknown_origin_is_not_continued(tmp_path: Path, notes: str) -> None:
    (tmp_path / "file.partial").write_bytes(b"rubbish")
    (tmp_path / "file.partial.json").write_text(notes)
    behaviour = Behaviour()
    with serving(behaviour) as base:
        fetch(Source((f"{base}/file",), SHA256), tmp_path / "file")
    assert behaviour.asked == [(None, None)]


def test_partial_file_longer_than_the_file_is_thrown_away(tmp_path: Path) -> None:
    behaviour = Behaviour()
    with serving(behaviour) as base:
        (tmp_path / "file.partial").write_bytes(CONTENT + b"more")
        (tmp_path / "file.partial.json").write_text(json.dumps({"address": f"{base}/file"}))
        fetch(Source((f"{base}/file",), SHA256), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize("checksum", ["sha256:" + "0" * 64, "md5:" + "0" * 32])
def test_wrong_checksum_removes_the_file(tmp_path: Path, checksum: str) -> None:
    with serving(Behaviour()) as base, pytest.raises(InputError, match=r"not the published one, so it was removed"):
        fetch(Source((f"{base}/file",), checksum), tmp_path / "file")
    assert leftovers(tmp_path) == []


def test_md5_is_understood(tmp_path: Path) -> None:
    with serving(Behaviour()) as base:
        checksum = "md5:" + hashlib.md5(CONTENT).hexdigest()
        assert fetch(Source((f"{base}/file",), checksum), tmp_path / "file") == SHA256.removeprefix("sha256:")


def test_spoilt_file_under_the_final_name_is_fetched_anew(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"spoilt")
    with serving(Behaviour()) as base:
        fetch(Source((f"{base}/file",), SHA256), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize("tell_length", [True, False])
def test_page_instead_of_the_file_leads_to_the_next_address(tmp_path: Path, tell_length: bool) -> None:
    page = Behaviour(content=b"<html>moved</html>", tell_length=tell_length)
    mirror = Behaviour(break_after=[500_000, 0, 0, 0])
    with serving(page) as gone, serving(mirror) as here:
        source = Source((f"{gone}/file", f"{here}/file"), SHA256, len(CONTENT))
        with pytest.raises(InputError, match=rf"{gone}.*; {here}.*broke after"):
            fetch(source, tmp_path / "file")
        fetch(source, tmp_path / "file")
    assert mirror.asked[-1] == ("bytes=500000-", '"one"'), "the rubbish of one address spoiled what another had sent"
    assert leftovers(tmp_path) == ["file"]


def test_server_that_promises_more_than_it_sends_is_given_up(tmp_path: Path) -> None:
    behaviour = Behaviour(claimed_length=len(CONTENT) + 7, ranges=False)
    with serving(behaviour) as base, pytest.raises(InputError, match="broke after 1,048,576 of 1,048,583 bytes"):
        fetch(Source((f"{base}/file",)), tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_server_that_sends_more_than_it_promises_fails_the_checksum(tmp_path: Path) -> None:
    with serving(Behaviour(claimed_length=10)) as base, pytest.raises(InputError, match="not the published one"):
        fetch(Source((f"{base}/file",), SHA256), tmp_path / "file")


def test_endless_download_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "MAX_DOWNLOAD_BYTES", 500_000)
    with serving(Behaviour(tell_length=False)) as base, pytest.raises(InputError, match="more than 500,000 bytes"):
        fetch(Source((f"{base}/file",)), tmp_path / "file")
    assert leftovers(tmp_path) == []


def test_passing_faults_are_tried_again_and_others_are_not(tmp_path: Path) -> None:
    behaviour = Behaviour(status=[503, 429, 500])
    with serving(behaviour) as base:
        fetch(Source((f"{base}/file",), SHA256), tmp_path / "file")
        assert len(behaviour.asked) == 4
        behaviour.status = [404]
        with pytest.raises(InputError, match="answered 404 Not Found"):
            fetch(Source((f"{base}/file",), SHA256), tmp_path / "other")
    assert len(behaviour.asked) == 5


def test_no_connection_is_one_sentence_with_the_address(tmp_path: Path) -> None:
    with serving(Behaviour()) as base:
        pass
    with pytest.raises(InputError, match=rf"{base}/file: no connection \(.*refused\)"):
        fetch(Source((f"{base}/file",)), tmp_path / "file")


def test_silent_server_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "TIMEOUT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/file"
        with pytest.raises(InputError, match="timed out"):
            fetch(Source((address,)), tmp_path / "file")


def test_only_the_web_is_asked(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    with pytest.raises(InputError, match="not an http or https address"):
        fetch(Source(((tmp_path / "secret").as_uri(),)), tmp_path / "file")


@pytest.mark.parametrize("address", ["http://[::1/x", "http://\u2028/x", f"http://{'a' * 70}.org/x"])
def test_malformed_address_is_named(tmp_path: Path, address: str) -> None:
    with pytest.raises(InputError, match="is not a usable address"):
        fetch(Source((address,)), tmp_path / "file")


def test_mirror_replaces_the_beginning_of_an_address(tmp_path: Path) -> None:
    with serving(Behaviour()) as base:
        source = Source(("https://example.invalid/data/file",), SHA256)
        fetch(source, tmp_path / "file", base_urls={"https://example.invalid": base})
    assert (tmp_path / "file").read_bytes() == CONTENT


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 60), max_size=6), st.binary(min_size=1, max_size=100))
def test_any_pattern_of_breaks_gives_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, breaks: list[int], content: bytes
) -> None:
    folder = tmp_path_factory.mktemp("breaks")
    with serving(Behaviour(content=content, break_after=breaks)) as base:
        fetch(Source((f"{base}/file",)), folder / "file")
    assert (folder / "file").read_bytes() == content
