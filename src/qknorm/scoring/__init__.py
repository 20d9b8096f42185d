"""Translations against references: BLEU, chrF, TER, multi-bleu, their signatures, and paired significance tests."""

from qknorm.scoring.detokenizing import detokenize, treebank_detokenize, unescape_entities
from qknorm.scoring.metrics import METRICS
from qknorm.scoring.paired_tests import ComparedSystem, Comparison, compare
from qknorm.scoring.reports import ScoreReport, ScoringOptions, SystemScores, score_report
from qknorm.scoring.resampling import Interval
from qknorm.scoring.scores import Score, score

__all__ = [
    "METRICS",
    "ComparedSystem",
    "Comparison",
    "Interval",
    "Score",
    "ScoreReport",
    "ScoringOptions",
    "SystemScores",
    "compare",
    "detokenize",
    "score",
    "score_report",
    "treebank_detokenize",
    "unescape_entities",
]
