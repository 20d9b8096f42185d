"""From run folders and texts to a report: has models read the texts, and reads the metrics of their training."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from qknorm.decoding.generate import TextGenerator
from qknorm.decoding.translate import TextTranslator, translate_ids
from qknorm.errors import InputError
from qknorm.inspection.figures import label_tokens
from qknorm.inspection.judgement import judge_once
from qknorm.inspection.monitor import Calls, capture
from qknorm.inspection.report import (
    MEASURES,
    MOST_MODELS,
    ModelLook,
    Panel,
    Report,
    Sentence,
    Series,
    over_known,
    sentence_of_calls,
)
from qknorm.progress import Progress
from qknorm.specials import END, START
from qknorm.text.cleaning import clean_line
from qknorm.training.checkpoint import Which
from qknorm.training.language_run import read_language_run
from qknorm.training.loading import load
from qknorm.training.metrics import read_metrics, scale_numbers
from qknorm.training.run_folder import LANGUAGE_MODEL, read_run, task_of

MOST_TOKENS = 128
"""Longer texts are cut: more tokens than this are no picture any more."""
MOST_POINTS = 400
"""Points kept of a curve."""

SOURCE, READ, WRITTEN = "source", "target so far", "next target token"
"""The sides of a translator: what it reads of the source, of its own output, and what it writes at each place."""
SIDES = {"encoder.self": (SOURCE, SOURCE), "decoder.self": (READ, READ), "decoder.cross": (WRITTEN, SOURCE)}


def build_report(
    runs: Sequence[str | Path],
    texts: Sequence[str],
    *,
    references: Sequence[str] | None = None,
    force: bool = False,
    names: Sequence[str] | None = None,
    checkpoint: Which | Path = "best",
    device: str | None = None,
    progress: Progress | None = None,
) -> Report:
    """A report of one or two runs over the same texts: sentences for translators, any text for language models.

    A translator reads its own translation; with `force`, the reference, so that two of them read the same.
    """
    _check(runs, texts, references, force)
    notes: list[str] = []
    folders = [Path(run) for run in runs]
    looks = []
    for name, run in zip(names or _short_names(folders), folders, strict=True):
        model = load(run, checkpoint=checkpoint, device=device)
        if isinstance(model, TextTranslator):
            sentences = list(_read_translations(model, texts, references, force, notes, progress))
        else:
            sentences = [_read_text(model, text, place, notes) for place, text in enumerate(texts, start=1)]
        looks.append(ModelLook(name, sentences, describe_run(run), read_course(run)))
    for look in looks:
        worries = [worry for name in look.attentions for worry in judge_once(name, look.measures(name))]
        notes += [f"{look.name}: {worry}" if len(looks) > 1 else worry for worry in worries]
    return Report(looks, notes=list(dict.fromkeys(notes)))


def _check(runs: Sequence[str | Path], texts: Sequence[str], references: Sequence[str] | None, force: bool) -> None:
    if not 1 <= len(runs) <= MOST_MODELS:
        raise InputError(f"a report is of one run or of {MOST_MODELS} to compare, not of {len(runs)}")
    if not texts:
        raise InputError("there is no sentence to look at; give at least one")
    if references is not None and len(references) != len(texts):
        raise InputError(f"{len(texts)} sentences have {len(references)} references; give one for each")
    if force and references is None:
        raise InputError("there are no references for the models to read; leave out force, or give references")


def _short_names(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, or all of it where that does not tell them apart."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def describe_run(run: Path) -> dict[str, str]:
    """What a run is, in a few words: its languages, how its attention is normalised, its size."""
    if task_of(run) == LANGUAGE_MODEL:
        model = read_language_run(run)[0].model
        what, layers = "language model", str(model.layers)
    else:
        settings, about = read_run(run)
        model = settings.model  # type: ignore[assignment]
        what, layers = (
            f"{about.source} → {about.target}",
            f"{settings.model.encoder_layers} + {settings.model.decoder_layers}",
        )
    size = f"{layers} layers, {model.heads} heads, width {model.width}"
    return {"task": what, "attention": _describe_attention(model.attention.qk_norm, model.attention.p), "size": size}


def _describe_attention(qk_norm: str, p: float) -> str:
    plain = {"none": "dot products", "rms": "RMSNorm on q and k", "layer": "LayerNorm on q and k"}
    return plain.get(qk_norm) or ("QKNorm" if p == 2 else f"QKNorm, p = {p:g}")


# ------------------------------------------------------------------ texts


def _read_translations(
    translator: TextTranslator,
    texts: Sequence[str],
    references: Sequence[str] | None,
    force: bool,
    notes: list[str],
    progress: Progress | None,
) -> Iterator[Sentence]:
    tokenizer = translator.tokenizer
    sources = [
        _cut(tokenizer.encode(clean_line(text)), f"sentence {place}", notes)
        for place, text in enumerate(texts, start=1)
    ]
    if force and references is not None:
        targets = [tokenizer.encode(clean_line(reference)) for reference in references]
    else:
        targets = _translate(translator, sources, notes, progress)
    for place, (text, source, target) in enumerate(zip(texts, sources, targets, strict=True)):
        short = _cut(target, f"the translation of sentence {place + 1}", notes)
        reference = None if references is None else references[place]
        yield read_translation(translator, text, source, short, None if force else tokenizer.decode(target), reference)


def _translate(
    translator: TextTranslator, sources: Sequence[Sequence[int]], notes: list[str], progress: Progress | None
) -> list[list[int]]:
    """The best translations; none of a model that has diverged, which is what may have brought someone here."""
    try:
        found = translate_ids(translator.model, sources, translator.settings, progress=progress)
    except FloatingPointError as error:
        notes.append(f"nothing could be translated: {error}")
        return [[] for _ in sources]
    return [hypotheses[0].tokens for hypotheses in found]


def _cut(ids: Sequence[int], what: str, notes: list[str], most: int = MOST_TOKENS) -> list[int]:
    if len(ids) > most:
        notes.append(f"{what} has {len(ids)} tokens; the first {most} of them are shown")
    return list(ids[:most])


@torch.no_grad()
def read_translation(
    translator: TextTranslator,
    text: str,
    source: Sequence[int],
    target: Sequence[int],
    translation: str | None = None,
    reference: str | None = None,
) -> Sentence:
    """Has the model read a sentence and a translation of it at once, and keeps what its attentions did."""
    model, tokenizer = translator.model, translator.tokenizer
    device = next(model.parameters()).device
    sides = {SOURCE: [*source, END], READ: [START, *target], WRITTEN: [*target, END]}
    ids = {side: torch.tensor([numbers], device=device) for side, numbers in sides.items()}
    with capture(model) as calls:
        model.decode(ids[READ], model.encode(ids[SOURCE]))
    _check_seen(calls)
    labels = {side: label_tokens(tokenizer.tokens(numbers)) for side, numbers in sides.items()}
    return sentence_of_calls(
        labels, calls, text=text, translation=translation, reference=reference, sides=_sides_in_translator
    )


def _sides_in_translator(name: str) -> tuple[str, str]:
    stack, _, kind = name.split(".")
    return SIDES[f"{stack}.{kind}"]


@torch.no_grad()
def _read_text(generator: TextGenerator, text: str, place: int, notes: list[str]) -> Sentence:
    """Has a language model read a text, as far as its context goes."""
    model = generator.model
    if not text:
        raise InputError(f"text {place} is empty, and a language model needs a character to look at; leave it out")
    ids = _cut(
        generator.characters.encode(text).tolist(), f"text {place}", notes, min(MOST_TOKENS, model.settings.context)
    )
    with capture(model) as calls:
        model(torch.tensor([ids], device=next(model.parameters()).device))
    _check_seen(calls)
    return sentence_of_calls(list(generator.characters.decode(ids)), calls, text=text)


def _check_seen(calls: Calls) -> None:
    if calls.unseen:  # our own models are seen whole
        raise RuntimeError(f"attentions that could not be watched: {calls.unseen}")


# ------------------------------------------------------------------ the course of a training


def read_course(run: Path) -> list[Panel]:
    """The curves of a run's metrics: BLEU, losses, g by layer, learning rate, and the measures that were recorded."""
    rows = [row for row in read_metrics(run) if "step" in row]
    steps, evaluations = ([row for row in rows if row.get("kind") == kind] for kind in ("step", "evaluation"))
    scales = _series_by_name((row["step"], "", row.get("scales")) for row in evaluations)
    panels = [
        Panel("Dev BLEU", [_series("dev", evaluations, "dev_bleu")]),
        Panel("Loss", [_series("training", steps, "loss"), _series("dev", evaluations, "dev_loss")]),
        Panel("Scale g", [one for one in scales if _changes(one)]),
        Panel("Learning rate", [_series("learning rate", steps, "learning_rate")]),
        *_measure_panels(rows),
    ]
    kept = [Panel(panel.title, [one for one in panel.series if one.steps]) for panel in panels]
    return [panel for panel in kept if panel.series]


def _series(name: str, rows: Iterable[Mapping[str, Any]], key: str) -> Series:
    return _thinned(name, [(row["step"], row[key]) for row in rows if isinstance(row.get(key), int | float)])


def _thinned(name: str, points: Sequence[tuple[int, float]]) -> Series:
    """At most MOST_POINTS of the points, the last always among them."""
    every = -(-len(points) // MOST_POINTS) or 1
    kept = points[::-1][::every][::-1]
    return Series(name, [step for step, _ in kept], [float(value) for _, value in kept])


def _changes(scale: Series) -> bool:
    """Where g is not learned, its line would only flatten those of others."""
    return len(scale.values) == 1 or len(set(scale.values)) > 1


def _series_by_name(found: Iterable[tuple[int, str, Any]]) -> list[Series]:
    """A curve for every name of the mappings found at (step, measure); of a number a head, the mean or the largest."""
    points: dict[str, list[tuple[int, float]]] = {}
    for step, measure, by_name in found:
        for name, value in by_name.items() if isinstance(by_name, Mapping) else ():
            one = over_known(measure, scale_numbers(value))
            if one is not None:
                points.setdefault(name, []).append((step, one))
    return [_thinned(name, each) for name, each in points.items()]


def _measure_panels(rows: Iterable[Mapping[str, Any]]) -> list[Panel]:
    """A panel for every measure that rows hold by attention, with a curve for each of them."""
    found: dict[str, list[tuple[int, str, Any]]] = {}
    for row in rows:
        for groups in row.values():
            for attention, measures in groups.items() if isinstance(groups, Mapping) else ():
                for measure, value in measures.items() if isinstance(measures, Mapping) else ():
                    if measure in MEASURES:
                        found.setdefault(measure, []).append((row["step"], measure, {attention: value}))
    return [
        Panel(label[:1].upper() + label[1:], _series_by_name(found[measure]))
        for measure, (label, _) in MEASURES.items()
        if measure in found
    ]
