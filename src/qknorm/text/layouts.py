"""How published archives become `split.lang` files: one sentence a line, line n of one side translates the other's."""

import html
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from qknorm.errors import InputError
from qknorm.progress import Progress
from qknorm.text.archives import extract, gunzip

Arrange = Callable[[Mapping[str, Path], Path, Progress | None], None]

TED_EMPTY = "__NULL__"
IWSLT14_TEST_SETS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
IWSLT14_DEV_EVERY = 23
# Titles and descriptions are sentences like any other; what stands in other tags has no translation.
IWSLT14_SENTENCE_TAG = re.compile(r"</?(?:title|description)>")
IWSLT14_NOTE = re.compile(r"\s*</?(?:url|keywords|speaker|talkid|reviewer|translator|doc|transcript)\b")
IWSLT14_SEGMENT = re.compile(r"<seg\b[^>]*>(.*?)</seg>", re.IGNORECASE | re.DOTALL)


def plain(names: Mapping[str, str]) -> Arrange:
    """For corpora that are published as single files, gzipped or not: {file there: file here}."""

    def arrange(downloads: Mapping[str, Path], folder: Path, progress: Progress | None) -> None:
        for there, here in names.items():
            if there.endswith(".gz"):
                gunzip(downloads[there], folder / here)
            else:
                shutil.copyfile(downloads[there], folder / here)

    return arrange


def ted(source: str, target: str) -> Arrange:
    """For two languages of the TED talks of Qi et al. (2018), three tables with a column for each of 60 languages."""

    def arrange(downloads: Mapping[str, Path], folder: Path, progress: Progress | None) -> None:
        wanted = {f"all_talks_{split}.tsv": split for split in ("train", "dev", "test")}
        with _unpacked(downloads, folder, lambda name: Path(name).name in wanted, progress) as tables:
            for table in tables:
                _write_pairs(folder, wanted[table.name], (source, target), read_ted_table(table, source, target))

    return arrange


def read_ted_table(path: Path, source: str, target: str) -> Iterator[tuple[str, str]]:
    """Yields the pairs of two columns of a TED table; rows where either side is `__NULL__` or blank are left out."""
    with path.open(encoding="utf-8", newline="\n") as table:
        columns = table.readline().rstrip("\r\n").split("\t")
        for language in (source, target):
            if language not in columns:
                raise InputError(f"{path}, line 1: there is no column {language!r} among {', '.join(columns)}")
        first, second = columns.index(source), columns.index(target)
        for row in table:
            cells = row.rstrip("\r\n").split("\t")
            if max(first, second) < len(cells):
                pair = cells[first].strip(), cells[second].strip()
                if all(pair) and not any(_is_null(side) for side in pair):
                    yield pair


def _is_null(cell: str) -> bool:
    return TED_EMPTY in cell.replace(" ", "")  # the tokeniser has spread some of the marks: _ _ NULL _ _


def flores(downloads: Mapping[str, Path], folder: Path, progress: Progress | None) -> None:
    """For FLORES-200: `dev/glg_Latn.dev` becomes `dev.glg_Latn`, for every language."""

    def wanted(name: str) -> bool:
        return Path(name).parent.name in ("dev", "devtest") and Path(name).suffix == f".{Path(name).parent.name}"

    with _unpacked(downloads, folder, wanted, progress) as files:
        for file in files:
            shutil.copyfile(file, folder / f"{file.parent.name}.{file.stem}")


def iwslt14(downloads: Mapping[str, Path], folder: Path, progress: Progress | None) -> None:
    """For IWSLT'14 de-en, split as the field does it; the text stays raw, neither tokenised nor lower-cased."""
    languages = ("de", "en")
    with _unpacked(downloads, folder, lambda name: name.startswith("de-en/"), progress) as files:
        by_name = {file.name: file for file in files}

        def sides(name: str, read: Callable[[Path], list[str]]) -> list[tuple[str, str]]:
            german, english = (read(_member(by_name, name.format(language))) for language in languages)
            if len(german) != len(english):
                raise InputError(f"{name.format('*')} has {len(german)} German and {len(english)} English lines")
            return [pair for pair in zip(german, english, strict=True) if all(pair)]

        training = sides("train.tags.de-en.{}", _read_tagged)
        tests = [sides(f"IWSLT14.{name}.de-en.{{}}.xml", _read_segments) for name in IWSLT14_TEST_SETS]
    numbered = list(enumerate(training, start=1))
    _write_pairs(folder, "train", languages, (pair for number, pair in numbered if number % IWSLT14_DEV_EVERY))
    _write_pairs(folder, "dev", languages, training[IWSLT14_DEV_EVERY - 1 :: IWSLT14_DEV_EVERY])
    _write_pairs(folder, "test", languages, (pair for pairs in tests for pair in pairs))


def _member(files: Mapping[str, Path], name: str) -> Path:
    if name not in files:
        raise InputError(f"the published archive holds no {name}")
    return files[name]


def _read_tagged(path: Path) -> list[str]:
    lines = path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")
    return [IWSLT14_SENTENCE_TAG.sub("", line).strip() for line in lines if not IWSLT14_NOTE.match(line)]


def _read_segments(path: Path) -> list[str]:
    segments = IWSLT14_SEGMENT.findall(path.read_bytes().decode("utf-8"))
    return [re.sub(r"\s*\n\s*", " ", html.unescape(segment)).strip() for segment in segments]


@contextmanager
def _unpacked(
    downloads: Mapping[str, Path], folder: Path, wanted: Callable[[str], bool], progress: Progress | None
) -> Iterator[list[Path]]:
    """The wanted files of the one archive, in a folder that is removed afterwards."""
    (archive,) = downloads.values()
    with tempfile.TemporaryDirectory(dir=folder) as unpacked:
        yield extract(archive, Path(unpacked), wanted, progress)


def _write_pairs(folder: Path, split: str, languages: tuple[str, str], pairs: Iterable[tuple[str, str]]) -> None:
    with (
        (folder / f"{split}.{languages[0]}").open("w", encoding="utf-8", newline="\n") as first,
        (folder / f"{split}.{languages[1]}").open("w", encoding="utf-8", newline="\n") as second,
    ):
        for source, target in pairs:
            first.write(source + "\n")
            second.write(target + "\n")


def count_lines(path: Path) -> int:
    """Lines of a file, a last one without a line break included; only the line feed ends a line."""
    lines, last = 0, b"\n"
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            lines, last = lines + chunk.count(b"\n"), chunk[-1:]
    return lines + (last != b"\n")
