"""A report as one page of HTML that opens anywhere: nothing is fetched, and its own policy forbids it."""

import base64
import hashlib
import html
import json
from importlib import resources
from pathlib import Path

from qknorm.errors import InputError
from qknorm.files import atomic_path
from qknorm.inspection.report import Report
from qknorm.version import __version__

__all__ = ["render_page", "write_page"]

_UNSAFE_IN_SCRIPT = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}
"""Letters that could end a script element or a line of JavaScript; inside JSON strings their escapes mean the same."""


def write_page(report: Report, path: Path) -> None:
    """Writes a report as HTML."""
    try:
        with atomic_path(path) as partial:
            # half a pair of surrogates, which broken text can hold, has no UTF-8, but an escape that JSON reads
            partial.write_bytes(render_page(report).encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; make room or get write access") from error


def render_page(report: Report) -> str:
    """The whole page: template, style, script and data in one text."""
    style, script = _read("page.css"), _script()
    parts = {
        "policy": _policy(style, script),
        "generator": f"qknorm {__version__}",
        "title": html.escape(report.title),
        "style": style,
        "report": json.dumps(report.to_json(), ensure_ascii=False, allow_nan=False).translate(_UNSAFE_IN_SCRIPT),
        "script": script,
    }
    before, *rest = _read("page.html").split("{{")
    pieces = [before]
    for piece in rest:  # in one pass, so that nothing inside the data is taken for a place to fill
        name, after = piece.split("}}", 1)
        pieces += [parts[name], after]
    return "".join(pieces)


def _script() -> str:
    """The files of js/ in the order of their names, as one script that leaves no name in the page."""
    folder = resources.files(__name__) / "js"
    sources = sorted((file for file in folder.iterdir() if file.name.endswith(".js")), key=lambda file: file.name)
    return "(() => {\n'use strict';\n" + "\n".join(file.read_text(encoding="utf-8") for file in sources) + "})();\n"


def _policy(style: str, script: str) -> str:
    """Allows this very style and script, and nothing from anywhere."""
    allowed = {"style-src": _digest(style), "script-src": _digest(script), "img-src": "data:"}
    rules = ["default-src 'none'", *(f"{kind} {what}" for kind, what in allowed.items()), "base-uri 'none'"]
    return "; ".join([*rules, "form-action 'none'"])


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"


def _read(name: str) -> str:
    return (resources.files(__name__) / name).read_text(encoding="utf-8")
