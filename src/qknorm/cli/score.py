"""`qknorm score`."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qknorm import files
from qknorm.cli.display import console, parse, progress_bar, warn
from qknorm.cli.translate import refuse_exported, which_checkpoint
from qknorm.errors import InputError
from qknorm.scoring import ScoreReport, ScoringOptions, score_report
from qknorm.text.prepared import PreparedData
from qknorm.text.readers import read_lines

WIDE = 200
"""Columns of a table that no terminal bounds: a signature then stands in one line, to be copied and searched for."""


@dataclass(frozen=True)
class Arguments:
    """Scores translations against references, or runs on a split of their data; tests differences for significance.

    Examples:

      qknorm score --ref test.en --hyp ours.en --hyp theirs.en

      qknorm score --ref test.tok.en --hyp ours.tok.en --tokenized --detokenize moses

      qknorm score runs/gl-en --split test

      qknorm score runs/baseline runs/qknorm --split test
    """

    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Run folders to translate a split with, each into a file SPLIT.LANG in it; the first is the tests' baseline."""
    ref: tuple[Path, ...] = ()
    """Reference files, one sentence a line."""
    hyp: Annotated[tuple[Path, ...], tyro.conf.UseAppendAction] = ()
    """Files of translations, one sentence a line; repeat --hyp for each; the first is the baseline of the tests."""
    split: str = "test"
    """With runs: the split to translate."""
    data: Path | None = None
    """With runs: the prepared folder, where it is not where the run was trained on."""
    checkpoint: str = "best"
    """With runs: best, last, a step, or a file of weights."""
    device: str | None = None
    """With runs: cpu or cuda."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """With runs: what to compute in; bfloat16 is faster where the processor has instructions for it."""
    json: bool = False
    """Print the report as JSON."""
    options: Annotated[ScoringOptions, tyro.conf.arg(name="")] = field(default_factory=ScoringOptions)


def run(words: Sequence[str]) -> None:
    """Parses, translates where runs are given, scores, prints."""
    arguments: Arguments = parse(Arguments, words, "score")
    options = arguments.options
    if arguments.runs:
        if arguments.ref or arguments.hyp:
            raise InputError("give run folders, or --ref and --hyp, not both")
        systems, references, names, options = _translate_runs(arguments)
    else:
        if not arguments.ref or not arguments.hyp:
            raise InputError("give --ref and --hyp, or a run folder; qknorm score --help has examples")
        systems = {name: list(read_lines(path)) for name, path in _named(arguments.hyp).items()}
        references = [list(read_lines(path)) for path in arguments.ref]
        names = tuple(str(path) for path in arguments.ref)
    with progress_bar() as progress:
        report = score_report(systems, references, options, reference_names=names, progress=progress)
    if arguments.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        show(report)


def _named(paths: Sequence[Path]) -> dict[str, Path]:
    """Distinct names, also where a file is given twice."""
    named: dict[str, Path] = {}
    for path in paths:
        name, number = str(path), 2
        while name in named:
            name, number = f"{path} ({number})", number + 1
        named[name] = path
    return named


def _translate_runs(
    arguments: Arguments,
) -> tuple[dict[str, list[str]], list[list[str]], tuple[str, ...], ScoringOptions]:
    from qknorm.training.run_folder import load_translator, read_run  # these import PyTorch, which help does without

    systems: dict[str, list[str]] = {}
    references: list[str] = []
    options = arguments.options
    for name, run_folder in _named(arguments.runs).items():
        refuse_exported(run_folder)
        _, about = read_run(run_folder)
        data = PreparedData.load(arguments.data or Path(about.data))
        split = data.split(arguments.split)
        found = split.text(data.target)
        if references and found != references:
            raise InputError(f"{run_folder} has other references in its {arguments.split} set than the runs before it")
        references = found
        translator = load_translator(
            run_folder,
            checkpoint=which_checkpoint(arguments.checkpoint),
            device=arguments.device,
            precision=arguments.precision,
        )
        with progress_bar() as progress:
            systems[name] = translator.translate(split.text(data.source), progress=progress)
        _keep(systems[name], run_folder / f"{arguments.split}.{data.target}")
        options = replace(options, lang=options.lang or data.target)
        if data.tokenizer.pretokenized:  # both numbers of the paper: over its own tokens, and over plain text
            options = replace(options, tokenized=True, detokenize=options.detokenize or "moses")
    return systems, [references], (f"{arguments.split} set",), options


def _keep(translations: Sequence[str], path: Path) -> None:
    """Writes translations where they can be; their scores are worth having without."""
    try:
        files.write_text(path, "".join(f"{line}\n" for line in translations))
    except OSError as error:
        warn(f"the translations are not kept, since {path} cannot be written ({error.strerror})")


def show(report: ScoreReport) -> None:
    """Scores with their signatures, then the tests between systems."""
    out = console if console.is_terminal else Console(width=WIDE, highlight=False, emoji=False)
    for system in report.systems:
        table = Table(title=escape(system.name), title_justify="left", box=None, padding=(0, 2, 0, 0))
        for column in ("metric", "score", "signature"):
            table.add_column(column, justify="right" if column == "score" else "left", overflow="fold")
        for score in system.scores:
            interval = f" ± {(score.interval.high - score.interval.low) / 2:.2f}" if score.interval else ""
            table.add_row(score.metric, f"[bold]{score.value:.2f}[/bold]{interval}", f"[dim]{score.signature}[/dim]")
        out.print(table)
    for comparison in report.comparisons:
        table = Table(title=f"{comparison.metric} against {escape(comparison.baseline)}", title_justify="left")
        for column in ("system", "score", "difference", "bootstrap p", "randomisation p", "wins"):
            table.add_column(column, justify="left" if column == "system" else "right", overflow="fold")
        for each in comparison.systems:
            if each.koehn_p is None:
                table.add_row(escape(each.name), f"{each.value:.2f}", "", "", "", "")
            else:
                table.add_row(
                    escape(each.name),
                    f"{each.value:.2f}",
                    f"{each.difference:+.2f}",
                    f"{each.koehn_p:.4f}",
                    f"{each.randomization_p:.4f}",
                    f"{each.win_rate:.1%}",
                )
        out.print(table)
        out.print(
            f"[dim]paired bootstrap (Koehn 2004, {comparison.samples:,} samples, one-sided) and approximate "
            f"randomisation ({comparison.trials:,} trials), seed {comparison.seed}[/dim]"
        )
    for note in report.notes:
        warn(note)
