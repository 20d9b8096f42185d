"""Sources read in parts, each cut to its longest: less padding is encoded, and the same is found."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_recorded_search import SETTINGS, make_batch, make_model, on_gpu, plain, shake
from torch import Tensor

from qknorm.decoding import recorded_search
from qknorm.decoding.beam_decoder import BeamDecoder, Extent, Part
from qknorm.decoding.recorded_search import FEWEST_IN_PARTS, SOURCE_STEP, RecordedSearch, parts_of
from qknorm.models.translator import Translator

LONGEST_FIRST = [100, 61, 50, *range(40, 20, -1), *[12] * 40, 1, 1, 1, 2, 3, 2, 2]


def short_limits(source: Tensor) -> Tensor:
    return torch.arange(len(source)) % 5 + 2


def note_shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of all sources that are encoded from now on."""
    shapes: list[tuple[int, ...]] = []
    original = Translator.encode
    monkeypatch.setattr(Translator, "encode", lambda self, x: (shapes.append(tuple(x.shape)), original(self, x))[1])
    return shapes


@pytest.mark.parametrize("options", SETTINGS)
@pytest.mark.parametrize("order", ["longest first", "shuffled"])
def test_the_same_is_found_for_sentences_of_very_different_lengths(monkeypatch, options, order):
    model = make_model(options, 1, 1.0).double()
    lengths = LONGEST_FIRST if order == "longest first" else [LONGEST_FIRST[i] for i in torch.randperm(70).tolist()]
    source, _ = make_batch(lengths, 0)
    limits = short_limits(source)
    expected = plain(model, source, limits, 3, nbest=3)
    shapes = note_shapes(monkeypatch)
    assert RecordedSearch(model, torch.float64)(source, limits, beam=3, nbest=3) == expected
    assert sum(n for n, _ in shapes) == 70
    if order == "longest first":
        assert shapes == [(3, 112), (24, 48), (43, 16)]


def test_what_an_earlier_source_left_beyond_a_part_is_forgotten():
    """A value that is no number would spoil even those who do not see it."""
    model = make_model({}, 2, 1.0).double()
    source, _ = make_batch(LONGEST_FIRST, 0)
    limits = short_limits(source)
    recorded = RecordedSearch(model, torch.float64)
    expected = plain(model, source, limits, 2)
    assert recorded(source, limits, beam=2) == expected
    (made,) = recorded._made.values()
    made.decoder._across.fill_(math.nan)
    made.decoder._real.zero_()
    assert recorded(source, limits, beam=2) == expected
    others = source.flip(0)  # in the same buffers the longest stand last
    assert recorded(others, limits, beam=2) == plain(model, others, limits, 2)
    assert len(recorded._made) == 1


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_keys_values_and_tables_are_those_of_one_reading(precision):
    model = make_model({"tie": "none", "kv_heads": 2}, 3, 1.0)
    source, _ = make_batch(LONGEST_FIRST, 0)
    whole, cut = (BeamDecoder(model, Extent(70, 2, 112, 32), precision) for _ in range(2))
    for decoder in (whole, cut):
        decoder.source[:, : source.shape[1]] = source
    with torch.no_grad():
        whole.read_source()
        cut.read_source(*parts_of(source))
    assert torch.equal(whole._real, cut._real) and (cut._real == 0).sum() == (source != 0).sum()
    seen = (cut._real == 0).squeeze(1).unsqueeze(-1)
    tolerance = 1e-5 if precision == torch.float32 else 0.05
    torch.testing.assert_close(cut._across * seen, whole._across * seen, atol=tolerance, rtol=tolerance)
    assert (cut._across[:, -1, :, 16:] == 0).all() and (whole._across[:, -1, :, 16:] != 0).any()
    assert whole._words.keys() == cut._words.keys() and len(cut._words) >= 2
    for name, table in cut._words.items():
        assert torch.equal(table, whole._words[name])


@given(st.lists(st.integers(1, 70), min_size=FEWEST_IN_PARTS, max_size=200), st.booleans())
@settings(max_examples=30)
def test_parts_cover_every_token(lengths, ordered):
    lengths = sorted(lengths, reverse=True) if ordered else lengths
    source, _ = make_batch(lengths, 0)
    parts = parts_of(source) or (Part(*source.shape),)
    assert len(parts) <= 4 and parts[-1].until == len(source)
    first = 0
    for until, length in parts:
        assert until > first and (source[first:until, length:] == 0).all()
        assert length % SOURCE_STEP == 0 or parts == (Part(*source.shape),)
        assert (source[first:until, max(0, length - SOURCE_STEP) :] != 0).any()  # and no longer than they must be
        first = until


def test_parts_are_few_and_none_where_nothing_is_gained():
    source = torch.ones(693, 176, dtype=torch.long)
    assert parts_of(source) == ()
    assert parts_of(source[:, :170]) == ()
    source[22:, 60:] = 0
    assert parts_of(source) == (Part(22, 176), Part(693, 64))
    source[22:, 63] = 1  # after padding, yet real
    source[100:] = 0
    assert parts_of(source) == (Part(22, 176), Part(260, 64), Part(693, 16))
    assert parts_of(source[: FEWEST_IN_PARTS - 1]) == ()


def test_ways_to_read_that_are_kept_are_few(monkeypatch):
    monkeypatch.setattr(recorded_search, "MOST_READINGS", 2)
    model = make_model({}, 4, 1.0).double()
    recorded = RecordedSearch(model, torch.float64)
    shapes = note_shapes(monkeypatch)
    counts = []
    for length in (4, 20, 36, 4, 52):
        source, _ = make_batch([60] + [length] * 69, 0)
        limits = short_limits(source)
        shapes.clear()
        found = recorded(source, limits, beam=2)
        counts.append(len(shapes))
        assert found == plain(model, source, limits, 2)
    (made,) = recorded._made.values()
    assert counts == [2, 2, 1, 2, 1]  # the third and the last are read whole
    assert len(made.board._readings) == 3  # two ways, and whole


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("precision", [torch.float64, torch.bfloat16])
def test_recorded_on_a_gpu_each_way_to_read_finds_the_same(precision):
    model = make_model({}, 5, -20.0, "cuda")  # to the limits, so that all shapes come up the first time
    model = model.double() if precision == torch.float64 else model
    recorded = RecordedSearch(model, precision)
    counts = []
    for turn in range(3):
        for lengths in (LONGEST_FIRST, LONGEST_FIRST[:1] + [20] * 69):
            source, _ = make_batch(lengths, 0)
            limits = short_limits(source)
            with torch.autocast("cuda", precision, enabled=precision == torch.bfloat16):
                expected = plain(model, source.cuda(), limits.cuda(), 4)
            found = recorded(source, limits, beam=4)
            close = {"abs": 1e-4} if precision == torch.float64 else {"abs": 0.2, "rel": 0.02}
            for (mine, *_), (reference, *_) in zip(found, expected, strict=True):
                assert mine.score == pytest.approx(reference.score, **close)
                assert mine.tokens == reference.tokens or precision == torch.bfloat16
        counts.append(recorded.recordings)
        shake(model, 0.02 if turn else 0.0)
    (made,) = recorded._made.values()
    assert len(made.board._readings) == 2 and counts[0] == counts[1] == counts[2]
