"""Random draws of sentences, from which intervals and significance tests are made.

The draws are those of sacreBLEU for the same seed; they are taken in blocks so that memory stays small.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qknorm.errors import InputError

Statistics = NDArray[np.float64]  # one row a sentence, or one row a draw: what a metric counts

_BLOCK_DRAWS = 1 << 20  # sentences drawn at a time
_ALIGNED_ROWS = 32  # numpy takes random bits 32 at a time: blocks of 32 rows draw the same bits as no blocks at all


@dataclass(frozen=True)
class Interval:
    """The mean of a score over bootstrap samples of the sentences, and the middle 95% of them."""

    mean: float
    low: float
    high: float


def estimate_interval(values: NDArray[np.float64]) -> Interval:
    """The 95% percentile interval; half its width is the ± that sacreBLEU prints."""
    ordered = np.sort(values)
    cut = len(ordered) // 40
    return Interval(float(ordered.mean()), float(ordered[cut]), float(ordered[len(ordered) - cut - 1]))


def bootstrap_totals(systems: Sequence[Statistics], samples: int, seed: int) -> list[Statistics]:
    """For each system the summed statistics of `samples` draws with replacement, the same sentences for all."""
    generator = _generator(seed)
    sentences = len(systems[0])
    blocks: list[list[Statistics]] = [[] for _ in systems]
    for rows in _blocks(samples, sentences):
        chosen = generator.choice(sentences, size=(rows, sentences), replace=True)
        times_chosen = _count_choices(chosen, sentences)
        for system, block in zip(systems, blocks, strict=True):
            block.append(times_chosen @ system)
    return [np.concatenate(block) for block in blocks]


def shuffled_totals(first: Statistics, second: Statistics, trials: int, seed: int) -> tuple[Statistics, Statistics]:
    """Summed statistics of two systems after swapping their outputs sentence by sentence, by the toss of a coin."""
    generator = _generator(seed)
    sentences = len(first)
    kept = np.concatenate(
        [
            generator.integers(2, size=(rows, sentences), dtype=np.bool_).astype(np.float64) @ (first - second)
            for rows in _blocks(trials, sentences)
        ]
    )
    return second.sum(axis=0) + kept, first.sum(axis=0) - kept


def _count_choices(chosen: NDArray[np.int64], sentences: int) -> Statistics:
    rows = len(chosen)
    flat = chosen + np.arange(rows)[:, None] * sentences
    return np.bincount(flat.ravel(), minlength=rows * sentences).reshape(rows, sentences).astype(np.float64)


def _blocks(draws: int, sentences: int) -> list[int]:
    if draws < 1:
        raise InputError(f"samples and trials must be at least 1, got {draws}")
    rows = max(1, _BLOCK_DRAWS // sentences // _ALIGNED_ROWS) * _ALIGNED_ROWS
    return [min(rows, draws - start) for start in range(0, draws, rows)]


def _generator(seed: int) -> np.random.Generator:
    if seed < 0:
        raise InputError(f"seed must not be negative, got {seed}")
    return np.random.default_rng(seed)
