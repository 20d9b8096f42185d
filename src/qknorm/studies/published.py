"""The numbers of the two papers that ours stand beside, with where they are there; ours are measured, elsewhere.

Henry et al. 2020: Query-Key Normalization for Transformers (arXiv 2010.04245).
López-Rubio et al. 2026: Enhanced QKNorm normalization for neural transformers with the Lp norm (arXiv 2602.05006).
"""

import math
from dataclasses import dataclass
from typing import Literal

Scorer = Literal["moses", "sacrebleu"]


@dataclass(frozen=True)
class Published:
    """A BLEU score on a test set, as printed."""

    where: str
    """The table, or the section, of Henry et al. 2020."""
    pair: str
    system: str
    """By our name for it, as `qknorm study paper --systems` takes it."""
    bleu: float
    scorer: Scorer = "moses"


@dataclass(frozen=True)
class PublishedTraining:
    """A row of Table 1: the data of a pair, and the training of QKNorm on it."""

    pair: str
    examples: int
    tokens: int
    parameters: int
    hours: float
    dev_bleu: float
    gpu: str
    length: int
    """L, the 97.5th percentile of the training lengths."""


TABLE_1 = (
    PublishedTraining("gl-en", 10_000, 370_000, 31_051_880, 6, 23.45, "T4", 79),
    PublishedTraining("sk-en", 61_000, 2_320_000, 48_356_907, 11, 31.34, "T4", 75),
    PublishedTraining("en-vi", 133_000, 5_990_000, 48_431_538, 19, 28.77, "T4", 72),
    PublishedTraining("en-he", 212_000, 7_880_000, 48_401_538, 38, 31.16, "T4", 72),
    PublishedTraining("ar-en", 214_000, 8_090_000, 48_499_512, 26, 37.94, "P100", 75),
)


def _row(where: str, system: str, scorer: Scorer, **bleu: float) -> tuple[Published, ...]:
    return tuple(Published(where, pair.replace("_", "-"), system, value, scorer) for pair, value in bleu.items())


def _column(where: str, **bleu: float) -> tuple[Published, ...]:
    """Of Tables 4 to 6, which are all of English to Vietnamese."""
    names = {system: system.replace("__", ".").replace("_", "-") for system in bleu}
    return tuple(Published(where, "en-vi", names[system], value) for system, value in bleu.items())


SCORES = (
    *_row("Table 2", "baseline", "moses", en_vi=32.79, ar_en=36.09, en_he=28.28, gl_en=22.01, sk_en=32.58),
    *_row("Table 2", "qknorm", "moses", en_vi=33.24, ar_en=36.75, en_he=28.96, gl_en=24.21, sk_en=33.23),
    *_row("Table 3", "baseline", "sacrebleu", en_vi=32.41, ar_en=36.09, en_he=28.28, gl_en=22.01, sk_en=32.58),
    *_row("Table 3", "qknorm", "sacrebleu", en_vi=33.18, ar_en=36.75, en_he=28.96, gl_en=24.21, sk_en=33.22),
    *_column("Table 4", heads_2=32.40, heads_4=33.16, heads_8=33.24, heads_16=32.42, heads_32=32.30),
    *_column(
        "Table 5",
        percentile_75=32.58,
        percentile_90=32.89,
        percentile_92__5=32.64,
        percentile_95=33.13,
        percentile_97__5=33.24,
        percentile_99=32.64,
        percentile_100=33.10,
    ),
    *_column(
        "Table 6",
        qknorm=33.24,
        without_g=24.53,
        without_layernorm=31.56,
        without_fixnorm=32.63,
        without_fixnorm_prenorm=32.20,
        values_normalised=32.34,
    ),
)

ANNOTATED_TRANSFORMER = {"dot products": 19.4, "qknorm": 24.33}
"""BLEU after ten epochs of the Annotated Transformer on IWSLT'16 German to English, without QKNorm and with it."""

AVERAGE_GAIN = 0.928
"""Of QKNorm over the baseline on the five pairs of Table 2, as the paper states it."""

SIGNIFICANCE = 0.01
"""The level at which the paper's gains pass paired bootstrap resampling (Koehn 2004)."""

SOFTMAX_EXAMPLE = {(760.0, 752.0, 750.0): (0.99962, 0.00034, 0.00005), (12.0, 4.0, 2.0): (0.99962, 0.00034, 0.00005)}
"""The paper's example of what softmax sees of large logits: differences alone."""

LP_EXPONENTS = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
"""The values of p in Figures 1 to 3 of López-Rubio et al. 2026, which prints no numbers for their losses."""

LP_FOLDS = 10


def published_bleu(where: str, pair: str, system: str) -> float | None:
    """The number of a system in a table, such as "Table 2"; None where the paper has none."""
    found = [each.bleu for each in SCORES if (each.where, each.pair, each.system) == (where, pair, system)]
    return found[0] if found else None


def average_gain(where: str) -> float:
    """Of QKNorm over the baseline on the pairs of "Table 2" or "Table 3", by the numbers as printed."""
    ours, theirs = (
        [each.bleu for each in SCORES if (each.where, each.system) == (where, system)]
        for system in ("qknorm", "baseline")
    )
    return (math.fsum(ours) - math.fsum(theirs)) / len(ours)


def nearest_pair(examples: int) -> str:
    """The pair of Table 1 whose number of training examples is nearest, by ratio."""
    if examples < 1:
        raise ValueError(f"a corpus has at least one example, got {examples}")
    return min(TABLE_1, key=lambda row: abs(math.log(row.examples / examples))).pair
