"""The HTTP API: which paths there are and what each of them does."""

import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel
from starlette.exceptions import HTTPException as FrameworkException

from qknorm.decoding.translate import TextTranslator
from qknorm.serving import messages
from qknorm.serving.batching import ModelFailure
from qknorm.serving.gate import Full
from qknorm.serving.guard import Application, Guard
from qknorm.serving.limits import Limits
from qknorm.serving.metrics import CONTENT_TYPE
from qknorm.serving.openapi import describe
from qknorm.serving.service import ClientGone, Refused, Result, Service, Work
from qknorm.serving.streaming import HeldStream

PAGE = Path(__file__).parent / "page"
FRESH = {"Cache-Control": "no-cache"}
IN_OUR_WORDS = {
    "There was an error parsing the body": 'the body cannot be read; send an object such as {"text": "…"}, in UTF-8',
    "Not Found": "there is nothing at this path; see /openapi.json for those there are",
    "Method Not Allowed": "this path does not take that method; see /openapi.json for those it takes",
}
"""What the framework says by itself, as we say it."""


def create_app(
    engines: Mapping[str, TextTranslator],
    limits: Limits | None = None,
    *,
    api_key: str | None = None,
    hosts: frozenset[str] | None = None,
) -> Application:
    """An ASGI application that translates with these models, by the names of their pairs.

    With an `api_key`, all that uses a model wants `Authorization: Bearer KEY`; `hosts` are the names that the server
    may be called by, any if not given.
    """
    service = Service(engines, limits or Limits())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.batcher.start()
        yield
        service.batcher.stop()

    app = FastAPI(title="qknorm", docs_url=None, redoc_url=None, lifespan=lifespan, redirect_slashes=False)
    locks = [Depends(_lock(api_key))] if api_key else []
    _add_translation(app, service, locks)
    _add_attention(app, service, locks)
    _add_state(app, service, locks)
    _add_page(app)
    _add_problems(app)
    describe(app, engines, service.limits, locked=bool(api_key))
    return Guard(app, service.limits, service.metrics, hosts)


def _lock(key: str) -> Callable[..., Awaitable[None]]:
    async def check(
        given: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))],
    ) -> None:
        if given is None or not hmac.compare_digest(given.credentials.encode("utf-8"), key.encode("utf-8")):
            detail = "this server wants its key, as Authorization: Bearer KEY"
            raise HTTPException(401, detail, {"WWW-Authenticate": "Bearer"})

    return check


def _add_translation(app: FastAPI, service: Service, locks: list[Any]) -> None:
    @app.post("/translate", dependencies=locks)
    async def translate(asked: messages.TranslateRequest, request: Request) -> messages.TranslateResponse:
        """Translates one text or many; answers when all are done."""
        work = service.check(asked)
        sentences = iter(await _let_in(service, request, _gather(service, work)))
        texts = [messages.describe_text(text, [next(sentences) for _ in text.pieces]) for text in work.texts]
        return messages.TranslateResponse(pair=work.options.pair, translations=texts)

    @app.post("/translate/stream", dependencies=locks, response_class=StreamingResponse)
    async def translate_in_a_stream(asked: messages.TranslateRequest, request: Request) -> Response:
        """Translates one text or many, and sends each sentence when it is done, as a line of JSON.

        The first line has the number of sentences, the last one `done`, or `error` if something went wrong.
        """
        work = service.check(asked)
        entered = await service.within_limits(service.gate.enter(), lambda: _gone(request))
        return HeldStream(service, work, release=lambda: service.gate.leave(entered))


def _add_attention(app: FastAPI, service: Service, locks: list[Any]) -> None:
    @app.post("/attention", dependencies=locks)
    async def look(asked: messages.AttentionRequest, request: Request) -> messages.AttentionResponse:
        """Makes a page that shows all attention weights while a sentence is translated, and says where it stands."""
        ticket = await _let_in(service, request, service.show_attention(asked))
        return messages.AttentionResponse(address=f"/attention/{ticket}")

    @app.get("/attention/{ticket}", response_class=Response)
    async def page(ticket: str) -> Response:
        """A page that POST /attention made, while it is kept."""
        found = service.pages.find(ticket)
        if found is None:
            raise HTTPException(404, "this page is no longer kept; ask for it again")
        # its own policy, inside, forbids more than ours; ours would forbid its own style
        own = {"Content-Security-Policy": "frame-ancestors 'self'", "X-Frame-Options": "SAMEORIGIN"}
        return Response(found, media_type="text/html; charset=utf-8", headers=own)


def _add_state(app: FastAPI, service: Service, locks: list[Any]) -> None:
    pairs = [messages.describe_pair(name, each.source, each.target) for name, each in service.engines.items()]
    allowed = messages.PublicLimits.model_validate(service.limits.model_dump())

    @app.get("/pairs", dependencies=locks)
    async def list_pairs() -> messages.PairsResponse:
        """The pairs of languages there are, and what a request may ask for."""
        return messages.PairsResponse(pairs=pairs, limits=allowed)

    @app.get("/health")
    async def health() -> messages.State:
        """Answers as long as the server lives."""
        return messages.State(status="alive")

    @app.get("/ready", responses={503: {"model": messages.State}})
    async def ready(response: Response) -> messages.State:
        """Whether the server translates."""
        if not service.batcher.alive:
            response.status_code = 503
            return messages.State(status="stopping")
        return messages.State(status="ready")

    @app.get("/metrics", dependencies=locks, response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Counts and times, in the text format of Prometheus."""
        return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})


def _add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE / "index.html", headers=FRESH)

    app.mount("/static", _Static(directory=PAGE))


class _Static(StaticFiles):
    def file_response(self, *words: Any, **named: Any) -> Response:
        response = super().file_response(*words, **named)
        response.headers.update(FRESH)
        return response


async def _let_in(service: Service, request: Request, task: Awaitable[Result]) -> Result:
    """What a task gives, done when there is room for it, as long as somebody waits."""

    async def wait_and_work() -> Result:
        entered = await service.gate.enter()
        try:
            return await task
        finally:
            service.gate.leave(entered)

    try:
        return await service.within_limits(wait_and_work(), lambda: _gone(request))
    finally:
        if hasattr(task, "close"):
            task.close()  # one that was never let in was never awaited


async def _gone(request: Request) -> None:
    """Returns when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _gather(service: Service, work: Work) -> list[messages.SentenceOut]:
    async with aclosing(service.translate(work)) as sentences:
        return [sentence async for sentence in sentences]


# ------------------------------------------------------------------ what goes wrong


def _add_problems(app: FastAPI) -> None:
    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        headers = {"Retry-After": "5"} if error.status == 503 else None
        return _problem(error.status, error.detail, headers)

    @app.exception_handler(Full)
    async def full(request: Request, error: Full) -> Response:
        return _problem(429, "too many requests wait already; try again later", {"Retry-After": str(error.seconds)})

    @app.exception_handler(ClientGone)
    async def gone(request: Request, error: ClientGone) -> Response:
        return _problem(499, "nobody waits for this answer")

    @app.exception_handler(ModelFailure)
    async def failed(request: Request, error: ModelFailure) -> Response:
        return _problem(500, "the model failed on this text; the server's log says why")

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _problem(422, _in_words(error))

    @app.exception_handler(FrameworkException)
    async def raised(request: Request, error: FrameworkException) -> Response:
        return _problem(error.status_code, IN_OUR_WORDS.get(error.detail, error.detail), error.headers)

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        return _problem(500, "something went wrong in the server; its log says what")


def _problem(status: int, detail: str, headers: Mapping[str, str] | None = None) -> Response:
    content: BaseModel = messages.Problem(detail=detail)
    return JSONResponse(json.loads(content.model_dump_json()), status, headers)


def _in_words(error: RequestValidationError) -> str:
    """The first fault by the name of its field, without what was sent."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return 'the body is no valid JSON; send an object such as {"text": "…"}'
    if first["loc"] == ("body",):
        return 'the body is no JSON object; send one such as {"text": "…"}, with Content-Type: application/json'
    place = ".".join(str(part) for part in first["loc"] if part not in ("body", "str", "list[str]"))
    # the name of a field that we do not know is the client's, and may be anything
    known = all(isinstance(part, int) or part.isidentifier() for part in first["loc"]) and len(place) < 100
    name = place.encode("ascii", "replace").decode("ascii") if known and place else "the body"
    return f"{name}: {first['msg']}; see /openapi.json"
