"""The paper's figures, and what heads do in its two systems: drawn from our own models."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from qknorm.inspection.figures import draw_heads
from qknorm.inspection.reading import build_report
from qknorm.inspection.report import MEASURES, TAKE_LARGEST, ModelLook, Report
from qknorm.progress import Progress
from qknorm.studies.grid.jobs import read_result
from qknorm.studies.paper.plan import Plan, Planned
from qknorm.studies.paper.report import NOTHING, WORDS, Extras
from qknorm.studies.tables import Table
from qknorm.training.checkpoint import list_steps

SYSTEM_OF_FIGURE = {"1": "baseline", "2": "qknorm"}
SHOWN = ("relative_entropy", "saturation", "largest_logit", "effective_keys")
SENTENCES = 16
SHORTEST, LONGEST = 8, 20
"""Tokens of the sentences looked at: long enough to show a pattern, short enough to read."""


def look_inside(
    plan: Plan,
    figures: Sequence[str],
    out: Path,
    device: str | None,
    quick: bool,
    progress: Progress,
    warn: Callable[[str], None],
) -> Extras:
    """Draws the figures that are asked for and tables the heads' measures, for each pair; warns of one without runs."""
    pictures: dict[str, Path] = {}
    tables: list[Table] = []
    for pair in dict.fromkeys(each.pair for each in plan.planned) if figures else ():
        runs = _runs_to_look_at(plan, pair)
        if not runs:
            warn(f"{pair}: the figures need both systems of Table 2 with one seed, finished, their weights in {out}")
            continue
        looks = _look(runs, device, progress)
        first = next(iter(runs.values()))
        for figure in figures:
            system = SYSTEM_OF_FIGURE[figure]
            path = out / f"figure-{figure}-{pair}.png"
            draw_heads(Report([looks[system]]), path)
            pictures[f"Figure {figure}, {first.languages}: self-attention of {system}, first encoder layer"] = path
        tables.append(_measures(first, looks))
    return Extras(pictures, tuple(tables), quick)


def _runs_to_look_at(plan: Plan, pair: str) -> dict[str, Planned]:
    """Both systems' runs of the first seed of which both are finished and have their weights; none if there is none."""
    by_seed: dict[int, dict[str, Planned]] = {}
    for each in plan.planned:
        if (each.experiment.name, each.pair) == ("2", pair) and _can_be_loaded(each):
            by_seed.setdefault(each.seed, {})[each.system.name] = each
    systems = SYSTEM_OF_FIGURE.values()
    whole = [seed for seed, runs in by_seed.items() if all(system in runs for system in systems)]
    return {system: by_seed[min(whole)][system] for system in systems} if whole else {}


def _can_be_loaded(planned: Planned) -> bool:
    """Whether a run is finished and its weights are here, not only its results."""
    result = read_result(planned.job.folder)
    return result is not None and bool(result.scores) and bool(list_steps(planned.job.run))


def _look(runs: dict[str, Planned], device: str | None, progress: Progress) -> dict[str, ModelLook]:
    texts = _texts(next(iter(runs.values())))
    folders = [each.job.run for each in runs.values()]
    report = build_report(folders, texts, names=list(runs), device=device, progress=progress)
    return {model.name: model for model in report.models}


def _texts(planned: Planned) -> list[str]:
    """The first sentences of the test set that are neither short nor long; any if none is so."""
    data = planned.data
    sources = [text for text in data.split("test").text(data.source) if text.strip()]
    fitting = [text for text in sources if SHORTEST <= len(data.tokenizer.encode(text)) <= LONGEST]
    return (fitting or sources)[:SENTENCES]


def _measures(planned: Planned, looks: dict[str, ModelLook]) -> Table:
    """Each attention of both systems: measures over its heads, and what the heads look at."""
    rows = []
    for attention in next(iter(looks.values())).attentions:
        for system, model in looks.items():
            if attention in model.attentions:
                measures = model.measures(attention)
                numbers = [_over_heads(name, measures.get(name, ())) for name in SHOWN]
                roles = Counter(model.roles(attention)).most_common()
                rows.append((attention, system, *numbers, ", ".join(f"{count} {role}" for role, count in roles)))
    columns = ("attention", "system", *(MEASURES[name][0] for name in SHOWN), "heads look at")
    count = len(next(iter(looks.values())).sentences)
    notes = tuple(f"{MEASURES[name][0]}: {MEASURES[name][1]}." for name in SHOWN)
    return Table(
        f"What the heads do, {planned.languages}, over {count} test sentences",
        columns,
        tuple(rows),
        WORDS | {"heads look at"},
        (f"Means over heads; of the largest |logit|, the largest. Seed {planned.seed}.", *notes),
    )


def _over_heads(name: str, values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return NOTHING
    return f"{max(known) if name in TAKE_LARGEST else sum(known) / len(known):.3g}"
