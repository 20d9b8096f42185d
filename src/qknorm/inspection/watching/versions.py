"""The versions of other libraries whose attention is understood; the tests hold the installed ones against it."""

import re
from importlib import metadata
from typing import NamedTuple


class Range(NamedTuple):
    """From one version on, and before another."""

    first: str
    before: str | None

    def holds(self, version: str) -> bool:
        return _numbers(self.first) <= _numbers(version) and (
            self.before is None or _numbers(version) < _numbers(self.before)
        )


SUPPORTED = {
    "torch": Range("2.6", None),
    "transformers": Range("5.1", "6"),  # T5 goes through the library's attention interface from 5.17 on
    "timm": Range("1.0", "2"),
}


def out_of_range(library: str) -> str | None:
    """In words, why the installed version may not be understood; None if it is, or if there is none."""
    try:
        version = metadata.version(library)
    except metadata.PackageNotFoundError:
        return None
    known = SUPPORTED[library]
    if known.holds(version):
        return None
    upper = "" if known.before is None else f", before {known.before}"
    return f"{library} {version} is not one of the versions that are understood ({known.first} and later{upper})"


def _numbers(version: str) -> tuple[int, ...]:
    """1.0.30+cpu as (1, 0, 30): what is no number, and all after it, is left out."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()
