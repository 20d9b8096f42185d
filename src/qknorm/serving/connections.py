"""Connections that do not wait for ever: uvicorn times what follows a request, but not what comes before it."""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 20.0
"""How long the head of a request may take to arrive."""


class ImpatientProtocol(H11Protocol):
    """HTTP for uvicorn, which closes connections that begin no request, or never come to the end of its head."""

    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._relax()

    def _watch(self) -> None:
        """Lets time run from the first sign of a request until all of its head is there."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._relax()
        elif self._patience is None:
            self._patience = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _relax(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
