"""Fetching published files over HTTP: resumed where they broke off, and checked before they are used."""

import email.message
import hashlib
import http.client
import json
import os
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from qknorm.errors import InputError
from qknorm.files import write_json
from qknorm.progress import Progress
from qknorm.version import __version__

TIMEOUT_SECONDS = 30.0
RETRY_SECONDS = (1.0, 3.0, 9.0)
PASSING_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
CHUNK_BYTES = 1 << 18
MAX_DOWNLOAD_BYTES = 4 << 30


@dataclass(frozen=True)
class Source:
    """One published file: its addresses, tried in order, and what is known of its bytes.

    `checksum` is "sha256:…" or "md5:…" as others have published it, None where nobody has.
    """

    addresses: tuple[str, ...]
    checksum: str | None = None
    size: int | None = None

    @property
    def file_name(self) -> str:
        """The last part of the first address."""
        return PurePosixPath(urllib.parse.urlsplit(self.addresses[0]).path).name


class _Interrupted(Exception):
    """A fault that may pass: the same request is worth another try."""


@dataclass(frozen=True)
class _Partial:
    """What has arrived so far, and notes on which version of which address it belongs to."""

    path: Path
    address: str

    @property
    def notes_path(self) -> Path:
        return self.path.with_name(self.path.name + ".json")

    def size(self) -> int:
        return self.path.stat().st_size if self.path.is_file() else 0

    def notes(self) -> dict[str, Any]:
        """What was noted when this download began; empty if it cannot be continued."""
        try:
            notes = json.loads(self.notes_path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return notes if isinstance(notes, dict) and notes.get("address") == self.address else {}

    def begin(self, headers: email.message.Message, total: int | None) -> None:
        """Forgets what was there and notes how to tell this version of the file from another."""
        self.path.write_bytes(b"")
        etag, modified = headers.get("ETag"), headers.get("Last-Modified")
        write_json(self.notes_path, {"address": self.address, "etag": etag, "modified": modified, "total": total})

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        self.notes_path.unlink(missing_ok=True)


def fetch(
    source: Source, path: Path, progress: Progress | None = None, base_urls: Mapping[str, str] | None = None
) -> str:
    """Downloads `source` to `path` and returns its SHA-256; a file of the right checksum is not fetched again.

    What arrived before a break stays in `path` + ".partial" and is continued by the next call.
    `base_urls` replaces the beginnings of addresses, for a mirror.
    """
    if path.is_file() and _difference(path, source) is None:
        return digest(path, "sha256")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Each address has a partial file of its own, so that one that sends rubbish spoils nothing of another's.
    partials = [
        _Partial(path.with_name(f"{path.name}.partial{number or ''}"), _mirrored(address, base_urls or {}))
        for number, address in enumerate(source.addresses)
    ]
    faults = []
    for partial in partials:
        try:
            _fetch_from(partial, source, progress)
        except InputError as fault:
            faults.append(str(fault))
        else:
            partial.path.replace(path)
            for spent in partials:
                spent.discard()
            return digest(path, "sha256")
    raise InputError("; ".join(faults))


def digest(path: Path, algorithm: str) -> str:
    """The file's checksum in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def _mirrored(address: str, base_urls: Mapping[str, str]) -> str:
    for beginning, replacement in base_urls.items():
        if address.startswith(beginning):
            address = replacement + address.removeprefix(beginning)
            break
    if not address.startswith(("http://", "https://")):
        raise InputError(f"{address} is not an http or https address")
    return address


def _difference(path: Path, source: Source) -> str | None:
    """How the file differs from what was published, in words; None if it is the published one, or nobody knows."""
    size = path.stat().st_size
    if source.size is not None and size != source.size:
        return f"{size:,} bytes long instead of {source.size:,}"
    if source.checksum is None:
        return None
    algorithm, _, expected = source.checksum.partition(":")
    found = digest(path, algorithm)
    return None if found == expected else f"of {algorithm} {found} instead of {expected}"


def _fetch_from(partial: _Partial, source: Source, progress: Progress | None) -> None:
    """Asks until the whole file is there and is the published one; gives up after several tries without headway."""
    farthest, failures = 0, 0
    while True:
        try:
            _request(partial, source, progress)
            break
        except _Interrupted as fault:
            reached = partial.size()
            # Only bytes never reached before count as headway: a server that always starts anew must not keep us here.
            failures = 1 if reached > farthest else failures + 1
            farthest = max(farthest, reached)
            if failures > len(RETRY_SECONDS):
                raise InputError(f"{partial.address}: {fault}") from fault
            time.sleep(RETRY_SECONDS[failures - 1])
    difference = _difference(partial.path, source)
    if difference is not None:
        partial.discard()
        raise InputError(f"{partial.address} sent a file {difference}: not the published one, so it was removed")
    with partial.path.open("rb+") as file:
        os.fsync(file.fileno())


def _request(partial: _Partial, source: Source, progress: Progress | None) -> None:
    """Asks once for what is missing and returns when the whole file is there."""
    notes = partial.notes()
    done = partial.size() if notes else 0
    try:
        response = _open(partial.address, _range_headers(notes, done))
    except urllib.error.HTTPError as answer:
        with answer:
            if answer.code == 416 and done and _content_range(answer.headers)[1] == done:
                return
        if answer.code == 416 and done:
            partial.discard()
            raise _Interrupted("the file changed on the server") from answer
        if answer.code in PASSING_STATUS:
            raise _Interrupted(f"the server answered {answer.code} {answer.reason}") from answer
        raise InputError(f"{partial.address}: the server answered {answer.code} {answer.reason}") from answer
    with response:
        if response.status == 206:
            start, total = _content_range(response.headers)
            if start != done or not _same_version(notes, response.headers, total):
                partial.discard()
                raise _Interrupted("the file changed on the server")
        else:
            done, total = 0, _length(response.headers)
        if source.size is not None and total not in (None, source.size):
            raise InputError(
                f"{partial.address} has {total:,} bytes, not {source.size:,}: it is not the published file"
            )
        if done == 0:
            partial.begin(response.headers, total)
        _receive(response, partial, done, total, f"download {source.file_name}", progress)


def _open(address: str, headers: dict[str, str]) -> http.client.HTTPResponse:
    identity = {"User-Agent": f"qknorm/{__version__}", "Accept-Encoding": "identity"}
    try:
        request = urllib.request.Request(address, headers=identity | headers)
        response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError:
        raise
    except ValueError as fault:  # some malformed addresses fail in the encoding of a host's name, others in the parser
        raise InputError(f"{address} is not a usable address ({fault})") from fault
    except (OSError, http.client.HTTPException) as fault:
        reason = getattr(fault, "reason", fault)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise InputError(f"{address}: its certificate is not trusted ({reason.verify_message})") from fault
        raise _Interrupted(f"no connection ({reason})") from fault
    return response


def _range_headers(notes: Mapping[str, Any], done: int) -> dict[str, str]:
    if not done:
        return {}
    headers = {"Range": f"bytes={done}-"}
    etag = notes.get("etag")
    strong = etag if isinstance(etag, str) and not etag.startswith("W/") else None  # If-Range forbids weak ones
    validator = strong or notes.get("modified")
    return headers | {"If-Range": str(validator)} if validator else headers


def _content_range(headers: email.message.Message) -> tuple[int | None, int | None]:
    """First byte and total length out of "bytes 5-9/10" or "bytes */10"; None for what is not told."""
    span, _, total = headers.get("Content-Range", "").removeprefix("bytes").strip().partition("/")
    start = span.partition("-")[0]
    return (int(start) if start.isdecimal() else None), (int(total) if total.isdecimal() else None)


def _length(headers: email.message.Message) -> int | None:
    length = headers.get("Content-Length", "")
    return int(length) if length.isdecimal() else None


def _same_version(notes: Mapping[str, Any], headers: email.message.Message, total: int | None) -> bool:
    """Whether a partial answer continues the file that was begun, by every sign that both sides give."""
    now = {"etag": headers.get("ETag"), "modified": headers.get("Last-Modified"), "total": total}
    return all(notes.get(sign) in (None, value) or value is None for sign, value in now.items())


def _receive(
    response: http.client.HTTPResponse,
    partial: _Partial,
    done: int,
    total: int | None,
    stage: str,
    progress: Progress | None,
) -> None:
    with partial.path.open("ab") as file:
        while True:
            try:
                chunk = response.read1(CHUNK_BYTES)
            except (OSError, http.client.HTTPException) as fault:
                raise _Interrupted(f"the connection broke after {done:,} bytes ({fault})") from fault
            if not chunk:
                break
            file.write(chunk)
            done += len(chunk)
            if progress is not None:
                progress(stage, done, total)
            if done > MAX_DOWNLOAD_BYTES:
                partial.discard()
                raise InputError(f"{partial.address} sends more than {MAX_DOWNLOAD_BYTES:,} bytes and is refused")
    if total is not None and done < total:
        raise _Interrupted(f"the connection broke after {done:,} of {total:,} bytes")
