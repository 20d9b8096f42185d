"""Loads runs and serves them until told to stop."""

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

from qknorm.decoding.translate import TextTranslator
from qknorm.errors import InputError
from qknorm.serving.limits import Limits

OWN_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


def name_pairs(translators: Sequence[TextTranslator]) -> dict[str, TextTranslator]:
    """Translators by the names of their pairs, such as gl-en; a second one of the same pair is gl-en-2."""
    named: dict[str, TextTranslator] = {}
    for translator in translators:
        pair = f"{translator.source}-{translator.target}"
        name, number = pair, 1
        while name in named:
            number += 1
            name = f"{pair}-{number}"
        named[name] = translator
    return named


def make_server(
    engines: Mapping[str, TextTranslator],
    limits: Limits,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    names: Sequence[str] = (),
) -> Any:
    """A uvicorn server; `run()` serves until SIGINT or SIGTERM, and then finishes what it began.

    Bound to this machine alone it answers only to its own names and those in `names`, so that no page from elsewhere
    can reach it by a name that was made to point here.
    """
    try:
        import uvicorn

        from qknorm.serving.app import create_app
        from qknorm.serving.connections import ImpatientProtocol
    except ImportError as error:
        raise InputError(f"serving needs the package {error.name}; get it with pip install 'qknorm[serve]'") from None
    hosts = frozenset({*OWN_NAMES, host.lower(), *(name.lower() for name in names)}) if is_local(host) else None
    app = create_app(engines, limits, api_key=api_key, hosts=hosts)
    room = limits.requests + limits.waiting
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        lifespan="on",
        http=ImpatientProtocol,
        ws="none",
        access_log=False,
        server_header=False,
        log_level="warning",
        limit_concurrency=4 * room + 64,
        timeout_graceful_shutdown=limits.grace_seconds,
    )
    return uvicorn.Server(config)


def is_local(host: str) -> bool:
    """Whether only this machine reaches a server bound to this host."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
