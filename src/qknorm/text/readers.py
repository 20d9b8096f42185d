"""Sentence pairs from files: plain text, TSV and JSONL here, TMX and gettext through `exchange`; gzip throughout."""

import codecs
import gzip
import json
import os
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from qknorm.errors import InputError
from qknorm.text.alignment import find_parting
from qknorm.text.exchange import Headed, read_mo, read_po, read_tmx


class Pair(NamedTuple):
    """A sentence and its translation."""

    source: str
    target: str


Spoiled = Callable[[Pair], None]
"""Told of a line that is no pair: what stands before its first tab, and the rest."""

_Reader = Callable[[Path, str, str], Iterator[Pair]]
_LINES_NAMED = 5
_NO_NULS = r"tr -d '\000'"
_FROM_WESTERN = "iconv -f CP1252 -t UTF-8"
_SMALL = bytes(range(9))  # control characters that no text of one byte a character holds
_TWO_COLUMNS = r"awk -F '\t' 'NF == 2'"


def read_pairs(
    paths: Sequence[Path], source: str, target: str, spoiled: Spoiled | None = None, headed: Headed | None = None
) -> Iterator[Pair]:
    """Streams the pairs of two plain text files (source, target), or of files that each hold both sides.

    Lines of a TSV file that have not two columns go to `spoiled`, and a file is refused where they are most of it;
    without `spoiled`, where there is any. `headed` is told whose language the header of a gettext catalogue names.
    """
    if not paths:
        raise InputError("no file to read pairs from; give two plain text files, or files that hold both sides")
    for path in paths:
        check_readable(path)
    plain = [path for path in paths if kind_of(path) not in _READERS]
    if not plain:
        return _read_files_of_pairs(paths, source, target, spoiled, headed)
    if len(plain) != len(paths):
        raise _mixed(plain, source, target)
    if len(paths) != 2:
        raise InputError(
            f"plain text comes as two files, {source} and {target}, but {len(paths)} given ({_listed(paths)}); "
            f"give two, or files that hold both sides ({', '.join(_READERS)})"
        )
    _check_sides(paths[0], paths[1], source, target)
    return _read_two_sides(paths[0], paths[1])


def read_lines(path: Path) -> Iterator[str]:
    """Streams the lines of a UTF-8 file; only a line feed ends a line, and a carriage return before it is dropped.

    In a file without any line feed, carriage returns end the lines, as on old Macs.
    """
    with open_bytes(path) as file:
        yield from decode_lines(_guarded(file, path), path)


def decode_lines(raw_lines: Iterable[bytes], name: str | Path) -> Iterator[str]:
    """The text of lines as a file or pipe called `name` gave them, without their ends and a byte-order mark."""
    start = 0
    for number, raw in enumerate(raw_lines, start=1):
        if b"\0" in raw:
            raise explain_no_utf8(name, number, raw, raw.index(b"\0"), start)
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise explain_no_utf8(name, number, raw, error.start, start) from None
        if number == 1:
            line = line.removeprefix("\ufeff")
            if not line:
                return  # a byte-order mark is all there is
        start += len(raw)
        text = line.removesuffix("\n").removesuffix("\r")
        yield from text.split("\r") if number == 1 and not line.endswith("\n") else (text,)


def explain_no_utf8(name: str | Path, line: int, raw: bytes, at: int, start: int = 0) -> InputError:
    """Says that a file is no UTF-8, at byte `at` of `raw`, its bytes from `start` on, and how to convert it."""
    wide = _kind_of_utf32(raw, start) or _kind_of_utf16(raw, start)
    if wide:
        convert = _through(f"iconv -f {wide} -t UTF-8", name)
        return InputError(f"{name} is {wide[: len('UTF-16')]}, not UTF-8; convert it: {convert}")
    if not raw[at]:
        way_out = f"if it is a stray one, delete it: {_through(_NO_NULS, name)}"
        return InputError(f"{name}, line {line}: holds a NUL byte; {way_out}")
    # CP1252 for Latin-1 too: the same letters, and LATIN1 would make control characters of its quotes and of €
    western = f"if it is Western European (Windows-1252 or Latin-1), convert it: {_through(_FROM_WESTERN, name)}"
    return InputError(f"{name}, line {line}: not UTF-8 at byte {start + at} of the file (0x{raw[at]:02x}); {western}")


def _kind_of_utf32(raw: bytes, start: int) -> str | None:
    """UTF-32 where a file begins with its mark; one of the two begins like UTF-16's, but no text does with U+0000."""
    marked = not start and raw.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE))
    return "UTF-32" if marked else None


def _kind_of_utf16(raw: bytes, start: int) -> str | None:
    """The kind of UTF-16 that a file's bytes from `start` on are: by its mark, or by its alphabet up to U+08FF.

    In text of such an alphabet most bytes of one parity, counted from the file's start, are below 9: the high ones.
    """
    if not start and raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "UTF-16"
    # one is enough at the file's start only: a NUL on a late line is a stray one, or an earlier line would have told
    enough = 1 if start < 2 else 2
    for kind, first in (("UTF-16LE", (start + 1) % 2), ("UTF-16BE", start % 2)):
        high = raw[first::2]
        small = len(high) - len(high.translate(None, _SMALL))
        # U+0000 stands in no text, but in one padded with NULs and in UTF-32
        if small >= enough and 2 * small > len(high) and "\0" not in raw[start % 2 :].decode(kind, "ignore"):
            return kind
    return None


def _through(command: str, name: str | Path) -> str:
    """The command with a file as its input and a new one beside it as its output; alone for what is no file."""
    if isinstance(name, str) or not name.is_file():
        return command
    new, old = shlex.quote(str(_new_name(name, kind_of(name)))), shlex.quote(str(name))
    return f"gzip -dc {old} | {command} > {new}" if _is_packed(name) else f"{command} < {old} > {new}"


def _new_name(path: Path, kind: str) -> Path:
    """train.gl becomes train.new.gl, or of whatever kind is wanted."""
    bare = path.with_suffix("") if _is_packed(path) else path
    return bare.with_suffix(f".new{kind}")


def kind_of(path: Path) -> str:
    """The file's kind by its name: `.tsv`, `.jsonl`, …, whatever suffix it has, `.gz` aside."""
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def check_readable(path: Path) -> None:
    """Refuses what is missing, a folder, or closed to us."""
    if "\0" in str(path):
        raise InputError(f"{str(path)!r} is no file name; take the NUL character out")
    if path.is_dir():
        raise InputError(f"{path} is a folder; name the files in it")
    if not path.exists():
        raise InputError(f"{path} does not exist; check the name and the folder you are in")
    if not os.access(path, os.R_OK):  # not by opening it: that would spoil a pipe
        raise InputError(f"{path} cannot be read; check its permissions")


def open_bytes(path: Path) -> BinaryIO:
    """Opens a file for reading, unpacking gzip."""
    check_readable(path)
    if _is_packed(path):
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb")


def _is_packed(path: Path) -> bool:
    return path.name.lower().endswith(".gz")


def _guarded(file: BinaryIO, path: Path) -> Iterator[bytes]:
    try:
        yield from file
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise InputError(f"{path} is no whole gzip file; fetch or pack it again") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read to its end ({error.strerror}); check the disk it is on") from None


def _mixed(plain: Sequence[Path], source: str, target: str) -> InputError:
    sides = plain if len(plain) == 2 else (Path(f"train.{source}"), Path(f"train.{target}"))
    unpacked = [_new_name(side, kind_of(side)) if _is_packed(side) else side for side in sides]
    names = [shlex.quote(str(side)) for side in unpacked]
    unpacking = [
        f"gzip -dc {shlex.quote(str(side))} > {name} && "  # not <(gzip …), which plain sh does not take
        for side, name in zip(sides, names, strict=True)
        if _is_packed(side)
    ]
    return InputError(
        f"{plain[0]} holds one side only and cannot be mixed with files that hold both; "
        f"join the two sides first: {''.join(unpacking)}"
        f"paste {' '.join(names)} > {shlex.quote(str(_new_name(sides[0], '.tsv')))}"
    )


def _check_sides(source_path: Path, target_path: Path, source: str, target: str) -> None:
    if source_path.resolve() == target_path.resolve():
        raise InputError(f"{source_path} is given as both sides; name the file of the other language")
    if (kind_of(source_path), kind_of(target_path)) == (f".{target.lower()}", f".{source.lower()}"):
        raise InputError(
            f"{source_path} and {target_path} stand in the wrong order by their names; "
            f"give the {source} file first, or swap source and target"
        )


def _read_two_sides(source_path: Path, target_path: Path) -> Iterator[Pair]:
    sources, targets = read_lines(source_path), read_lines(target_path)
    count = 0
    for source in sources:
        target = next(targets, None)
        if target is None:
            raise _unequal(source_path, target_path, count + 1 + sum(1 for _ in sources), count)
        count += 1
        yield Pair(source, target)
    left_over = sum(1 for _ in targets)
    if left_over:
        raise _unequal(source_path, target_path, count, count + left_over)
    if not count:
        raise InputError(f"{source_path} and {target_path} are empty; give files with one sentence a line")


def _unequal(source_path: Path, target_path: Path, source_count: int, target_count: int) -> InputError:
    for path, count in ((source_path, source_count), (target_path, target_count)):
        if not count:
            return InputError(f"{path} is empty; give a file with one sentence a line")
    place = ""
    if source_path.is_file() and target_path.is_file():  # a pipe cannot be read again
        shorter, longer = sorted(((source_count, source_path), (target_count, target_path)))
        line = find_parting(read_lines(shorter[1]), read_lines(longer[1]))
        place = f"; they seem to part near line {line} of {longer[1]}" if line else ""
    return InputError(
        f"{source_path} has {source_count:,} lines but {target_path} has {target_count:,}{place}; "
        "line n of one must be the translation of line n of the other"
    )


def _read_files_of_pairs(
    paths: Sequence[Path], source: str, target: str, spoiled: Spoiled | None, headed: Headed | None
) -> Iterator[Pair]:
    readers: dict[str, _Reader] = {
        **_READERS,
        ".tsv": partial(_read_tsv, spoiled=spoiled),
        ".po": partial(_read_po, headed=headed),
        ".mo": partial(_read_mo, headed=headed),
    }
    for path in paths:
        found = False
        for pair in readers[kind_of(path)](path, source, target):
            found = True
            yield pair
        if not found:
            raise InputError(f"{path} holds no sentence pair; check the file, and that it is a {kind_of(path)} file")


def _read_tsv(path: Path, source: str, target: str, spoiled: Spoiled | None = None) -> Iterator[Pair]:
    good = bad = widest = 0
    first: list[str] = []
    named: tuple[int, int] | None = None
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        cells = line.split("\t")
        if number == 1:
            named = _columns(cells, source, target)
        if len(cells) != 2:
            bad, widest = bad + 1, max(widest, len(cells))
            if bad <= _LINES_NAMED:
                first.append(str(number))
            if spoiled:
                spoiled(Pair(cells[0], "\t".join(cells[1:])))
        elif number != 1 or not named:
            good += 1
            yield Pair(cells[1], cells[0]) if named == (1, 0) else Pair(cells[0], cells[1])
    total = good + bad
    if bad > (good if spoiled else 0):
        lines = f"line{'s' * (bad > 1)} {', '.join(first)}{', …' * (bad > len(first))}"
        way_out = f"put one tab into each, between {source} and {target}"
        if bad <= good:
            way_out = f"keep the others: {_through(_TWO_COLUMNS, path)}"
        elif widest > 2:
            columns = "that the heading names" if named else f"that hold {source} and {target}, such as the first two"
            cut = "cut -f {},{}".format(*sorted(column + 1 for column in named or (0, 1)))
            way_out = f"keep the two columns {columns}: {_through(cut, path)}"
        raise InputError(
            f"{path}: {bad:,} of {total:,} line{'s' * (total > 1)} {'are' if bad > 1 else 'is'} not {source}, a tab, "
            f"{target} ({lines}); {way_out}"
        )


def _columns(heading: Sequence[str], source: str, target: str) -> tuple[int, int] | None:
    """Where source and target stand by a heading; None where the line names not both, and so is none."""
    names = [cell.strip().lower() for cell in heading]
    for first, second in ((source.lower(), target.lower()), ("source", "target")):
        if first in names and second in names:
            return names.index(first), names.index(second)
    return None


def _read_jsonl(path: Path, source: str, target: str) -> Iterator[Pair]:
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            raise InputError(f"{path}, line {number}: not a JSON object; every line must be one by itself") from None
        pair = _pair_of_object(content, source, target)
        if pair is None:
            raise InputError(
                f'{path}, line {number}: needs text under "{source}" and "{target}" '
                '(also inside "translation"), or under "source" and "target"'
            )
        yield pair


def _pair_of_object(content: Any, source: str, target: str) -> Pair | None:
    if not isinstance(content, dict):
        return None
    for holder in (content, content.get("translation")):
        for keys in ((source, target), ("source", "target")):
            if isinstance(holder, dict) and all(isinstance(holder.get(key), str) for key in keys):
                return Pair(holder[keys[0]], holder[keys[1]])
    return None


def _read_tmx(path: Path, source: str, target: str) -> Iterator[Pair]:
    with open_bytes(path) as file:
        for sides in read_tmx(file, path, source, target):
            yield Pair(*sides)


def _read_po(path: Path, source: str, target: str, headed: Headed | None = None) -> Iterator[Pair]:
    for sides in read_po(read_lines(path), path, source, target, headed):
        yield Pair(*sides)


def _read_mo(path: Path, source: str, target: str, headed: Headed | None = None) -> Iterator[Pair]:
    with open_bytes(path) as file:
        content = b"".join(_guarded(file, path))
    for sides in read_mo(content, path, source, target, headed):
        yield Pair(*sides)


_READERS: dict[str, _Reader] = {
    ".tsv": _read_tsv,
    ".jsonl": _read_jsonl,
    ".tmx": _read_tmx,
    ".po": _read_po,
    ".mo": _read_mo,
}


def _listed(paths: Sequence[Path]) -> str:
    return ", ".join(str(path) for path in paths)
