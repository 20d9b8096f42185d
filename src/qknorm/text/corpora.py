"""Data sets by name: where they lie on this machine, and how they come to it.

A local copy is a folder `name` with one file per side, `split.lang` (`input.txt` for a text of one language). It is
looked for under the environment variable QKNORM_DATA, then in the cache that `download` fills.

Checksums are those that others have published. Where nobody has, the first download is trusted, and its SHA-256 is
kept in `checksums.json` beside the data: a later download that differs from it is refused.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from qknorm.errors import InputError
from qknorm.files import atomic_folder, write_json
from qknorm.progress import Progress
from qknorm.text import layouts
from qknorm.text.catalogue import CORPORA, Corpus, find, suggestion
from qknorm.text.download import Source, fetch


@dataclass(frozen=True)
class CorpusState:
    """A line of `qknorm corpora list`: `folder` is None if the corpus is not here; `pairs` counts what is here."""

    name: str
    languages: tuple[str, ...]
    what: str
    licence: str
    folder: Path | None
    pairs: Mapping[str, int]


# ------------------------------------------------------------------ where it lies


def cache_folder() -> Path:
    """Where downloads go if no folder is named: qknorm/corpora in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "qknorm" / "corpora"


def local_folder(name: str, folder: Path | None = None) -> Path | None:
    """The folder that holds the corpus: under QKNORM_DATA, else under `folder` or the cache; None if it is nowhere."""
    corpus = find(name)
    for place in (_given_folder(), folder or cache_folder()):
        if place is not None and any((place / name / file).is_file() for file in corpus.files):
            return place / name
    return None


def _given_folder() -> Path | None:
    given = os.environ.get("QKNORM_DATA", "")
    if not given:
        return None
    if not Path(given).is_dir():
        raise InputError(f"the environment variable QKNORM_DATA names {given!r}, which is not a folder")
    return Path(given)


def split_files(
    name: str, split: str, languages: tuple[str, str] | None = None, folder: Path | None = None
) -> tuple[Path, Path]:
    """The two files of one split, source first; `languages` chooses the two, and may turn them round."""
    corpus = find(name)
    if len(corpus.languages) == 1:
        raise InputError(f"{name} is text of one language, without translations: use text_file")
    if split not in corpus.splits:
        raise InputError(f"{name} has no split called {split!r}{suggestion(split, corpus.splits)}")
    if languages is None:
        if len(corpus.languages) > 2:
            raise InputError(
                f"{name} has many languages: name two of them, such as {' and '.join(corpus.languages[2:4])}"
            )
        languages = (corpus.languages[0], corpus.languages[1])
    here = _folder_or_error(corpus, folder)
    known = {file.name.removeprefix(f"{split}.") for file in here.glob(f"{split}.*")}
    chosen = [corpus.short_codes.get(language, language) for language in languages]
    for language in chosen:
        if language not in known:
            way_out = suggestion(language, known) if known else ": the split is missing"
            raise InputError(f"{here} has no file {split}.{language}{way_out}")
    return here / f"{split}.{chosen[0]}", here / f"{split}.{chosen[1]}"


def text_file(name: str, folder: Path | None = None) -> Path:
    """The file of a corpus that is text of one language."""
    corpus = find(name)
    if len(corpus.languages) != 1:
        raise InputError(f"{name} is a parallel corpus, with two files a split: use split_files")
    return _folder_or_error(corpus, folder) / corpus.files[0]


def _folder_or_error(corpus: Corpus, folder: Path | None) -> Path:
    here = local_folder(corpus.name, folder)
    if here is None:
        raise InputError(
            f"{corpus.name} is not here: run `qknorm corpora download {corpus.name}`, or {_by_hand(corpus)}"
        )
    return here


def _by_hand(corpus: Corpus) -> str:
    files = ", ".join(corpus.files[:2]) + (", and so on" if len(corpus.files) > 2 else "")
    return f"set QKNORM_DATA to a folder and put the files there yourself, in {corpus.name}/: {files}"


def state(folder: Path | None = None) -> list[CorpusState]:
    """Every known corpus, and what of it is here."""
    states = []
    for corpus in CORPORA.values():
        here = local_folder(corpus.name, folder)
        pairs = {}
        if here is not None:
            # Read backwards, a split's first language comes last and stays: one side tells the number of pairs.
            firsts = {file.rpartition(".")[0]: here / file for file in reversed(corpus.files)}
            pairs = {split: layouts.count_lines(firsts[split]) for split in corpus.splits if firsts[split].is_file()}
        states.append(CorpusState(corpus.name, corpus.languages, corpus.what, corpus.licence, here, pairs))
    return states


# ------------------------------------------------------------------ how it comes here


def download(
    name: str,
    folder: Path | None = None,
    progress: Progress | None = None,
    base_urls: Mapping[str, str] | None = None,
) -> Path:
    """Downloads and arranges a corpus as `folder/name/split.lang` and returns that folder; does nothing if it is whole.

    A broken download is continued by the next call. `base_urls` replaces the beginnings of addresses, for a mirror.
    """
    corpus = find(name)
    root = (folder or cache_folder()).absolute()
    goal = root / name
    try:
        missing = [file for file in corpus.files if not (goal / file).is_file()]
        if missing:
            if goal.exists() and any(goal.iterdir()):  # our own folders are whole or not there, so it is someone's work
                raise InputError(f"{goal} holds other files but no {missing[0]}, so move it out of the way first")
            root.mkdir(parents=True, exist_ok=True)
            with _alone_in(root):
                _download(corpus, root, progress, base_urls)
    except InputError as fault:
        raise InputError(f"{name} could not be downloaded: {fault}; try again later, or {_by_hand(corpus)}") from fault
    except UnicodeDecodeError as fault:
        raise InputError(f"{name} could not be arranged: a file in it is not UTF-8 ({fault})") from fault
    except OSError as fault:
        reason = fault.strerror or fault
        raise InputError(
            f"{name} could not be written to {root}: {reason}; mend that or choose another folder"
        ) from fault
    return goal


def _download(corpus: Corpus, root: Path, progress: Progress | None, base_urls: Mapping[str, str] | None) -> None:
    store = root / "downloads"
    fetched, checksums = {}, {}
    for source in corpus.sources:
        path = store / ("" if _is_shared(source) else corpus.name) / source.file_name
        checksums[source.addresses[0]] = fetch(source, path, progress, base_urls)
        fetched[source.file_name] = path
        _compare_with_first(source, path, checksums[source.addresses[0]], root)
    try:
        with atomic_folder(root / corpus.name) as partial:
            corpus.arrange(fetched, partial, progress)
            _check_arranged(corpus, partial)
            origin = {"licence": corpus.licence, "citation": corpus.citation, "sha256": checksums}
            write_json(partial / "origin.json", origin)
    except (InputError, UnicodeDecodeError):
        for source in corpus.sources:
            if source.checksum is None:  # nothing says that it is the published file: the next call fetches it anew
                fetched[source.file_name].unlink(missing_ok=True)
        raise
    _remember_first(corpus, checksums, root)
    shutil.rmtree(store / corpus.name, ignore_errors=True)  # what is shared lies beside it, and stays


def _is_shared(source: Source) -> bool:
    return sum(source in corpus.sources for corpus in CORPORA.values()) > 1


def _check_arranged(corpus: Corpus, folder: Path) -> None:
    for file in corpus.files:
        if not (folder / file).is_file():
            raise InputError(f"the published archive holds nothing for {file}")
    for split in corpus.splits if len(corpus.languages) > 1 else ():
        lines = {language: layouts.count_lines(folder / f"{split}.{language}") for language in corpus.languages}
        if len(set(lines.values())) != 1 or 0 in lines.values():
            raise InputError(f"the sides of {split} are empty or of different length: {lines}")


def _first_checksums(root: Path) -> dict[str, str]:
    path = root / "checksums.json"
    if not path.is_file():
        return {}
    try:
        return {str(address): str(checksum) for address, checksum in json.loads(path.read_text("utf-8")).items()}
    except (ValueError, AttributeError) as fault:
        raise InputError(f"{path} is damaged: mend or delete it") from fault


def _compare_with_first(source: Source, path: Path, checksum: str, root: Path) -> None:
    first = _first_checksums(root).get(source.addresses[0], checksum)
    if source.checksum is None and checksum != first:
        path.unlink()
        raise InputError(
            f"{source.addresses[0]} has SHA-256 {checksum}, the first download had {first}, so it was removed; "
            f"if it was changed on purpose, delete its line from {root / 'checksums.json'}"
        )


def _remember_first(corpus: Corpus, checksums: Mapping[str, str], root: Path) -> None:
    unpublished = [source.addresses[0] for source in corpus.sources if source.checksum is None]
    if unpublished:
        write_json(
            root / "checksums.json", {address: checksums[address] for address in unpublished} | _first_checksums(root)
        )


@contextmanager
def _alone_in(root: Path) -> Iterator[None]:
    """Holds a lock, so that two downloads never write to one partial file; it ends with the process that holds it."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    with (root / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as fault:
            raise InputError(f"another download to {root} is running") from fault
        yield
