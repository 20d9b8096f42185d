"""Tables of a study as a terminal of usual width shows them."""

import io

import pytest
from rich.console import Console

from qknorm.cli import grid_display
from qknorm.cli.study_paper import LEFT_TO_THE_PAGE
from qknorm.cli.study_tune import LEFT_NEXT
from qknorm.cli.study_tune import LEFT_TO_THE_PAGE as LEFT_BY_TUNE
from qknorm.studies.tables import Table

SEARCH = Table(
    "One change at a time",
    ("system", "dev BLEU", "difference", "mean of 3", "mean of 6", "steps", "seconds", "parameters"),
    tuple(
        (name, "23.45", "+0.32", "+0.10", "-0.03", "12,000", "1,234", "5,123,456")
        for name in ("start", "paper-qknorm-gl-en", "decoder layers 3 and encoder layers 6, seed 2")
    ),
    frozenset({"system"}),
)
TEST = Table(
    "Test, after the choice",
    ("system", "multi-bleu", "multi-bleu-detok", "bleu-moses", "bleu-treebank", "difference, multi-bleu-detok", "p"),
    (("paper-qknorm-gl-en", "20.11", "21.31", "22.10", "23.03", "+0.32", "0.012"),),
    frozenset({"system"}),
)
PAPER = Table(
    "Table 2",
    ("pair", "system", "settings", "paper", "ours, mean ± sd", "seeds", "difference", "p", "outcome"),
    (("gl→en", "values-normalised", "all", "24.20", "23.45 ± 0.12", "3 (1 diverged)", "+0.32", "0.001", "not shown"),),
    frozenset({"pair", "system", "settings", "outcome"}),
)


def draw(table, width, monkeypatch, left, left_next=()):
    console = Console(width=width, file=io.StringIO(), highlight=False)
    monkeypatch.setattr(grid_display, "console", console)
    console.print(grid_display.draw_table(table, left, left_next))
    drawn = console.file.getvalue()
    assert max(map(len, drawn.splitlines())) <= width
    return drawn


@pytest.mark.parametrize(
    ("table", "left", "left_next", "gone"),
    [
        (SEARCH, LEFT_BY_TUNE, LEFT_NEXT, {"steps", "parameters"}),
        (TEST, LEFT_BY_TUNE, LEFT_NEXT, {"multi-bleu", "bleu-moses", "bleu-treebank"}),
        (PAPER, LEFT_TO_THE_PAGE, (), {"pair", "settings"}),
    ],
    ids=["search", "test", "paper"],
)
def test_at_80_columns_no_word_and_no_number_is_cut(table, left, left_next, gone, monkeypatch):
    shown = draw(table, 80, monkeypatch, left, left_next).split()
    assert not any("…" in word for word in shown)
    kept = [place for place, column in enumerate(table.columns) if column not in gone]
    wanted = {word for row in (table.columns, *table.rows) for place in kept for word in row[place].split()}
    assert wanted <= set(shown) and not gone & set(shown)


def test_a_wide_terminal_shows_all(monkeypatch):
    drawn = draw(SEARCH, 160, monkeypatch, LEFT_BY_TUNE, LEFT_NEXT)
    assert all(column in drawn for column in SEARCH.columns) and SEARCH.rows[-1][0] in drawn


def test_a_very_narrow_one_folds_names_before_numbers_are_cut(monkeypatch):
    drawn = draw(SEARCH, 50, monkeypatch, LEFT_BY_TUNE, LEFT_NEXT)
    assert "23.45" in drawn and "+0.32" in drawn and "seconds" not in drawn and "…" not in drawn
