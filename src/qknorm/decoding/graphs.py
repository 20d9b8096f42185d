"""Jobs over fixed buffers as CUDA graphs: run once as they are, recorded then, replayed ever after."""

from collections.abc import Callable, Hashable
from typing import Any

import torch


class Graphs:
    """Recordings by name. They share their memory, so none may leave results there: jobs write to buffers of ours.

    On other devices than GPUs, and without `record`, every run is computed anew.
    """

    _beside: Any = None  # one stream for all: matrix products keep room for themselves on each

    def __init__(self, device: torch.device, *, record: bool = True) -> None:
        self._record = record and device.type == "cuda"
        self._recorded: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._recorded)

    def run(self, name: Hashable, job: Callable[[], None]) -> None:
        """Does the job; what it reads and writes must stay at its place, since later runs of this name are replays.

        The first run makes kernels ready, since none may be compiled while one is recorded, and counts like any other.
        """
        if name in self._recorded:
            self._recorded[name].replay()
            return
        job()
        if self._record:
            self._recorded[name] = self._recording(job)

    def _recording(self, job: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Not by torch.cuda.graph, which empties the cache of memory that training needs again right after."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        if Graphs._beside is None:
            Graphs._beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        Graphs._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(Graphs._beside):
            # a thread that writes a checkpoint may go on meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                job()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(Graphs._beside)
        return graph
