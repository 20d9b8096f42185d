"""`qknorm inspect`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.markup import escape
from rich.table import Table

from qknorm.cli.display import console, parse, progress_bar, warn
from qknorm.cli.translate import which_checkpoint
from qknorm.errors import InputError
from qknorm.inspection.report import MEASURES, SHOWN, ModelLook, Report
from qknorm.inspection.viewer import write_page
from qknorm.text.prepared import PreparedData
from qknorm.text.readers import read_lines

COUNT = 8
NARROW, SHOWN_IF_NARROW = 120, 3
"""Under so many columns of the terminal, the first so many measures are shown; the page has all of them."""


@dataclass(frozen=True)
class Arguments:
    """Shows what the attention of a model does with some sentences: a table, and if asked for a page and pictures.

    Examples:

      qknorm inspect runs/gl-en --text "Onde está o gato?" --html gato.html

      qknorm inspect runs/qknorm runs/baseline --split test --count 8 --html compare.html --figures figures
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """One run folder, or two to compare."""
    text: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A sentence to look at; repeat --text for more."""
    input: Path | None = None
    """File with one sentence a line, of which the first --count are looked at."""
    split: str | None = None
    """A split of the run's prepared data to take sentences from, with their references: dev or test; dev if no
    sentences are given."""
    data: Path | None = None
    """The prepared folder of --split, where it is not where the run was trained on."""
    count: int | None = None
    """How many sentences to take from --input or --split; 8 if not given."""
    force: bool = False
    """Have the models read the references of --split in place of their own translations, so that two read the same."""
    heads: bool = False
    """Show a line for every head in the table, not for every attention."""
    html: Path | None = None
    """Page to write: all heads, weights, measures and curves, in one file that opens in any browser."""
    figures: Path | None = None
    """Folder to draw pictures into."""
    format: Literal["png", "svg"] | None = None
    """Of the pictures; png if not given."""
    attention: str | None = None
    """The attention whose heads are drawn with --figures, such as decoder.0.cross; encoder.0.self if not given."""
    names: tuple[str, ...] = ()
    """What to call the runs; their folders' names if not given."""
    checkpoint: str = "best"
    """best, last, a step, or a file of weights that `qknorm average` wrote."""
    device: str | None = None
    """cpu or cuda; a GPU where there is one if not given."""


def run(words: Sequence[str]) -> None:
    """Parses, has the models read, shows and writes."""
    arguments: Arguments = parse(Arguments, words, "inspect")
    _check(arguments)
    texts, references = _texts(arguments)
    from qknorm.inspection.reading import build_report  # it imports PyTorch, which help does without

    with progress_bar() as progress:
        report = build_report(
            arguments.runs,
            texts,
            references=references,
            force=arguments.force,
            names=arguments.names or None,
            checkpoint=which_checkpoint(arguments.checkpoint),
            device=arguments.device,
            progress=progress,
        )
    _check_attention(report, arguments.attention)
    show(report, heads=arguments.heads)
    if arguments.html is not None:
        write_page(report, arguments.html)
        console.print(f"Page: [bold]{escape(str(arguments.html))}[/bold]", soft_wrap=True)
    if arguments.figures is not None:
        from qknorm.inspection.figures import draw_report

        kind = f".{arguments.format or 'png'}"
        for picture in draw_report(report, arguments.figures, kind, attention=arguments.attention):
            console.print(f"Picture: [bold]{escape(str(picture))}[/bold]", soft_wrap=True)


def _check(arguments: Arguments) -> None:
    """Refuses what cannot be done, and options that would do nothing."""
    if not arguments.runs:
        raise InputError("name a run folder, or two to compare; qknorm inspect --help has examples")
    if arguments.names and len(arguments.names) != len(arguments.runs):
        raise InputError(f"--names has {len(arguments.names)} names for {len(arguments.runs)} runs; give one for each")
    if twice := next((name for name in arguments.names if arguments.names.count(name) > 1), None):
        raise InputError(f"--names calls two runs {twice}; give each a name of its own")
    if arguments.html is not None and arguments.html.is_dir():
        raise InputError(f"--html {arguments.html} is a folder; name a file, such as {arguments.html / 'page.html'}")
    for option in ("format", "attention"):
        if arguments.figures is None and getattr(arguments, option) is not None:
            raise InputError(f"--{option} is of the pictures that --figures draws; add that, or leave it out")
    given = [name for name in ("text", "input", "split") if getattr(arguments, name)]
    if len(given) > 1:
        raise InputError(f"give one of --{' and --'.join(given)}, not {'both' if len(given) == 2 else 'all'}")
    if arguments.count is not None and arguments.count < 1:
        raise InputError(f"--count is {arguments.count}; give 1 or more")
    if arguments.count is not None and arguments.text:
        raise InputError("--count is of --input or --split, and every --text is looked at; leave it out")
    if arguments.data is not None and given and given != ["split"]:
        raise InputError("--data has sentences for --split alone; leave it out")
    if arguments.force and given and given != ["split"]:
        raise InputError("--force needs references, which only --split has; leave it out")


def _check_attention(report: Report, name: str | None) -> None:
    for model in report.models:
        if name is not None and name not in model.attentions:
            raise InputError(f"--attention: {model.name} has no {name}; it has {', '.join(model.attentions)}")


def show(report: Report, *, heads: bool) -> None:
    """Prints a table of measures for every model, and what there is to worry about."""
    for model in report.models:
        console.print(_table(model, heads))
    for note in report.notes:
        warn(note)


def _table(model: ModelLook, heads: bool) -> Table:
    facts, count = ", ".join(model.facts.values()), len(model.sentences)
    shown = SHOWN[:SHOWN_IF_NARROW] if console.width < NARROW else SHOWN
    table = Table(title=escape(f"{model.name}: {facts}"), caption=f"over {count} sentence{'s' * (count > 1)}")
    table.add_column("attention", no_wrap=True)
    if heads:
        table.add_column("head", justify="right")
    table.add_column("looks at" if heads else "heads look at")
    for name in shown:
        table.add_column(MEASURES[name][0], justify="right")
    for attention in model.attentions:
        measures, roles = model.measures(attention), model.roles(attention)
        if heads:
            for head, role in enumerate(roles):
                table.add_row(attention, str(head + 1), role, *(_number(measures[name][head]) for name in shown))
        else:
            table.add_row(attention, _counted(roles), *(_range(measures[name]) for name in shown))
    return table


def _counted(roles: Sequence[str]) -> str:
    """Roles by how many heads have them: 3 mixed, 1 previous."""
    counts = {role: list(roles).count(role) for role in roles}
    return ", ".join(f"{count} {role}" for role, count in sorted(counts.items(), key=lambda one: (-one[1], one[0])))


def _range(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    low, high = _number(min(known)), _number(max(known))
    return low if low == high else f"{low} – {high}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


# ------------------------------------------------------------------ sentences


def _texts(arguments: Arguments) -> tuple[list[str], list[str] | None]:
    """The sentences that were asked for, and their references where a split has them."""
    if arguments.text:
        return list(arguments.text), None
    if arguments.input is not None:
        lines = [line for line in read_lines(arguments.input) if line.strip()][: arguments.count or COUNT]
        if not lines:
            raise InputError(f"{arguments.input} has no sentence in it; name another file")
        return lines, None
    return _from_split(arguments)


def _from_split(arguments: Arguments) -> tuple[list[str], list[str]]:
    from qknorm.training.run_folder import LANGUAGE_MODEL, read_run, task_of

    first = arguments.runs[0]
    if task_of(first) == LANGUAGE_MODEL:
        raise InputError(f"{first} is a language model, whose text has no sentences to choose; give --text or --input")
    data = PreparedData.load(arguments.data or Path(read_run(first)[1].data))
    split = data.split(arguments.split or "dev")
    sources, references = split.text(data.source), split.text(data.target)
    count = arguments.count or COUNT
    return sources[:count], references[:count]
