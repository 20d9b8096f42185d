"""From text files to a folder of token ids: read, clean, split, learn subwords, encode; streaming, all or nothing."""

import os
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qknorm import files
from qknorm.config import Prepare
from qknorm.errors import InputError
from qknorm.progress import Progress
from qknorm.text import prepared
from qknorm.text.alignment import OrderCheck, WordSample
from qknorm.text.cleaning import OVERLAP, CleaningReport, HeldOut, clean_pair, drop_pairs, hash_pair, rules_for
from qknorm.text.exchange import Heading
from qknorm.text.readers import Pair, read_lines, read_pairs
from qknorm.text.spacing import SpacingSample, explain_spacing
from qknorm.text.subwords import SPECIALS, Tokenizer, choose_merges

_CODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
_MOST_PAIRS_FOR_MERGES = 200_000  # more text changes few merges and costs time and memory
_LARGEST_SHARE = 10  # dev and test each are at most one in so many pairs
_BATCH = 10_000


@dataclass(frozen=True)
class SplitCounts:
    """The size of a split."""

    pairs: int
    source_tokens: int
    target_tokens: int


@dataclass(frozen=True)
class Report:
    """What `prepare` did; `warnings` are sentences for the user."""

    folder: Path
    source: str
    target: str
    vocabulary: int
    types_in_training: int
    merges: int
    splits: dict[str, SplitCounts]
    cleaning: CleaningReport
    warnings: list[str]
    fingerprint: str


def prepare(settings: Prepare, out: str | Path, overwrite: bool = False, progress: Progress | None = None) -> Report:
    """Reads, cleans, splits and encodes a corpus into the folder `out`, which appears whole or not at all."""
    _check_languages(settings.source, settings.target)
    out = Path(out).resolve()
    _check_out(out, overwrite, (*settings.train, *settings.dev, *settings.test))
    try:
        with files.atomic_folder(out) as folder:
            return _Preparation(settings, folder, progress or _keep_silent).run(out)
    except OSError as error:
        raise InputError(
            f"{out} cannot be written ({error.strerror or error}); make room or name another place"
        ) from error


class _Preparation:
    """One run of `prepare`: its methods are the stages, in order."""

    def __init__(self, settings: Prepare, folder: Path, progress: Progress) -> None:
        self.settings = settings
        self.folder = folder
        self.progress = progress
        self.languages = (settings.source, settings.target)
        self.held_out = HeldOut()
        self.cleaning = CleaningReport()
        self.words: dict[str, WordSample] = {}
        self.spacing: dict[str, SpacingSample] = {}
        self.pairs: dict[str, int] = {}
        self.warnings: list[str] = []

    def run(self, out: Path) -> Report:
        for name, paths in (("dev", self.settings.dev), ("test", self.settings.test)):
            if paths:
                self.copy_held_out(name, paths)
        hashes = self.clean_training_text()
        self.split_off(hashes)
        if not self.pairs["train"]:
            reasons = ", ".join(
                f"{rule} {entry.pairs:,}" for rule, entry in self.cleaning.dropped.items() if entry.pairs
            )
            raise InputError(
                f"no training pair is left of {self.cleaning.read:,} ({reasons}); check files and cleaning settings"
            )
        tokenizer = self.learn_subwords()
        return self.encode(tokenizer, out)

    def copy_held_out(self, name: str, paths: tuple[Path, ...]) -> None:
        """Normalises a given dev or test set without losing a pair."""
        pairs = (clean_pair(pair) for pair in self.watch(name, paths))
        self.pairs[name] = self.write(name, self.hold_out(pairs) if self.settings.cleaning.drop_overlap else pairs)

    def clean_training_text(self) -> "array[int]":
        """Writes the training pairs that pass all rules, and returns their hashes."""
        hashes = array("Q")

        def remember(pairs: Iterable[Pair]) -> Iterator[Pair]:
            for pair in pairs:
                hashes.append(hash_pair(pair))
                yield pair

        rules = rules_for(self.settings.cleaning, self.held_out)
        kept = drop_pairs(self.watch("train", self.settings.train), rules, self.cleaning)
        self.pairs["train"] = self.write("train", remember(kept))
        for name, sample in self.words.items():
            if sample.looks_swapped_against(self.words["train"]):
                raise InputError(
                    f"the {name} files have {self.settings.source} and {self.settings.target} the other way round "
                    f"from the train files; swap the files of one of them"
                )
        if told := explain_spacing(self.spacing, self.languages, self.settings.subwords.pretokenized):
            self.warnings.append(told)
        return hashes

    def split_off(self, hashes: "array[int]") -> None:
        """Moves the pairs with the smallest hashes to test and dev, and what overlaps with them out of training.

        Hashes rank pairs the same in a corpus that has grown: a pair that leaves test for a newcomer goes to dev first.
        """
        ranked = np.unique(np.frombuffer(hashes, dtype=np.uint64))
        most = len(ranked) // _LARGEST_SHARE
        chosen: dict[str, set[int]] = {}
        for name, given, wanted in (
            ("test", self.settings.test, self.settings.test_pairs),
            ("dev", self.settings.dev, self.settings.dev_pairs),
        ):
            if not given and wanted:
                count, taken = min(wanted, most), sum(map(len, chosen.values()))
                chosen[name] = {int(key) for key in ranked[taken : taken + count]}
        if not chosen:
            return
        if not most:
            pairs = "1 pair is" if len(ranked) == 1 else f"{len(ranked)} pairs are"
            self.warnings.append(f"{pairs} too few to split off {' and '.join(sorted(chosen))}")
            return
        staged = self.folder / "staged"
        staged.mkdir()
        for language in self.languages:
            (self.folder / prepared.text_name("train", language)).rename(staged / language)
        self.route(staged, hashes, chosen)
        for language in self.languages:
            (staged / language).unlink()
        staged.rmdir()

    def route(self, staged: Path, hashes: "array[int]", chosen: dict[str, set[int]]) -> None:
        """Writes the chosen pairs to their splits, then the rest to train; copies of chosen pairs are dropped."""

        def staged_pairs() -> Iterator[tuple[Pair, int]]:
            sides = [read_lines(staged / language) for language in self.languages]
            for source, target, key in zip(*sides, hashes, strict=True):
                yield Pair(source, target), key

        for name, keys in chosen.items():
            waiting = set(keys)

            def first_copies(waiting: set[int] = waiting) -> Iterator[Pair]:
                for pair, key in staged_pairs():
                    if key in waiting:
                        waiting.remove(key)
                        yield pair

            self.pairs[name] = self.write(name, self.hold_out(first_copies()))
            self.cleaning.held_out += self.pairs[name]

        first = set().union(*chosen.values())

        def training_pairs() -> Iterator[Pair]:
            for pair, key in staged_pairs():
                if key in first:
                    first.remove(key)
                elif self.held_out.overlaps(pair):
                    self.cleaning.note_drop(OVERLAP, pair)
                else:
                    yield pair

        self.pairs["train"] = self.cleaning.kept = self.write("train", training_pairs())

    def learn_subwords(self) -> Tokenizer:
        """Learns merges from both sides of the training text, or from an even sample of a large one."""
        pairs = self.pairs["train"]
        wanted = self.settings.subwords.merges
        merges = choose_merges(pairs) if wanted is None else wanted
        self.progress("learning subwords", 0, merges)
        step = -(-pairs // _MOST_PAIRS_FOR_MERGES)
        sides = (read_lines(self.folder / prepared.text_name("train", language)) for language in self.languages)
        lines = chain.from_iterable(islice(side, 0, None, step) for side in sides)
        tokenizer = Tokenizer.train(lines, merges, self.settings.subwords.pretokenized)
        tokenizer.save(self.folder / prepared.TOKENIZER)
        self.progress("learning subwords", merges, merges)
        if wanted is not None and tokenizer.merges < wanted:
            self.warnings.append(f"the text gave only {tokenizer.merges:,} of the {wanted:,} merges asked for")
        return tokenizer

    def encode(self, tokenizer: Tokenizer, out: Path) -> Report:
        """Writes token ids of all splits, and the manifest."""
        lengths: Counter[int] = Counter()
        types = {language: np.zeros(tokenizer.size, dtype=np.bool_) for language in self.languages}
        splits = {}
        for split in sorted(self.pairs, key=("train", "dev", "test").index):
            tokens = []
            for language in self.languages:
                ids, offsets = self.encode_side(tokenizer, split, language)
                np.save(self.folder / prepared.ids_name(split, language), ids)
                np.save(self.folder / prepared.offsets_name(split, language), offsets)
                tokens.append(len(ids))
                if split == "train":
                    types[language][np.unique(ids)] = True
                    lengths.update(np.diff(offsets).tolist())
            splits[split] = SplitCounts(self.pairs[split], tokens[0], tokens[1])
        np.save(self.folder / prepared.TARGET_TYPES, types[self.settings.target])
        report = Report(
            folder=out,
            source=self.settings.source,
            target=self.settings.target,
            vocabulary=tokenizer.size,
            types_in_training=int(np.logical_or(*types.values()).sum()),
            merges=tokenizer.merges,
            splits=splits,
            cleaning=self.cleaning,
            warnings=self.warnings,
            fingerprint=prepared.fingerprint(
                self.folder, [prepared.TOKENIZER, *(path.name for path in self.folder.glob("*.npy"))]
            ),
        )
        files.write_json(self.folder / prepared.MANIFEST, self.manifest(report, lengths))
        return report

    def encode_side(
        self, tokenizer: Tokenizer, split: str, language: str
    ) -> tuple[prepared.TokenIds, NDArray[np.int64]]:
        kind = np.uint16 if tokenizer.size <= 1 << 16 else np.uint32
        lines = read_lines(self.folder / prepared.text_name(split, language))
        pieces, lengths = [np.zeros(0, kind)], array("q", [0])
        while batch := tokenizer.encode_batch(list(islice(lines, _BATCH))):
            pieces.append(np.fromiter(chain.from_iterable(batch), dtype=kind, count=sum(map(len, batch))))
            lengths.extend(map(len, batch))
            self.progress(f"encoding {split}.{language}", len(lengths) - 1, self.pairs[split])
        return np.concatenate(pieces), np.cumsum(lengths, dtype=np.int64)

    def manifest(self, report: Report, lengths: Counter[int]) -> dict[str, Any]:
        return {
            "format_version": prepared.FORMAT_VERSION,
            "source": report.source,
            "target": report.target,
            "vocabulary": report.vocabulary,
            "specials": list(SPECIALS),
            "types_in_training": report.types_in_training,
            "merges": report.merges,
            "splits": {name: vars(counts) for name, counts in report.splits.items()},
            "cleaning": report.cleaning.as_json(),
            "warnings": report.warnings,
            "settings": self.settings.model_dump(mode="json"),
            "train_lengths": sorted(lengths.items()),
            "fingerprint": report.fingerprint,
            "files": {path.name: path.stat().st_size for path in sorted(self.folder.iterdir())},
        }

    def hold_out(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        for pair in pairs:
            self.held_out.add(pair)
            yield pair

    def watch(self, split: str, paths: tuple[Path, ...]) -> Iterator[Pair]:
        """Streams the pairs of files, shows progress, and checks at the end that the sides are in the same order."""
        order, words, spacing = OrderCheck(), WordSample(), SpacingSample()
        spoiled = self.cleaning.note_spoiled if split == "train" else None  # given sets lose no pair
        catalogues: dict[Heading, list[Path]] = {"source": [], "target": [], "neither": []}

        def headed(path: Path, heading: Heading) -> None:
            catalogues[heading].append(path)

        count = 0
        for count, pair in enumerate(read_pairs(paths, *self.languages, spoiled, headed), start=1):
            order.add(*pair)
            words.add(*pair)
            spacing.add(*pair)
            if count % _BATCH == 0:
                self.progress(f"reading {split}", count, None)
            yield pair
        self.progress(f"reading {split}", count, count)
        self.words[split], self.spacing[split] = words, spacing
        self.warnings += _explain_headings(catalogues, *self.languages)
        listed = ", ".join(str(path) for path in paths)
        if order.is_disordered():
            raise InputError(
                f"the two sides of {listed} are not in the same order: lengths, numbers and question marks agree no "
                "better than by chance; pair the lines again from the original files"
            )
        if order.is_doubtful():
            self.warnings.append(
                f"the two sides of {listed} hardly fit each other; look whether line n translates line n"
            )

    def write(self, split: str, pairs: Iterable[Pair]) -> int:
        """Writes both sides as text, and returns the number of pairs."""
        count = 0
        with ExitStack() as stack:
            names = [prepared.text_name(split, language) for language in self.languages]
            source, target = (
                stack.enter_context((self.folder / name).open("w", encoding="utf-8", newline="\n")) for name in names
            )
            for pair in pairs:
                count += 1
                source.write(pair.source + "\n")
                target.write(pair.target + "\n")
        return count


def _explain_headings(catalogues: Mapping[Heading, Sequence[Path]], source: str, target: str) -> list[str]:
    """What to know of how gettext catalogues were read; nothing of those whose header names the target."""
    told = []
    if turned := catalogues["source"]:
        told.append(
            f"{_listed(turned)} read from msgstr to msgid because the header's Language: names {source}, the source; "
            "if that is wrong, correct the header"
        )
    if unknown := catalogues["neither"]:
        told.append(
            f"{_listed(unknown)} read from msgid as {source} to msgstr as {target}, for the header's Language: tells "
            "neither; if it is the other way round, set it to the language of msgstr"
        )
    return told


def _listed(catalogues: Sequence[Path]) -> str:
    first, more = catalogues[0], len(catalogues) - 1
    return f"{first} and {more} more catalogue{'s' * (more > 1)} were" if more else f"{first} was"


def _check_languages(source: str, target: str) -> None:
    for setting, code in (("source", source), ("target", target)):
        if not _CODE.fullmatch(code):
            raise InputError(
                f"{setting} = {code!r} is no language code; use letters, digits, - and _, such as gl or pt-BR"
            )
    if source.casefold() == target.casefold():
        raise InputError(f"source and target are both {source}; name two languages")


def _check_out(out: Path, overwrite: bool, inputs: Iterable[Path]) -> None:
    """Refuses to replace anything but prepared data, and that only if asked and if nothing else lies in it."""
    if not os.path.lexists(out):
        return
    if out.is_file():
        raise InputError(f"{out} is a file, not a folder to write to, which comes first: qknorm prepare FOLDER …")
    if not overwrite:
        raise InputError(f"{out} exists already; name another folder, or add --overwrite")
    try:
        manifest = prepared.read_manifest(out)
    except InputError as error:
        raise InputError(f"{out} is not overwritten, for it may be something else: {error}") from None
    strangers = {path.name for path in out.iterdir()} - {prepared.MANIFEST, *manifest.get("files", ())}
    if strangers:
        raise InputError(
            f"{out} also holds {', '.join(sorted(strangers)[:3])}, which would be lost; move it away first"
        )
    for path in inputs:
        if path.resolve().is_relative_to(out):
            raise InputError(f"{path} lies in {out}, which would be overwritten; name another folder")


def _keep_silent(stage: str, done: int, total: int | None) -> None:
    """Shows nothing."""
