"""Translations as lines of JSON, each sent when it is made."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from qknorm.serving.batching import ModelFailure
from qknorm.serving.service import CLIENT_LEFT, TIME_WAS_UP, Service, Work

MEDIA_TYPE = "application/x-ndjson"
READING = 30.0
"""Seconds beyond those of any request that a client may take to read a stream."""


class HeldStream(StreamingResponse):
    """A stream that lets go of the place it holds when it ends, however that comes about.

    It has a line with the number of sentences, one for each of them, and one that says how it ended.
    """

    def __init__(self, service: Service, work: Work, release: Callable[[], None]) -> None:
        self._lines = self._make_lines(service, work)
        super().__init__(self._lines, media_type=MEDIA_TYPE)
        self._service, self._release = service, release
        self._is_settled = False  # sent to its end, or counted as given up

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the lines; gives up on a client that takes forever to read them."""
        reason = CLIENT_LEFT
        try:
            async with asyncio.timeout(self._service.limits.seconds + READING):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            reason = TIME_WAS_UP
        finally:
            await self._lines.aclose()
            self._release()
            if not self._is_settled:
                self._service.metrics.saw_drop(reason)

    async def _make_lines(self, service: Service, work: Work) -> AsyncGenerator[str]:
        yield _line(pair=work.options.pair, sentences=len(work.pieces))
        owners = [text for text, pieces in enumerate(work.texts) for _ in pieces.pieces]
        deadline = asyncio.get_running_loop().time() + service.limits.seconds
        try:
            async with aclosing(service.translate(work)) as sentences:
                for owner in owners:
                    async with asyncio.timeout_at(deadline):
                        sentence = await anext(sentences)
                    yield _line(text=owner, sentence=sentence.model_dump(mode="json"))
            last = _line(done=True, after=[text.after for text in work.texts])
        except TimeoutError:
            last = _line(error=service.out_of_time().detail)
            self._is_settled = True
        except ModelFailure:
            last = _line(error="the model failed on this text; the server's log says why")
        yield last
        self._is_settled = True


def _line(**content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n"
