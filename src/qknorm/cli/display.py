"""What verbs share of the terminal: one console, progress bars, tables."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

ProgressCallback = Callable[[str, int, int | None], None]


@contextmanager
def progress_bar(transient: bool = True) -> Iterator[ProgressCallback]:
    """A callback (stage, done, total or None) that draws a bar for each stage, on standard error."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=errors,
        transient=transient,
        disable=not errors.is_terminal,
    )
    stages: dict[str, object] = {}
    with bar:

        def show(stage: str, done: int, total: int | None) -> None:
            if stage not in stages:
                stages[stage] = bar.add_task(stage, total=total)
            bar.update(stages[stage], completed=done, total=total)  # type: ignore[arg-type]

        yield show


def warn(sentence: str) -> None:
    """One line on standard error."""
    errors.print(f"[yellow]note:[/yellow] {sentence}", soft_wrap=True)
