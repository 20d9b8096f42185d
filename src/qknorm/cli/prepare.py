"""`qknorm prepare`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tyro
from pydantic import ValidationError
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from qknorm.cli.display import console, parse, progress_bar, suggest, warn
from qknorm.config import Cleaning, Prepare, Subwords, explain_validation
from qknorm.errors import InputError
from qknorm.text import catalogue, corpora
from qknorm.text.prepare import Report, prepare


@dataclass(frozen=True)
class Arguments:
    """Cleans parallel text, learns joint BPE and writes token ids.

    Examples:

      qknorm prepare data/gl-en --source gl --target en --train train.gl train.en

      qknorm prepare data/gl-en --source gl --target en --train pairs.tsv more.tmx --dev dev.gl dev.en

      qknorm prepare data/gl-en --corpus ted-gl-en --subwords.pretokenized --subwords.merges 3000
    """

    out: tyro.conf.Positional[Path]
    """Folder to write."""
    source: str | None = None
    """Code of the language to translate from, such as gl."""
    target: str | None = None
    """Code of the language to translate to, such as en."""
    train: tuple[Path, ...] = ()
    """Training text: two plain text files (source, target), or files of both sides (TSV, JSONL, TMX, PO, MO)."""
    dev: tuple[Path, ...] = ()
    """Development set, in the same forms; split off from the training text if not given."""
    test: tuple[Path, ...] = ()
    """Test set, in the same forms; split off from the training text if not given."""
    corpus: str | None = None
    """A data set by name instead of files; `qknorm corpora list` shows them."""
    dev_pairs: int | None = None
    """How many pairs to split off as dev where none is given, 1,000 if not told; at most a tenth of the corpus."""
    test_pairs: int | None = None
    """How many pairs to split off as test where none is given, 1,000 if not told; at most a tenth of the corpus."""
    cleaning: Cleaning = field(default_factory=Cleaning)
    subwords: Subwords = field(default_factory=Subwords)
    overwrite: bool = False
    """Replace an earlier prepared folder."""


def run(words: Sequence[str]) -> None:
    """Parses, prepares, reports."""
    arguments: Arguments = parse(Arguments, words, "prepare")
    settings = _settings(arguments)
    with progress_bar() as progress:
        report = prepare(settings, arguments.out, arguments.overwrite, progress)
    show(report)
    source, target = settings.source, settings.target
    if "dev" in report.splits:
        suggest("\nNext", "qknorm", "train", arguments.out, "--run", f"runs/{source}-{target}")
    else:
        words = f"--dev dev.{source} dev.{target} --overwrite"
        console.print(f"\nTraining needs a dev set; prepare again with {words}", soft_wrap=True)


def _settings(arguments: Arguments) -> Prepare:
    source, target = arguments.source, arguments.target
    files = {"train": arguments.train, "dev": arguments.dev, "test": arguments.test}
    if arguments.corpus is not None:
        if arguments.train:
            raise InputError("give --corpus or --train, not both")
        corpus = catalogue.find(arguments.corpus)
        if source is None and target is None and len(corpus.languages) == 2:
            source, target = corpus.languages
        languages = (source, target) if source and target else None
        for split in files:
            files[split] = files[split] or corpora.split_files(arguments.corpus, split, languages)
    sizes = {"dev": arguments.dev_pairs, "test": arguments.test_pairs}
    for split, pairs in sizes.items():
        if files[split] and pairs:
            given = f"--{split} gives one" if getattr(arguments, split) else "--corpus brings one"
            raise InputError(
                f"--{split}-pairs is for splitting off a {split} set, but {given}; leave --{split}-pairs out"
            )
    if source is None or target is None:
        raise InputError("say which languages: --source gl --target en")
    if not files["train"]:
        raise InputError("give the training text: --train train.gl train.en, or --corpus NAME")
    try:
        return Prepare(
            source=source,
            target=target,
            train=files["train"],
            dev=files["dev"],
            test=files["test"],
            **{f"{split}_pairs": pairs for split, pairs in sizes.items() if pairs is not None},
            cleaning=arguments.cleaning,
            subwords=arguments.subwords,
        )
    except ValidationError as error:
        raise InputError(explain_validation(error, "settings of prepare", Prepare)) from None


def show(report: Report) -> None:
    """What was kept, what each rule dropped and why."""
    source, target = escape(report.source), escape(report.target)
    table = Table(title=f"{source} → {target}: {report.vocabulary:,} types, {report.merges:,} merges")
    for column in ("split", "pairs", f"{source} subwords", f"{target} subwords"):
        table.add_column(column, justify="left" if column == "split" else "right")
    for name, counts in report.splits.items():
        table.add_row(name, f"{counts.pairs:,}", f"{counts.source_tokens:,}", f"{counts.target_tokens:,}")
    console.print(table)
    dropped = {rule: drop for rule, drop in report.cleaning.dropped.items() if drop.pairs}
    pairs = "pair" if report.cleaning.read == 1 else "pairs"
    console.print(f"{report.cleaning.read:,} training {pairs} read, {report.cleaning.kept:,} kept", end="")
    console.print(f", {report.cleaning.held_out:,} held out" if report.cleaning.held_out else "")
    for rule, drop in dropped.items():
        console.print(f"  dropped {drop.pairs:,}: [bold]{rule}[/bold]")
        for example in drop.examples[:1]:
            console.print(Text(f"    {' ⇄ '.join(example)}", style="dim"), soft_wrap=True)
    for sentence in report.warnings:
        warn(sentence)
