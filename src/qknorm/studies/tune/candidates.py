"""The candidates as data: by factor, the values to try in place of the start's, the likeliest first."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from qknorm.config import Train
from qknorm.errors import InputError
from qknorm.studies.recipes import change
from qknorm.text.catalogue import suggestion

MERGES = "subwords.merges"
"""The one change that is made to the data."""
NONE = "none"
JOINED_SIZES = (2, 3, 4, 6, 9)
"""How many of the winners are joined, besides all: changes that help alone may not help together."""

Changes = Mapping[str, object]


def _values(setting: str, *values: object) -> tuple[Changes, ...]:
    return tuple({setting: value} for value in values)


def _together(settings: Sequence[str], *values: object) -> tuple[Changes, ...]:
    return tuple(dict.fromkeys(settings, value) for value in values)


FACTORS: dict[str, tuple[Changes, ...]] = {
    "merges": _values(MERGES, 1_000, 2_000, 500, 4_000, 8_000),
    "word-dropout": _values("model.dropout.word", 0.0, 0.1, 0.2),
    "schedule": (
        {
            "training.schedule.kind": "cosine",
            "training.schedule.floor": 1e-5,
            "training.max_steps": 25_000,
            "training.stop_after": None,
        },
        {
            "training.schedule.kind": "inverse-sqrt",
            "training.max_steps": 40_000,
            "training.stop_after": 20,
        },
        {
            "training.schedule.kind": "plateau",
            "training.schedule.floor": 5e-5,
            "training.evaluate_every": 100,
            "training.stop_after": None,
        },
    ),
    "steps": _values("training.max_steps", 50_000, 25_000, 12_500),
    "dropout": _together(("model.dropout.residual", "model.dropout.embedding"), 0.2, 0.3, 0.4),
    "bpe-dropout": _values("training.bpe_dropout", 0.1, 0.05, 0.2, 0.0),
    "learning-rate": _values("training.schedule.peak", 1e-3, 7e-4, 4e-4),
    "feed-forward": _values("model.feed_forward", 2_048, 1_024, 512),
    "batch": _values("training.batch_tokens", 8_192, 4_096, 2_048),
    "layers": _together(("model.encoder_layers", "model.decoder_layers"), 6, 5, 4, 3),
    "label-smoothing": _values("training.label_smoothing", 0.1, 0.2, 0.4),
    "heads": _values("model.heads", 8, 4, 2),
    "attention-dropout": _values("model.dropout.attention", 0.1, 0.3, 0.2),
    "feed-forward-dropout": _values("model.dropout.feed_forward", 0.1, 0.3, 0.2),
    "width": _values("model.width", 512, 256),
    "norm": _values("model.norm", "scale", "rms", "layer"),
    "positions": _values("model.positions", "sinusoid", "rotary"),
}
"""Our preset's own values among them, for a search that starts elsewhere.

Where two are joined that set the same, the later one counts: a number of steps goes over the schedule's."""

QUICK = ("merges", "heads", "learning-rate")
"""What the quick form tries if nothing is asked for."""


@dataclass(frozen=True)
class Candidate:
    """Changes of the start; those of the start itself are none."""

    name: str
    changes: Changes = field(hash=False)
    factor: str = ""


START = Candidate("start", {})


def check_factors(names: Sequence[str]) -> None:
    """Refuses a factor that is not known; `none` stands for no factor."""
    for name in names:
        if name not in FACTORS and name != NONE:
            raise InputError(f"--only {name}: there is no such factor{suggestion(name, (*FACTORS, NONE))}")


def single_changes(start: Train, merges: int, only: Sequence[str] = (), values: int | None = None) -> list[Candidate]:
    """One change each: the first value of every factor, then the second ones.

    What the start has already or cannot have is left out; `values` is how many of the rest to take of each factor.
    """
    chosen = [
        [Candidate(_name(factor, each), each, factor) for each in changes if _is_new(start, merges, each)][:values]
        for factor, changes in FACTORS.items()
        if not only or factor in only
    ]
    rounds = itertools.zip_longest(*chosen)
    return [candidate for each in rounds for candidate in each if candidate is not None]


def find_winners(gains: Mapping[Candidate, float], margin: float) -> list[Candidate]:
    """Of each factor the value that gains most, if it gains more than the margin; the largest gain first."""
    best: dict[str, Candidate] = {}
    for candidate, gain in gains.items():
        if gain > margin and gain > gains.get(best.get(candidate.factor, START), -math.inf):
            best[candidate.factor] = candidate
    return sorted(best.values(), key=lambda candidate: -gains[candidate])


def join(start: Train, winners: Sequence[Candidate]) -> list[Candidate]:
    """All winners joined, and the foremost few of them; none where there are not two, or they exclude each other."""
    sizes = sorted({*JOINED_SIZES, len(winners)}, reverse=True)
    joined = []
    for size in (size for size in sizes if 2 <= size <= len(winners)):
        ordered = sorted(winners[:size], key=lambda candidate: list(FACTORS).index(candidate.factor))
        changes = {setting: value for each in ordered for setting, value in each.changes.items()}
        joined.append(Candidate(f"best {size} joined", changes))
    return [each for each in joined if _is_possible(start, each.changes)]


def apply(start: Train, changes: Changes) -> Train:
    """The start's settings with the changes that are not of the data."""
    return change(start, {setting: value for setting, value in changes.items() if setting != MERGES})


def _is_new(start: Train, merges: int, changes: Changes) -> bool:
    return _is_possible(start, changes) and (apply(start, changes) != start or changes.get(MERGES, merges) != merges)


def _is_possible(start: Train, changes: Changes) -> bool:
    """Whether the settings go together: a width is to be divided by the heads, for one."""
    try:
        apply(start, changes)
    except InputError:
        return False
    return True


def _name(factor: str, changes: Changes) -> str:
    value = next(iter(changes.values()))
    return f"{factor} {value:g}" if isinstance(value, int | float) else f"{factor} {value}"
