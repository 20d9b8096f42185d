"""Translations against references: BLEU, chrF, TER, multi-bleu, their signatures, and paired significance tests."""

from qknorm.scoring.detokenizing import detokenize, treebank_detokenize, unescape_entities
from qknorm.scoring.paired_tests import ComparedSystem, Comparison, compare
from qknorm.scoring.reports import ScoreReport, ScoringOptions, SystemScores, score_report
from qknorm.scoring.resampling import Interval
from qknorm.scoring.scores import METRICS, Score, corpus_bleu, multi_bleu, multi_bleu_detok, score, tokenized_bleu

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
    "corpus_bleu",
    "detokenize",
    "multi_bleu",
    "multi_bleu_detok",
    "score",
    "score_report",
    "tokenized_bleu",
    "treebank_detokenize",
    "unescape_entities",
]
