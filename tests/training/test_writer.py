"""Checkpoints written beside the training: in order, the newest of those that wait, none lost that must be kept."""

import threading

import pytest

from qknorm.training.writer import Writer


def test_a_job_that_waits_gives_way_to_a_newer_one_and_one_under_way_does_not() -> None:
    writer, done, begun, may_end = Writer(), [], threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        assert may_end.wait(10)
        done.append(1)

    writer.submit(first, wait=False)
    assert begun.wait(10) and writer.busy
    writer.submit(lambda: done.append(2), wait=False)
    writer.submit(lambda: done.append(3), wait=False)
    may_end.set()
    writer.wait()
    assert done == [1, 3] and not writer.busy


@pytest.mark.parametrize("then", ["submit", "wait"])
def test_what_goes_wrong_is_raised_by_the_next_call(then: str) -> None:
    writer, ended = Writer(), threading.Event()

    def fail() -> None:
        ended.set()
        raise OSError("the disk is full")

    writer.submit(fail, wait=False)
    assert ended.wait(10)
    while writer.busy:
        pass
    with pytest.raises(OSError, match="the disk is full"):
        writer.submit(lambda: None, wait=False) if then == "submit" else writer.wait()
    writer.wait()  # said once


def test_who_waits_comes_after_all_that_were_given_before() -> None:
    writer, done = Writer(), []
    writer.submit(lambda: done.append(1), wait=False)
    writer.submit(lambda: done.append(2), wait=True)
    assert done[-1] == 2 and not writer.busy


@pytest.mark.parametrize("waiting", [False, True])
def test_who_leaves_by_an_error_leaves_nobody_writing(waiting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    done, may_end, writer = [], threading.Event(), Writer()

    def job() -> None:
        assert may_end.wait(10)
        done.append(1)

    def interrupt(*_: object) -> None:
        monkeypatch.undo()
        threading.Timer(0.2, may_end.set).start()
        raise KeyboardInterrupt

    def write_and_leave() -> None:
        with writer:
            writer.submit(job, wait=False)
            if waiting:
                monkeypatch.setattr("concurrent.futures.wait", interrupt)
                writer.wait()
            interrupt()

    with pytest.raises(KeyboardInterrupt):
        write_and_leave()
    assert done == [1] and not writer.busy
