"""Which study a folder is of: none writes its pages over those of another."""

import json
from pathlib import Path
from typing import Any

from qknorm import files
from qknorm.errors import InputError
from qknorm.text.prepared import MANIFEST

ABOUT = "study.json"
"""In a study's folder: which it is, or what only one kind of study tells there."""


def require_study(out: Path, study: str) -> None:
    """Refuses a folder that holds another study than this one, as the command names it: tune, lp, paper --quick …"""
    found = _study_of(out)
    if found not in (None, study):
        raise InputError(f"{out} holds a study of qknorm study {found}; name another folder")


def mark(out: Path, study: str) -> None:
    """Writes down which study the folder is of."""
    if not (out / ABOUT).is_file():
        files.write_json(out / ABOUT, {"study": study})


def read_about(out: Path) -> dict[str, Any] | None:
    """What the folder's own file tells; None where there is none."""
    file = out / ABOUT
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror})") from None
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise InputError(f"{file} is damaged; move it away, or name another folder")
    return content


def _study_of(out: Path) -> str | None:
    """None where no study has begun; by its runs where it began before there was a file that tells."""
    about = read_about(out)
    if about is None:
        return _by_runs(out)
    if isinstance(about.get("study"), str):
        return str(about["study"])
    for key, study in (("settings", "lp"), ("text", "tune")):
        if key in about:
            return study
    raise InputError(f"{out / ABOUT} is damaged; move it away, or name another folder")


def _by_runs(out: Path) -> str | None:
    for job in out.glob("runs/*/job.json"):
        try:
            if json.loads(job.read_text(encoding="utf-8")).get("split") == "dev":
                return "tune"
        except (OSError, ValueError, AttributeError):  # damaged: it tells nothing, and whoever needs it says so
            continue
        quick = (out / "data" / MANIFEST).is_file() and (out / "corpus").is_dir()
        return "paper --quick" if quick else "paper"
    return None
