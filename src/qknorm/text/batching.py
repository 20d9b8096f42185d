"""Token-budget batches in a small set of fixed shapes, so that compiled code and CUDA graphs can be used again."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qknorm.specials import END, PAD, START
from qknorm.text.ahead import CutEpochs
from qknorm.text.cutting import Cutter, number_words
from qknorm.text.prepared import Sentences, Split, TokenIds
from qknorm.text.subwords import Tokenizer

Ids = NDArray[np.int64]


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


class TrainingBatches:
    """The batches of every epoch, in an order that depends on the seed and the epoch alone.

    With `bpe_dropout` the text is cut into subwords anew for every epoch, repeatably, and for the coming epochs ahead
    by so many `workers`: processes beside this one, which `close` ends; without any it is cut when an epoch starts.
    """

    def __init__(
        self,
        split: Split,
        tokenizer: Tokenizer,
        languages: tuple[str, str],
        budget: int,
        seed: int,
        bpe_dropout: float,
        workers: int = 0,
    ) -> None:
        self._budget, self._seed = budget, seed
        self._sides = [split.source, split.target]
        self._cut: CutEpochs | None = None
        if bpe_dropout:
            rules, words, lines = number_words(tokenizer, map(split.text, languages))
            self._cut = CutEpochs(Cutter(rules, words, bpe_dropout), lines, seed, workers)
        self._epoch = -1
        self.batches: list[Batch] = []
        self.order: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.source_lengths: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.target_lengths: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.start_epoch(0)

    def start_epoch(self, epoch: int) -> None:
        """Makes `batches` and their `order` those of this epoch."""
        if epoch == self._epoch:
            return
        if self._cut is not None:
            self._sides = [Sentences(ids, starts) for ids, starts in self._cut.cut(epoch)]
        if self._cut is not None or not self.batches:
            self.source_lengths, self.target_lengths = (side.lengths + 1 for side in self._sides)
            self.batches = plan_batches(self.source_lengths, self.target_lengths, self._budget)
        self.order = np.random.default_rng([self._seed, epoch]).permutation(len(self.batches))
        self._epoch = epoch

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The shapes of the batches; where epochs are cut anew, which brings other lengths, also those to expect."""
        if self._cut is None:
            return sorted({batch.shape for batch in self.batches})
        longest = max((batch.length for batch in self.batches), default=0)
        return sorted((max(1, self._budget // length), length) for length in shape_lengths(longest + 1))

    def close(self) -> None:
        """Ends the processes that cut ahead."""
        if self._cut is not None:
            self._cut.close()

    def target_tokens(self, batch: Batch) -> int:
        """Real target tokens of a batch, ends included."""
        return int(self.target_lengths[batch.sentences].sum())

    def arrays(self, batch: Batch) -> Arrays:
        """The padded arrays of a batch of this epoch."""
        source, target = self._sides
        return collate_chosen(source, target, batch)


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


def collate_chosen(sources: Sentences, targets: Sentences, batch: Batch) -> Arrays:
    """`collate` of a batch's sentences, quicker: all rows are filled at once."""
    arrays = np.full((3, *batch.shape), PAD, dtype=np.int64)
    source, target_in, target_out = (array.reshape(-1) for array in arrays)
    begins = np.arange(batch.rows) * batch.length
    filled = begins[: len(batch.sentences)]
    ids, places, ends = _chosen(sources, batch.sentences, filled)
    source[places] = ids
    source[ends] = END
    source[begins[len(filled) :]] = END
    ids, places, ends = _chosen(targets, batch.sentences, filled)
    target_in[places + 1] = ids
    target_in[filled] = START
    target_out[places] = ids
    target_out[ends] = END
    return Arrays(*arrays)


def _chosen(side: Sentences, chosen: Ids, rows: Ids) -> tuple[TokenIds, Ids, Ids]:
    """The ids of these sentences, their places where each has a row that begins here, and where each sentence ends."""
    lengths = side.lengths[chosen]
    counted, before = np.arange(lengths.sum()), np.cumsum(lengths) - lengths
    ids: TokenIds = side.ids[counted + np.repeat(side.offsets[chosen] - before, lengths)]
    return ids, counted + np.repeat(rows - before, lengths), rows + lengths


def batches_by_length(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Indices of sentences of like length, longest first, each group's count × longest within `budget`."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    start = 0
    while start < len(order):
        count = max(1, budget // max(1, lengths[order[start]]))
        yield order[start : start + count]
        start += count
