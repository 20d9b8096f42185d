"""The course of a training as one picture: losses, BLEU, learning rate, and the scale g of every layer."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from qknorm.errors import InputError
from qknorm.files import atomic_path
from qknorm.training.metrics import METRICS_FILE, read_metrics, scale_numbers

Rows = Sequence[Mapping[str, Any]]
Curve = tuple[NDArray[np.float64], NDArray[np.float64]]

BLUE, ORANGE, GREEN, PURPLE = "#2f6fb0", "#d9772b", "#3a9a5b", "#8455b0"
KIND_LOOKS = ((BLUE, "-"), (ORANGE, (0, (5, 1.5))), (GREEN, (0, (1.5, 1))), (PURPLE, (0, (5, 1, 1.5, 1))))
PANEL_INCHES = (5.6, 3.5)
SMOOTH_FROM = 60


def draw_curves(run: Path, path: Path) -> None:
    """Draws the metrics of a run folder; panels without data are left out."""
    panels = _panels(read_metrics(run))
    if not panels:
        raise InputError(f"there is nothing to draw in {run / METRICS_FILE}; train for at least one evaluation first")
    columns = min(len(panels), 2)
    lines = -(-len(panels) // columns)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    figure = Figure(figsize=(columns * PANEL_INCHES[0], lines * PANEL_INCHES[1]), dpi=130, layout=layout)
    FigureCanvasAgg(figure)
    first = None
    for place, draw in enumerate(panels, start=1):
        axes = figure.add_subplot(lines, columns, place, sharex=first)
        first = first or axes
        draw(axes)
        _dress(axes)
    save_figure(figure, path)


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a picture in the format of its suffix, .png or .svg."""
    kind = path.suffix[1:].lower()
    if kind not in ("png", "svg"):
        raise InputError(f"cannot draw {path}: a picture's name ends in .png or .svg")
    about = {"Date": None} if kind == "svg" else {}  # the same picture is the same file
    try:
        with atomic_path(path) as partial:
            figure.savefig(partial, format=kind, metadata=about)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; make room or get write access") from error


def _panels(rows: Rows) -> list[Callable[[Axes], None]]:
    """One drawing function for each panel that has something to show."""
    steps, evaluations = (
        [row for row in rows if row.get("kind") == kind and "step" in row] for kind in ("step", "evaluation")
    )
    train, dev, bleu = _curve(steps, "loss"), _curve(evaluations, "dev_loss"), _curve(evaluations, "dev_bleu")
    rate = _curve(steps, "learning_rate")
    rate = rate if rate[0].size else _curve(evaluations, "learning_rate")
    scales = _scale_curves(evaluations)
    panels: list[Callable[[Axes], None]] = []
    if train[0].size or dev[0].size:
        panels.append(lambda axes: _draw_losses(axes, train, dev))
    if bleu[0].size:
        panels.append(lambda axes: _draw_bleu(axes, bleu, [row["step"] for row in evaluations if row.get("best")]))
    if rate[0].size:
        panels.append(lambda axes: _draw_rate(axes, rate))
    if scales:
        panels.append(lambda axes: _draw_scales(axes, scales))
    return panels


# ------------------------------------------------------------------ panels


def _draw_losses(axes: Axes, train: Curve, dev: Curve) -> None:
    axes.set_title("Loss")
    if train[0].size:
        smooth = train[0].size >= SMOOTH_FROM
        _plot(
            axes, train, color=BLUE, alpha=0.25 if smooth else 1.0, linewidth=0.8, label=None if smooth else "training"
        )
        if smooth:
            _plot(axes, _running_mean(train), color=BLUE, label="training")
    if dev[0].size:
        _plot(axes, dev, color=ORANGE, label="dev")
    values = np.concatenate([train[1], dev[1]])
    if values.size >= SMOOTH_FROM:  # the first steps are so high that nothing else would be seen
        low, high = values.min(), max(np.quantile(values, 0.98), dev[1].max(initial=-np.inf))
        if high > low:
            axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    axes.legend(fontsize="small", frameon=False)


def _draw_bleu(axes: Axes, bleu: Curve, marked: list[int]) -> None:
    steps, values = bleu
    last_marked = np.flatnonzero(np.isin(steps, marked[-1:]))
    best = int(last_marked[-1]) if last_marked.size else int(values.argmax())
    axes.set_title(f"Dev BLEU (best: {values[best]:.2f} at step {steps[best]:,.0f})")
    _plot(axes, bleu, color=GREEN)
    axes.plot(steps[best], values[best], marker="*", markersize=13, color=ORANGE, linestyle="none", zorder=3)


def _draw_rate(axes: Axes, rate: Curve) -> None:
    axes.set_title("Learning rate")
    _plot(axes, rate, color=PURPLE)
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 3))


def _draw_scales(axes: Axes, scales: dict[str, Curve]) -> None:
    """Colour and dashes tell the kind of attention, the shade its depth."""
    axes.set_title("Scale g of every layer (deeper is darker)")
    kinds: dict[str, list[str]] = {}
    for name in scales:
        kinds.setdefault(_kind(name), []).append(name)
    for index, (kind, names) in enumerate(kinds.items()):
        color, dashes = KIND_LOOKS[index % len(KIND_LOOKS)]
        for place, name in enumerate(names):
            depth = (place + 1) / len(names)
            label = kind if place == len(names) - 1 else None
            _plot(axes, scales[name], color=_shade(color, depth), linestyle=dashes, linewidth=1.3, label=label)
    axes.legend(fontsize="x-small", frameon=False, ncols=min(len(kinds), 3), loc="best", handlelength=2.5)


def _plot(axes: Axes, curve: Curve, **look: Any) -> None:
    if curve[0].size < (25 if look.get("linestyle") is None else 2):  # the many scales would be hidden by markers
        look |= {"marker": "o", "markersize": 3.5}
    axes.plot(*curve, **({"linewidth": 1.6} | look))


def _dress(axes: Axes) -> None:
    axes.set_title(axes.get_title(), fontsize="medium", fontweight="bold")
    axes.set_xlabel("step", fontsize="small")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
    axes.tick_params(labelsize="small")
    axes.grid(color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


# ------------------------------------------------------------------ numbers


def _curve(rows: Rows, name: str) -> Curve:
    """Steps and values of a field, where it has a value."""
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    steps, values = np.array(points, dtype=np.float64).reshape(-1, 2).T
    return steps[np.isfinite(values)], values[np.isfinite(values)]


def _scale_curves(evaluations: Rows) -> dict[str, Curve]:
    """The curve of every scale by its name, layers in order; of scales by head, their mean."""
    flat = [
        {"step": row["step"], **{name: float(np.mean(numbers)) for name, numbers in _scales(row).items() if numbers}}
        for row in evaluations
    ]
    names = sorted({name for row in flat for name in row if name != "step"}, key=_place)
    return {name: _curve(flat, name) for name in names}


def _scales(row: Mapping[str, Any]) -> dict[str, list[float]]:
    return {name: scale_numbers(scale) for name, scale in (row.get("scales") or {}).items()}


def _place(name: str) -> tuple[int, str, list[int]]:
    """Where a layer stands: encoder before decoder, self before cross, then by number."""
    kind = _kind(name)
    rank = 2 * ("encoder" not in kind) + ("cross" in kind)
    return rank, kind, [int(number) for number in re.findall(r"\d+", name)]


def _kind(name: str) -> str:
    """What is left of a name such as encoder.0.self without its numbers: encoder self."""
    return " ".join(part for part in name.split(".") if not part.isdigit()) or "layer"


def _running_mean(curve: Curve) -> Curve:
    """The mean of the points around each, over a thirtieth of the curve."""
    steps, values = curve
    reach = max(values.size // 60, 1)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    first = np.maximum(np.arange(values.size) - reach, 0)
    last = np.minimum(np.arange(values.size) + reach + 1, values.size)
    return steps, (sums[last] - sums[first]) / (last - first)


def _shade(color: str, depth: float) -> tuple[float, float, float]:
    """The colour mixed with white: a depth of 1 is the colour itself."""
    red, green, blue = to_rgb(color)
    share = 0.35 + 0.65 * depth
    return 1 - share * (1 - red), 1 - share * (1 - green), 1 - share * (1 - blue)
