"""The grid of processes; most tests put a small script in the place of a training, so that what dies dies for sure."""

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from paper_cases import prepare_copy, tiny

from qknorm.cli.grid_display import tell_failures
from qknorm.errors import InputError
from qknorm.studies.grid import local
from qknorm.studies.grid.claims import CLAIM, take
from qknorm.studies.grid.jobs import Job, begin_count, look, read_device_seconds, read_result
from qknorm.studies.grid.local import LocalGrid, Slot, make_slots
from qknorm.studies.grid.work import do
from qknorm.training.translation import CORES, choose_workers

RESULT = """
import json, os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
begun = folder / "begun"
times = int(begun.read_text()) + 1 if begun.exists() else 1
begun.write_text(str(times))
def done():
    plain = {"status": "finished", "reason": "", "seconds": 1, "steps": times, "best_step": 1, "dev_bleu": 1.0}
    (folder / "whole").write_text(json.dumps(plain))
    os.replace(folder / "whole", folder / "result.json")  # as results are written: whole or not at all
    sys.exit(0)
"""
DIE_ONCE = "import os, signal\nif times == 1: os.kill(os.getpid(), signal.SIGKILL)\ndone()"
DIE_ALWAYS = "import os, signal\nprint('last words', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
NO_MEMORY_ONCE = "if times == 1: sys.exit(77)\ndone()"
NO_MEMORY_EVER = """
(folder / "whole").write_text('{"error": "full"}')
os.replace(folder / "whole", folder / "failure.json")
sys.exit(77)
"""
TAKEN_ONCE = "if times == 1: sys.exit(76)\ndone()"
LOSE_THE_CLAIM = """
import time
from qknorm.studies.grid import claims, work
claims.BEAT_SECONDS = 0.01
def lose(claim, job, device):
    (claim.folder / claims.CLAIM).unlink()
    time.sleep(60)
work._do_claimed = lose
work.do(folder, "cpu")
"""
DO_WHEN_TWO_HAVE_TRIED = """
import time
from qknorm.studies.grid import work
def count(name):
    with (folder / name).open("a") as file:
        file.write("x")
def note(claim, job, device):
    count("done")
    until = time.monotonic() + 20
    while len((folder / "tried").read_text()) < 2 and time.monotonic() < until: time.sleep(0.01)
    time.sleep(0.2)
    work.Result("finished", "", 1.0, 1, 1, 1.0).write(folder)
    return "done"
work._do_claimed = note
count("tried")
sys.exit(work.EXIT_STATUS[work.do(folder, "cpu")])
"""
WAIT_FOR_INTERRUPT = """
import signal, time
def leave(*_):
    (folder / "left").touch()
    sys.exit(130)
signal.signal(signal.SIGINT, leave)
(folder / "ready").touch()
while True: time.sleep(0.01)
"""

LEAVE_NEVER = WAIT_FOR_INTERRUPT.replace('(folder / "left").touch()\n    sys.exit(130)', "pass")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare_copy(tmp_path_factory.mktemp("copy"))


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    monkeypatch.setattr(local, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(local, "LOOK_SECONDS", 0.0)


@pytest.fixture
def script(monkeypatch):
    """Has jobs done by a script in place of a training."""

    def use(body):
        def start(job, slot, slots):
            with (job.folder / local.LOG).open("ab") as log:
                command = [sys.executable, "-c", RESULT + body, str(job.folder)]
                return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

        monkeypatch.setattr(local, "_start", start)

    return use


def plan(data, root, count):
    return [Job.plan(f"job {seed}", data, tiny(**{"training.seed": seed}), root) for seed in range(count)]


def silent(views):
    pass


def test_real_trainings_side_by_side_and_never_again(data, tmp_path, monkeypatch):
    jobs = plan(data, tmp_path, 2)
    seen = []
    begun = time.monotonic()
    LocalGrid([*jobs, jobs[0]], [Slot("cpu"), Slot("cpu")], seen.append).run()
    passed = time.monotonic() - begun
    assert [look(job).state for job in jobs] == ["finished", "finished"]
    assert [view.state for view in seen[-1]] == ["finished"] * 3
    results = [read_result(job.folder) for job in jobs]
    assert all(result.made_by["device"] == "cpu" for result in results)
    counted = [read_device_seconds(job.folder) for job in jobs]
    assert max(result.seconds for result in results) <= sum(counted) <= passed, "the device was at work for so long"
    monkeypatch.setattr(local, "_start", None)
    LocalGrid(jobs, [Slot("cpu")], silent).run()


def test_a_process_that_dies_is_begun_again(data, tmp_path, script):
    script(DIE_ONCE)
    jobs = plan(data, tmp_path, 2)
    LocalGrid(jobs, [Slot("cpu")], silent).run()
    assert [read_result(job.folder).steps for job in jobs] == [2, 2]


def test_one_that_always_dies_has_failed_in_the_end_with_its_last_words(data, tmp_path, script):
    script(DIE_ALWAYS)
    (job,) = plan(data, tmp_path, 1)
    LocalGrid([job], [Slot("cpu")], silent).run()
    assert (job.folder / "begun").read_text() == str(local.MOST_DEATHS)
    assert look(job).note.startswith("its process ended with signal 9 3 times: last words")
    script("done()")
    LocalGrid([job], [Slot("cpu")], silent).run()
    assert look(job).state == "finished"


def test_one_that_always_loses_its_claim_is_reported_with_the_file_and_the_way_out(
    data, tmp_path, script, monkeypatch, capsys
):
    script(LOSE_THE_CLAIM)
    monkeypatch.setattr(local, "MOST_DEATHS", 2)
    (job,) = plan(data, tmp_path, 1)
    LocalGrid([job], [Slot("cpu")], silent).run()
    assert (job.folder / "begun").read_text() == "2"
    told = f"{job.folder / CLAIM} was gone or could not be read for 0.02 s, so its process ended"
    assert look(job).note.startswith(told)
    assert (job.folder / local.LOG).read_text(encoding="utf-8").count(f"qknorm: {told}") == 2
    assert tell_failures([job])
    assert f"note: job 0 failed: {told}" in capsys.readouterr().err
    script("done()")
    LocalGrid([job], [Slot("cpu")], silent).run()
    assert look(job).state == "finished"


def test_a_full_gpu_gets_fewer_side_by_side(data, tmp_path, script):
    script(NO_MEMORY_ONCE)
    jobs = plan(data, tmp_path, 1)
    grid = LocalGrid(jobs, [Slot("cuda", "0"), Slot("cuda", "0"), Slot("cuda", "1")], silent)
    grid.run()
    assert [slot.gpu for slot in grid.slots] == ["0", "1"]
    assert look(jobs[0]).state == "finished"


def test_what_does_not_fit_alone_has_failed(data, tmp_path, script):
    script(NO_MEMORY_EVER)
    (job,) = plan(data, tmp_path, 1)
    grid = LocalGrid([job], [Slot("cuda", "0")], silent)
    grid.run()
    assert (look(job).state, look(job).note, len(grid.slots)) == ("failed", "full", 1)


def test_a_job_that_was_taken_in_between_waits(data, tmp_path, script):
    script(TAKEN_ONCE)
    (job,) = plan(data, tmp_path, 1)
    LocalGrid([job], [Slot("cpu")], silent).run()
    assert read_result(job.folder).steps == 2


def test_a_job_of_another_is_waited_for(data, tmp_path, script):
    script("done()")
    jobs = plan(data, tmp_path, 2)
    claim = take(jobs[0].folder)

    def leave_when_the_other_is_done(views):
        states = [view.state for view in views]
        if states == ["running", "finished"]:
            assert not (jobs[0].folder / "begun").exists()
            claim.release()

    LocalGrid(jobs, [Slot("cpu"), Slot("cpu")], leave_when_the_other_is_done).run()
    assert [look(job).state for job in jobs] == ["finished", "finished"]


def test_two_grids_at_once_do_no_job_twice(data, tmp_path, script):
    script(DO_WHEN_TWO_HAVE_TRIED)
    jobs = plan(data, tmp_path, 2)
    runs = [LocalGrid(jobs, [Slot("cpu"), Slot("cpu")], silent).run for _ in range(2)]
    grids = [threading.Thread(target=run, daemon=True) for run in runs]
    for grid in grids:
        grid.start()
    for grid in grids:
        grid.join(timeout=120)
    assert not any(grid.is_alive() for grid in grids)
    assert all(len((job.folder / "tried").read_text()) > 1 for job in jobs)
    assert [(job.folder / "done").read_text() for job in jobs] == ["x", "x"]
    assert [look(job).state for job in jobs] == ["finished", "finished"]


def test_when_time_is_up_every_process_leaves(data, tmp_path, script, monkeypatch):
    script(WAIT_FOR_INTERRUPT)
    (job,) = plan(data, tmp_path, 1)
    now = [0.0]
    monkeypatch.setattr(local, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))

    def let_time_pass(views):
        now[0] += 61.0 * (job.folder / "ready").exists()

    assert not LocalGrid([job], [Slot("cpu")], let_time_pass, max_minutes=1).run()
    assert (job.folder / "left").exists()
    script("done()")
    assert LocalGrid([job], [Slot("cpu")], silent, max_minutes=1).run()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_lets_every_process_leave(data, tmp_path, script, number):
    script(WAIT_FOR_INTERRUPT)
    jobs = plan(data, tmp_path, 2)

    def interrupt_when_ready(views):
        if all((job.folder / "ready").exists() for job in jobs) and not (jobs[0].folder / "left").exists():
            os.kill(os.getpid(), number)

    former = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        LocalGrid(jobs, [Slot("cpu"), Slot("cpu")], interrupt_when_ready).run()
    assert all((job.folder / "left").exists() for job in jobs)
    assert signal.getsignal(signal.SIGTERM) is former


def test_slots_are_those_of_the_gpus_one_may_see(monkeypatch):
    assert [slot.device for slot in make_slots(3, "cpu")] == ["cpu"] * 3
    monkeypatch.setenv(CORES, "5")
    assert len(make_slots(None, "cpu")) == 5
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [slot.gpu for slot in make_slots(2)] == ["0", "1", "0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert [slot.gpu for slot in make_slots(None)] == ["3", "5"]


def test_bad_slots_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="--parallel is 0; give 1 or more"):
        make_slots(0)
    with pytest.raises(InputError, match="PyTorch sees no GPU"):
        make_slots(1, "cuda")
    with pytest.raises(InputError, match="is no device of a grid"):
        make_slots(1, "tpu")


class Running:
    """In the place of a process."""


@pytest.fixture
def environment(data, tmp_path, monkeypatch):
    """What a process is told on a machine of 16 cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv(CORES, "16")

    def environment(slot, slots, dropout=0.0):
        job = Job.plan("job", data, tiny(**{"training.bpe_dropout": dropout}), tmp_path)
        return local._environment(job, slot, slots)

    return environment


def test_processes_share_the_cores_and_see_their_gpu_alone(environment):
    share = {CORES: "4", "OMP_NUM_THREADS": "4"}
    assert environment(Slot("cuda", "3"), 4) == {**share, "CUDA_VISIBLE_DEVICES": "3"}
    share = {CORES: "1", "OMP_NUM_THREADS": "1"}
    assert environment(Slot("cpu"), 32) == {**share, "CUDA_VISIBLE_DEVICES": ""}


def test_the_time_of_a_device_is_shared_out_among_those_at_work_on_it(data, tmp_path, monkeypatch):
    first, second, other = plan(data, tmp_path, 3)
    slots = [Slot("cuda", "3", first, Running()), Slot("cuda", "4", other, Running()), Slot("cuda", "3"), Slot("cpu")]
    grid = LocalGrid([first, second, other], slots, silent, _counted_at=100.0)
    monkeypatch.setattr(local.time, "monotonic", lambda: now)
    now = 110.0
    grid._count()
    slots[2].job, slots[2].process = second, Running()
    now = 114.0
    grid._count()
    slots[0].process = None
    now = 115.0
    grid._count()
    assert grid._spent == {first.folder: 12.0, second.folder: 3.0, other.folder: 15.0}


@pytest.mark.parametrize("interrupts", [1, 2])
def test_what_was_taken_until_an_interrupt_is_counted(data, tmp_path, script, interrupts):
    script(WAIT_FOR_INTERRUPT if interrupts == 1 else LEAVE_NEVER)
    (job,) = plan(data, tmp_path, 1)

    def interrupt_when_ready(views):
        if (job.folder / "ready").exists() and not (job.folder / "left").exists():
            begin_count(job.folder)
            if interrupts == 2:
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            os.kill(os.getpid(), signal.SIGINT)

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        LocalGrid([job], [Slot("cpu")], interrupt_when_ready).run()
    assert 0 < read_device_seconds(job.folder) <= time.monotonic() - begun


def test_what_a_run_took_is_not_known_where_its_grid_was_killed(data, tmp_path):
    (job,) = plan(data, tmp_path, 1)
    job.write()
    assert do(job.folder, "cpu") == "done", "as a process that outlives its grid"
    assert read_device_seconds(job.folder) is None


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_threads_and_those_who_cut_ahead_share_the_cores(environment, monkeypatch, device, dropout):
    found = []
    for slots in (1, 3, 4, 5, 8, 16):
        slot = Slot(device, "0" if device == "cuda" else None)
        told = environment(slot, slots, dropout)
        with monkeypatch.context() as there:
            there.setenv(CORES, told[CORES])
            workers = choose_workers(torch.device(device)) if dropout else 0
        assert slots * (int(told["OMP_NUM_THREADS"]) + workers) <= 16
        found.append((int(told["OMP_NUM_THREADS"]), workers))
    if device == "cuda" and dropout:
        assert found == [(14, 2), (3, 2), (2, 2), (1, 2), (1, 1), (1, 0)]
    else:
        assert found == [(16, 0), (5, 0), (4, 0), (3, 0), (2, 0), (1, 0)]


def test_whoever_names_the_threads_gets_them(environment, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    told = environment(Slot("cuda", "0"), 4, 0.1)
    assert (told[CORES], told["OMP_NUM_THREADS"]) == ("4", "7")


def test_a_started_process_is_told_its_share(environment, data, tmp_path, monkeypatch):
    job = Job.plan("job", data, tiny(), tmp_path)
    job.write()
    (tmp_path / "python").write_text(f'#!/bin/sh\necho "told ${CORES}"\n')
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert local._start(job, Slot("cpu"), 4).wait() == 0
    assert (job.folder / local.LOG).read_text() == "told 4\n"
