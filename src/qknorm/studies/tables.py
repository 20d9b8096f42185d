"""Tables and pages of a study, as Markdown and as HTML, from cells that are already words."""

import csv
import html
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qknorm import files
from qknorm.errors import InputError

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0; font-size: 0.9rem }
caption { text-align: left; font-weight: 600; padding: 0.5rem 0 }
th, td { padding: 0.3rem 0.6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap }
th { border-bottom: 2px solid #888; white-space: normal; vertical-align: bottom }
th:not(.words) { width: 1px } /* as narrow as its numbers, so that words have the rest */
th.words, td.words { text-align: left }
td.words { white-space: normal }
div.wide { overflow-x: auto }
code { background: #f3f3f3; padding: 0.1rem 0.3rem }
li, p.note { overflow-wrap: anywhere }
p.note { color: #555; font-size: 0.85rem }
img { max-width: 100% }
@media (prefers-color-scheme: dark) {
  body { background: #1b1b1b; color: #ddd } th, td { border-color: #444 } code { background: #2c2c2c }
  p.note { color: #aaa } img { background: white }
}
"""


@dataclass(frozen=True)
class Table:
    """Cells as they are shown, under a title; columns named in `words` stand at the left, the others are numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.title}: a row of {len(row)} cells under {len(self.columns)} columns")

    def markdown(self) -> str:
        """As a Markdown table under its title, notes below."""
        marks = ["---" if column in self.words else "---:" for column in self.columns]
        lines = [f"## {self.title}", "", _markdown_row(self.columns), f"| {' | '.join(marks)} |"]
        lines += map(_markdown_row, self.rows)
        return "\n".join([*lines, *(line for note in self.notes for line in ("", note))])

    def html(self) -> str:
        """As an HTML table with its title as caption, notes below."""
        kinds = [' class="words"' if column in self.words else "" for column in self.columns]
        head = "".join(f"<th{kind}>{html.escape(cell)}</th>" for kind, cell in zip(kinds, self.columns, strict=True))
        body = "\n".join(
            f"<tr>{''.join(f'<td{kind}>{html.escape(cell)}</td>' for kind, cell in zip(kinds, row, strict=True))}</tr>"
            for row in self.rows
        )
        notes = "".join(f'\n<p class="note">{html.escape(note)}</p>' for note in self.notes)
        title = f"<caption>{html.escape(self.title)}</caption>"
        table = f"<table>{title}\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"
        return f'<div class="wide">{table}</div>{notes}'


@dataclass(frozen=True)
class Page:
    """A title, what can be said in a few sentences, tables, pictures, and lists of remarks under headings."""

    title: str
    summary: tuple[str, ...]
    tables: tuple[Table, ...]
    pictures: Mapping[str, Path] = field(default_factory=dict)
    """Paths by what they show, in the folder of the page or below it."""
    sections: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def markdown(self, folder: Path) -> str:
        """The whole page, for a file in this folder."""
        parts = [f"# {self.title}", "\n".join(f"- {line}" for line in self.summary)]
        parts += [table.markdown() for table in self.tables]
        parts += [f"![{what}]({_beside(path, folder)})" for what, path in self.pictures.items()]
        for heading, lines in self.sections.items():
            parts.append("\n".join([f"## {heading}", "", *(f"- {line}" for line in lines)]))
        return "\n\n".join(parts) + "\n"

    def html(self, folder: Path) -> str:
        """The whole page, for a file in this folder."""
        title = html.escape(self.title)
        parts = [f"<h1>{title}</h1>", _html_list(self.summary), *(table.html() for table in self.tables)]
        for what, path in self.pictures.items():
            said = html.escape(what)
            parts.append(f'<h2>{said}</h2>\n<img src="{html.escape(_beside(path, folder))}" alt="{said}">')
        for heading, lines in self.sections.items():
            parts += [f"<h2>{html.escape(heading)}</h2>", _html_list(lines)]
        body = "\n".join(parts)
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{_STYLE}</style></head>\n'
            f"<body>\n{body}\n</body></html>\n"
        )

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Writes both forms into the folder, as report.md and report.html; returns their paths."""
        _write(folder / "report.md", self.markdown(folder))
        _write(folder / "report.html", self.html(folder))
        return folder / "report.md", folder / "report.html"


@dataclass(frozen=True)
class Written:
    """What was made of the finished runs of a grid: the page, where it lies in both forms, and every run as CSV."""

    page: Page
    markdown: Path
    html: Path
    results: Path


def going_on(command: str) -> str:
    """How to go on with runs that are not finished, below a page that this command made."""
    without = " without --report" if "--report" in command.split() else ""
    return f"The same command{without} goes on with them."


def write_csv(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> None:
    """Writes rows by their columns; what a row lacks is empty, a column it should not have is an error."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    _write(path, text.getvalue())


def _write(path: Path, text: str) -> None:
    try:
        files.write_text(path, text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}; make room or get write access") from error


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _beside(path: Path, folder: Path) -> str:
    return path.resolve().relative_to(folder.resolve()).as_posix()


def _html_list(lines: Sequence[str]) -> str:
    """Lines of Markdown prose, of which `code` and **bold** alone are given their form."""
    coded = [re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(line)) for line in lines]
    items = [re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", line) for line in coded]
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"
