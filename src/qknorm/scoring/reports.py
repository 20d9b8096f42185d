"""Everything there is to say about one or more systems on one test set, as plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from qknorm.errors import InputError
from qknorm.progress import Progress
from qknorm.scoring.detokenizing import detokenize, treebank_detokenize, unescape_entities
from qknorm.scoring.languages import primary_language
from qknorm.scoring.line_checks import check_parallel, name_references
from qknorm.scoring.metrics import AS_GIVEN, Metric
from qknorm.scoring.paired_tests import Comparison, check_baseline, compare_counts
from qknorm.scoring.scores import Score, score_counts


@dataclass(frozen=True)
class ScoringOptions:
    """How to score. The text is prepared alike on both sides, unless `raw_references` leaves the references alone."""

    metrics: tuple[str, ...] | None = None
    """Of bleu, chrf, chrf++, ter, multi-bleu, multi-bleu-detok; if not given bleu, chrf, ter, or see `tokenized`."""
    tokenized: bool = False
    """The text is tokenised: give the numbers of Moses' two scripts, and no other unless `detokenize` is set too."""
    detokenize: Literal["moses", "treebank"] | None = None
    """Detokenise before every metric but the multi-bleus; "moses" also undoes entities, "treebank" is NLTK's way."""
    unescape: bool = False
    """Undo the entities of the Moses tokeniser (&apos; and its like) before every metric but the multi-bleus."""
    raw_references: bool = False
    """The references are plain text already: prepare only the translations."""
    lang: str = ""
    """The target language: chooses BLEU's tokeniser and the rules of Moses detokenisation (English if not given)."""
    tokenizer: str | None = None
    """A tokeniser of sacreBLEU for BLEU, in place of the language's own."""
    lowercase: bool = False
    """Ignore case in BLEU, chrF and multi-bleu (TER always does)."""
    intervals: bool = False
    """Give each score a 95% interval by bootstrap."""
    baseline: str | None = None
    """The system that the others are tested against; the first if not given."""
    samples: int = 1000
    """Bootstrap samples."""
    trials: int = 10_000
    """Random swaps in approximate randomisation."""
    seed: int = 12345
    """The seed of all random draws; sacreBLEU's default."""


@dataclass(frozen=True)
class SystemScores:
    """The scores of one system, in the order of the metrics."""

    name: str
    scores: tuple[Score, ...]


@dataclass(frozen=True)
class ScoreReport:
    """Scores of every system; comparisons, one a metric, where there are two systems or more; and things to know."""

    sentences: int
    systems: tuple[SystemScores, ...]
    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...]


_DEFAULTS = ScoringOptions()


def score_report(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[Sequence[str]],
    options: ScoringOptions = _DEFAULTS,
    *,
    reference_names: Sequence[str] = (),
    progress: Progress | None = None,
) -> ScoreReport:
    """Scores every system (name → lines) and, from two systems on, tests each against the baseline."""
    check_parallel(systems, references, reference_names)
    baseline = options.baseline if options.baseline is not None else next(iter(systems))
    if len(systems) > 1 or options.baseline is not None:
        check_baseline(systems, baseline)
    metrics = _choose_metrics(options)
    prepared = {name: _prepare(lines, options) for name, lines in systems.items()}
    prepared_references = references if options.raw_references else [_prepare(lines, options) for lines in references]
    scores: dict[str, list[Score]] = {name: [] for name in systems}
    comparisons = []
    for metric in metrics:
        as_given = metric.name in AS_GIVEN
        prep = "" if as_given else _describe_preparation(options)
        texts, targets = (systems, references) if as_given else (prepared, prepared_references)
        counts = {name: metric.count(lines, targets, _named(progress, name), name) for name, lines in texts.items()}
        for name, counted in counts.items():
            samples = options.samples if options.intervals else 0
            scores[name].append(score_counts(metric, counted, samples, options.seed, prep))
        if len(systems) > 1:
            comparisons.append(
                compare_counts(metric, counts, baseline, options.samples, options.trials, options.seed, prep)
            )
    notes = _note_missing_tokenizers(metrics)
    if any(metric.name not in AS_GIVEN for metric in metrics):
        named_references = zip(name_references(references, reference_names), prepared_references, strict=True)
        for name, lines in [*prepared.items(), *named_references]:
            notes += _note_leftovers(name, lines)
    for name, lines in systems.items():
        notes += _note_empty(name, lines)
    by_system = tuple(SystemScores(name, tuple(found)) for name, found in scores.items())
    return ScoreReport(len(references[0]), by_system, tuple(comparisons), tuple(notes))


def _choose_metrics(options: ScoringOptions) -> list[Metric]:
    names = options.metrics
    if names is None:
        names = () if options.tokenized and not options.detokenize else ("bleu", "chrf", "ter")
    if options.tokenized:
        names = (*AS_GIVEN, *names)
    if not names:
        raise InputError("metrics is empty: name at least one metric, such as bleu")
    return [Metric(name, options.lang, options.tokenizer, options.lowercase) for name in dict.fromkeys(names)]


def _prepare(lines: Sequence[str], options: ScoringOptions) -> Sequence[str]:
    if options.detokenize not in (None, "moses", "treebank"):
        raise InputError(f'unknown detokenize "{options.detokenize}": use moses or treebank')
    if options.detokenize == "moses":
        return detokenize(lines, options.lang or "en")
    if options.unescape:
        lines = [unescape_entities(line) for line in lines]
    return treebank_detokenize(lines) if options.detokenize == "treebank" else lines


def _describe_preparation(options: ScoringOptions) -> str:
    steps = []
    if options.unescape or options.detokenize == "moses":
        steps.append("unescape")
    if options.detokenize == "moses":
        steps.append(f"moses-detok[{primary_language(options.lang) or 'en'}]")
    elif options.detokenize:
        steps.append(f"{options.detokenize}-detok")
    described = "+".join(steps)
    return f"{described}(hyp)" if described and options.raw_references else described


def _named(progress: Progress | None, system: str) -> Progress | None:
    if progress is None:
        return None
    return lambda metric, done, total: progress(f"{metric} of {system}", done, total)


def _note_missing_tokenizers(metrics: Sequence[Metric]) -> list[str]:
    return [
        f"{metric.missing_tokenizer} is not installed, so BLEU counts characters, which is not comparable with "
        f'published numbers: pip install "sacrebleu[{metric.missing_tokenizer[:2]}]"'
        for metric in metrics
        if metric.missing_tokenizer
    ]


def _note_leftovers(name: str, lines: Sequence[str]) -> list[str]:
    notes = []
    tokenized = sum(line.rstrip().endswith((" .", " ?", " !")) for line in lines)
    if 2 * tokenized > len(lines):
        notes.append(
            f"{name} looks tokenised ({tokenized:,} of {len(lines):,} lines end in a mark that stands alone): "
            "BLEU, chrF and TER want plain text, so detokenise it or ask for the tokenised score (--tokenized)"
        )
    escaped = sum(unescape_entities(line) != line for line in lines)
    if escaped:
        notes.append(f"{name} has entities such as &apos; in {escaped:,} of {len(lines):,} lines: unescape them")
    return notes


def _note_empty(name: str, lines: Sequence[str]) -> list[str]:
    empty = sum(not line.strip() for line in lines)
    return [f"{name} has {empty:,} empty of {len(lines):,} lines"] if empty else []
