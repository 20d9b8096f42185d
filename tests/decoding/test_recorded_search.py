"""Whole steps over fixed buffers against the plain search: the same hypotheses and the same scores, to the bit."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_search import STATES, coarse_table, random_table, search
from torch import Tensor

from qknorm.config import Attention, Decoding, Dropout, Model
from qknorm.decoding import recorded_search
from qknorm.decoding.beam_decoder import BeamDecoder, Counters, Extent
from qknorm.decoding.graphs import Graphs
from qknorm.decoding.recorded_search import Board, RecordedSearch
from qknorm.decoding.results import Hypothesis
from qknorm.decoding.search import Rules, beam_search, penalties, read_results
from qknorm.decoding.translate import ModelStepper, translate_ids
from qknorm.models.translator import Translator, start_of_scale
from qknorm.specials import END
from qknorm.text.batching import collate

SETTINGS = [
    {},
    {"positions": "rotary", "kv_heads": 2},
    {"positions": "rotary", "rotary_order": "after_norm", "attention": Attention(cross_query_norm="width")},
    {"tie": "none", "fixnorm": False, "norm": "scale", "attention": Attention(qk_norm="none")},
    {"norm_position": "post", "attention": Attention(p=3.0, normalize_values=True)},
    {"language_vectors": True, "attention": Attention(qk_norm="rms")},
]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class TableDecoder:
    """A table of log-probabilities in fixed buffers, as a `BeamDecoder` is a model in them."""

    def __init__(self, table: Tensor, beam: int) -> None:
        self.source = torch.zeros(len(table), 1, dtype=torch.long)
        self._table = table
        self._sentence_b = torch.arange(len(table))
        self._state_bk = torch.zeros(len(table), beam, dtype=torch.long)
        self.sizes: list[int] = []

    def read_source(self) -> None:
        self._state_bk.zero_()
        self._sentence_b.copy_(torch.arange(len(self._table)))

    def step(self, last_bk: Tensor, room: int, counters: Counters) -> Tensor:
        size = len(last_bk)
        assert int(counters.position) < room and int(counters.length) == int(counters.position) + 1
        self.sizes.append(size)
        self._state_bk[:size] = (7 * self._state_bk[:size] + 3 * last_bk + 1) % STATES
        return self._table[self._sentence_b[:size, None], self._state_bk[:size]]

    def reorder(self, origin_bk: Tensor, room: int) -> None:
        size = len(origin_bk)
        self._state_bk[:size] = self._state_bk[:size].gather(1, origin_bk)

    def move(self, to: Tensor, origins: Tensor, length: int) -> None:
        self._state_bk[to], self._sentence_b[to] = self._state_bk[origins], self._sentence_b[origins]


def search_on_board(decoder: TableDecoder, board: Board, limits: list[int], alpha: float, nbest: int) -> object:
    board.limit_b.copy_(torch.tensor(limits))
    board.penalty_t.copy_(penalties(len(board.penalty_t) - 1, alpha))
    rules = Rules(nbest, 0, board.penalty_t)
    return read_results(board.search(max(limits), rules), rules)


@given(
    st.integers(0, 10**6),
    st.lists(st.integers(1, 40), min_size=1, max_size=40),
    st.sampled_from([0.0, 0.6, 1.3]),
    st.integers(1, 4),
    st.booleans(),
    st.data(),
)
@settings(max_examples=60)
def test_whole_steps_find_what_the_plain_search_finds(seed, limits, alpha, beam, ties, data):
    """Over tables whose answers depend on the whole history: with ties, dead ends, and sentences of any length."""
    table = (coarse_table if ties else random_table)(seed, len(limits), 6)
    rules = {"alpha": alpha, "nbest": data.draw(st.integers(1, beam))}
    decoder = TableDecoder(table, beam)
    room = 32 * -(-max(limits) // 32)
    board = Board(decoder, Extent(len(limits), beam, 1, room), Graphs(torch.device("cpu")))
    expected = search(table, limits, beam=beam, **rules)
    for _ in range(2):  # the second time the buffers are full of what the first left
        found = search_on_board(decoder, board, limits, **rules)
        assert repr(found) == repr(expected)  # −inf and all


def test_settled_sentences_are_dropped_and_the_others_go_on():
    torch.manual_seed(1)
    limits = [3] * 40 + [30] * 20 + [60] * 4
    table = random_table(0, len(limits), 6)
    table[:, :, END] -= 30.0  # sentences run to their limits
    expected = search(table, limits, beam=3)
    decoder = TableDecoder(table, 3)
    board = Board(decoder, Extent(len(limits), 3, 1, 64), Graphs(torch.device("cpu")))
    assert search_on_board(decoder, board, limits, 0.6, nbest=1) == expected
    assert decoder.sizes[0] == 64 and decoder.sizes[12] == 24 and decoder.sizes[-1] == 4
    assert len(decoder.sizes) == 60


def make_model(options: dict[str, object], seed: int, willing: float, device: str = "cpu") -> Translator:
    """A model with random weights; the larger `willing`, the sooner it ends sentences."""
    torch.manual_seed(seed)
    small = {"width": 16, "feed_forward": 24, "encoder_layers": 1, "decoder_layers": 2, "heads": 4}
    shape = Model(**small, dropout=Dropout.everywhere(0.0), **options)  # type: ignore[arg-type]
    model = Translator(29, shape, scale_init=start_of_scale(shape, 20))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        model.output_bias[END] += willing
    return model.eval().to(device)


def make_batch(lengths: list[int], extra: int) -> tuple[Tensor, Tensor]:
    sources = [torch.randint(4, 29, (n,)).tolist() for n in lengths]
    return torch.from_numpy(collate(sources, []).source), torch.tensor(lengths) + extra


def plain(model: Translator, source: Tensor, limits: Tensor, beam: int, **rules: float) -> list[list[Hypothesis]]:
    with torch.no_grad():
        return beam_search(ModelStepper(model, source, beam), len(source), limits, beam=beam, **rules)


def shake(model: Translator, size: float = 0.1) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn_like(parameter))


@given(
    st.integers(0, 10**6),
    st.sampled_from(SETTINGS),
    st.lists(st.integers(1, 20), min_size=1, max_size=12),
    st.integers(1, 20),
    st.integers(1, 4),
    st.floats(-1, 5),
)
@settings(max_examples=25)
def test_a_translator_in_fixed_buffers_finds_what_it_finds_step_by_step(seed, options, lengths, extra, beam, willing):
    """In float64, where the order of sums does not reach the float32 of the search: so scores are equal to the bit."""
    model = make_model(options, seed, willing).double()
    recorded = RecordedSearch(model, torch.float64)
    source, limits = make_batch(lengths, extra)
    for _ in range(2):  # the second time the weights are others
        expected = plain(model, source, limits, beam, nbest=beam)
        assert recorded(source, limits, beam=beam, nbest=beam) == expected
        shake(model)


@pytest.mark.parametrize("options", SETTINGS)
def test_in_single_precision_the_same_is_found(options):
    model = make_model(options, 0, 2.0)
    sources = [torch.randint(4, 29, (n,)).tolist() for n in (3, 9, 20, 4, 7, 40, 2, 5)]
    for decoding in (Decoding(), Decoding(beam=1, extra_length=5), Decoding(beam=3, length_penalty=0.0)):
        expected = translate_ids(model, sources, decoding)
        found = translate_ids(model, sources, decoding, search=RecordedSearch(model, torch.float32))
        assert [best.tokens for best, *_ in found] == [best.tokens for best, *_ in expected]
        for (mine, *_), (reference, *_) in zip(found, expected, strict=True):
            assert mine.score == pytest.approx(reference.score, abs=1e-4)


@pytest.mark.parametrize("options", SETTINGS[:5])
def test_in_half_precision_weights_are_cast_anew_for_every_search(options):
    """The first step is the one that autocast computes, though its weights are cast once for all steps."""
    model = make_model(options, 0, 2.0)
    decoder = BeamDecoder(model, Extent(2, 3, 16, 32), torch.bfloat16)
    source, _ = make_batch([4, 9], 1)
    decoder.source[:, : source.shape[1]] = source
    last_bk, answers = torch.tensor([[5, 6, 7], [8, 9, 9]]), []
    for _ in range(2):
        with torch.no_grad():
            decoder.read_source()
            mine = decoder.logits(last_bk, 16, Counters(3, torch.device("cpu")))
            with torch.autocast("cpu", torch.bfloat16):
                memory = model.encode(source)
                read = [model.score(model.decode(column[:, None], memory))[:, 0] for column in last_bk.T]
        assert any(half.dtype == torch.bfloat16 for half in decoder._halves.values())
        torch.testing.assert_close(mine, torch.stack(read, dim=1), atol=0.05, rtol=0.05)
        answers.append(mine)
        shake(model)
    assert (answers[0] - answers[1]).abs().max() > 0.5


def test_what_does_not_fit_into_memory_is_searched_in_parts():
    model = make_model({}, 3, 1.0).double()
    source, limits = make_batch([4, 9, 2, 5, 7], 8)
    one = BeamDecoder.bytes_for(model, Extent(1, 2, 16, 32), torch.float64)
    recorded = RecordedSearch(model, torch.float64, most_bytes=2 * one)
    assert recorded(source, limits, beam=2) == plain(model, source, limits, 2)
    assert {extent.sentences for extent in recorded._made} <= {1, 2}


def test_ngrams_that_may_not_be_repeated_take_the_plain_search():
    model = make_model({}, 4, -2.0).double()
    source, limits = make_batch([4, 9, 2], 12)
    expected = plain(model, source, limits, 3, no_repeat_ngram=2)
    assert expected != plain(model, source, limits, 3)
    assert RecordedSearch(model, torch.float64)(source, limits, beam=3, no_repeat_ngram=2) == expected
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(model, source, limits, 3, no_repeat_ngram=2)
    assert expected != plain(model, source, limits, 3, no_repeat_ngram=2)
    assert RecordedSearch(model, torch.bfloat16)(source, limits, beam=3, no_repeat_ngram=2) == expected


def test_nothing_is_found_for_no_sentences_and_bad_settings_are_refused():
    recorded = RecordedSearch(make_model({}, 0, 0.0), torch.float32)
    assert recorded(torch.zeros(0, 3, dtype=torch.long), torch.zeros(0, dtype=torch.long)) == []
    source, limits = make_batch([4, 9], 12)
    with pytest.raises(ValueError, match="nbest"):
        recorded(source, limits, beam=2, nbest=3)


def test_weights_that_diverged_are_reported_and_leave_no_trace():
    model = make_model({}, 5, 1.0).double()
    source, limits = make_batch([4, 9, 2], 12)
    recorded = RecordedSearch(model, torch.float64)
    expected = recorded(source, limits, beam=2)
    weight = model.decoder[1].attention.in_proj_weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(math.nan)
    with pytest.raises(FloatingPointError):
        recorded(source, limits, beam=2)
    with torch.no_grad():
        weight.copy_(kept)
    assert recorded(source, limits, beam=2) == expected


def test_weights_put_elsewhere_are_found_there():
    model = make_model({}, 6, 1.0).double()
    source, limits = make_batch([4, 9, 2], 12)
    recorded = RecordedSearch(model, torch.float64)
    recorded(source, limits, beam=2)
    before = list(recorded._made.values())
    model.load_state_dict(make_model({}, 7, 1.0).double().state_dict(), assign=True)
    assert recorded(source, limits, beam=2) == plain(model, source, limits, 2)
    assert all(made not in before for made in recorded._made.values())


def test_a_fixed_scale_put_elsewhere_is_found_there():
    model = make_model({"attention": Attention(scale_learned=False)}, 6, 1.0).double()
    before = recorded_search.addresses_of(model)
    norm = model.decoder[0].attention.norm
    norm.scale = 2 * norm.scale
    after = recorded_search.addresses_of(model)
    assert after != before
    model.ensure_positions(1_000)  # the smaller table stays for those who read it
    assert recorded_search.addresses_of(model) == after and len(model._outgrown) == 1


class Short(BeamDecoder):
    """A decoder on a GPU whose memory is nearly used up."""

    sentences = 2
    refused = 0

    def read_source(self) -> None:
        if len(self.source) > self.sentences:
            Short.refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        super().read_source()


def test_where_memory_is_short_fewer_are_searched_together(monkeypatch):
    model = make_model({}, 3, 1.0).double()
    source, limits = make_batch([4, 9, 2, 5, 7, 3, 3], 8)
    monkeypatch.setattr(recorded_search, "BeamDecoder", Short)
    monkeypatch.setattr(Short, "refused", 0)
    recorded = RecordedSearch(model, torch.float64)
    for _ in range(2):
        assert recorded(source, limits, beam=2) == plain(model, source, limits, 2)
    assert Short.refused == 2  # of 7 and of 3, and the second time it is known
    assert {extent.sentences for extent in recorded._made} == {1}
    monkeypatch.setattr(Short, "sentences", 0)
    with pytest.raises(torch.OutOfMemoryError):
        recorded(source, limits, beam=2)


def test_memory_for_logits_and_for_reading_counts():
    model = make_model({}, 3, 1.0)
    wide, extent = Translator(50_000, model.settings, scale_init=1.0), Extent(3, 2, 16, 32)
    more = BeamDecoder.bytes_for(wide, extent, torch.float32) - BeamDecoder.bytes_for(model, extent, torch.float32)
    assert more > 3 * 2 * 49_000 * 3 * 4  # three arrays of logits at least
    longer = BeamDecoder.bytes_for(model, extent._replace(source_length=4_096), torch.float32)
    assert longer > 3 * 4_096 * (2 * 2 * 16 + 6 * 16) * 4  # keys and values of two layers, and states on the way


def test_extents_kept_are_few(monkeypatch):
    monkeypatch.setattr(recorded_search, "MOST_EXTENTS", 2)
    model = make_model({}, 3, 1.0).double()
    recorded = RecordedSearch(model, torch.float64)
    for count in (1, 2, 3, 2, 4):
        source, limits = make_batch([4] * count, 8)
        assert recorded(source, limits, beam=2) == plain(model, source, limits, 2)
        assert len(recorded._made) <= 2


def test_buffers_made_in_inference_mode_serve_outside_too():
    model = make_model({}, 3, 1.0).double()
    source, limits = make_batch([4, 9, 2], 8)
    recorded = RecordedSearch(model, torch.float64)
    with torch.inference_mode():
        inside = recorded(source, limits, beam=2)
    assert recorded(source, limits, beam=2) == inside == plain(model, source, limits, 2)


def test_single_precision_stays_so_under_another_autocast():
    model = make_model({}, 3, 1.0)
    source, limits = make_batch([4, 9, 2], 8)
    recorded = RecordedSearch(model, torch.float32)
    expected = recorded(source, limits, beam=2)
    with torch.autocast("cpu", torch.bfloat16):
        assert recorded(source, limits, beam=2) == expected


def test_whether_there_is_a_kernel_is_asked_of_the_device_in_force(monkeypatch):
    """A model may have been on a GPU when its search was made."""
    model = make_model({}, 3, 1.0).double()
    source, limits = make_batch([4, 9, 2], 8)
    monkeypatch.setattr(recorded_search, "kernels_apply", lambda device: True)
    recorded = RecordedSearch(model, torch.float64)
    monkeypatch.setattr(recorded_search, "kernels_apply", lambda device: False)
    assert recorded(source, limits, beam=2) == plain(model, source, limits, 2)


@pytest.mark.parametrize("beam", [1, 31, 40])
def test_a_beam_wider_than_the_vocabulary_and_long_sources(beam):
    model = make_model({}, 8, 1.0).double()
    source, limits = make_batch([300, 3, 41], 2)
    limits[0] = 20
    found = RecordedSearch(model, torch.float64)(source, limits, beam=beam, nbest=beam)
    assert found == plain(model, source, limits, beam, nbest=beam)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("options", SETTINGS)
@pytest.mark.parametrize("beam", [1, 4])
def test_recordings_find_the_same_on_a_gpu_and_follow_the_weights(options, beam):
    model = make_model(options, 0, 2.0, "cuda").double()
    recorded = RecordedSearch(model, torch.float64)
    source, limits = make_batch([3, 9, 20, 4, 7, 40, 2, 5, 12, 30, 18, 6, 8, 3, 2, 9], 30)
    for _ in range(4):
        expected = plain(model, source.cuda(), limits.cuda(), beam, nbest=beam)
        for _ in range(2):  # as it is recorded, and replayed
            found = recorded(source, limits, beam=beam, nbest=beam)
            assert [[each.tokens for each in some] for some in found] == [
                [each.tokens for each in some] for some in expected
            ]
            for some, reference in zip(found, expected, strict=True):
                assert [each.score for each in some] == pytest.approx([each.score for each in reference], abs=1e-4)
        shake(model, 0.05)
    assert recorded.recordings > 2


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_recordings_outlive_a_search_and_read_the_weights_in_force(precision):
    model = make_model({}, 0, -20.0, "cuda")  # to the limits, so that all shapes come up the first time
    recorded = RecordedSearch(model, precision)
    source, limits = make_batch([3, 9, 20, 4, 7, 40, 2, 5], 30)
    counts = []
    for _ in range(3):
        with torch.autocast("cuda", precision, enabled=precision != torch.float32):
            expected = plain(model, source.cuda(), limits.cuda(), 4)
            found = recorded(source, limits)
        tolerance = 1e-3 if precision == torch.float32 else 0.2
        for (mine, *_), (reference, *_) in zip(found, expected, strict=True):
            assert mine.score == pytest.approx(reference.score, abs=tolerance, rel=tolerance / 10)
        counts.append(recorded.recordings)
        with torch.no_grad():
            model.output_bias.mul_(0.5)  # other weights: other scores, by far more than the tolerance
            model.output_bias[END] = -20.0
            model.words.weight.add_(0.2 * torch.randn_like(model.words.weight))
    assert counts[0] == counts[1] == counts[2]


def test_rooms_and_sizes_are_few():
    board = Board(TableDecoder(random_table(0, 693, 6), 4), Extent(693, 4, 176, 256), Graphs(torch.device("cpu")))
    assert board._rooms == [16, 32, 48, 64, 96, 128, 192, 256]
    assert len(board._sizes) == len(recorded_search.SHARES) + 1 and board._sizes[0] == 11
