"""Writes beside the training, one job at a time."""

from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor


class Writer:
    """Does one job after another beside the training; what goes wrong in one is raised by the next call.

    Who leaves its context, for whatever reason, leaves nobody writing.
    """

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
        while self._jobs:
            futures.wait(self._jobs[:1])
            self._jobs.pop(0).result()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        futures.wait(self._jobs)
