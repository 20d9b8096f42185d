"""What decoding gives, and how long text is cut for it, whichever engine decodes: nothing here imports PyTorch."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from qknorm.text.subwords import Tokenizer


@dataclass(frozen=True)
class Hypothesis:
    """A sentence found, without start and end; `score` is its log-probability over its length penalty."""

    tokens: list[int]
    score: float
    log_probability: float


@dataclass(frozen=True)
class Alternative:
    """One translation of a sentence and its score: log-probability over length penalty."""

    text: str
    score: float


@dataclass(frozen=True)
class Translation:
    """The best translation of a sentence, others where asked for, and which source word each target word came from."""

    text: str
    score: float
    alternatives: list[Alternative]
    alignment: list[tuple[int, int]] | None = None
    parts: int = 1
    """Into how many parts the sentence was cut because it was longer than any in training."""


def split_long(tokenizer: Tokenizer, text: str, longest: int) -> list[str]:
    """The text, or parts of it within `longest` tokens, cut after punctuation where there is some, else at a space."""
    if len(tokenizer.encode(text)) <= longest:
        return [text]
    words = text.split(" ")
    if len(words) == 1:
        cut = _cut_of_word(text)
        halves = (text[:cut], text[cut:]) if cut else ()  # a letter is all there is
        return [part for half in halves for part in split_long(tokenizer, half, longest)] or [text]
    half_way = len(words) / 2
    cuts = range(1, len(words))
    after_stop = [i for i in cuts if words[i - 1][-1:] in _STOPS and len(words) / 4 <= i <= 3 * len(words) / 4]
    cut = min(after_stop or cuts, key=lambda i: abs(i - half_way))
    return [part for half in (words[:cut], words[cut:]) for part in split_long(tokenizer, " ".join(half), longest)]


_STOPS = set(".!?;:,…。！？；，、؟،؛")
_WIDE_ENDS = tuple(re.compile(rf"[{stops}]++[」』）】》〉”’]*+(?=.)") for stops in ("。！？", "，、；：…", ".!?;:,"))
"""Ends of sentences in scripts without spaces, then of clauses, then what may well stand inside a word or number."""


def _cut_of_word(text: str) -> int:
    """Where to cut a text without spaces: after the stop nearest to its middle; letters are the last resort."""
    for pattern in _WIDE_ENDS:
        if ends := [found.end() for found in pattern.finditer(text)]:
            return min(ends, key=lambda end: abs(end - len(text) / 2))
    return len(text) // 2


# ------------------------------------------------------------------ putting together

_WIDE_STOPS = r"\u3001-\u303f\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65"
_UNSPACED = r"\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"
_NO_SPACE = re.compile(rf"""[{_WIDE_STOPS}][”’"')…]*\0|[{_UNSPACED}][”’…]*\0[“‘]*[{_WIDE_STOPS}{_UNSPACED}]""")


def space_between(left: str, right: str) -> str:
    """What stands between two pieces of a text: nothing in Chinese and Japanese, else a space.

    That is after a stop of full width, and between Han or kana. Thai, Lao, Khmer and Burmese have no spaces between
    words, but they do between sentences.
    """
    return "" if not left or not right or _NO_SPACE.search(f"{left[-8:]}\0{right[:8]}") else " "


def join_texts(texts: Iterable[str]) -> str:
    """Pieces of text in a row, each with single spaces, as their script wants it."""
    joined = ""
    for text in texts:
        tidy = " ".join(text.split())  # what a model makes of spaces is not what anybody would write
        joined += space_between(joined, tidy) + tidy
    return joined
