"""`qknorm serve`."""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from qknorm.cli.display import console, parse, warn
from qknorm.cli.translate import refuse_exported, which_checkpoint
from qknorm.errors import InputError
from qknorm.serving.limits import Limits

KEY_VARIABLE = "QKNORM_API_KEY"


@dataclass(frozen=True)
class Arguments:
    """Serves translators: a page to use in a browser, and a JSON API described at /openapi.json.

    Examples:

      qknorm serve runs/gl-en

      qknorm serve runs/gl-en runs/en-gl --quantize int8 --port 9000

      qknorm serve runs/gl-en --host 0.0.0.0 --api-key-file key.txt --limits.characters 5000
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders that `qknorm train` wrote, one for each pair of languages."""
    host: str = "127.0.0.1"
    """Address to listen on; this machine alone unless told otherwise, 0.0.0.0 for all that can reach it."""
    port: int = 8000
    """Port to listen on; 0 for any that is free."""
    names: tuple[str, ...] = ()
    """Further names that a server on this machine alone may be called by, as behind a proxy that keeps them."""
    api_key_file: Path | None = None
    """File with a key that requests must carry; QKNORM_API_KEY in the environment does the same."""
    checkpoint: str = "best"
    """best, last or a step."""
    device: str | None = None
    """cpu or cuda; a GPU where there is one if not given."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What to compute in; bfloat16 is faster where the processor has instructions for it."""
    quantize: Literal["int8"] | None = None
    """Compute linear layers in 8-bit integers, on the CPU: faster than float32, at a small loss."""
    limits: Limits = field(default_factory=Limits)


def run(words: Sequence[str]) -> None:
    """Parses, loads, serves until told to stop."""
    arguments: Arguments = parse(Arguments, words, "serve")
    if not arguments.runs:
        raise InputError("name a run folder, or several; qknorm serve --help has examples")
    if not 0 <= arguments.port < 65_536:
        raise InputError(f"--port is {arguments.port}; give one from 0 to 65535")
    for each in arguments.runs:
        refuse_exported(each)
    key = read_key(arguments.api_key_file)
    from qknorm.serving.server import is_local, make_server, name_pairs  # these import PyTorch, which help does without
    from qknorm.training.run_folder import load_translator

    translators = [
        load_translator(
            each,
            checkpoint=which_checkpoint(arguments.checkpoint),
            device=arguments.device,
            precision=arguments.precision,
            quantize=arguments.quantize,
        )
        for each in arguments.runs
    ]
    engines = name_pairs(translators)
    server = make_server(
        engines, arguments.limits, host=arguments.host, port=arguments.port, api_key=key, names=arguments.names
    )
    if not is_local(arguments.host) and key is None:
        warn(f"anyone who reaches {arguments.host} may translate; set {KEY_VARIABLE} to want a key")
    _serve(server, arguments, list(engines))


def read_key(path: Path | None) -> str | None:
    """The key of a file or of the environment; refuses one that is empty or no header could carry."""
    if path is None:
        key, where = os.environ.get(KEY_VARIABLE), KEY_VARIABLE
        if key is None:
            return None
    else:
        where = str(path)
        try:
            key = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise InputError(f"{path} cannot be read; name a file with the key in it") from None
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise InputError(f"{where} holds no key: one word of ASCII characters, such as openssl rand -hex 16 makes")
    return key


def _serve(server: object, arguments: Arguments, pairs: list[str]) -> None:
    try:
        found = socket.getaddrinfo(arguments.host, arguments.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        listener = socket.create_server(address, family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"cannot listen on {arguments.host}, port {arguments.port}: {reason}; name others with --host and --port"
        ) from None
    with listener:
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        console.print(f"Serving {', '.join(pairs)} at http://{shown}:{port} · Ctrl-C stops", soft_wrap=True)
        with suppress(KeyboardInterrupt):  # raised once more when all is finished
            server.run(sockets=[listener])  # type: ignore[attr-defined]
