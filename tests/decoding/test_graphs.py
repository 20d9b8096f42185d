"""Recordings, of which these tests have imitations that need no GPU: what is shared, and what may go wrong."""

import threading
import time

import pytest
import torch

from qknorm.decoding.graphs import Graphs

GPU = torch.device("cuda", 1)


class Imitation:
    """Stands for torch.cuda: a recorded job is done again at each replay."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.devices, self.pools = 0, set(), []
        self.recording_now = self.most_at_once = self.begun = self.ended = 0
        self.fail_at_end: Exception | None = None
        monkeypatch.setattr(Graphs, "_beside", {})
        for name in ("device", "stream", "current_stream", "Stream", "CUDAGraph", "graph_pool_handle"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def device(self, device: torch.device) -> object:
        self.devices.add(device)
        return torch.no_grad()  # any context

    def stream(self, stream: object) -> object:
        return torch.no_grad()

    def current_stream(self) -> "Imitation":
        return self

    Stream = current_stream

    def wait_stream(self, other: object) -> None:
        pass

    def graph_pool_handle(self) -> object:
        self.pools.append(object())
        return self.pools[-1]

    def CUDAGraph(self) -> "Recording":
        return Recording(self)


class Recording:
    def __init__(self, gpu: Imitation) -> None:
        self.gpu, self.replays, self.pool = gpu, 0, None

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        gpu, self.pool = self.gpu, pool
        gpu.begun, gpu.recording_now = gpu.begun + 1, gpu.recording_now + 1
        gpu.most_at_once = max(gpu.most_at_once, gpu.recording_now)

    def capture_end(self) -> None:
        self.gpu.ended, self.gpu.recording_now = self.gpu.ended + 1, self.gpu.recording_now - 1
        if self.gpu.fail_at_end is not None:
            raise self.gpu.fail_at_end

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Imitation:
    return Imitation(monkeypatch)


def test_a_job_is_done_then_recorded_then_replayed_on_its_own_device(gpu):
    graphs, done = Graphs(GPU), []
    for _ in range(3):
        graphs.run("a", lambda: done.append("a"))
    graphs.run("b", lambda: done.append("b"))
    assert done == ["a", "a", "b", "b"]  # each once for itself, once for the recording
    assert len(graphs) == 2 and graphs._recorded["a"].replays == 2
    assert len(gpu.pools) == 1 and gpu.devices == {GPU}


@pytest.mark.parametrize("at_end", [False, True])
def test_where_memory_is_short_nothing_is_recorded_and_all_is_computed(gpu, at_end):
    graphs, done = Graphs(GPU), []

    def job() -> None:
        if gpu.recording_now and not at_end:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        done.append(gpu.recording_now)

    gpu.fail_at_end = RuntimeError("CUDA error: out of memory") if at_end else None
    for _ in range(3):
        graphs.run("a", job)
    assert done.count(0) == 3 and len(graphs) == 0
    assert gpu.begun == gpu.ended == 1


def test_other_mistakes_are_told_and_the_next_recording_has_new_memory(gpu):
    graphs, answers = Graphs(GPU), [KeyboardInterrupt(), ValueError("first")]

    def job() -> None:
        if gpu.recording_now and answers:
            gpu.fail_at_end = RuntimeError("the recording was ended too soon")
            raise answers.pop(0)
        gpu.fail_at_end = None

    with pytest.raises(KeyboardInterrupt):
        graphs.run("a", job)
    with pytest.raises(ValueError, match="first"):
        graphs.run("a", job)
    graphs.run("a", job)
    assert len(graphs) == 1 and gpu.begun == gpu.ended == 3
    assert len(gpu.pools) == 3  # the memory of a recording that came to nothing cannot be shared


def test_threads_record_one_after_another(gpu):
    def record_some() -> None:
        for name in range(5):
            Graphs(GPU).run(name, lambda: time.sleep(0.002))

    threads = [threading.Thread(target=record_some) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert gpu.begun == gpu.ended == 20 and gpu.most_at_once == 1
    assert list(Graphs._beside) == [GPU]


def test_elsewhere_nothing_is_recorded():
    done = []
    for graphs in (Graphs(torch.device("cpu")), Graphs(torch.device("cpu"), record=False)):
        for _ in range(2):
            graphs.run("a", lambda: done.append(1))
        assert len(graphs) == 0
    assert len(done) == 4
