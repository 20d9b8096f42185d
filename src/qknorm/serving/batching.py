"""One thread that owns the models: sentences of all requests wait for it together and are translated in batches."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from qknorm.decoding.translate import Translation

BATCH_CHARACTERS = 8_000
"""A batch is full with so many characters, so that a few endless sentences do not hold up everyone else's."""

log = logging.getLogger("qknorm.serving")


class Engine(Protocol):
    """What translates sentences, as `TextTranslator` does."""

    def explain(
        self, texts: Sequence[str], *, nbest: int = 1, align: bool = False, beam: int | None = None
    ) -> list[Translation]:
        """Translations in the order of the texts."""


@dataclass(frozen=True)
class Options:
    """What sentences must agree in to share a batch."""

    pair: str
    beam: int | None = None
    nbest: int = 1
    align: bool = False


class ModelFailure(Exception):
    """The model could not translate; what went wrong is in the log, and not for the client."""


class Job:
    """The sentences of one request. Iterating gives their translations, in order, as they are made."""

    def __init__(self, options: Options, sentences: Sequence[str]) -> None:
        self.options, self.size = options, len(sentences)
        self.left = deque(sentences)
        self.since = time.monotonic()
        self.cancelled = False
        self._loop = asyncio.get_running_loop()
        self._results: asyncio.Queue[Translation | ModelFailure] = asyncio.Queue()

    def deliver(self, result: Translation | ModelFailure) -> None:
        """Hands over the next result, from any thread."""
        if not self.cancelled and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._results.put_nowait, result)

    async def __aiter__(self) -> AsyncIterator[Translation]:
        for _ in range(self.size):
            result = await self._results.get()
            if isinstance(result, ModelFailure):
                raise result
            yield result


class Batcher:
    """Runs all that touches the models in one thread, which takes from all waiting jobs in turn."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        *,
        most: int,
        wait: float,
        observe: Callable[[str, int, float], None] = lambda pair, sentences, seconds: None,
    ) -> None:
        """`most` sentences make a batch, which waits `wait` seconds to fill; `observe` is told of every batch."""
        self._engines, self._most, self._wait, self._observe = engines, most, wait, observe
        self._jobs: deque[Job] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="models", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Finishes what has been submitted, then ends the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether it takes jobs."""
        return self._thread.is_alive() and not self._stopping

    @property
    def waiting(self) -> int:
        """Sentences that no batch has taken yet."""
        with self._changed:
            return sum(len(job.left) for job in self._jobs)

    def submit(self, job: Job) -> Job:
        """Puts the sentences of a job in line."""
        if job.left:
            with self._changed:
                self._jobs.append(job)
                self._changed.notify()
        return job

    def cancel(self, job: Job) -> None:
        """Forgets what is left of a job whose client no longer wants it."""
        with self._changed:
            job.cancelled = True
            if job in self._jobs:
                self._jobs.remove(job)

    async def call(self, function: Callable[[], Any]) -> Any:
        """The result of a function that uses a model, called between two batches."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any, error: Exception | None) -> None:
            if not future.done():
                future.set_result(result) if error is None else future.set_exception(error)

        def work() -> None:
            result, failure = None, None
            try:
                if not future.cancelled():
                    result = function()
            except Exception as error:
                log.exception("a model failed")
                failure = ModelFailure(type(error).__name__)
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result, failure)

        with self._changed:
            self._calls.append(work)
            self._changed.notify()
        return await future

    # ------------------------------------------------------------------ in the thread

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._calls or self._stopping)
                if self._stopping and not self._jobs and not self._calls:
                    return
                call = self._calls.popleft() if self._calls else None
                self._let_fill(hurry=call is not None)
                batch = self._take()
            if call is not None:
                call()
            if batch:
                self._translate(batch)

    def _let_fill(self, hurry: bool) -> None:
        """Waits for company for the sentence that has waited longest, unless a batch is full already."""
        if hurry or not self._jobs:
            return
        left = min(job.since for job in self._jobs) + self._wait - time.monotonic()
        if left > 0:
            self._changed.wait_for(
                lambda: self._stopping or sum(len(job.left) for job in self._jobs) >= self._most, timeout=left
            )

    def _take(self) -> list[tuple[Job, str]]:
        """A batch of the first job and those like it, a sentence of each in turn; others come first next time."""
        if not self._jobs:
            return []
        options = self._jobs[0].options
        turns = deque(job for job in self._jobs if job.options == options)
        others = [job for job in self._jobs if job.options != options]
        taken: list[tuple[Job, str]] = []
        characters = 0
        while turns and len(taken) < self._most and characters < BATCH_CHARACTERS:
            job = turns.popleft()
            taken.append((job, job.left.popleft()))
            characters += len(taken[-1][1])
            if job.left:
                turns.append(job)
        self._jobs = deque([*others, *turns])
        return taken

    def _translate(self, batch: list[tuple[Job, str]]) -> None:
        options, began = batch[0][0].options, time.monotonic()
        results: Sequence[Translation | ModelFailure]
        try:
            results = self._engines[options.pair].explain(
                [text for _, text in batch], nbest=options.nbest, align=options.align, beam=options.beam
            )
        except Exception as error:
            log.exception("a model failed")
            results = [ModelFailure(type(error).__name__)] * len(batch)
        self._observe(options.pair, len(batch), time.monotonic() - began)
        for (job, _), result in zip(batch, results, strict=True):
            job.deliver(result)
