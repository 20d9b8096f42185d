"""What verbs share of the terminal: how words are parsed and helped with, one console, progress bars."""

import inspect
import io
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any

import tyro
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from qknorm.config import explain_validation
from qknorm.errors import InputError
from qknorm.progress import Progress as OnProgress

console = Console(highlight=False, emoji=False)
errors = Console(stderr=True, highlight=False, emoji=False)


def parse(kind: Any, words: Sequence[str], verb: str, **options: Any) -> Any:
    """The words of a verb as its arguments; its help shows the whole docstring, examples included."""
    whole = re.sub(r"\n\n(?= )", "\n", inspect.getdoc(kind) or "")  # examples stand in one block
    complaint = io.StringIO()
    try:
        with redirect_stderr(complaint):
            return tyro.cli(kind, args=words, prog=f"qknorm {verb}", description=whole or None, **options)
    except SystemExit as end:
        cause: BaseException | None = end
        while cause is not None and not isinstance(cause, ValidationError):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:  # tyro shows it in pydantic's words
            raise InputError(explain_validation(cause, f"settings of {cause.title.lower()}")) from None
        sys.stderr.write(complaint.getvalue())
        raise


@contextmanager
def progress_bar(transient: bool = True) -> Iterator[OnProgress]:
    """A callback (stage, done, total or None) that draws a bar for each stage, on standard error."""
    bar = Progress(
        TextColumn("{task.description}", markup=False),
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
    errors.print(Text.assemble(("note:", "yellow"), f" {sentence}"), soft_wrap=True)


def suggest(what: str, *words: object) -> None:
    """A command to go on with, as a shell takes it."""
    console.print(Text.assemble(f"{what}: ", (shlex.join(map(str, words)), "bold")), soft_wrap=True)
