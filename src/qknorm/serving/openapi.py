"""What the description of the API says beyond what its types do: the limits, the pairs, and what can go wrong."""

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI

from qknorm.serving.limits import Limits
from qknorm.serving.streaming import MEDIA_TYPE
from qknorm.version import __version__

SUMMARY = "Translates text. Every error is an object with one sentence, `detail`."
ALWAYS = {"421": "The server was called by a name that is not its own."}
USES_A_MODEL = {
    "400": "The body could not be read.",
    "408": "The body did not arrive in time.",
    "413": "The request is larger than allowed.",
    "422": "The request is not as described here.",
    "429": "Too many requests wait; Retry-After says when to come back.",
    "500": "The model failed.",
    "503": "Time was up, or the server is stopping.",
}
LOCKED = {"401": "The key is missing or wrong."}


def describe(app: FastAPI, pairs: Iterable[str], limits: Limits, *, locked: bool) -> None:
    """Has the application serve its description with these facts in it."""
    app.version, app.description = __version__, SUMMARY
    names = list(pairs)

    def description() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _with_facts(FastAPI.openapi(app), names, limits, locked)
        return app.openapi_schema

    app.openapi = description  # type: ignore[method-assign]


def _with_facts(schema: dict[str, Any], pairs: list[str], limits: Limits, locked: bool) -> dict[str, Any]:
    parts = schema["components"]["schemas"]
    for unused in ("HTTPValidationError", "ValidationError"):
        parts.pop(unused, None)
    parts["Problem"] = {
        "type": "object",
        "title": "Problem",
        "description": "What is wrong with a request, and the way out.",
        "properties": {"detail": {"type": "string"}},
        "required": ["detail"],
    }
    text = {"type": "string", "maxLength": limits.characters}
    asked = parts["TranslateRequest"]["properties"]
    asked["text"]["anyOf"] = [text, {"type": "array", "items": text, "maxItems": limits.sentences}]
    for field in ("beam", "nbest"):
        bounded = asked[field].get("anyOf", [asked[field]])[0]
        bounded["maximum"] = limits.beam
    parts["AttentionRequest"]["properties"]["text"] |= {**text, "pattern": r"\S"}
    for request in ("TranslateRequest", "AttentionRequest"):
        parts[request]["properties"]["pair"]["anyOf"][0]["enum"] = pairs
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            _describe_operation(path, method, operation, locked)
    return schema


def _describe_operation(path: str, method: str, operation: dict[str, Any], locked: bool) -> None:
    problems = {**ALWAYS, **(USES_A_MODEL if method == "post" else {})}
    if locked and "security" in operation:
        problems |= LOCKED
    if "{ticket}" in path:
        problems |= {"404": "The page is no longer kept."}
        operation["responses"]["200"]["content"] = {"text/html": {"schema": {"type": "string"}}}
    if path == "/translate/stream":
        operation["responses"]["200"]["content"] = {MEDIA_TYPE: {"schema": {"type": "string"}}}
    operation["responses"].pop("422", None)
    reference = {"schema": {"$ref": "#/components/schemas/Problem"}}
    for status, words in problems.items():
        if status not in operation["responses"]:
            operation["responses"][status] = {"description": words, "content": {"application/json": reference}}
