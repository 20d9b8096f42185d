"""What the terminal shows of a grid of trainings: who is at what, and the tables that come of it."""

import shlex
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.cells import cell_len
from rich.live import Live
from rich.markup import escape
from rich.table import Table as Drawn
from rich.text import Text

from qknorm.cli.display import console, errors, warn
from qknorm.errors import InputError
from qknorm.studies.grid.jobs import RESULT, Job, View, look, read_result
from qknorm.studies.grid.local import OnChange
from qknorm.studies.tables import Table, Written

NARROW = 150
SHORTEST_FOLD = 8
"""Narrower than this no text is folded."""
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


def require_finished(runs: Path, command: Sequence[str], jobs: Sequence[Job] | None = None) -> None:
    """Refuses --report where none of the jobs is finished: its page would say nothing, and replace one that does.

    Without jobs, before they are planned, it goes by what is in the folder of runs.
    """
    some = any(runs.glob(f"*/{RESULT}"))
    if some and (jobs is None or some_finished(jobs)):
        return
    words = shlex.join(word for word in command if word != "--report")
    if not some:
        raise InputError(f"--report: nothing is finished in {runs}; run it first: {words}")
    raise InputError(
        f"--report: what is finished in {runs} is of other settings, data or code than asked for; run it first: "
        f"{words}, or add --any-code if only the code has changed"
    )


def some_finished(jobs: Sequence[Job]) -> bool:
    """Whether there is anything to report of."""
    return any(read_result(job.folder) is not None for job in jobs)


def tell_failures(jobs: Sequence[Job]) -> bool:
    """Names every job that failed, with its reason; whether there is one."""
    failed = [view for view in map(look, jobs) if view.state == "failed"]
    for view in failed:
        warn(f"{view.job.name} failed: {view.note}; see {view.job.folder}")
    return bool(failed)


def show_written(written: Written, left_to_the_page: Collection[str], left_next: Sequence[str] = ()) -> None:
    """The tables and sentences of the page of a study, and where its files are."""
    for table in written.page.tables:
        console.print(draw_table(table, left_to_the_page, left_next))
    for line in written.page.summary:
        console.print(Text(line), soft_wrap=True)
    for what, path in {**written.page.pictures, "Every run": written.results}.items():
        console.print(Text.assemble(f"{what}: ", (str(path), "bold")), soft_wrap=True)
    tell_page(written.markdown, written.html)


def tell_page(markdown: Path, html: Path) -> None:
    """Where the page of a study is, in both forms."""
    console.print(Text.assemble("The page: ", (str(markdown), "bold"), " and ", (str(html), "bold")), soft_wrap=True)


def describe(view: View) -> str:
    """A run in a line; of test scores the tables tell, each with its measure."""
    dev = "" if view.dev_bleu is None else f", dev BLEU {view.dev_bleu:.2f}"
    seconds = "" if view.seconds is None else f", {view.seconds:,.0f} s"
    note = f": {view.note}" if view.note else ""
    return f"{view.job.name}: {view.state}{dev}{seconds}{note}"


def state_table(views: Sequence[View]) -> Drawn:
    """The runs, those under way first."""
    order = ("running", "failed", "diverged", "waiting", "finished")
    shown = sorted(views, key=lambda view: order.index(view.state))[:MOST_SHOWN]
    counts = ", ".join(f"{sum(view.state == state for view in views)} {state}" for state in order)
    table = Drawn(title=counts, box=box.SIMPLE_HEAD)
    for column in ("run", "state", "step", "dev BLEU", "seconds", ""):
        table.add_column(column, justify="left" if column in ("run", "state", "") else "right")
    for view in shown:
        total = f" / {view.total:,}" if view.total and view.state == "running" else ""
        where = f"{view.holder.host}, process {view.holder.pid}" if view.holder else view.note
        table.add_row(
            escape(view.job.name),
            view.state,
            f"{view.step:,}{total}" if view.step else "",
            "" if view.dev_bleu is None else f"{view.dev_bleu:.2f}",
            "" if view.seconds is None else f"{view.seconds:,.0f}",
            escape(where),
        )
    return table


def draw_table(table: Table, left_to_the_page: Collection[str] = (), left_next: Sequence[str] = ()) -> Drawn:
    """The table as the terminal bears it: a narrow one leaves to the page what can be missed first.

    Of `left_next` one column after another goes until no word of the others has to be cut; long names are folded.
    """
    left = set(left_to_the_page) if console.width < NARROW else set()
    if "pair" in table.columns and len({row[table.columns.index("pair")] for row in table.rows}) == 1:
        left.add("pair")  # as the command said
    columns = [_Column(name, cells) for name, cells in zip(table.columns, _by_column(table), strict=True)]
    columns = [each for each in columns if each.name not in left]
    for name in left_next:
        if sum(each.longest_word for each in columns) > _room(len(columns)):
            columns = [each for each in columns if each.name != name]
    drawn = Drawn(title=escape(table.title), box=box.SIMPLE_HEAD)
    for each, width in zip(columns, _share_out(columns, table.words), strict=True):
        is_text = each.name in table.words
        drawn.add_column(
            escape(each.name),
            justify="left" if is_text else "right",
            overflow="fold" if is_text else "ellipsis",
            width=width,
        )
    for cells in zip(*(each.cells for each in columns), strict=True):
        drawn.add_row(*map(escape, cells))
    return drawn


@dataclass(frozen=True)
class _Column:
    name: str
    cells: Sequence[str]

    @property
    def longest_word(self) -> int:
        return max(cell_len(word) for text in (self.name, *self.cells) for word in text.split())


def _by_column(table: Table) -> list[list[str]]:
    return [[row[place] for row in table.rows] for place in range(len(table.columns))]


def _room(columns: int) -> int:
    """What the frame and the gaps of so many columns leave of the terminal."""
    return console.width - 3 * columns - 1


def _share_out(columns: Sequence[_Column], words: Collection[str]) -> list[int]:
    """A width for each column: its longest word at least; what is left goes to where most lines would be broken.

    Where not even the words have room, those of text columns are folded, the longest first.
    """
    widths = [each.longest_word for each in columns]
    spare = _room(len(columns)) - sum(widths)
    texts = [place for place, each in enumerate(columns) if each.name in words]
    while spare < 0 and any(widths[place] > SHORTEST_FOLD for place in texts):
        widths[max(texts, key=lambda place: widths[place])] -= 1
        spare += 1
    for texts_of in (lambda each: each.cells, lambda each: (each.name,)):  # a head of some lines does least harm
        longest = [max(map(cell_len, texts_of(each)), default=0) for each in columns]
        while spare > 0:
            tallest = max(range(len(columns)), key=lambda place: longest[place] / widths[place])
            if longest[tallest] <= widths[tallest]:
                break
            widths[tallest] += 1
            spare -= 1
    return widths
