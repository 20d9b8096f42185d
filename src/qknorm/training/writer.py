"""Writes beside the training, one job at a time."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Writer:
    """Does one job after another beside the training; what goes wrong in one is raised by the next call."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._jobs: list[Future[None]] = []

    @property
    def busy(self) -> bool:
        """Whether something is being written."""
        return any(not job.done() for job in self._jobs)

    def submit(self, job: Callable[[], None], *, wait: bool) -> None:
        """Starts a job once the one before has ended; it takes the place of one that has not begun."""
        if wait:
            self.wait()
            job()
            return
        under_way = [each for each in self._jobs if not each.cancel()]
        self._jobs = [each for each in under_way if not each.done()]
        for each in under_way:
            if each not in self._jobs:
                each.result()
        self._jobs.append(self._thread.submit(job))

    def wait(self) -> None:
        """Returns when nothing is left to write."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.result()
