"""Batches: each sentence once, within the budget, in few shapes, in an order that can be had again."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qknorm.config import Cleaning, Prepare, Subwords
from qknorm.text.batching import (
    Batch,
    TrainingBatches,
    batches_by_length,
    collate,
    collate_chosen,
    plan_batches,
    shape_lengths,
)
from qknorm.text.prepare import prepare
from qknorm.text.prepared import PreparedData, Sentences

pairs_of_lengths = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), max_size=150)


def as_arrays(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    both = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


@given(pairs_of_lengths, st.integers(8, 2_000))
def test_every_sentence_stands_in_one_batch_that_fits_its_budget_and_a_known_shape(pairs, budget):
    source, target = as_arrays(pairs)
    longer = np.maximum(source, target)
    batches = plan_batches(source, target, budget)
    together = np.concatenate([batch.sentences for batch in batches]) if batches else np.array([])
    assert sorted(together.tolist()) == list(range(len(pairs)))
    for batch in batches:
        assert 1 <= len(batch.sentences) <= batch.rows
        assert longer[batch.sentences].max() <= batch.length
        assert batch.rows * batch.length <= budget or batch.rows == 1
        assert batch.length in shape_lengths(200)
        assert batch.rows == max(1, budget // batch.length)
    assert all(len(batch.sentences) == batch.rows for batch in batches[:-1])


@given(st.integers(1, 5_000))
def test_lengths_of_shapes_are_few_and_never_far_above_what_is_needed(longest):
    lengths = shape_lengths(longest)
    steps = np.diff(lengths)
    assert lengths[0] == 8 and lengths[-1] >= longest
    assert all(step == 4 for step, length in zip(steps, lengths, strict=False) if length < 64)
    assert all(step <= max(4, length / 8) for step, length in zip(steps, lengths, strict=False))
    assert len(lengths) <= 14 + 8 * max(0, np.ceil(np.log2(longest / 64)) + 1)


def test_collate_golden():
    arrays = collate([[7, 8], [9], []], [[5], [6, 4], []], shape=(4, 4))
    assert arrays.source.tolist() == [[7, 8, 3, 0], [9, 3, 0, 0], [3, 0, 0, 0], [3, 0, 0, 0]]
    assert arrays.target_in.tolist() == [[2, 5, 0, 0], [2, 6, 4, 0], [2, 0, 0, 0], [0, 0, 0, 0]]
    assert arrays.target_out.tolist() == [[5, 3, 0, 0], [6, 4, 3, 0], [3, 0, 0, 0], [0, 0, 0, 0]]
    assert collate([[7, 8], [9]], [[5], [6, 4, 4]]).source.shape == (2, 4)
    assert collate([[7, 8]], []).source.tolist() == [[7, 8, 3]]


_SIDE = st.lists(st.lists(st.integers(4, 99), max_size=9), min_size=4, max_size=4)


@given(_SIDE, _SIDE, st.permutations(range(4)), st.integers(0, 4), st.integers(0, 2))
def test_all_rows_at_once_are_those_row_by_row(sources, targets, order, chosen, empty):
    batch = Batch(np.array(order[:chosen], dtype=np.int64), chosen + empty, 10)
    sides = [
        Sentences(np.array([*chain(*side)], dtype=np.uint16), np.cumsum([0, *map(len, side)]))
        for side in (sources, targets)
    ]
    due = collate(*([side[i] for i in batch.sentences] for side in sides), batch.shape)
    for one, other in zip(collate_chosen(*sides, batch), due, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert one.tolist() == other.tolist()


@given(st.lists(st.integers(0, 80), max_size=60), st.integers(1, 500))
def test_groups_by_length_hold_each_sentence_once_within_the_budget(lengths, budget):
    groups = list(batches_by_length(lengths, budget))
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(len(group) == 1 or len(group) * max(lengths[i] for i in group) <= budget for group in groups)
    in_order = [lengths[i] for group in groups for i in group]
    assert in_order == sorted(lengths, reverse=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> PreparedData:
    folder = tmp_path_factory.mktemp("batching")
    words = ["casa", "libro", "vermello", "branca", "grande", "pequena"]
    for language, shift in (("gl", 0), ("en", 1)):
        lines = [" ".join(words[(n * k + shift) % 6] for k in range(1, 2 + n % 9)) + f" {n}\n" for n in range(120)]
        (folder / f"a.{language}").write_text("".join(lines))
    prepare(
        Prepare(source="gl", target="en", train=(folder / "a.gl", folder / "a.en"), dev_pairs=5, test_pairs=5),
        folder / "out",
    )
    return PreparedData.load(folder / "out")


def make(data: PreparedData, seed: int = 0, dropout: float = 0.0) -> TrainingBatches:
    return TrainingBatches(data.split("train"), data.tokenizer, (data.source, data.target), 128, seed, dropout)


def content(batches: TrainingBatches, epoch: int) -> list[list[list[int]]]:
    """All an epoch shows to a model, in its order."""
    batches.start_epoch(epoch)
    return [array.tolist() for i in batches.order for array in batches.arrays(batches.batches[i])]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_an_epoch_depends_on_the_seed_and_its_number_alone(data, dropout):
    one, other = make(data, dropout=dropout), make(data, dropout=dropout)
    in_turn = [content(one, epoch) for epoch in (0, 1, 2)]
    assert content(other, 2) == in_turn[2]
    assert content(other, 0) == in_turn[0]
    assert in_turn[0] != in_turn[1] != in_turn[2]
    assert content(make(data, seed=1, dropout=dropout), 0) != in_turn[0]


def test_an_epoch_holds_every_training_sentence_once(data):
    train = data.split("train")
    due = sorted((train.source[i].tolist(), train.target[i].tolist()) for i in range(len(train)))
    batches = make(data)
    for epoch in (0, 3):
        batches.start_epoch(epoch)
        seen, tokens = [], 0
        for i in batches.order:
            batch = batches.batches[i]
            arrays = batches.arrays(batch)
            rows = [[row[row > 3].tolist() for row in side] for side in (arrays.source, arrays.target_out)]
            seen += list(zip(*rows, strict=True))[: len(batch.sentences)]
            assert (arrays.target_out != 0).sum() == batches.target_tokens(batch)
            tokens += batches.target_tokens(batch)
        assert sorted(seen) == due
        assert set(batches.shapes) == {batch.shape for batch in batches.batches}
        assert tokens == len(train.target.ids) + len(train)


def test_bpe_dropout_cuts_the_same_text_otherwise_in_every_epoch(data):
    text = sorted(data.split("train").text("gl"))
    batches = make(data, dropout=0.5)
    cuts = []
    for epoch in (0, 1):
        batches.start_epoch(epoch)
        sides = [batches.arrays(batch).source[: len(batch.sentences)] for batch in batches.batches]
        rows = [row[row > 3].tolist() for side in sides for row in side]
        assert sorted(data.tokenizer.decode(row) for row in rows) == text
        cuts.append(sorted(rows))
    assert cuts[0] != cuts[1]
    assert {batch.shape for batch in batches.batches} < set(batches.shapes)
    undropped = sum(len(sentence) for sentence in cuts[0]) - len(data.split("train").source.ids)
    assert undropped > 0


@pytest.mark.slow
@pytest.mark.corpus
def test_padding_wastes_less_than_15_percent_of_galician_english(corpora, tmp_path):
    files = tuple(corpora / "ted-gl-en" / f"train.{language}" for language in ("gl", "en"))
    held_out = {name: tuple(path.with_stem(name) for path in files) for name in ("dev", "test")}
    kept = Cleaning(drop_duplicates=False, drop_identical=False, drop_overlap=False, max_ratio=100)
    subwords = Subwords(merges=3_000, pretokenized=True)
    prepare(
        Prepare(source="gl", target="en", train=files, **held_out, cleaning=kept, subwords=subwords), tmp_path / "out"
    )
    data = PreparedData.load(tmp_path / "out")
    train = data.split("train")
    lengths = train.source.lengths + 1, train.target.lengths + 1
    batches = plan_batches(*lengths, 4_096)
    positions = sum(2 * batch.rows * batch.length for batch in batches)  # of both sides, empty rows included
    assert 1 - sum(lengths).sum() / positions < 0.15
    assert len({batch.shape for batch in batches}) <= 40
    assert data.length_percentile(97.5) == pytest.approx(79, abs=1)
