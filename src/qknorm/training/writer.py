"""Writes beside the training, one job at a time."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Writer:
    """Does one job after another beside the training; what goes wrong in one is raised by the next call."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._job: Future[None] | None = None

    def submit(self, job: Callable[[], None], *, wait: bool) -> None:
        """Starts a job once the one before has ended."""
        self.wait()
        if wait:
            job()
        else:
            self._job = self._thread.submit(job)

    def wait(self) -> None:
        """Returns when nothing is left to write."""
        if self._job is not None:
            job, self._job = self._job, None
            job.result()
