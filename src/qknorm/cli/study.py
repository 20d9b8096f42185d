"""`qknorm study`: the papers' experiments and the search for settings, one word each."""

import importlib
from collections.abc import Sequence

from qknorm.cli.display import console
from qknorm.errors import InputError
from qknorm.text.catalogue import suggestion

STUDIES = {
    "lp": ("qknorm.cli.study_lp", "the second paper's: p of the Lp norm, over folds of a text, with two controls"),
    "paper": ("qknorm.cli.study_paper", "the first paper's: tables, figures and what it left open, ours beside theirs"),
    "tune": (
        "qknorm.cli.study_tune",
        "which settings are best for your corpus: single changes, the best of them joined",
    ),
}


def run(words: Sequence[str]) -> None:
    """Finds the study that the first word names, and hands it the rest."""
    if not words or words[0] in ("-h", "--help"):
        console.print(_overview(), markup=False)
        raise SystemExit(0 if words else 2)
    name, rest = words[0], words[1:]
    if name not in STUDIES:
        raise InputError(f"there is no study {name}{suggestion(name, STUDIES)}")
    importlib.import_module(STUDIES[name][0]).run(rest)


def _overview() -> str:
    width = max(map(len, STUDIES))
    lines = [f"  {name:{width}}  {what}" for name, (_, what) in STUDIES.items()]
    return "\n".join(["usage: qknorm study NAME …", "", *lines, "", "Example: qknorm study lp --quick --out out/lp"])
