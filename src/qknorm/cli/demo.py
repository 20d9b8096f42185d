"""`qknorm demo`."""

import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import tyro
from rich.markup import escape
from rich.table import Table

from qknorm import files
from qknorm.cli.display import console, progress_bar, suggest
from qknorm.cli.prepare import show as show_preparation
from qknorm.config import Prepare, Subwords, Train
from qknorm.errors import InputError
from qknorm.studies.recipes import demo as recipe
from qknorm.text.demo_corpus import demo_splits
from qknorm.text.prepare import prepare
from qknorm.text.prepared import PreparedData

if TYPE_CHECKING:  # these import PyTorch, which help does without; so do those that functions import below
    from torch import Tensor

    from qknorm.decoding.translate import TextTranslator

MERGES = 3_000
MARKER = "demo.json"
CORPUS, DATA, RUN, ATTENTION = "corpus", "data", "run", "attention.png"
OURS = frozenset({MARKER, CORPUS, DATA, RUN, ATTENTION})
SHOWN_TRANSLATIONS = 12
LONGEST_DRAWN = 12
MOST_COMPARED = 40
LEAST_CROSSINGS = 3


@dataclass(frozen=True)
class Arguments:
    """Trains a small Galician-English translator on the embedded corpus, scores it and shows what it learned.

    Example: qknorm demo
    """

    out: Path = Path("out/demo")
    """Folder to write; an earlier demo there is replaced, anything else is left alone."""
    steps: int = recipe().training.max_steps
    """Training steps; fewer are quicker and translate worse."""
    device: str | None = None
    """cpu or cuda; a GPU where there is one if not given."""


def run(words: Sequence[str]) -> None:
    """Parses, makes the corpus, trains, and shows scores, translations, scales, pictures and the next commands."""
    arguments = tyro.cli(Arguments, args=words, prog="qknorm demo")
    from qknorm.training.fit import train
    from qknorm.training.run_folder import load_translator, read_run

    started = time.monotonic()
    settings = _settings(arguments.steps)
    out: Path = arguments.out
    _clear(out)
    with progress_bar() as progress:
        report = prepare(_write_corpus(out), out / DATA, progress=progress)
    show_preparation(report)
    console.print()
    outcome = train(out / DATA, out / RUN, settings, device=arguments.device)
    if outcome is None:
        raise InputError("the demo is for one process; run it without torchrun")
    if outcome.interrupted:
        suggest("Go on", "qknorm", "train", out / DATA, "--run", out / RUN, "--resume")
        raise SystemExit(130)
    translator = load_translator(out / RUN, device=arguments.device)
    translations = _translate(translator, PreparedData.load(out / DATA))
    _show_scores(translations, translator.target)
    _show_translations(translations["test"])
    _show_scales(translator, read_run(out / RUN)[1].scale_init)
    _draw(translator, translations["test"], out / ATTENTION)
    pictures = {"Attention, source against translation": out / ATTENTION, "Training curves": out / RUN / "curves.png"}
    for what, picture in pictures.items():
        console.print(f"{what}: [bold]{escape(str(picture))}[/bold]", soft_wrap=True)
    console.print(f"All done in {time.monotonic() - started:.0f} s.\n")
    _show_next(out / RUN)


@dataclass(frozen=True)
class Translated:
    """A sentence, what the model made of it, and what it should be."""

    source: str
    translation: str
    reference: str

    @property
    def exact(self) -> bool:
        """Whether nothing differs."""
        return self.translation == self.reference


def _settings(steps: int) -> Train:
    if steps < 1:
        raise InputError(f"--steps is {steps}; give 1 or more")
    settings = recipe()
    schedule = settings.training.schedule
    fewer = {
        "max_steps": steps,
        "evaluate_every": min(steps, settings.training.evaluate_every),
        "schedule": schedule.model_copy(update={"warmup": min(schedule.warmup, steps // 2)}),
    }
    return settings.model_copy(update={"training": settings.training.model_copy(update=fewer)})


# ------------------------------------------------------------------ the folder


def _clear(out: Path) -> None:
    """Makes the folder, or empties it of an earlier demo; refuses one that holds anything else."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; name a folder with --out")
    found = {path.name for path in out.iterdir()} if out.is_dir() else set()
    strangers = sorted(name for name in found - OURS if not _is_leftover(name))
    if strangers or (found and MARKER not in found):
        what = f"holds {', '.join(strangers[:3])}" if strangers else "was not made by qknorm demo"
        raise InputError(f"{out} {what}, which would be lost; name another folder with --out")
    for name in found - {MARKER}:  # the marker goes never: an interrupted demo is still a demo
        path = out / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    files.write_json(out / MARKER, {"made_by": "qknorm demo"})


def _is_leftover(name: str) -> bool:
    """Whether a killed demo left this half-written."""
    return name.startswith(tuple(f".{ours}." for ours in OURS)) and name.endswith((".partial", ".retired"))


def _write_corpus(out: Path) -> Prepare:
    """Writes the embedded corpus as plain text, and returns how to prepare it."""
    paths: dict[str, tuple[Path, ...]] = {}
    for split, pairs in demo_splits().items():
        paths[split] = (out / CORPUS / f"{split}.gl", out / CORPUS / f"{split}.en")
        for path, lines in zip(paths[split], zip(*pairs, strict=True), strict=True):
            files.write_text(path, "".join(f"{line}\n" for line in lines))
    train_files, dev_files, test_files = (paths[split] for split in ("train", "dev", "test"))
    return Prepare(
        source="gl",
        target="en",
        train=train_files,
        dev=dev_files,
        test=test_files,
        subwords=Subwords(merges=MERGES),
    )


# ------------------------------------------------------------------ what was learned


def _translate(translator: "TextTranslator", data: PreparedData) -> dict[str, list[Translated]]:
    translated = {}
    for name in ("dev", "test"):
        split = data.split(name)
        sources, references = split.text(data.source), split.text(data.target)
        with progress_bar() as progress:
            translations = translator.translate(sources, progress=progress)
        translated[name] = [Translated(*each) for each in zip(sources, translations, references, strict=True)]
    return translated


def _show_scores(splits: dict[str, list[Translated]], language: str) -> None:
    from qknorm.scoring import score

    table = Table("split", "sentences", "exact", "BLEU", "chrF", title="Scores")
    signatures: dict[str, str] = {}
    for name, each in splits.items():
        translations, references = [one.translation for one in each], [one.reference for one in each]
        scores = score(translations, [references], ("bleu", "chrf"), lang=language)
        exact = sum(one.exact for one in each) / len(each)
        table.add_row(name, f"{len(each):,}", f"{exact:.0%}", *(f"[bold]{one.value:.2f}[/bold]" for one in scores))
        signatures |= {one.metric: one.signature for one in scores}
    console.print(table)
    for metric, signature in signatures.items():
        console.print(f"[dim]{metric}: {signature}[/dim]", soft_wrap=True)
    console.print()


def _show_translations(translated: Sequence[Translated]) -> None:
    """A dozen from all over the test set, with a mark at those that are not as the reference."""
    table = Table("Galician", "translation", "", "reference", title="From the test set", show_lines=True)
    step = max(1, len(translated) // SHOWN_TRANSLATIONS)
    for one in translated[::step][:SHOWN_TRANSLATIONS]:
        mark = "[green]=[/green]" if one.exact else "[yellow]≠[/yellow]"
        table.add_row(escape(one.source), escape(one.translation), mark, escape(one.reference))
    console.print(table)


def _show_scales(translator: "TextTranslator", start: float | None) -> None:
    """g of every attention, a row a layer; all started from the same value."""
    by_place: dict[str, dict[str, float]] = {}
    for name, scale in translator.model.scales().items():
        stack, layer, kind = name.split(".")
        by_place.setdefault(f"layer {int(layer) + 1}", {})[f"{stack} {kind}"] = scale
    columns = list(dict.fromkeys(column for scales in by_place.values() for column in scales))
    table = Table("", *columns, title="The learned scale g, start → now")
    for place, scales in by_place.items():
        table.add_row(place, *(f"{start:.2f} → [bold]{scales[column]:.2f}[/bold]" for column in columns))
    console.print(table)


def _draw(translator: "TextTranslator", translated: Sequence[Translated], path: Path) -> None:
    """Cross-attention of the last layer over the clearest of some short, right translations that reorder words."""
    from qknorm.decoding.alignment import cross_attention_weights
    from qknorm.inspection.figures import draw_attention, label_tokens

    tokenizer = translator.tokenizer
    exact = [one for one in translated if one.exact] or [one for one in translated if one.translation] or translated
    short = [one for one in exact if len(tokenizer.encode(one.source)) <= LONGEST_DRAWN] or exact
    seen = []
    for one in short[:MOST_COMPARED]:
        source, target = tokenizer.encode(one.source), tokenizer.encode(one.translation)
        weights = cross_attention_weights(translator.model, source, target)[-1]
        seen.append((weights, source, target))
    reordered = [each for each in seen if _crossings(each[0]) >= LEAST_CROSSINGS] or seen
    weights, source, target = max(reordered, key=lambda each: _clarity(each[0]))
    names = [label_tokens(tokenizer.tokens([*ids, tokenizer.end_id])) for ids in (source, target)]
    title = f"Where the translation looks: cross-attention, decoder layer {len(translator.model.decoder)}"
    draw_attention(weights.cpu().numpy(), names[0], names[1], path, title=title)


def _crossings(weights: "Tensor") -> int:
    """How many pairs of target tokens look, on the mean of heads, to source tokens that stand the other way round."""
    places = weights.mean(dim=0).argmax(dim=-1).tolist()
    return sum(first > second for first, second in combinations(places, 2))


def _clarity(weights: "Tensor") -> float:
    """The mean, over target tokens, of the largest weight on the mean of heads."""
    return float(weights.mean(dim=0).amax(dim=-1).mean())


# ------------------------------------------------------------------ what to do next


def _show_next(run_folder: Path) -> None:
    steps = {
        "Talk to it": [f"qknorm translate {_word(run_folder)}"],
        "Your own files, one sentence a line (TSV, JSONL, TMX, PO and MO work too)": [
            "qknorm prepare data/mine --source gl --target en --train train.gl train.en",
            "qknorm train data/mine --run runs/mine",
            "qknorm score runs/mine --split test",
            "qknorm translate runs/mine --input news.gl --output news.en",
        ],
    }
    activate = Path(sys.prefix) / "bin" / "activate"
    if shutil.which("qknorm") is None and activate.is_file():
        here = Path.cwd()
        near = activate.relative_to(here) if activate.is_relative_to(here) else activate
        steps = {"First, in this shell": [f"source {_word(near)}"], **steps}
    for what, commands in steps.items():
        console.print(f"{what}:")
        for command in commands:
            console.print(f"  [bold]{escape(command)}[/bold]", soft_wrap=True)


def _word(path: Path) -> str:
    return shlex.quote(str(path))
