"""Token-budget batches in a small set of fixed shapes, so that compiled code and CUDA graphs can be used again."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qknorm.specials import END, PAD, START
from qknorm.text.prepared import Sentences, Split, TokenIds
from qknorm.text.subwords import Tokenizer

Ids = NDArray[np.int64]
Side = Sentences | list[list[int]]


class Arrays(NamedTuple):
    """A batch as arrays: source with its end, target with its start, and target with its end, all padded with 0."""

    source: Ids
    target_in: Ids
    target_out: Ids


@dataclass(frozen=True)
class Batch:
    """Which sentences stand in a batch, and its shape; rows beyond the sentences are empty."""

    sentences: Ids
    rows: int
    length: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.length


def shape_lengths(longest: int) -> list[int]:
    """The lengths that batches may have: steps of 4 up to 64, then of a sixteenth of the next power of two."""
    lengths = [8]
    while lengths[-1] < longest:
        lengths.append(lengths[-1] + max(4, 2 ** lengths[-1].bit_length() // 16))
    return lengths


def plan_batches(source_lengths: NDArray[np.int64], target_lengths: NDArray[np.int64], budget: int) -> list[Batch]:
    """Batches whose sentences × longest side stay within `budget`; lengths count the end-of-sentence token.

    Sentences are sorted by their longer side (by the source alone, the other side wastes three times as much), and
    taken from the longest down, so that only the last batch is not full.
    """
    longer = np.maximum(source_lengths, target_lengths)
    order = np.lexsort((np.arange(len(longer)), source_lengths + target_lengths, longer))[::-1]
    lengths = np.array(shape_lengths(int(longer.max(initial=8))))
    batches, start = [], 0
    while start < len(order):
        length = int(lengths[np.searchsorted(lengths, longer[order[start]])])
        rows = max(1, budget // length)
        batches.append(Batch(order[start : start + rows].astype(np.int64), rows, length))
        start += rows
    return batches


def padding_share(
    batches: Sequence[Batch], source_lengths: NDArray[np.int64], target_lengths: NDArray[np.int64]
) -> float:
    """The share of all positions, both sides together, that hold padding."""
    positions = sum(2 * batch.rows * batch.length for batch in batches)
    real = sum(int((source_lengths + target_lengths)[batch.sentences].sum()) for batch in batches)
    return 1 - real / positions


class TrainingBatches:
    """The batches of every epoch, in an order that depends on the seed and the epoch alone.

    With `bpe_dropout` the text is cut into subwords anew for every epoch, repeatably.
    """

    def __init__(
        self, split: Split, tokenizer: Tokenizer, languages: tuple[str, str], budget: int, seed: int, bpe_dropout: float
    ) -> None:
        self._split, self._tokenizer, self._languages = split, tokenizer, languages
        self._budget, self._seed, self._bpe_dropout = budget, seed, bpe_dropout
        self._texts = [split.text(language) for language in languages] if bpe_dropout else []
        self._epoch = -1
        self._sides: list[Side] = []
        self.batches: list[Batch] = []
        self.order: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.source_lengths: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.target_lengths: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.start_epoch(0)

    def start_epoch(self, epoch: int) -> None:
        """Makes `batches` and their `order` those of this epoch."""
        if epoch == self._epoch:
            return
        if self._bpe_dropout or not self.batches:
            self._plan(epoch)
        self.order = np.random.default_rng([self._seed, epoch]).permutation(len(self.batches))
        self._epoch = epoch

    def _plan(self, epoch: int) -> None:
        if self._bpe_dropout:
            cut = [self._cut_anew(text, epoch, side) for side, text in enumerate(self._texts)]
            lengths = [np.array([len(ids) for ids in side]) for side in cut]
            self._sides = [*cut]
        else:
            self._sides = [self._split.source, self._split.target]
            lengths = [self._split.source.lengths, self._split.target.lengths]
        self.source_lengths, self.target_lengths = (each + 1 for each in lengths)
        self.batches = plan_batches(self.source_lengths, self.target_lengths, self._budget)

    def _cut_anew(self, text: list[str], epoch: int, side: int) -> list[list[int]]:
        rng = random.Random(f"{self._seed} {epoch} {side}")
        return [self._tokenizer.encode_with_dropout(line, self._bpe_dropout, rng) for line in text]

    def target_tokens(self, batch: Batch) -> int:
        """Real target tokens of a batch, ends included."""
        return int(self.target_lengths[batch.sentences].sum())

    def arrays(self, batch: Batch) -> Arrays:
        """The padded arrays of a batch of this epoch."""
        source, target = self._sides
        return collate(
            [source[int(i)] for i in batch.sentences],
            [target[int(i)] for i in batch.sentences],
            batch.shape,
        )


def collate(
    sources: Sequence[Sequence[int] | TokenIds],
    targets: Sequence[Sequence[int] | TokenIds],
    shape: tuple[int, int] | None = None,
) -> Arrays:
    """Pads sentences to one shape. A row without a sentence has an end as its source, and nothing to learn."""
    if shape is None:
        shape = len(sources), 1 + max(len(ids) for ids in (*sources, *targets))
    source, target_in, target_out = (np.full(shape, PAD, dtype=np.int64) for _ in range(3))
    source[len(sources) :, 0] = END
    for row, ids in enumerate(sources):
        source[row, : len(ids)] = ids
        source[row, len(ids)] = END
    for row, ids in enumerate(targets):
        target_in[row, 0] = START
        target_in[row, 1 : len(ids) + 1] = ids
        target_out[row, : len(ids)] = ids
        target_out[row, len(ids)] = END
    return Arrays(source, target_in, target_out)


def batches_by_length(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Indices of sentences of like length, longest first, each group's count × longest within `budget`."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    start = 0
    while start < len(order):
        count = max(1, budget // max(1, lengths[order[start]]))
        yield order[start : start + count]
        start += count
