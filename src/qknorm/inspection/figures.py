"""Attention as pictures."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.layout_engine import ConstrainedLayoutEngine
from numpy.typing import ArrayLike, NDArray

from qknorm.errors import InputError
from qknorm.files import atomic_path
from qknorm.text.subwords import END_OF_WORD, SPACE, SPECIALS

FONTS = ("DejaVu Sans", "Noto Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans Devanagari", "Arial Unicode MS")
"""Tried in this order for every letter, as far as they are installed; the first comes with matplotlib."""

INSIDE_WORD = "·"
FORMATS = {".png": "png", ".svg": "svg"}
MOST_COLUMNS = 4
CELL_INCHES = 0.27
LETTER_INCHES = 0.085
NUMBERS_UP_TO = 15  # more rows or columns leave no room for numbers in the cells


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
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"{path} is to be a picture; end its name in {' or '.join(FORMATS)}")
    columns = min(len(heads), MOST_COLUMNS)
    lines = -(-len(heads) // columns)
    figure = Figure(
        figsize=_figure_size(columns, lines, source_tokens, target_tokens),
        dpi=130,
        layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08),
    )
    FigureCanvasAgg(figure)
    image: Any = None
    panels = []
    for place, head in enumerate(heads):
        axes = figure.add_subplot(lines, columns, place + 1)
        panels.append(axes)
        image = axes.imshow(head, cmap="Blues", vmin=0.0, vmax=1.0, aspect="equal")
        _write_tokens(axes, source_tokens, target_tokens, at_left=place % columns == 0)
        if len(heads) == 1 and max(head.shape) <= NUMBERS_UP_TO:
            _write_numbers(axes, head)
        if len(heads) > 1:
            axes.set_title(f"head {place + 1}", fontsize="medium", pad=8)
    bar = figure.colorbar(image, ax=panels, shrink=0.8, pad=0.02, aspect=25)
    bar.set_label("attention weight", fontsize="small")
    bar.ax.tick_params(labelsize="small")
    bar.outline.set_visible(False)
    if title:
        figure.suptitle(title, fontfamily=_fonts(), fontsize="large", parse_math=False)
    _save(figure, path)


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
    axes.set_xticks(range(len(source)), labels=list(source), rotation=90, **look)
    axes.set_yticks(range(len(target)), labels=list(target) if at_left else [""] * len(target), **look)
    axes.set_xticks(np.arange(len(source) - 1) + 0.5, minor=True)
    axes.set_yticks(np.arange(len(target) - 1) + 0.5, minor=True)
    axes.grid(which="minor", color="0.9", linewidth=0.6)
    axes.tick_params(which="both", length=0)
    for spine in axes.spines.values():
        spine.set_color("0.7")


def _write_numbers(axes: Axes, head: NDArray[np.float64]) -> None:
    """Each weight of a tenth or more in its cell, in hundredths."""
    for row, column in np.argwhere(head >= 0.1):
        weight = head[row, column]
        color = "white" if weight > 0.55 else "0.25"
        axes.text(column, row, f"{100 * weight:.0f}", ha="center", va="center", fontsize="x-small", color=color)


def _fonts() -> list[str]:
    installed = set(fontManager.get_font_names())
    return [name for name in FONTS if name in installed]


def _save(figure: Figure, path: Path) -> None:
    kind = FORMATS[path.suffix.lower()]
    about = {"Date": None} if kind == "svg" else {}  # the same picture is the same file
    try:
        with atomic_path(path) as partial:
            figure.savefig(partial, format=kind, metadata=about)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; make room or get write access") from error
