"""The translators' exchange formats: TMX by lxml, gettext PO and MO by polib, both optional."""

import gzip
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

from qknorm.errors import InputError

Sides = tuple[str, str]
Heading = Literal["source", "target", "neither"]
"""Whose language the header of a gettext catalogue names."""
Headed = Callable[[Path, Heading], None]
"""Told of every catalogue, and of whose language its header names."""

_LANGUAGE = "{http://www.w3.org/XML/1998/namespace}lang"
_CODE_ELEMENTS = {"bpt", "ept", "it", "ph", "ut"}  # what they hold is markup of the original document, not text
_MO_MAGIC = (b"\xde\x12\x04\x95", b"\x95\x04\x12\xde")


def read_tmx(file: BinaryIO, path: Path, source: str, target: str) -> Iterator[Sides]:
    """Streams the units that have both languages; the code of a language may be given with or without its region."""
    try:
        from lxml import etree
    except ImportError:
        raise _missing("lxml", path) from None
    languages: set[str] = set()
    found = False
    etree.clear_error_log()  # it would go on with the faults of earlier files
    try:
        units = etree.iterparse(
            file, events=("start", "end"), resolve_entities=False, no_network=True, load_dtd=False, huge_tree=False
        )
        for event, element in units:
            if event == "start":
                if element.getparent() is None:
                    _refuse_entities(element, path)
            elif _name(element) == "tu":
                texts = _texts_by_language(element)
                languages.update(texts)
                _free(element)
                sides = _pick_sides(texts, source, target)
                if sides:
                    found = True
                    yield sides
    except etree.XMLSyntaxError as error:
        # the error tells of the last fault, which may be but a consequence of the first, at a place of its own
        first = next(iter(error.error_log.filter_from_fatals()), None)
        line, fault = error.lineno or 1, error.msg
        if first:
            line, fault = first.line, f"{first.message.strip()}, column {first.column}"
        raise InputError(f"{path}, line {line}: broken XML ({fault}); mend or export it again") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise InputError(f"{path} is no whole gzip file; fetch or pack it again") from None
    if languages and not found:
        raise InputError(
            f"{path} has no unit with both {source} and {target}; its languages are {', '.join(sorted(languages))}"
        )


def read_po(
    lines: Iterable[str], path: Path, source: str, target: str, headed: Headed | None = None
) -> Iterator[Sides]:
    """The translated entries of a PO file; untranslated, fuzzy and obsolete ones are skipped."""
    polib = _import_polib(path)
    # polib cuts at every kind of line break, and would take contents that are the name of a file for that file
    contents = "".join(" ".join(line.splitlines()) + "\n" for line in lines)
    try:
        entries = polib.pofile(contents)
    except Exception as error:  # polib lets through whatever the damage leads to
        place = re.search(r"line (\d+)", str(error))
        where = f"{path}, line {place[1]}" if place else str(path)
        raise InputError(f"{where}: not the PO format; msgfmt -c names the fault") from None
    yield from _translations(entries, path, source, target, headed)


def read_mo(content: bytes, path: Path, source: str, target: str, headed: Headed | None = None) -> Iterator[Sides]:
    """The entries of a MO file."""
    polib = _import_polib(path)
    try:
        if not content.startswith(_MO_MAGIC):
            raise ValueError("magic number")
        entries = polib.mofile(content)
    except Exception:  # polib lets through whatever the damage leads to
        raise InputError(f"{path} is no whole MO file; make it again with msgfmt") from None
    yield from _translations(entries, path, source, target, headed)


def _translations(entries: Any, path: Path, source: str, target: str, headed: Headed | None) -> Iterator[Sides]:
    """What is to be translated and its translation; the other way round where the catalogue's language is the source.

    A language that could be either's says nothing, such as pt between pt-BR and pt-PT.
    """
    language = entries.metadata.get("Language", "").partition("@")[0]  # ca@valencia, sr@latin
    heading = _heading(_plain(source), _plain(target), language)
    if headed:
        headed(path, heading)
    for original, translation in _entries(entries):
        yield (translation, original) if heading == "source" else (original, translation)


def _heading(source: str, target: str, language: str) -> Heading:
    found = {_match(codes, language) for codes in ((source, target), (target, source))}
    if found == {source}:
        return "source"
    return "target" if found == {target} else "neither"


def _entries(entries: Any) -> Iterator[Sides]:
    for entry in entries.translated_entries():
        forms = [text for _, text in sorted(entry.msgstr_plural.items())]
        if not forms:
            yield entry.msgid, entry.msgstr
        elif len(forms) == 1:  # a language without plural: its one form serves for all numbers
            yield entry.msgid_plural, forms[0]
        else:
            yield entry.msgid, forms[0]
            for form in forms[1:]:
                yield entry.msgid_plural, form


def _import_polib(path: Path) -> Any:
    try:
        import polib
    except ImportError:
        raise _missing("polib", path) from None
    return polib


def _missing(package: str, path: Path) -> InputError:
    return InputError(f"reading {path} needs the package {package}; get it with pip install 'qknorm[formats]'")


def _refuse_entities(root: Any, path: Path) -> None:
    declared = root.getroottree().docinfo.internalDTD
    if declared is not None and any(True for _ in declared.iterentities()):
        raise InputError(f"{path} declares XML entities, which can blow up in memory; export it again without them")


def _texts_by_language(unit: Any) -> dict[str, str]:
    """First text of each language in a translation unit, by lower-case language code."""
    texts: dict[str, str] = {}
    for variant in unit:
        if _name(variant) != "tuv":
            continue
        language = _plain(variant.get(_LANGUAGE) or variant.get("lang") or "")
        for child in variant:
            if language and _name(child) == "seg":
                texts.setdefault(language, _text(child))
    return texts


def _pick_sides(texts: dict[str, str], source: str, target: str) -> Sides | None:
    codes = _match(texts, source), _match(texts, target)
    if codes[0] is None or codes[1] is None or codes[0] == codes[1]:
        return None
    return texts[codes[0]], texts[codes[1]]


def _match(codes: Iterable[str], language: str) -> str | None:
    """Exactly this code, else the first one with the same primary subtag."""
    wanted = _plain(language)
    if wanted in codes:
        return wanted
    primary = wanted.partition("-")[0]
    return next((code for code in codes if code.partition("-")[0] == primary), None)


def _plain(code: str) -> str:
    return code.strip().lower().replace("_", "-")


def _text(element: Any) -> str:
    pieces = [element.text or ""]
    for child in element:
        name = _name(child)
        if name and name not in _CODE_ELEMENTS:
            pieces.append(_text(child))
        pieces.append(child.tail or "")
    return "".join(pieces)


def _name(element: Any) -> str:
    """The tag without its namespace; empty for comments and processing instructions."""
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""


def _free(unit: Any) -> None:
    unit.clear()
    while unit.getprevious() is not None:
        del unit.getparent()[0]
