import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict, replace

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
