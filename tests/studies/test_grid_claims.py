import errno
import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import asdict, replace

import pytest

from qknorm.studies.grid import claims
from qknorm.studies.grid.claims import CLAIM, Holder, find_holder, take, wait_until_free


def hold(folder, holder):
    folder.mkdir(exist_ok=True)
    (folder / CLAIM).write_text(json.dumps(asdict(holder)), encoding="utf-8")


def test_a_claim_is_held_once_and_free_after_its_release(tmp_path):
    with take(tmp_path / "job") as claim:
        assert claim.held() and find_holder(tmp_path / "job") == claim.holder
        assert take(tmp_path / "job") is None
    assert find_holder(tmp_path / "job") is None
    second = take(tmp_path / "job")
    claim.release()  # once more, and late: the claim of the second is not touched
    assert second.held()
    second.release()


def test_of_many_who_try_at_once_one_gets_it(tmp_path):
    found = []
    gate = threading.Barrier(8)

    def try_it():
        gate.wait()
        found.append(take(tmp_path))

    threads = [threading.Thread(target=try_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held = [claim for claim in found if claim is not None]
    assert len(held) == 1
    held[0].release()


def test_the_claim_of_a_dead_process_is_free_at_once(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    hold(tmp_path, replace(Holder.here(), pid=ended.pid, began="123"))
    assert find_holder(tmp_path) is None
    take(tmp_path).release()


def test_a_process_number_that_was_given_again_is_not_the_holder(tmp_path):
    hold(tmp_path, replace(Holder.here(), began="1"))
    assert find_holder(tmp_path) is None


def test_on_another_machine_a_claim_lives_as_long_as_it_is_touched(tmp_path):
    hold(tmp_path, replace(Holder.here(), machine="elsewhere", pid=1, began="1"))
    assert find_holder(tmp_path).machine == "elsewhere"
    assert take(tmp_path) is None
    touched = (tmp_path / CLAIM).stat().st_mtime - claims.STALE_SECONDS - 5
    os.utime(tmp_path / CLAIM, (touched, touched))
    assert find_holder(tmp_path) is None
    take(tmp_path).release()


def test_a_damaged_claim_is_nobodys(tmp_path):
    for content in ("", "{", "[]", '{"host": 1}'):
        (tmp_path / CLAIM).write_text(content, encoding="utf-8")
        assert find_holder(tmp_path) is None


def test_whoever_loses_a_claim_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "BEAT_SECONDS", 0.01)
    lost = threading.Event()
    claim = take(tmp_path, lost.set)
    hold(tmp_path, replace(claim.holder, token="another"))
    assert lost.wait(30)
    claim.release()
    assert find_holder(tmp_path).token == "another"


def test_a_held_claim_is_touched(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "BEAT_SECONDS", 0.01)
    touched = threading.Event()
    monkeypatch.setattr(claims.os, "utime", lambda path: touched.set())
    with take(tmp_path):
        assert touched.wait(30)


def test_waiting_ends_when_the_holder_leaves(tmp_path):
    claim = take(tmp_path)
    threading.Timer(0.05, claim.release).start()
    wait_until_free(tmp_path, poll=0.01)
    assert find_holder(tmp_path) is None


def make_stale(folder):
    touched = (folder / CLAIM).stat().st_mtime - claims.STALE_SECONDS - 5
    os.utime(folder / CLAIM, (touched, touched))


def test_on_windows_no_process_is_sent_a_signal_and_a_claim_goes_by_age(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(claims.os, "kill", lambda *words: sent.append(words))  # 0 is Ctrl-C there
    monkeypatch.setattr(claims.sys, "platform", "win32")
    monkeypatch.setattr(claims, "PROC", tmp_path / "none")
    with take(tmp_path / "job") as claim:
        assert claim.holder.began == claims.UNKNOWN
        assert find_holder(tmp_path / "job") == claim.holder and take(tmp_path / "job") is None
        make_stale(tmp_path / "job")
        assert find_holder(tmp_path / "job") is None
    assert not sent


@pytest.mark.skipif(sys.platform == "win32", reason="it would send Ctrl-C")
@pytest.mark.parametrize("began", [claims.UNKNOWN, "alive"])  # the second is of an older version
def test_without_proc_a_number_given_again_holds_a_claim_only_while_it_is_touched(tmp_path, monkeypatch, began):
    monkeypatch.setattr(claims, "PROC", tmp_path / "none")
    hold(tmp_path, replace(Holder.here(), began=began))
    assert find_holder(tmp_path).pid == os.getpid()
    make_stale(tmp_path)
    assert find_holder(tmp_path) is None
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    hold(tmp_path, replace(Holder.here(), pid=ended.pid, began=began))
    assert find_holder(tmp_path) is None  # and one that is gone is free at once


class Beats:
    """Lets a claim's thread through beat by beat: `pass_one` returns when it waits for the next."""

    def __init__(self, claim):
        self.go, self.waits, self.over = threading.Semaphore(0), threading.Semaphore(0), False
        claim._ended.wait = self._wait

    def _wait(self, seconds):
        self.waits.release()
        self.go.acquire()
        return self.over

    def pass_one(self):
        self.go.release()
        assert self.waits.acquire(timeout=30)

    def end(self):
        self.over = True
        self.go.release()


@pytest.fixture
def beaten(tmp_path, monkeypatch):
    """A claim on `tmp_path`, what it told of its loss, and its beats."""
    monkeypatch.setattr(claims, "BEAT_SECONDS", 0.01)
    lost = []
    claim = take(tmp_path, lambda: lost.append(1))
    beats = Beats(claim)
    assert beats.waits.acquire(timeout=30)
    yield claim, lost, beats
    beats.end()
    claim.release()


def test_a_claim_that_is_away_for_one_beat_is_not_lost(beaten, tmp_path):
    claim, lost, beats = beaten
    for _ in range(3):
        (tmp_path / CLAIM).rename(tmp_path / "away")
        beats.pass_one()
        (tmp_path / "away").rename(tmp_path / CLAIM)
        beats.pass_one()
    assert not lost and claim.held()


def test_a_claim_that_stays_away_is_told_once_and_touched_when_it_is_back(beaten, tmp_path):
    _, lost, beats = beaten
    (tmp_path / CLAIM).rename(tmp_path / "away")
    beats.pass_one()
    assert not lost
    beats.pass_one()
    beats.pass_one()
    assert lost == [1]
    (tmp_path / "away").rename(tmp_path / CLAIM)
    make_stale(tmp_path)
    before = (tmp_path / CLAIM).stat().st_mtime
    beats.pass_one()
    assert (tmp_path / CLAIM).stat().st_mtime > before and lost == [1]


def test_anothers_token_is_a_loss_at_once_and_is_not_touched(beaten, tmp_path):
    claim, lost, beats = beaten
    hold(tmp_path, replace(claim.holder, token="another"))
    make_stale(tmp_path)
    before = (tmp_path / CLAIM).stat().st_mtime
    beats.pass_one()
    assert lost == [1] and (tmp_path / CLAIM).stat().st_mtime == before


LOSE = """
import json, sys, time
from pathlib import Path
from qknorm.studies.grid import claims
claims.BEAT_SECONDS = 0.01
folder, taken = Path(sys.argv[1]), sys.argv[2] == "taken"
claims.take(folder)
path = folder / claims.CLAIM
if taken:
    other = {"host": "far", "machine": "far", "pid": 7, "began": "1", "token": "another"}
    (folder / "other").write_text(json.dumps(other))
    (folder / "other").replace(path)
else:
    path.unlink()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("away", "was gone or could not be read for 0.02 s, so its process ended, .* then run the same command again"),
        ("taken", "is now held by process 7 on far, so this one ended, .* wait for the other"),
    ],
)
def test_a_process_that_ends_with_its_claim_says_why(tmp_path, how, told):
    ended = subprocess.run([sys.executable, "-c", LOSE, str(tmp_path), how], capture_output=True, text=True, timeout=50)
    assert ended.returncode == 1
    assert re.fullmatch(rf"qknorm: {re.escape(str(tmp_path / CLAIM))} {told}\n", ended.stderr)


def test_a_claim_that_came_back_is_not_taken_for_anothers(tmp_path):
    with take(tmp_path):
        assert claims.find_other(tmp_path) is None
        assert "was gone or could not be read for 20 s" in claims.explain_loss(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_that_refuses_locks_still_has_claims(tmp_path, monkeypatch, number):
    fcntl = pytest.importorskip("fcntl")

    def refuse(file, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with take(tmp_path) as claim:
        assert claim.held() and take(tmp_path) is None
    assert find_holder(tmp_path) is None
