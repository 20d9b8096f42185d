"""The study in pictures: the paper's three figures in its own form, and ours."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from qknorm.errors import InputError
from qknorm.files import atomic_path
from qknorm.studies.lp.analysis import LP_ARMS, Measure, Results
from qknorm.studies.lp.design import Arm
from qknorm.studies.lp.records import Point, Record
from qknorm.studies.statistics import mean_and_deviation

GREY = "#777777"
ARM_LOOKS: dict[str, dict[str, Any]] = {
    "same-scale": {"color": "#2f6fb0", "marker": "o"},
    "matched": {"color": "#d9772b", "marker": "s"},
}
LINE_LOOKS: dict[str, dict[str, Any]] = {
    "dot-product": {"color": GREY, "linestyle": "--"},
    "learned-p": {"color": "#3a9a5b", "linestyle": "-."},
    "infinity": {"color": "#8455b0", "linestyle": ":"},
}


def draw_all(results: Results, folder: Path, iterations: int) -> dict[str, Path]:
    """Every picture that the finished runs allow, by what it shows."""
    pictures: dict[str, Path] = {}
    for arm in results.arms():
        if arm not in LP_ARMS:
            continue
        drawings = {
            f"Validation loss by p, mean over folds ({arm})": (draw_validation_curves, f"validation-{arm}.png"),
            f"Training time by p ({arm})": (draw_times, f"time-{arm}.png"),
            f"Validation loss of every fold ({arm})": (draw_folds, f"folds-{arm}.png"),
            f"Scale of every layer ({arm})": (draw_scales, f"scales-{arm}.png"),
        }
        for what, (draw, name) in drawings.items():
            figure = draw(results, arm, iterations)
            pictures[what] = _save(figure, folder / name)
    if pictures:
        pictures["The arms side by side"] = _save(draw_arms(results), folder / "arms.png")
        pictures["Entropy and saturation of attention"] = _save(
            draw_attention_course(results), folder / "attention.png"
        )
    return pictures


# ------------------------------------------------------------------ the paper's figures


def draw_validation_curves(results: Results, arm: Arm, iterations: int) -> Figure:
    """The paper's figure 1: a curve for every p, averaged over folds; beside it the last three quarters, closer."""
    figure, panels = _new_figure(1, 2, 5.4, 3.8)
    whole, close = panels[0]
    ends: list[float] = []
    for p in results.exponents(arm):
        records = list(results.by_fold(arm, p).values())
        for axes in (whole, close):
            axes.plot(*_mean_course(records, "validation"), **_p_look(p, results.exponents(arm)), label=f"p = {p:g}")
        late = [value for at, value in zip(*_mean_course(records, "validation"), strict=True) if at >= iterations / 4]
        ends.extend(value for value in late if math.isfinite(value))
    _draw_control(results, (whole, close))
    if ends:
        room = 0.05 * (max(ends) - min(ends)) or 0.01
        close.set_xlim(iterations / 4, iterations)
        close.set_ylim(min(ends) - room, max(ends) + room)
    whole.set_ylabel("validation cross-entropy (nats)")
    whole.legend(fontsize="small", frameon=False)
    close.set_title("the last three quarters", fontsize="medium")
    whole.set_title(f"{arm}: mean over folds", fontsize="medium")
    _label_iterations([whole, close])
    return figure


def draw_times(results: Results, arm: Arm, iterations: int) -> Figure:
    """The paper's figure 2: box plots: medians, quartiles, 1.5 IQR whiskers, outliers; means as diamonds."""
    figure, panels = _new_figure(1, 1, 6.4, 3.8)
    axes: Axes = panels[0][0]
    exponents = results.exponents(arm)
    times = [
        [record.ms_per_iteration * iterations / 1_000 for record in results.by_fold(arm, p).values()] for p in exponents
    ]
    axes.boxplot(
        times,
        whis=1.5,
        showmeans=True,
        medianprops={"color": "#d9772b"},
        meanprops={"marker": "D", "markerfacecolor": "#3a9a5b", "markeredgecolor": "white", "markersize": 6},
        flierprops={"markersize": 4},
    )
    axes.set_xticks(range(1, len(exponents) + 1), labels=[f"{p:g}" for p in exponents])
    axes.set_xlabel("p")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("training time of a run (s)")
    axes.set_title(f"{arm}: training time by p", fontsize="medium")
    return figure


def draw_folds(results: Results, arm: Arm, iterations: int) -> Figure:
    """The paper's figure 3: validation loss against iterations, a panel for every fold."""
    exponents = results.exponents(arm)
    folds = sorted({fold for p in exponents for fold in results.by_fold(arm, p)})
    columns = min(5, len(folds))
    rows = -(-len(folds) // columns)
    figure, panels = _new_figure(rows, columns, 2.9 if columns > 2 else 4.4, 2.6, share=True)
    flat = [axes for row in panels for axes in row]
    for axes, fold in zip(flat, folds, strict=False):
        for p in exponents:
            record = results.record(arm, p, fold)
            if record is not None:
                axes.plot(*_mean_course([record], "validation"), **_p_look(p, exponents), label=f"p = {p:g}")
        control = results.record("dot-product", None, fold)
        if control is not None:
            axes.plot(*_mean_course([control], "validation"), **LINE_LOOKS["dot-product"], label="dot product")
        axes.set_title(f"fold {fold}", fontsize="small")
    for axes in flat[len(folds) :]:
        axes.set_visible(False)
    _zoom_to_late(flat[: len(folds)], results, arm, iterations)
    for row in panels:
        row[0].set_ylabel("validation loss", fontsize="small")
    _label_iterations(flat[max(0, len(folds) - columns) : len(folds)])
    _share_legend(figure, flat[0])
    return figure


# ------------------------------------------------------------------ ours


def draw_arms(results: Results) -> Figure:
    """Final and best loss against p, as differences from p = 2 on the same folds; arms without p as lines."""
    figure, panels = _new_figure(1, 2, 5.2, 3.8, share="rows")
    measures: tuple[Measure, Measure] = ("final", "best")
    for axes, measure in zip(panels[0], measures, strict=True):
        for arm in LP_ARMS:
            if results.exponents(arm):
                values = {p: _differences(results, arm, p, measure) for p in results.exponents(arm)}
                _draw_against_p(axes, arm, values)
        for arm, p in results.variants():
            if arm in LINE_LOOKS:
                _draw_level(axes, arm, _differences(results, arm, p, measure))
        axes.set_xlabel("p")
        axes.set_title(f"{measure} validation loss", fontsize="medium")
    panels[0][0].set_ylabel("nats above p = 2 on the same fold, mean ± sd", fontsize="small")
    panels[0][0].legend(fontsize="small", frameon=False)
    return figure


def _differences(results: Results, arm: Arm, p: float | None, measure: Measure) -> list[float]:
    baseline, records = results.by_fold("same-scale", 2.0), results.by_fold(arm, p)
    return [getattr(records[fold], measure) - getattr(baseline[fold], measure) for fold in records if fold in baseline]


def _draw_against_p(axes: Axes, arm: Arm, values: Mapping[float, Sequence[float]]) -> None:
    nudge = -0.02 if arm == "same-scale" else 0.02
    means, deviations = zip(*map(mean_and_deviation, values.values()), strict=True)
    bars = [deviation if math.isfinite(deviation) else 0.0 for deviation in deviations]
    look = {**ARM_LOOKS[arm], "capsize": 3, "linewidth": 1.4, "markersize": 5}
    axes.errorbar([p + nudge for p in values], means, bars, label=arm, **look)


def _draw_level(axes: Axes, arm: Arm, values: Sequence[float]) -> None:
    """A line at the mean; a band over its standard deviation."""
    mean, deviation = mean_and_deviation(values)
    if not math.isfinite(mean):
        return
    axes.axhline(mean, label=arm, linewidth=1.4, **LINE_LOOKS[arm])
    if math.isfinite(deviation):
        axes.axhspan(mean - deviation, mean + deviation, color=LINE_LOOKS[arm]["color"], alpha=0.12, linewidth=0)


def draw_scales(results: Results, arm: Arm, iterations: int) -> Figure:
    """The scale of every layer, over its start, a panel for every p; deeper layers are darker. Mean over folds."""
    exponents = results.exponents(arm)
    columns = min(4, len(exponents))
    rows = -(-len(exponents) // columns)
    figure, panels = _new_figure(rows, columns, 2.9 if columns > 1 else 4.4, 2.6, share=True)
    flat = [axes for row in panels for axes in row]
    for axes, p in zip(flat, exponents, strict=False):
        records = list(results.by_fold(arm, p).values())
        start = records[0].curve[0].scales
        for layer in range(len(start)):
            at, values = _mean_course(records, "scales", layer)
            shade = matplotlib.colormaps["Blues"](0.35 + 0.6 * (layer + 1) / len(start))
            axes.plot(at, np.asarray(values) / start[layer], color=shade, linewidth=1.4, label=f"layer {layer + 1}")
        axes.set_title(f"p = {p:g}, from {start[0]:.3g}", fontsize="small")
    for axes in flat[len(exponents) :]:
        axes.set_visible(False)
    for row in panels:
        row[0].set_ylabel("scale / its start", fontsize="small")
    _label_iterations(flat[max(0, len(exponents) - columns) : len(exponents)])
    _share_legend(figure, flat[0])
    return figure


def draw_attention_course(results: Results) -> Figure:
    """Entropy and saturation along training, mean over layers and folds: a column for every arm of Lp."""
    arms = [arm for arm in results.arms() if arm in LP_ARMS]
    figure, panels = _new_figure(2, len(arms), 4.8, 2.9, share="rows")
    names = {"entropy": "entropy / log(keys)", "saturation": "share of saturated queries"}
    for row, (what, label) in zip(panels, names.items(), strict=True):
        for axes, arm in zip(row, arms, strict=True):
            for p in results.exponents(arm):
                records = list(results.by_fold(arm, p).values())
                axes.plot(*_mean_course(records, what), **_p_look(p, results.exponents(arm)), label=f"p = {p:g}")
            _draw_control(results, (axes,), what)
            if what == "entropy":
                axes.set_title(arm, fontsize="medium")
        row[0].set_ylabel(label, fontsize="small")
    _label_iterations(panels[-1])
    _share_legend(figure, panels[0][0])
    return figure


# ------------------------------------------------------------------ parts


def _mean_course(records: Sequence[Record], what: str, layer: int | None = None) -> tuple[list[int], list[float]]:
    """Iterations and the mean over runs of a measure: of a layer, or over layers where it has some."""
    at = [point.iteration for point in records[0].curve]
    return at, [
        float(np.mean([_value(record.curve[place], what, layer) for record in records])) for place in range(len(at))
    ]


def _value(point: Point, what: str, layer: int | None) -> float:
    value = getattr(point, what)
    if isinstance(value, tuple):
        return float(np.mean(value)) if layer is None else float(value[layer])
    return float(value)


def _p_look(p: float, exponents: Sequence[float]) -> dict[str, Any]:
    """p = 2 in black; the others from blue to red in their order."""
    if p == 2:
        return {"color": "black", "linewidth": 2.0, "zorder": 3}
    place = sorted(exponents).index(p) / max(1, len(exponents) - 1)
    return {"color": matplotlib.colormaps["turbo"](0.08 + 0.84 * place), "linewidth": 1.4}


def _draw_control(results: Results, panels: Sequence[Axes], what: str = "validation") -> None:
    control = list(results.by_fold("dot-product", None).values())
    for axes in panels if control else ():
        axes.plot(*_mean_course(control, what), **LINE_LOOKS["dot-product"], linewidth=1.4, label="dot product")


def _zoom_to_late(panels: Sequence[Axes], results: Results, arm: Arm, iterations: int) -> None:
    """The range of losses after the first tenth, for all panels: the first losses would hide the rest."""
    late = [
        point.validation
        for p in results.exponents(arm)
        for record in results.by_fold(arm, p).values()
        for point in record.curve
        if point.iteration >= iterations / 10 and math.isfinite(point.validation)
    ]
    if late and max(late) > min(late):
        room = 0.05 * (max(late) - min(late))
        for axes in panels:
            axes.set_ylim(min(late) - room, max(late) + room)


def _share_legend(figure: Figure, axes: Axes) -> None:
    """One legend for all panels, below them."""
    handles, labels = axes.get_legend_handles_labels()
    columns = min(8, len(labels))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize="small")


def _label_iterations(panels: Sequence[Axes]) -> None:
    for axes in panels:
        axes.set_xlabel("iteration", fontsize="small")
        axes.tick_params(labelbottom=True)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
        axes.xaxis.set_major_formatter(lambda at, _: f"{at:,.0f}")


def _new_figure(
    rows: int, columns: int, width: float, height: float, share: bool | str = False
) -> tuple[Figure, list[list[Axes]]]:
    figure = Figure(figsize=(columns * width, rows * height + 0.3), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    how = {"sharey": "row", "sharex": True} if share == "rows" else {"sharey": share, "sharex": share}
    panels = figure.subplots(rows, columns, squeeze=False, **how)
    for axes in panels.flat:
        axes.grid(color="0.92", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize="small")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    return figure, panels.tolist()


def _save(figure: Figure, path: Path) -> Path:
    try:
        with atomic_path(path) as partial:
            figure.savefig(partial, format="png")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; make room or get write access") from error
    return path
