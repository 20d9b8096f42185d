"""A request from its check to its translations: what is allowed, in which order, and how it ends."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from itertools import accumulate
from typing import TypeVar

from qknorm.decoding.texts import check_nbest
from qknorm.decoding.translate import TextTranslator
from qknorm.errors import InputError
from qknorm.serving.attention import Pages, attention_page
from qknorm.serving.batching import Batcher, Job, Options
from qknorm.serving.gate import Gate
from qknorm.serving.limits import Limits
from qknorm.serving.messages import AttentionRequest, SentenceOut, TranslateRequest, describe_sentence
from qknorm.serving.metrics import Metrics
from qknorm.serving.sentences import Piece, Pieces, split_sentences

Result = TypeVar("Result")

CLIENT_LEFT, TIME_WAS_UP = "client left", "time was up"
"""Why requests are given up."""


class Refused(Exception):
    """A request that is against the rules, in words for the client."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Work:
    """A request that was found to be in order: its texts in sentences, and how to translate them."""

    def __init__(self, texts: list[Pieces], options: Options) -> None:
        self.texts, self.options = texts, options
        self.pieces: list[Piece] = [piece for text in texts for piece in text.pieces]


class Service:
    """The models, the thread that runs them, and the rules of who may use them when."""

    def __init__(self, engines: Mapping[str, TextTranslator], limits: Limits) -> None:
        self.engines, self.limits = engines, limits
        self.metrics, self.pages = Metrics(), Pages()
        self.gate = Gate(limits.requests, limits.waiting)
        self.batcher = Batcher(
            engines,
            most=limits.batch_sentences,
            wait=limits.batch_wait_ms / 1000,
            observe=self.metrics.saw_batch,
        )
        self.metrics.gauge("qknorm_requests_running", "Requests being translated.", lambda: self.gate.inside)
        self.metrics.gauge("qknorm_requests_waiting", "Requests that wait to be let in.", lambda: self.gate.waiting)
        self.metrics.gauge("qknorm_sentences_waiting", "Sentences in no batch yet.", lambda: self.batcher.waiting)

    def check(self, request: TranslateRequest) -> Work:
        """Cuts the texts of a request into sentences; raises `Refused` where it asks for too much."""
        pair, limits = self._pair(request.pair), self.limits
        for name in ("beam", "nbest"):
            if (getattr(request, name) or 1) > limits.beam:
                raise Refused(422, f"{name} is at most {limits.beam} here; ask for less")
        try:
            check_nbest(request.nbest, request.beam)
        except InputError as error:
            raise Refused(422, str(error)) from None
        texts = request.texts()
        self._check_length(sum(map(len, texts)))
        if len(texts) > limits.sentences:
            raise Refused(413, f"{len(texts):,} texts are more than the {limits.sentences:,} allowed; send fewer")
        pieces = [split_sentences(text) for text in texts]
        count = sum(len(each.pieces) for each in pieces)
        if count > limits.sentences:
            raise Refused(413, f"{count:,} sentences are more than the {limits.sentences:,} allowed; send fewer")
        return Work(pieces, Options(pair, request.beam, request.nbest, request.alignment))

    def _check_length(self, characters: int) -> None:
        if characters > self.limits.characters:
            raise Refused(
                413, f"{characters:,} characters are more than the {self.limits.characters:,} allowed; send less"
            )

    def _pair(self, name: str | None) -> str:
        if name is None:
            return next(iter(self.engines))
        if name not in self.engines:
            raise Refused(422, f"there is no such pair; there is {', '.join(self.engines)}")
        return name

    async def translate(self, work: Work) -> AsyncGenerator[SentenceOut]:
        """The sentences of all texts, in order, as they are translated; what is left is dropped when nobody asks."""
        job = self.batcher.submit(Job(work.options, [piece.text for piece in work.pieces]))
        try:
            firsts = {0, *accumulate(len(text.pieces) for text in work.texts)}
            place, former = 0, ""
            async for translation in job:
                former = "" if place in firsts else former
                yield describe_sentence(work.pieces[place], translation, former)
                place, former = place + 1, translation.text or former
        finally:
            self.batcher.cancel(job)

    async def show_attention(self, request: AttentionRequest) -> str:
        """The ticket of a page about a sentence."""
        engine = self.engines[self._pair(request.pair)]
        self._check_length(len(request.text))
        if not request.text.strip():
            raise Refused(422, "there is no sentence to look at; send one in text")
        page: bytes = await self.batcher.call(lambda: attention_page(engine, request.text))
        return self.pages.keep(page)

    async def within_limits(self, task: Awaitable[Result], gone: Callable[[], Awaitable[None]]) -> Result:
        """What a task gives, unless time is up or the client leaves before; then the task is cancelled."""
        work, leaving = asyncio.ensure_future(task), asyncio.ensure_future(gone())
        try:
            await asyncio.wait({work, leaving}, timeout=self.limits.seconds, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            left = leaving.done()
        finally:
            for each in (work, leaving):
                each.cancel()
            await asyncio.gather(work, leaving, return_exceptions=True)
        if left:
            self.metrics.saw_drop(CLIENT_LEFT)
            raise ClientGone
        raise self.out_of_time()

    def out_of_time(self) -> Refused:
        """Counts a request that took too long, and says so."""
        self.metrics.saw_drop(TIME_WAS_UP)
        return Refused(503, f"this took longer than {self.limits.seconds:g} s; send less text, or try again later")
