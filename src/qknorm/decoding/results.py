"""What decoding gives, and how long text is cut for it, whichever engine decodes: nothing here imports PyTorch."""

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
    if len(words) == 1:  # a word beyond any in training: letters are all there is to cut at
        middle = len(text) // 2
        halves = [text[:middle], text[middle:]]
        return [
            part for half in halves if half for part in (split_long(tokenizer, half, longest) if middle else [half])
        ]
    half_way = len(words) / 2
    cuts = range(1, len(words))
    after_stop = [i for i in cuts if words[i - 1][-1:] in _STOPS and len(words) / 4 <= i <= 3 * len(words) / 4]
    cut = min(after_stop or cuts, key=lambda i: abs(i - half_way))
    return [part for half in (words[:cut], words[cut:]) for part in split_long(tokenizer, " ".join(half), longest)]


_STOPS = set(".!?;:,…。！？；，、؟،؛")
