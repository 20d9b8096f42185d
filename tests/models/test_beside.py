"""Work beside the main stream: its order, what it holds, and when it is waited for."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from qknorm.models.beside import Beside, CudaSideStream
from qknorm.models.fused_run import FlatParameters, gradient_room


class LateStream:
    """A side stream as late as one can be: no job runs before the join."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], object]] = []
        self.joins = 0

    def start(self, job: Callable[[], object]) -> None:
        self.jobs.append(job)

    def join(self) -> None:
        self.joins += 1
        for job in self.jobs:
            job()
        self.jobs.clear()


def test_a_cuda_stream_waits_for_the_main_one_at_each_start_and_is_waited_for_at_the_join(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened: list[str] = []

    class Stream:
        device = torch.device("cuda", 0)

        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: "Stream") -> None:
            happened.append(f"{self.name} waits for {other.name}")

    streams = [Stream("main")]

    @contextmanager
    def within(stream: Stream) -> Iterator[None]:
        streams.append(stream)
        yield
        streams.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: Stream("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: streams[-1])
    monkeypatch.setattr(torch.cuda, "stream", within)
    side = CudaSideStream(torch.device("cuda", 0))
    for job in "ab":
        side.start(lambda job=job: happened.append(f"{job} on {streams[-1].name}"))  # type: ignore[misc]
    side.join()
    assert happened == [
        "side waits for main", "a on side", "side waits for main", "b on side", "main waits for side",
    ]  # fmt: skip


def make_flat(beside: Beside) -> tuple[nn.Parameter, nn.Parameter, FlatParameters]:
    first, second = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(5))
    flat = FlatParameters([first, second])
    flat.add_beside(beside)
    return first, second, flat


def add_later(beside: Beside, place: Tensor, value: float) -> None:
    beside.start(lambda: place.add_(value), [torch.zeros(2)], [place])


def test_jobs_are_done_in_order_by_the_join_and_not_before() -> None:
    stream, place = LateStream(), torch.zeros(3)
    beside = Beside(stream)
    beside.join()
    assert stream.joins == 0, "there was nothing to wait for"
    beside.start(lambda: place.fill_(2.0), [], [place])
    beside.start(lambda: place.mul_(5.0), [], [place])
    assert place.tolist() == [0, 0, 0]
    beside.join()
    beside.join()
    assert place.tolist() == [10, 10, 10] and stream.joins == 1


def test_what_jobs_read_is_held_until_the_join_and_no_longer() -> None:
    beside, read = Beside(LateStream()), torch.zeros(3)
    alive = weakref.ref(read)
    beside.start(lambda: None, [read], [torch.zeros(1)])
    del read
    assert alive() is not None
    beside.join()
    assert alive() is None


def test_memory_held_is_bounded() -> None:
    stream, place = LateStream(), torch.zeros(1)
    beside = Beside(stream, most_held=1_000)
    joins = []
    for _ in range(6):
        beside.start(lambda: None, [torch.zeros(100)], [place])  # 400 bytes
        joins.append(stream.joins)
    assert joins == [0, 0, 1, 1, 2, 2]
    beside.start(lambda: None, [torch.zeros(1_000)], [place])  # more than the bound by itself runs all the same
    beside.join()
    assert stream.joins == 4 and not stream.jobs


def test_only_those_who_add_to_the_same_place_wait() -> None:
    stream, flat = LateStream(), torch.zeros(10)
    beside = Beside(stream)
    add_later(beside, flat[2:5], 1.0)
    for free in (flat[:2], flat[5:], torch.zeros(3)):
        beside.settle(free)
    assert stream.joins == 0
    beside.settle(flat[4:6])
    assert stream.joins == 1 and flat.tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 0, 0]
    beside.settle(flat[4:6])
    assert stream.joins == 1


def test_gaps_within_a_place_count_as_its_own() -> None:
    stream, table = LateStream(), torch.zeros(4, 6)
    beside = Beside(stream)
    add_later(beside, table[1:3, 2:4], 1.0)  # entries 8 … 15
    beside.settle(table[0])
    beside.settle(table[3])
    assert stream.joins == 0
    beside.settle(table[2, :2])
    assert stream.joins == 1


def test_whoever_asks_for_room_on_the_main_stream_waits_for_that_place_alone() -> None:
    stream = LateStream()
    beside = Beside(stream)
    first, second, flat = make_flat(beside)
    place, final = gradient_room(first, flat, beside=True)
    assert final
    add_later(beside, place, 3.0)
    gradient_room(first, flat, beside=True)  # in order on the side stream, so there is nothing to wait for
    gradient_room(second, flat)
    assert stream.joins == 0
    gradient_room(first[1:], flat)
    assert stream.joins == 1 and first.grad is not None and (first.grad == 3).all()


@pytest.mark.parametrize("other", [True, False])
def test_what_autograd_adds_by_itself_waits_too(other: bool) -> None:
    stream = LateStream()
    beside = Beside(stream)
    first, second, flat = make_flat(beside)
    place = flat.gradient_of(first)
    assert place is not None
    beside.start(lambda: place.copy_(place * 10 + 2), [], [place])
    (second if other else first).sum().backward()
    assert stream.joins == (0 if other else 1)
    beside.join()
    assert first.grad is not None and (first.grad == (2 if other else 3)).all()
