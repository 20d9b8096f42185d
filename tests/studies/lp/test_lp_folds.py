"""The folds partition the text and never leak."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from qknorm.errors import InputError
from qknorm.studies.lp.folds import Fold, cover, draw_starts, make_folds

lengths, counts, contexts = st.integers(40, 400), st.integers(2, 8), st.integers(2, 12)


def folds_or_none(length: int, count: int, context: int) -> list[Fold]:
    try:
        return make_folds(length, count, context)
    except InputError:
        assume(False)
        raise


@given(lengths, counts, contexts)
def test_blocks_partition_the_text_evenly(length: int, count: int, context: int) -> None:
    folds = folds_or_none(length, count, context)
    places = [place for fold in folds for place in range(*fold.held_out)]
    assert places == list(range(length))
    sizes = {end - start for start, end in (fold.held_out for fold in folds)}
    assert max(sizes) - min(sizes) <= 1


@given(lengths, counts, contexts, st.integers(0, 2**40))
def test_no_training_window_comes_within_a_context_of_the_block(
    length: int, count: int, context: int, seed: int
) -> None:
    for fold in folds_or_none(length, count, context):
        near = set(range(fold.held_out[0] - context, fold.held_out[1] + context))
        starts = draw_starts(fold, context, 20, 5, seed)
        assert starts.shape == (20, 5)
        for start in starts.flatten().tolist():
            window = range(start, start + context + 1)  # with the last target
            assert window[0] >= 0 and window[-1] < length
            assert not near.intersection(window)


def test_every_window_that_may_be_drawn_is_drawn() -> None:
    context, length = 3, 40
    fold = make_folds(length, 4, context)[1]
    assert fold.held_out == (10, 20)
    allowed = {s for s in range(length - context) if s + context < 10 - context or s >= 20 + context}
    starts = draw_starts(fold, context, 400, 20, seed=1).flatten()
    drawn, times = starts.unique(return_counts=True)
    assert set(drawn.tolist()) == allowed
    assert times.max() < 1.5 * times.min()  # evenly


def test_the_order_of_windows_is_the_seeds() -> None:
    fold = make_folds(300, 3, 8)[0]
    assert torch.equal(draw_starts(fold, 8, 5, 4, seed=3), draw_starts(fold, 8, 5, 4, seed=3))
    assert not torch.equal(draw_starts(fold, 8, 5, 4, seed=3), draw_starts(fold, 8, 5, 4, seed=4))


@given(st.integers(2, 100), st.integers(2, 20), st.integers(0, 50))
def test_held_out_windows_count_every_character_but_the_first_once(size: int, context: int, before: int) -> None:
    ids = torch.arange(before + size + 7, dtype=torch.int32)  # every id tells its place
    held_out = cover(ids, (before, before + size), context)
    assert torch.equal(held_out.targets, held_out.inputs + 1)
    counted = held_out.targets[held_out.counted].tolist()
    assert sorted(counted) == list(range(before + 1, before + size))
    assert held_out.total == size - 1
    assert held_out.inputs.min() == before and held_out.targets.max() == before + size - 1
    assert held_out.inputs.shape[1] == min(context, size - 1)


def test_a_text_too_short_is_told_so() -> None:
    with pytest.raises(InputError, match="too short for 10 folds"):
        make_folds(12, 10, 2)
    with pytest.raises(InputError, match=r"no window of 30 is left to train on.*--model\.context"):
        make_folds(100, 2, 30)
