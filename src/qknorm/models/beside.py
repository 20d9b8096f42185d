"""Work beside the main stream: gradients of weights, which nothing else of a backward pass waits for."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

MOST_HELD = 2**30
"""Bytes of memory that jobs under way may keep from being used again, before the main stream waits for them."""


class SideStream(Protocol):
    """Where jobs run in the order they are started."""

    def start(self, job: Callable[[], object]) -> None:
        """Runs a job after all that the main stream was given so far, beside what it is given from now on."""

    def join(self) -> None:
        """Lets what the main stream is given from now on wait for every job started."""


class CudaSideStream:
    """A second CUDA stream; within a recording of the main one it takes part in it, from a first job to a join."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, job: Callable[[], object]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            job()

    def join(self) -> None:
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


class Beside:
    """Starts jobs on a side stream, and joins it before anyone could see that they ran there.

    What a job reads is held until the join: given back earlier, its memory might be written to while it is still read,
    and autograd adds in place to tensors that nobody else holds. Whoever adds to a place on the main stream calls
    `settle` first, and whoever reads what jobs have added calls `join`.
    """

    def __init__(self, stream: SideStream, most_held: int = MOST_HELD) -> None:
        self._stream, self._most_held = stream, most_held
        self._held: list[Tensor] = []
        self._places: list[range] = []
        self._bytes = 0

    def start(self, job: Callable[[], object], reads: Sequence[Tensor], adds_to: Sequence[Tensor]) -> None:
        """Starts a job that reads some tensors and adds to others."""
        size = sum(each.nbytes for each in reads)
        if self._bytes + size > self._most_held:
            self.join()
        self._held += reads
        self._bytes += size
        self._places += map(_addresses, adds_to)
        self._stream.start(job)

    def settle(self, place: Tensor) -> None:
        """Joins, if a job may still be adding to this place."""
        if self._places:
            mine = _addresses(place)
            if any(each.start < mine.stop and mine.start < each.stop for each in self._places):
                self.join()

    def join(self) -> None:
        """After it, what jobs have added is there, and what they read is let go."""
        if self._places:
            self._stream.join()
            self._held, self._places, self._bytes = [], [], 0


def _addresses(x: Tensor) -> range:
    """From the first byte of a tensor to its last, gaps included."""
    entries = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return range(x.data_ptr(), x.data_ptr() + entries * x.element_size())
