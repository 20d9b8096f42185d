"""What verbs share of the terminal: how words are parsed and helped with, one console, progress bars."""

import inspect
import io
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from dataclasses import fields
from typing import Any, get_origin

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
    _refuse_repeated(kind, words)
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
            group = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", cause.title).lower()
            raise InputError(explain_validation(cause, f"settings of the {group}")) from None
        sys.stderr.write(complaint.getvalue())
        raise


def _refuse_repeated(kind: Any, words: Sequence[str]) -> None:
    """Of an option that takes several values a second one would replace the first, and nobody would be told."""
    given = [word.partition("=")[0] for word in words]
    for field in fields(kind):
        option = f"--{field.name.replace('_', '-')}"
        # what stands without a word, or may be repeated, is marked by tyro, and so no bare tuple
        if get_origin(field.type) is tuple and given.count(option) > 1:
            raise InputError(f"{option} is given more than once; name all after the first: {option} A B")


def drawn(bars: Progress) -> AbstractContextManager[object]:
    """Draws the bars on a terminal; elsewhere nothing, where rich before 14.3 would still end with an empty line."""
    return nullcontext() if bars.disable else bars


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
    with drawn(bar):

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
