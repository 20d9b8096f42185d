"""The metrics: what each counts in a sentence, the score of the sums, and the signature that makes it comparable."""

import difflib
from collections.abc import Sequence
from typing import Any

import numpy as np
from sacrebleu.metrics.base import Metric as SacreMetric
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

from qknorm.errors import InputError
from qknorm.progress import Progress
from qknorm.scoring.languages import primary_language
from qknorm.scoring.resampling import Statistics

Detail = float | int | list[float] | list[int]

METRICS = ("bleu", "chrf", "chrf++", "ter", "multi-bleu", "multi-bleu-detok")
AS_GIVEN = ("multi-bleu", "multi-bleu-detok")
"""The numbers of Moses' scripts on the text as it is, whatever is done to it for the other metrics.

multi-bleu.perl on tokenised text is corpus BLEU-4 over words, unsmoothed: 0 where some order has no match.
multi-bleu-detok.perl makes its own tokens (mteval's 13a) of any text it is given, and is meant for plain text. The
released QKNorm code runs it on tokenised text: there an `&apos;` of Moses' tokeniser becomes the three tokens
`& apos ;`, which match easily, so that the score is higher, by about three BLEU on English text of the TED talks.
"""
TOKENIZERS = ("13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none")

_TOKENIZER_OF_LANGUAGE = {"zh": "zh", "ja": "ja-mecab", "ko": "ko-mecab"}
_WITHOUT_SPACES = ("zh", "ja")
_BLOCK_SENTENCES = 50
_TER_CELLS = 4_000_000  # two lines of 2,000 words take up to two minutes; a line of a million characters all memory

# multi-bleu.perl reads bytes: only ASCII blanks part words there, and its -lc lowers only A to Z. str.split would also
# split at the blanks below, so they become private characters that no text has.
_WIDE_BLANKS = {
    code: 0xF0000 + code for code in range(0x3001) if chr(code).isspace() and chr(code) not in " \t\n\v\f\r"
}
_ASCII_LOWER = {code: code + 32 for code in range(ord("A"), ord("Z") + 1)}


class Metric:
    """One metric with its settings; `lang` is the target language, which chooses the tokeniser unless one is named."""

    def __init__(self, name: str, lang: str = "", tokenizer: str | None = None, lowercase: bool = False) -> None:
        if name not in METRICS:
            raise InputError(_unknown("metric", name, METRICS))
        if tokenizer is not None and tokenizer not in TOKENIZERS:
            raise InputError(_unknown("tokenizer", tokenizer, TOKENIZERS))
        self.name = name
        self.higher_is_better = name != "ter"
        self._lowercase = lowercase
        self._signed: dict[str, str] = {}  # what our signature says beyond sacreBLEU's
        self._metric = self._build(primary_language(lang), tokenizer)

    def _build(self, language: str, tokenizer: str | None) -> SacreMetric:
        if self.name == "bleu":
            return self._build_bleu(language, tokenizer)
        if self.name == "multi-bleu":
            self._signed = {"case": "lc-ascii"} if self._lowercase else {}
            self._signed |= {"tok": "ascii-blanks", "script": "multi-bleu"}
            return BLEU(tokenize="none", smooth_method="none", force=True)
        if self.name == "multi-bleu-detok":
            self._signed = {"script": "multi-bleu-detok"}
            return BLEU(tokenize="13a", lowercase=self._lowercase, smooth_method="none", force=True)
        if self.name == "ter":
            by_character = language in _WITHOUT_SPACES
            return TER(normalized=by_character, asian_support=by_character)
        return CHRF(word_order=2 if self.name == "chrf++" else 0, lowercase=self._lowercase)

    def _build_bleu(self, language: str, tokenizer: str | None) -> BLEU:
        wanted = tokenizer or _TOKENIZER_OF_LANGUAGE.get(language, "13a")
        try:
            return BLEU(tokenize=wanted, lowercase=self._lowercase, force=True)
        except (RuntimeError, ImportError) as error:  # MeCab is an extra of sacreBLEU
            if tokenizer is not None:
                raise InputError(
                    f'tokenizer "{wanted}" is not installed: pip install "sacrebleu[{wanted[:2]}]", or use "char"'
                ) from error
            self._signed["wanted"] = wanted
            return BLEU(tokenize="char", lowercase=self._lowercase, force=True)

    @property
    def missing_tokenizer(self) -> str | None:
        """The tokeniser that the language asks for, where characters had to stand in for it."""
        return self._signed.get("wanted")

    def count(
        self,
        hypotheses: Sequence[str],
        references: Sequence[Sequence[str]],
        progress: Progress | None = None,
        system: str = "the translation",
    ) -> Statistics:
        """What the metric counts, one row a sentence; any sum of rows has a score."""
        if self.name == "ter":
            _check_lengths(system, hypotheses, references)
        rows: list[list[float]] = []
        for start in range(0, len(hypotheses), _BLOCK_SENTENCES):
            block = slice(start, start + _BLOCK_SENTENCES)
            prepared = [[self._prepare(line) for line in lines[block]] for lines in (hypotheses, *references)]
            rows += self._metric._extract_corpus_statistics(prepared[0], prepared[1:])
            if progress:
                progress(self.name, len(rows), len(hypotheses))
        return np.array(rows, dtype=np.float64)

    def remember(self, references: Sequence[Sequence[str]]) -> None:
        """Counts references once, for `count_against_remembered`."""
        prepared = [[self._prepare(line) for line in lines] for lines in references]
        self._metric._ref_cache = self._metric._cache_references(prepared)

    def count_against_remembered(self, hypotheses: Sequence[str]) -> Statistics:
        """What `count` counts, against the references remembered."""
        prepared = [self._prepare(line) for line in hypotheses]
        return np.array(self._metric._extract_corpus_statistics(prepared, None), dtype=np.float64)

    def _prepare(self, line: str) -> str:
        if self.name != "multi-bleu":
            return line
        return (line.translate(_ASCII_LOWER) if self._lowercase else line).translate(_WIDE_BLANKS)

    def score_total(self, total: Statistics) -> float:
        """The score of one row of summed statistics."""
        return float(self._metric._compute_score_from_stats(total.tolist()).score)

    def score_totals(self, totals: Statistics) -> Statistics:
        """The score of every row of summed statistics."""
        compute = self._metric._compute_score_from_stats
        return np.array([compute(total).score for total in totals.tolist()], dtype=np.float64)

    def describe_total(self, total: Statistics) -> dict[str, Detail]:
        """The parts that the score is made of."""
        result = self._metric._compute_score_from_stats(total.tolist())
        if isinstance(self._metric, BLEU):
            return {
                "precisions": [float(value) for value in result.precisions],
                "brevity_penalty": float(result.bp),
                "matches": [int(value) for value in result.counts],
                "ngrams": [int(value) for value in result.totals],
                "hypothesis_length": int(result.sys_len),
                "reference_length": int(result.ref_len),
            }
        if isinstance(self._metric, TER):
            return {"edits": int(result.num_edits), "reference_length": float(result.ref_length)}
        return {"char_order": int(result.char_order), "word_order": int(result.word_order), "beta": int(result.beta)}

    def signature(self, **more: Any) -> str:
        """sacreBLEU's signature of what was counted last, with `more` keys (bs, ar, seed, prep) that are not None."""
        signature = self._metric.get_signature()
        for key, value in (self._signed | more).items():
            signature.update(key, value)
        return str(signature)


def _check_lengths(system: str, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    for number, (hypothesis, *expected) in enumerate(zip(hypotheses, *references, strict=True), start=1):
        words, longest = len(hypothesis.split()), max(len(line.split()) for line in expected)
        if words * longest > _TER_CELLS:
            raise InputError(
                f"{system}, line {number}: {words:,} words against {longest:,} are too many for TER, whose cost grows "
                "with their product: leave ter out of the metrics, or split the line"
            )


def _unknown(kind: str, name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f'did you mean "{near[0]}"?' if near else f"known: {', '.join(known)}"
    return f'unknown {kind} "{name}": {hint}'
