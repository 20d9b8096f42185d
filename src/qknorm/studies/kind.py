"""Which study a folder is of: none writes its pages over those of another."""

import json
from pathlib import Path
from typing import Any

from qknorm.errors import InputError

ABOUT = "study.json"
"""In a study's folder: what all of its runs share."""
_TOLD_BY = {"settings": "lp", "paper": "paper", "text": "tune"}
"""The study, by the first of these that its file has."""


def read_study(out: Path, kind: str) -> dict[str, Any] | None:
    """What the folder of a study of this kind says of it; None before there is one, refused where it is of another."""
    file = out / ABOUT
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        found = next(study for key, study in _TOLD_BY.items() if key in content)
    except (OSError, ValueError, TypeError, StopIteration):
        raise InputError(f"{file} is damaged; move it away, or name another folder") from None
    if found != kind:
        raise InputError(f"{out} holds a study of qknorm study {found}; name another folder")
    about: dict[str, Any] = content
    return about
