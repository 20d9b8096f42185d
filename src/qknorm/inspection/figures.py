"""Attention as pictures: heat maps of weights, and what a report holds, as PNG or SVG."""

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, fontManager
from matplotlib.layout_engine import ConstrainedLayoutEngine
from numpy.typing import ArrayLike, NDArray

from qknorm.errors import InputError
from qknorm.inspection.heads import ROLES
from qknorm.inspection.report import (
    MEASURES,
    ModelLook,
    Panel,
    Report,
    Series,
    direction,
    group_attentions,
    split_name,
)
from qknorm.text.subwords import END_OF_WORD, SPACE, SPECIALS
from qknorm.training.curves import save_figure

FONTS = ("DejaVu Sans", "Noto Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans Devanagari", "Arial Unicode MS")
"""Tried in this order for every letter, as far as they are installed; the first comes with matplotlib."""

INSIDE_WORD = "·"
FORMATS = (".png", ".svg")
COURSES = {"scales": "Scale g", "logits": "Largest |logit|"}
"""Pictures of what happened over training: their names, and the panels of a model that they draw."""
MOST_COLUMNS = 4
CELL_INCHES = 0.27
LETTER_INCHES = 0.085
TITLE_INCHES = 0.25
NUMBERS_UP_TO = 15  # more rows or columns leave no room for numbers in the cells
KIND_COLOURS = ("#2b72b0", "#c2500c", "#2c8a57", "#7a4fb0")
ROLE_COLOURS = dict(
    zip(ROLES, ("#2b72b0", "#2c8a57", "#7a4fb0", "#b8860b", "#b03a5b", "#5f7d8c", "#1b2530", "#aab4bf"), strict=True)
)
BLANKS = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥"})


def draw_attention(
    weights: ArrayLike,
    source_tokens: Sequence[str],
    target_tokens: Sequence[str],
    path: Path,
    title: str = "",
) -> None:
    """Draws attention weights (target, source), or (heads, target, source) side by side, as a PNG or SVG by suffix.

    Each row is a target token; all heads share one range of colours, from 0 to 1.
    """
    heads = _check_weights(weights, source_tokens, target_tokens)
    _check_name(path)
    columns = min(len(heads), MOST_COLUMNS)
    lines = -(-len(heads) // columns)
    figure = _figure(_figure_size(columns, lines, source_tokens, target_tokens))
    image: Any = None
    panels = []
    for place, head in enumerate(heads):
        axes = figure.add_subplot(lines, columns, place + 1)
        panels.append(axes)
        image = _draw_cells(axes, head, source_tokens, target_tokens, at_left=place % columns == 0)
        if len(heads) == 1 and max(head.shape) <= NUMBERS_UP_TO:
            _write_numbers(axes, head)
        if len(heads) > 1:
            axes.set_title(f"head {place + 1}", fontsize="medium", pad=8)
    _add_bar(figure, image, panels, "attention weight")
    _entitle(figure, title)
    save_figure(figure, path)


# ------------------------------------------------------------------ pictures of a report


def draw_report(report: Report, folder: Path, suffix: str = ".png", *, attention: str | None = None) -> list[Path]:
    """Draws all pictures that a report has the data for into a folder; returns their paths.

    The heads drawn are those of `attention`, as in `draw_heads`.
    """
    pictures: dict[str, Callable[[Path], None]] = {
        "heads": functools.partial(draw_heads, report, attention=attention),
        "measures": functools.partial(draw_measures, report),
        "map": functools.partial(draw_map, report),
    }
    for name, title in COURSES.items():
        if found := [(model, panel) for model in report.models for panel in model.panels if panel.title == title]:
            pictures[name] = functools.partial(_draw_course, found)
    paths = {name: folder / f"{name}{suffix}" for name in pictures}
    for name, draw in pictures.items():
        draw(paths[name])
    return list(paths.values())


def draw_heads(report: Report, path: Path, *, attention: str | None = None) -> None:
    """Draws the first heads of one attention in the first sentence, a row a model: the paper's Figures 1 and 2.

    The first attention if none is named, which in a translator is the encoder's first layer.
    """
    _check_name(path)
    seen = [model.sentences[0] for model in report.models]
    name = attention or seen[0].attentions[0].name
    shown = [(each, each.attention(name)) for each in seen]
    wanted = range(min(MOST_COLUMNS, *(one.heads for _, one in shown)))
    widest = max((each.tokens[one.keys] for each, one in shown), key=len)
    tallest = max((each.tokens[one.queries] for each, one in shown), key=len)
    width, height = _figure_size(len(wanted), len(shown), widest, tallest)
    alone = len(shown) == 1
    figure = _figure((width, height + TITLE_INCHES if alone else height))
    image: Any = None
    panels = []
    for line, (model, (each, one)) in enumerate(zip(report.models, shown, strict=True)):
        for column, head in enumerate(wanted):
            axes = figure.add_subplot(len(shown), len(wanted), line * len(wanted) + column + 1)
            panels.append(axes)
            keys, queries = each.tokens[one.keys], each.tokens[one.queries]
            image = _draw_cells(axes, one.weights[head], keys, queries, at_left=column == 0)
            title = f"head {head + 1}" if alone else f"{model.name}, head {head + 1}"
            axes.set_title(title, fontsize="medium", pad=8, parse_math=False)
    _add_bar(figure, image, panels, "attention weight")
    kind, layer = split_name(name)
    title = f"{kind[:1].upper()}{kind[1:]}-attention, layer {layer + 1}"
    _entitle(figure, f"{title}\n{_end_of(report.models[0].name, width)}" if alone else title)
    save_figure(figure, path)


def draw_measures(report: Report, path: Path, measures: Sequence[str] = ("relative_entropy", "saturation")) -> None:
    """Draws measures by attention and head, a row a measure, a column a model; a measure has one range of colours."""
    _check_name(path)
    tallest = max(len(model.attentions) for model in report.models)
    width = 1.6 + len(report.models) * max(2.2, 0.34 * _most_heads(report) + 1.4)
    figure = _figure((width + 1.0, len(measures) * (0.26 * tallest + 0.9)))
    for line, measure in enumerate(measures):
        tables = [_measure_table(model, measure) for model in report.models]
        known = np.concatenate([table[np.isfinite(table)] for table in tables])
        low, high = (known.min(), known.max()) if known.size else (0.0, 1.0)
        image: Any = None
        panels = []
        for column, (model, table) in enumerate(zip(report.models, tables, strict=True)):
            axes = figure.add_subplot(len(measures), len(tables), line * len(tables) + column + 1)
            panels.append(axes)
            image = axes.imshow(table, cmap="YlOrBr", vmin=low, vmax=max(high, low + 1e-9), aspect="auto")
            axes.set_xticks(range(table.shape[1]), labels=[str(head + 1) for head in range(table.shape[1])])
            axes.set_yticks(range(len(table)), labels=model.attentions if column == 0 else [""] * len(table))
            _separate_cells(axes, table.shape)
            label = MEASURES.get(measure, (measure, ""))[0]
            title = f"{label}: {model.name}" if len(tables) > 1 else label
            axes.set_title(title, fontsize="medium", parse_math=False)
            for spine in axes.spines.values():
                spine.set_visible(False)
        _add_bar(figure, image, panels, "")
    save_figure(figure, path)


def draw_map(report: Report, path: Path) -> None:
    """Draws heads near each other where they attend alike, a row a model, a column a kind of attention."""
    _check_name(path)
    groups = [group_attentions(model.sentences[0]) for model in report.models]
    most = max(map(len, groups))
    figure = _figure((3.4 * most, 3.4 * len(groups) + 0.5))
    used: dict[str, Any] = {}
    for line, (model, kinds) in enumerate(zip(report.models, groups, strict=True)):
        for column, (kind, names) in enumerate(kinds.items()):
            axes = figure.add_subplot(len(groups), most, line * most + column + 1)
            heads = [
                (f"{split_name(name)[1] + 1}.{head + 1}", role)
                for name in names
                for head, role in enumerate(model.roles(name))
            ]
            for (x, y), (label, role) in zip(model.heads_map(names), heads, strict=True):
                used[role] = axes.scatter(x, y, s=190, color=ROLE_COLOURS[role], edgecolors="white", linewidths=0.8)
                dark = role == "mixed"
                axes.text(x, y, label, ha="center", va="center", fontsize=6.5, color="black" if dark else "white")
            axes.set_title(f"{model.name}: {kind}" if len(groups) > 1 else kind, fontsize="medium", parse_math=False)
            axes.set_aspect("equal", adjustable="datalim")
            axes.margins(0.15)
            axes.set_xticks([])
            axes.set_yticks([])
            for spine in axes.spines.values():
                spine.set_color("0.85")
    order = [role for role in ROLES if role in used]
    figure.legend(
        [used[role] for role in order],
        order,
        loc="outside lower center",
        ncols=8,
        frameon=False,
        fontsize="small",
        markerscale=0.5,
    )
    save_figure(figure, path)


def _draw_course(found: Sequence[tuple[ModelLook, Panel]], path: Path) -> None:
    """Draws curves over training, one panel a model that recorded them."""
    figure = _figure((5.2 * len(found), 3.4))
    first: Axes | None = None
    for place, (model, panel) in enumerate(found, start=1):
        axes = figure.add_subplot(1, len(found), place, sharey=first)
        first = first or axes
        _draw_series(axes, panel)
        axes.set_title(f"{panel.title}: {model.name}", fontsize="medium", parse_math=False)
        axes.set_xlabel("step", fontsize="small")
        axes.tick_params(labelsize="small")
        axes.grid(color="0.92", linewidth=0.8)
        key = axes.legend(fontsize="x-small", frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        key.set_title("deeper is stronger", prop=FontProperties(size="x-small"))
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    save_figure(figure, path)


def _draw_series(axes: Axes, panel: Panel) -> None:
    """Colour tells the kind of attention, its strength the depth."""
    kinds: dict[str, list[Series]] = {}
    for series in panel.series:
        kinds.setdefault(split_name(series.name)[0], []).append(series)
    for colour, (kind, alike) in zip(KIND_COLOURS * len(kinds), kinds.items(), strict=False):
        for depth, series in enumerate(alike, start=1):
            axes.plot(
                series.steps,
                series.values,
                color=colour,
                alpha=0.35 + 0.65 * depth / len(alike),
                label=kind if depth == len(alike) else None,
                marker="o" if len(series.steps) == 1 else None,
            )


def _most_heads(report: Report) -> int:
    return max(one.heads for model in report.models for one in model.sentences[0].attentions)


def _measure_table(model: ModelLook, measure: str) -> NDArray[np.float64]:
    """A measure (attentions, heads) over all sentences; NaN where an attention has fewer heads or no value."""
    rows = [model.measures(name).get(measure, []) for name in model.attentions]
    table = np.full((len(rows), max(map(len, rows), default=0)), np.nan)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = [np.nan if value is None else value for value in row]
    if not table.size:
        raise ValueError(f"{model.name} has no measure {measure}")
    return table


def label_tokens(tokens: Iterable[str]) -> list[str]:
    """Tokens of a vocabulary as a reader likes them: no marks of words, but a · where a token goes on inside a word."""
    labels, inside = [], False
    for token in tokens:
        if token in SPECIALS:
            labels.append(token)
            continue
        plain = token.removesuffix(END_OF_WORD).removeprefix(SPACE)
        goes_on = inside and not token.startswith(SPACE) and plain[:1].isalnum()
        labels.append(f"{INSIDE_WORD}{plain}" if goes_on else plain or SPACE)
        inside = not token.endswith(END_OF_WORD)
    return labels


# ------------------------------------------------------------------ the parts of a picture


def _check_weights(weights: ArrayLike, source: Sequence[str], target: Sequence[str]) -> NDArray[np.float64]:
    """The weights as (heads, target, source)."""
    heads = np.asarray(weights, dtype=np.float64)
    heads = heads[None] if heads.ndim == 2 else heads
    if heads.ndim != 3 or not heads.size or heads.shape[1:] != (len(target), len(source)):
        raise ValueError(
            f"weights of shape {np.shape(weights)} do not fit {len(target)} target and {len(source)} source tokens; "
            f"give (target, source) or (heads, target, source)"
        )
    return heads


def _check_name(path: Path) -> None:
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"{path} is to be a picture; end its name in {' or '.join(FORMATS)}")


def _figure(inches: tuple[float, float]) -> Figure:
    figure = Figure(figsize=inches, dpi=130, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
    FigureCanvasAgg(figure)
    return figure


def _end_of(name: str, inches: float) -> str:
    """A name as a title of at most this width: the end of a long one, where paths differ."""
    most = int(inches / (2 * LETTER_INCHES))
    return name if len(name) <= most else f"…{name[-most:]}"


def _entitle(figure: Figure, title: str) -> None:
    if title:
        figure.suptitle(title, fontfamily=_fonts(), fontsize="large", parse_math=False)


def _add_bar(figure: Figure, image: Any, panels: Sequence[Axes], label: str) -> None:
    bar = figure.colorbar(image, ax=panels, shrink=0.8, pad=0.02, aspect=25)
    bar.set_label(label, fontsize="small")
    bar.ax.tick_params(labelsize="small")
    bar.outline.set_visible(False)


def _draw_cells(
    axes: Axes, head: NDArray[np.float64], source: Sequence[str], target: Sequence[str], at_left: bool
) -> Any:
    """The weights of a head with tokens on the axes; where keys read from the right, the first stands there."""
    image = axes.imshow(head, cmap="Blues", vmin=0.0, vmax=1.0, aspect="equal")
    _write_tokens(axes, source, target, at_left)
    if direction(source) == "rtl":
        axes.invert_xaxis()
    return image


def _figure_size(columns: int, lines: int, source: Sequence[str], target: Sequence[str]) -> tuple[float, float]:
    """Inches: as much as cells and the longest tokens need."""
    names = [max(map(len, tokens)) * LETTER_INCHES for tokens in (source, target)]
    cell = CELL_INCHES if columns > 1 else 1.6 * CELL_INCHES
    width = columns * (len(source) * cell + 0.25) + names[1] + 1.1
    height = lines * (len(target) * cell + names[0] + 0.45) + 0.5
    return max(width, 4.0), max(height, 2.5)


def _write_tokens(axes: Axes, source: Sequence[str], target: Sequence[str], at_left: bool) -> None:
    """Source tokens below, reading upwards; target tokens at the left, if there is their place; thin lines between."""
    look: dict[str, Any] = {"fontfamily": _fonts(), "fontsize": "small", "parse_math": False}
    below, beside = (
        [token.translate(BLANKS) if token.isspace() else token for token in side] for side in (source, target)
    )
    axes.set_xticks(range(len(source)), labels=below, rotation=90, **look)
    axes.set_yticks(range(len(target)), labels=beside if at_left else [""] * len(target), **look)
    _separate_cells(axes, (len(target), len(source)))
    for spine in axes.spines.values():
        spine.set_color("0.7")


def _separate_cells(axes: Axes, shape: tuple[int, ...]) -> None:
    """Thin lines between cells, and no ticks."""
    axes.set_xticks(np.arange(shape[1] - 1) + 0.5, minor=True)
    axes.set_yticks(np.arange(shape[0] - 1) + 0.5, minor=True)
    axes.grid(which="minor", color="0.9", linewidth=0.6)
    axes.tick_params(which="both", length=0, labelsize="small")


def _write_numbers(axes: Axes, head: NDArray[np.float64]) -> None:
    """Each weight of a tenth or more in its cell, in hundredths."""
    for row, column in np.argwhere(head >= 0.1):
        weight = head[row, column]
        color = "white" if weight > 0.55 else "0.25"
        axes.text(column, row, f"{100 * weight:.0f}", ha="center", va="center", fontsize="x-small", color=color)


def _fonts() -> list[str]:
    installed = set(fontManager.get_font_names())
    return [name for name in FONTS if name in installed]
