"""Too much, too long, too late: clients that send, wait or leave as they should not, over real connections."""

import json
import socket
import threading
from contextlib import suppress

import pytest
from servers import PATIENCE, HeldEngine, serving

from qknorm.decoding.translate import Translation
from qknorm.serving.limits import Limits

pytest.importorskip("fastapi", reason="fastapi is not installed")

from qknorm.serving import streaming


def send_until_cut_off(port: int, head: bytes, chunk: bytes, most: int) -> tuple[int, bytes]:
    """How many bytes of a body a server took before it closed the connection, and what it said."""
    sent, said = 0, b""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        connection.sendall(head)
        try:
            while sent < most:
                connection.sendall(chunk)
                sent += len(chunk)
        except OSError:
            pass
        try:
            while part := connection.recv(65_536):
                said += part
        except OSError:
            pass
    return sent, said


def test_a_hundred_megabytes_are_cut_off_early(engines):
    head = b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    block = b"10000\r\n" + b"x" * 65_536 + b"\r\n"
    with serving(engines) as server:
        # what the two ends hold for a connection that nobody reads is a few megabytes
        sent, said = send_until_cut_off(server.port, head + b"Transfer-Encoding: chunked\r\n\r\n", block, 100 << 20)
        assert sent < 50 << 20 and (not said or b" 413 " in said)
        server.wait_for_metric('qknorm_requests_total{path="/translate",status="413"}', 1)
        declared = head + b"Content-Length: 104857600\r\n\r\n"
        sent, said = send_until_cut_off(server.port, declared, b"x" * 65_536, 100 << 20)
        assert sent < 50 << 20 and (not said or b" 413 " in said)
        server.wait_for_metric('qknorm_requests_total{path="other",status="413"}', 1)
        assert server.translate(text="A casa.").status_code == 200


def test_a_body_that_never_ends_is_given_up(engines):
    with (
        serving(engines, Limits(seconds=0.2)) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection,
    ):
        connection.sendall(
            b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{"
        )
        assert b" 408 " in connection.recv(65_536)
        while connection.recv(65_536):
            pass


def test_when_all_places_are_taken_others_are_told_to_come_back():
    engine = HeldEngine()
    with serving({"aa-bb": engine}, Limits(requests=1, waiting=1)) as server:
        answers: list[int] = []
        ask = lambda: answers.append(server.translate(text="a").status_code)  # noqa: E731
        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        server.wait_for_metric("qknorm_requests_running", 1)
        server.wait_for_metric("qknorm_requests_waiting", 1)
        for path in ("/translate", "/translate/stream", "/attention"):
            refused = server.client.post(path, json={"text": "b"})
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
        assert server.client.get("/health").status_code == 200
        engine.go.set()
        for thread in threads:
            thread.join(PATIENCE)
        assert answers == [200, 200]
        assert server.translate(text="a").status_code == 200


def in_one_piece(path: str, text: str) -> bytes:
    """A request whose head and body arrive together, so that the time allowed to it cannot pass between them."""
    body = json.dumps({"text": text}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json"
    return f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize(("path", "status"), [("/translate", b" 503 "), ("/translate/stream", b" 200 ")])
def test_a_request_that_takes_too_long_is_given_up(path, status):
    engine = HeldEngine()
    with serving({"aa-bb": engine}, Limits(seconds=0.2)) as server:
        try:
            _, said = send_until_cut_off(server.port, in_one_piece(path, "a"), b"", 0)
        finally:
            engine.go.set()
        assert status in said.splitlines()[0]
        assert b"longer than 0.2 s" in said
        server.wait_for_metric('qknorm_dropped_total{reason="time was up"}', 1)
        assert server.metric('qknorm_dropped_total{reason="client left"}') == 0


def test_a_connection_that_asks_for_nothing_is_closed(running, monkeypatch):
    from qknorm.serving import connections

    with socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE) as used:
        used.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        said = b""
        while not said.endswith(b'{"status":"alive"}'):
            said += used.recv(65_536)
        monkeypatch.setattr(connections, "HEAD_SECONDS", 0.1)
        with suppress(OSError):  # it may be closed by now, for having been silent
            used.sendall(b"GET /hea")
            assert used.recv(65_536) == b""
    with socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE) as silent:
        assert silent.recv(65_536) == b""


@pytest.mark.parametrize("path", ["/translate", "/translate/stream"])
def test_what_a_client_that_hangs_up_asked_for_is_dropped(path):
    engine = HeldEngine()
    with serving({"aa-bb": engine}, Limits(batch_sentences=1)) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
            connection.sendall(in_one_piece(path, "One. Two. Three."))
            assert engine.began.wait(PATIENCE)
        server.wait_for_metric('qknorm_dropped_total{reason="client left"}', 1)
        server.wait_for_metric("qknorm_requests_running", 0)
        server.wait_for_metric("qknorm_sentences_waiting", 0)
        engine.go.set()
        assert server.translate(text="next").status_code == 200
    assert engine.batches == [["One."], ["next"]]


def test_a_client_that_goes_before_it_has_said_all_leaves_no_trace(running):
    for part in (b"", b"POST", b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{"):
        with socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE) as connection:
            connection.sendall(part)
    assert running.translate(text="A casa.").status_code == 200
    running.wait_for_metric("qknorm_requests_running", 0)


class LongWinded:
    """Makes more of a sentence than any connection holds unread."""

    source, target = "aa", "bb"

    def explain(self, texts, **options):
        return [Translation("x" * (16 << 20), -1.0, []) for _ in texts]


def test_a_client_that_does_not_read_does_not_keep_its_place(monkeypatch):
    monkeypatch.setattr(streaming, "READING", 0.3)
    with (
        serving({"aa-bb": LongWinded()}, Limits(seconds=0.3)) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection,
    ):
        connection.sendall(in_one_piece("/translate/stream", "a"))
        server.wait_for_metric('qknorm_dropped_total{reason="time was up"}', 1)
        server.wait_for_metric("qknorm_requests_running", 0)
        assert server.metric('qknorm_dropped_total{reason="client left"}') == 0


def test_a_stop_finishes_what_was_begun():
    engine = HeldEngine()
    with serving({"aa-bb": engine}) as server:
        answers: list[str] = []
        ask = lambda: answers.append(server.translate(text="a. B.").json()["translations"][0]["text"])  # noqa: E731
        thread = threading.Thread(target=ask)
        thread.start()
        assert engine.began.wait(PATIENCE)
        server.begin_stop()
        engine.go.set()
        thread.join(PATIENCE)
        server.thread.join(PATIENCE)
        assert not server.thread.is_alive()
    assert answers == ["A. B."]
