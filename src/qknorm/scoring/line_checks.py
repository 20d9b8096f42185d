"""Checks that translations and references can stand side by side."""

from collections.abc import Mapping, Sequence

from qknorm.errors import InputError


def check_parallel(
    systems: Mapping[str, Sequence[str]], references: Sequence[Sequence[str]], reference_names: Sequence[str] = ()
) -> None:
    """Raises InputError unless every system and every reference has text on the same number of lines."""
    if not systems:
        raise InputError("there is no translation to score: name at least one file of translations")
    if not references:
        raise InputError("there is no reference to score against: name at least one reference file")
    if isinstance(references, str) or isinstance(references[0], str):
        raise InputError("references must be a list of reference texts, each a list of lines: wrap a single one in [ ]")
    names = name_references(references, reference_names)
    for name, lines in zip(names, references, strict=True):
        _check_text(name, lines)
        if not any(line.strip() for line in lines):
            raise InputError(f"{name} has only empty lines: nothing can be scored against it")
    expected = len(references[0])
    for name, lines in [*zip(names[1:], references[1:], strict=True), *systems.items()]:
        _check_text(name, lines)
        if len(lines) != expected:
            raise InputError(
                f"{name} has {_count(len(lines))} but {names[0]} has {_count(expected)}: "
                "line n of one must translate the same sentence as line n of the other"
            )


def name_references(references: Sequence[Sequence[str]], known_names: Sequence[str] = ()) -> list[str]:
    """A name for every reference: the known ones, and a number for the rest."""
    if len(references) == 1:
        return [*known_names[:1]] or ["the reference"]
    return [*known_names, *(f"reference {i + 1}" for i in range(len(known_names), len(references)))][: len(references)]


def _check_text(name: str, lines: Sequence[str]) -> None:
    if isinstance(lines, str):
        raise InputError(f"{name} must be a list of lines, not one string")
    if len(lines) == 0:
        raise InputError(f"{name} is empty: it needs one line for each sentence")
    for number, line in enumerate(lines, start=1):
        if not isinstance(line, str):
            raise InputError(f"{name}, line {number}: expected text, got {type(line).__name__}")


def _count(lines: int) -> str:
    return "1 line" if lines == 1 else f"{lines:,} lines"
