"""What stands before the application: sizes, times, host names and headers of every request."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import HTTPException

from qknorm.serving.limits import Limits
from qknorm.serving.metrics import Metrics

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    b"content-security-policy": POLICY.encode("ascii"),
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"cache-control": b"no-store",
}
"""Sent with every answer that does not say otherwise itself."""

CLOSE = {"Connection": "close"}
"""An answer that leaves the rest of a body unread ends the connection."""


class Guard:
    """Refuses bodies that are too large or too slow and hosts that are not ours; counts; adds headers."""

    def __init__(self, app: Application, limits: Limits, metrics: Metrics, hosts: frozenset[str] | None) -> None:
        """`hosts` are the names that requests may call this server by; any if None."""
        self._app, self._limits, self._metrics, self._hosts = app, limits, metrics, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request by the application, or without it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 499  # as others count it: the client was gone before there was an answer

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                _add_headers(message)
            await send(message)

        try:
            refusal = self._refusal(scope)
            if refusal is None:
                await self._app(scope, self._limited(receive), answer)
            else:
                await _refuse(refusal, answer)
        finally:
            self._metrics.saw_request(_path(scope), status, time.monotonic() - began)

    def _refusal(self, scope: Scope) -> HTTPException | None:
        headers = dict(scope["headers"])
        if self._hosts is not None and _host(headers.get(b"host", b"")) not in self._hosts:
            return HTTPException(421, "this server does not go by that name")
        if int(headers.get(b"content-length", b"0")) > self._limits.body_bytes:
            return self._too_large()
        return None

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"the body is larger than {self._limits.body_bytes:,} bytes; send less", CLOSE)

    def _limited(self, receive: Receive) -> Receive:
        """Counts a body while it arrives, and gives it only so long."""
        received, whole = 0, False
        deadline = asyncio.get_running_loop().time() + self._limits.seconds

        async def limited() -> Message:
            nonlocal received, whole
            if whole:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, "the body did not arrive in time; send it again", CLOSE) from None
            received += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if received > self._limits.body_bytes:
                raise self._too_large()
            return message

        return limited


def _add_headers(message: Message) -> None:
    given = {name.lower() for name, _ in message.get("headers", ())}
    message["headers"] = [
        *message.get("headers", ()),
        *((name, value) for name, value in HEADERS.items() if name not in given),
    ]


def _host(header: bytes) -> str:
    """The name of a Host header, without the port."""
    name = header.decode("latin-1").lower()
    return name.partition("]")[0] + "]" if name.startswith("[") else name.partition(":")[0]


def _path(scope: Scope) -> str:
    """The path as it was declared: no one may make us count names of their own."""
    return str(getattr(scope.get("route"), "path", "other"))


async def _refuse(refusal: HTTPException, send: Send) -> None:
    body = json.dumps({"detail": refusal.detail}).encode("utf-8")
    headers = {"content-type": "application/json", "content-length": str(len(body)), **(refusal.headers or {})}
    encoded = [(name.lower().encode("ascii"), value.encode("ascii")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status_code, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
