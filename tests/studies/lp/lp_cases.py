"""Small studies and made-up records that the tests of the Lp study share."""

from collections.abc import Callable, Iterable

from qknorm.config import LanguageModel, LanguageModelDropout
from qknorm.studies.lp.corpus import Text, make_text
from qknorm.studies.lp.design import Arm, LpStudy, make_run
from qknorm.studies.lp.records import Point, Record

WORDS = "the quick brown fox jumps over a lazy dog; quis custodiet ipsos custodes? ßü\n"


def tiny_study(dropout: float = 0.0, iterations: int = 6, context: int = 12, **more: object) -> LpStudy:
    """Trains in a blink."""
    model = LanguageModel(
        width=16, feed_forward=32, layers=2, heads=2, context=context, dropout=LanguageModelDropout.everywhere(dropout)
    )
    settings = {"fold_count": 3, "batch": 3, "evaluate_every": 4, "warmup": 2, "precision": "float32", **more}
    return LpStudy(model=model, iterations=iterations, **settings)  # type: ignore[arg-type]


def tiny_text() -> Text:
    return make_text("words", WORDS * 6)


def made_up(arm: Arm, p: float | None, fold: int, final: float, best: float | None = None) -> Record:
    """A run whose loss falls in even steps to `best` at iteration 80 and ends at `final`."""
    best = final if best is None else best
    courses = [(at, 4.0 + (best - 4.0) * at / 80) for at in range(0, 81, 20)] + [(100, final)]
    curve = tuple(
        Point(at, loss, loss, scales=(10.0, 12.0), entropy=(0.8, 0.6), saturation=(0.0, 0.1)) for at, loss in courses
    )
    return Record(make_run(arm, p, fold), "mark", curve, 5.0 + (p or 0.0) / 10, {"device": "none", "versions": {}})


def made_up_arm(
    arm: Arm, exponents: Iterable[float | None], folds: int, loss: Callable[[float | None, int], float]
) -> list[Record]:
    """Runs of an arm whose final losses are loss(p, fold)."""
    return [made_up(arm, p, fold, loss(p, fold)) for p in exponents for fold in range(folds)]
