"""Text as sentences with the white space between them, so that translations go back where they came from."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from qknorm.decoding.results import space_between

_SPACED_STOPS = ".!?…؟۔।॥"
_BARE_STOPS = "。！？"
_CLOSERS = "\"'”’»›)\\]」』）"
_OPENERS = "\"'“‘«‹(\\[¿¡「『（—–-"
# Possessive, and never from within a run of stops: no text, however odd, takes longer than in proportion to its length.
_END = re.compile(
    rf"(?<![{_SPACED_STOPS}])(?P<stop>[{_SPACED_STOPS}]++)[{_CLOSERS}]*+\s++(?=(?P<next>[{_OPENERS}]*\S))"
    rf"|(?<![{_BARE_STOPS}])[{_BARE_STOPS}]++[{_CLOSERS}]*+\s*+(?=\S)"
)
_LINE = re.compile(r"[^\n]*\n?")
_LAST_WORD = re.compile(r"(\w+)\W*$")
_ABBREVIATIONS = frozenset(
    {"capt", "dr", "dra", "dres", "fig", "jr", "lic", "mr", "mrs", "ms", "núm", "pág", "prof", "profa", "rev", "sgt"}
    | {"sr", "sra", "sras", "sres", "srta", "st", "sta", "sto", "ud", "uds", "vol", "vs"}
)


@dataclass(frozen=True)
class Piece:
    """A sentence and the white space before it."""

    before: str
    text: str


@dataclass(frozen=True)
class Pieces:
    """A text cut into sentences; put together again with the white space after the last, they are the text."""

    pieces: list[Piece]
    after: str

    def joined(self, translations: Sequence[str]) -> str:
        """Other sentences in the places of these, with the same white space around them where their script has any."""
        joined = former = ""
        for piece, text in zip(self.pieces, translations, strict=True):
            joined += space_before(piece, former, text) + text
            former = text or former
        return joined + self.after


def space_before(piece: Piece, former: str, translation: str) -> str:
    """What stands between the translation of a sentence and that of the one before it, if any.

    Line breaks stay; within a line the target's script decides whether there is white space, the source which.
    """
    if not former or not translation or len(f"{piece.before}x".splitlines()) > 1:
        return piece.before
    given = piece.before if piece.before.strip("\u3000") else " "
    return given if space_between(former, translation) else ""


def split_sentences(text: str) -> Pieces:
    """Cuts a text at line ends, and in a line after full stops, question and exclamation marks of many scripts.

    A stop is no end before a small letter, after an initial, or after one of a few common abbreviations.
    """
    pieces: list[Piece] = []
    before = ""
    for line in _LINE.findall(text):
        for stretch in _stretches(line):
            sentence = stretch.strip()
            start = stretch[: len(stretch) - len(stretch.lstrip())]
            if sentence:
                pieces.append(Piece(before + start, sentence))
                before = stretch[len(start) + len(sentence) :]
            else:
                before += stretch
    return Pieces(pieces, before)


def _stretches(line: str) -> list[str]:
    """The line in parts that end where a sentence does."""
    parts, start = [], 0
    for end in _END.finditer(line):
        if end["stop"] is None or _is_end(line[start : end.start()], end["stop"], end["next"]):
            parts.append(line[start : end.end()])
            start = end.end()
    return [*parts, line[start:]]


def _is_end(before: str, stop: str, following: str) -> bool:
    if following[-1].islower():
        return False
    if stop != ".":
        return True
    word = _LAST_WORD.search(before[-40:])
    if word is None:
        return bool(before.strip())
    initial = len(word[1]) == 1 and word[1].isupper()
    return not initial and word[1].lower() not in _ABBREVIATIONS
