"""From tokens back to the text a reader would see, so that detokenised scores can be taken."""

import re
from collections.abc import Iterable

from sacremoses import MosesDetokenizer

from qknorm.scoring.languages import primary_language

_ENTITIES = {
    "&apos;": "'",
    "&quot;": '"',
    "&lt;": "<",
    "&gt;": ">",
    "&#124;": "|",
    "&#91;": "[",
    "&#93;": "]",
    "&bar;": "|",  # &bar; &bra; &ket; are what old Moses releases wrote
    "&bra;": "[",
    "&ket;": "]",
    "&amp;": "&",
}
_ENTITY = re.compile("|".join(map(re.escape, _ENTITIES)))

_CZECH_DECIMAL = re.compile(r"(?<!\S)(\d+) ([.,]) (?=\d+(?!\S))")
_CZECH_DASH = re.compile(r"(?<=\w') ([-–]) (?=(?:li(?!\S)|mail))", re.IGNORECASE)
_CZECH_GUARD = "\u2063"


def unescape_entities(line: str) -> str:
    """Undoes the escapes of the Moses tokeniser, each once: `&amp;quot;` becomes `&quot;`, not a quotation mark."""
    return _ENTITY.sub(lambda found: _ENTITIES[found.group()], line)


def detokenize(lines: Iterable[str], lang: str = "en") -> list[str]:
    """Moses detokenisation of whitespace-separated tokens, entities and `@-@` undone, by the rules of `lang`."""
    language = primary_language(lang)
    detokenizer = MosesDetokenizer(lang=language)
    restore = _detokenize_czech if language == "cs" else _detokenize_line
    return [restore(detokenizer, unescape_entities(line)) for line in lines]


def _detokenize_line(detokenizer: MosesDetokenizer, line: str) -> str:
    return str(detokenizer.detokenize(line.split(), unescape=False))


def _detokenize_czech(detokenizer: MosesDetokenizer, line: str) -> str:
    """Joins decimals and dashes before sacremoses does: it looks for them at the end of the sentence, or crashes."""
    joined = _CZECH_DECIMAL.sub(r"\1\2", " ".join(line.split()))
    joined = _CZECH_DASH.sub(r"\1", joined)
    restored = _detokenize_line(detokenizer, f"{joined} {_CZECH_GUARD}")  # the guard keeps those rules from firing
    return restored.removesuffix(_CZECH_GUARD).rstrip()


def _dropped_space(pattern: str, flags: re.RegexFlag = re.NOFLAG) -> tuple[re.Pattern[str], str]:
    return re.compile(pattern, flags), ""


_SPLIT_WORDS = (
    (r"\bcan", "not"), (r"\bd", "'ye"), (r"\bgim", "me"), (r"\bgon", "na"), (r"\bgot", "ta"), (r"\blem", "me"),
    (r"\bmore", "'n"), (r"\bwan", "na"), (" 't", "is"), (" 't", "was"),
)  # fmt: skip

# In order: nearly all of it says between what and what a space goes. The line has a space at either end.
_TREEBANK_RULES = (
    *(_dropped_space(rf"(?<={head}) (?={tail}\b)", re.IGNORECASE) for head, tail in _SPLIT_WORDS),
    _dropped_space(r"(?<=[^' ]) (?=(?:'(?:ll|LL|re|RE|ve|VE)|n't|N'T) )"),
    _dropped_space(r"(?<=[^' ]) (?='[sSmMdD]? )"),
    _dropped_space(r"(?<=\S) (?='')"),
    _dropped_space(r"(?<='') (?=[.,:)\]>};%])"),
    (re.compile("''"), '"'),
    (re.compile(r"^ +| +$"), ""),
    (re.compile(" -- "), "--"),
    _dropped_space(r"(?<=[\[({<]) "),
    _dropped_space(r" (?=[\])}>])"),
    _dropped_space(r"(?<=[\])}>]) (?=[:;,.])"),
    _dropped_space(r"(?<=[^']) (?=' )"),
    _dropped_space(r" (?=[?!])"),
    _dropped_space(r"(?<=[^.]) (?=\.[\])}>\"']*$)"),
    _dropped_space(r"(?<=[#$]) "),
    _dropped_space(r" (?=[;%])"),
    (re.compile(r" \.\.\. "), "..."),
    _dropped_space(r" (?=[:,])"),
    _dropped_space(r"(?<=``) "),
    (re.compile("``"), '"'),
)


def treebank_detokenize(lines: Iterable[str]) -> list[str]:
    """Joins Penn Treebank tokens of English as NLTK's detokeniser does, which the QKNorm paper ran before SacreBLEU.

    Unlike NLTK's it joins every one of several contractions in a row. Entities stay as they are: unescape them first.
    """
    return [_join_treebank(line) for line in lines]


def _join_treebank(line: str) -> str:
    text = f" {' '.join(line.split())} "
    for pattern, replacement in _TREEBANK_RULES:
        text = pattern.sub(replacement, text)
    return text.strip()
