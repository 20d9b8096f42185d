"""`qknorm corpora`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.table import Table

from qknorm.cli.display import console, progress_bar
from qknorm.text import corpora


@dataclass(frozen=True)
class List:
    """Shows the data sets known by name, and which of them are here.

    QKNORM_DATA names a folder of local copies, laid out as name/split.language.
    """


@dataclass(frozen=True)
class Download:
    """Downloads a data set, checks it and lays it out for `qknorm prepare --corpus NAME`.

    Example: qknorm corpora download multi30k-en-de
    """

    name: tyro.conf.Positional[str]
    """Its name in `qknorm corpora list`."""


Choice = Annotated[List, tyro.conf.subcommand("list")] | Annotated[Download, tyro.conf.subcommand("download")]


def run(words: Sequence[str]) -> None:
    """Lists or downloads."""
    chosen = tyro.cli(Choice, args=words or ["list"], prog="qknorm corpora")
    if isinstance(chosen, Download):
        with progress_bar() as progress:
            folder = corpora.download(chosen.name, progress=progress)
        console.print(f"{chosen.name} is in {folder}", markup=False, soft_wrap=True)
        return
    table = Table("name", "languages", "here", "train / dev / test", "licence")
    for each in corpora.state():
        counts = " / ".join(f"{n:,}" for n in each.pairs.values()) if each.folder else ""
        table.add_row(
            each.name, "–".join(each.languages), "[green]yes[/green]" if each.folder else "no", counts, each.licence
        )
    console.print(table)
    console.print("[dim]qknorm corpora download NAME fetches one; qknorm prepare OUT --corpus NAME uses it[/dim]")
