"""What the terminal shows of a grid of trainings: who is at what, and the tables that come of it."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from rich import box
from rich.live import Live
from rich.markup import escape
from rich.table import Table as Drawn
from rich.text import Text

from qknorm.cli.display import console, errors
from qknorm.studies.grid.jobs import Job, View, look
from qknorm.studies.grid.local import OnChange
from qknorm.studies.tables import Table

NARROW = 150
MOST_SHOWN = 30
"""Lines of the live table; the newest matter, and a terminal is not long."""


@contextmanager
def follow(jobs: Sequence[Job]) -> Iterator[OnChange]:
    """A table that follows the grid; without a terminal, a line for every run that ends."""
    ended: set[str] = {view.job.name for view in map(look, jobs) if view.state in ("finished", "diverged")}

    def tell(views: Sequence[View]) -> None:
        for view in views:
            if view.state in ("finished", "diverged", "failed") and view.job.name not in ended:
                ended.add(view.job.name)
                errors.print(Text(describe(view)), soft_wrap=True)

    if not errors.is_terminal:
        yield tell
        return
    with Live(console=errors, transient=True, refresh_per_second=4) as live:

        def show(views: Sequence[View]) -> None:
            tell(views)
            live.update(state_table(views))

        yield show


def describe(view: View) -> str:
    """A run in a line."""
    test = "" if view.test_bleu is None else f", test BLEU {view.test_bleu:.2f}"
    if view.job.split == "dev" and view.dev_bleu is not None:
        test = f", dev BLEU {view.dev_bleu:.2f}"
    seconds = "" if view.seconds is None else f", {view.seconds:,.0f} s"
    note = f": {view.note}" if view.note else ""
    return f"{view.job.name}: {view.state}{test}{seconds}{note}"


def state_table(views: Sequence[View]) -> Drawn:
    """The runs, those under way first."""
    order = ("running", "failed", "diverged", "waiting", "finished")
    shown = sorted(views, key=lambda view: order.index(view.state))[:MOST_SHOWN]
    counts = ", ".join(f"{sum(view.state == state for view in views)} {state}" for state in order)
    table = Drawn(title=counts, box=box.SIMPLE_HEAD)
    for column in ("run", "state", "step", "dev BLEU", "test BLEU", "seconds", ""):
        table.add_column(column, justify="left" if column in ("run", "state", "") else "right")
    for view in shown:
        total = f" / {view.total:,}" if view.total and view.state == "running" else ""
        where = f"{view.holder.host}, process {view.holder.pid}" if view.holder else view.note
        table.add_row(
            escape(view.job.name),
            view.state,
            f"{view.step:,}{total}" if view.step else "",
            "" if view.dev_bleu is None else f"{view.dev_bleu:.2f}",
            "" if view.test_bleu is None else f"{view.test_bleu:.2f}",
            "" if view.seconds is None else f"{view.seconds:,.0f}",
            escape(where),
        )
    return table


def draw_table(table: Table, left_to_the_page: Collection[str] = ()) -> Drawn:
    """The table as the terminal bears it: a narrow one leaves to the page what can be missed first."""
    left = set(left_to_the_page) if console.width < NARROW else set()
    if "pair" in table.columns and len({row[table.columns.index("pair")] for row in table.rows}) == 1:
        left.add("pair")  # as the command said
    shown = [column for column in table.columns if column not in left]
    drawn = Drawn(title=escape(table.title), box=box.SIMPLE_HEAD)
    for column in shown:
        justify: Literal["left", "right"] = "left" if column in table.words else "right"
        drawn.add_column(escape(column), justify=justify, no_wrap=column in ("system", "attention"))
    for row in table.rows:
        cells = dict(zip(table.columns, row, strict=True))
        drawn.add_row(*(escape(cells[column]) for column in shown))
    return drawn
