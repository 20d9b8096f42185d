"""Jobs over fixed buffers as CUDA graphs: run once as they are, recorded then, replayed ever after."""

import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, ClassVar

import torch

ONE_RECORDING_AT_A_TIME = threading.Lock()
"""Threads record on one stream, which can take one recording at a time."""


class Graphs:
    """Recordings by name. They share their memory, so none may leave results there: jobs write to buffers of ours.

    On other devices than GPUs, without `record`, and where memory is too short to record, every run is computed anew.
    """

    _beside: ClassVar[dict[torch.device, Any]] = {}  # one for all: matrix products keep room for themselves on each

    def __init__(self, device: torch.device, *, record: bool = True) -> None:
        self._device, self._record = device, record and device.type == "cuda"
        self._recorded: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._recorded)

    def run(self, name: Hashable, job: Callable[[], None]) -> None:
        """Does the job; what it reads and writes must stay at its place, since later runs of this name are replays.

        The first run makes kernels ready, since none may be compiled while one is recorded, and counts like any other.
        """
        with self._on_device():
            if name in self._recorded:
                self._recorded[name].replay()
                return
            job()
            if self._record:
                self._try_to_record(name, job)

    def _on_device(self) -> AbstractContextManager[object]:
        """Streams and Triton's kernels are those of the current GPU, which need not be ours."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _try_to_record(self, name: Hashable, job: Callable[[], None]) -> None:
        """Not where memory is short: the job is done, and training may need what is left."""
        try:
            self._recorded[name] = self._recording(job)
        except RuntimeError as error:
            if "out of memory" not in str(error).lower():
                raise
            self._record = False

    def _recording(self, job: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Not by torch.cuda.graph, which empties the cache of memory that training needs again right after."""
        if not self._recorded:  # memory that no recording holds any more cannot be shared again
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with ONE_RECORDING_AT_A_TIME:
            if self._device not in Graphs._beside:
                Graphs._beside[self._device] = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            beside = Graphs._beside[self._device]
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                # a thread that writes a checkpoint may go on meanwhile
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    job()
                except BaseException:
                    with suppress(RuntimeError):  # what went wrong first is what counts
                        graph.capture_end()
                    raise
                graph.capture_end()
            torch.cuda.current_stream().wait_stream(beside)
        return graph
