"""A beam search whose attention is one kernel against PyTorch's: on a GPU, or in Triton's interpreter."""

import sys
from typing import Any

import pytest
import torch
from test_recorded_search import make_batch, make_model
from torch import Tensor

from qknorm.config import Attention
from qknorm.decoding.beam_decoder import BeamDecoder, Counters, Extent
from qknorm.decoding.recorded_search import RecordedSearch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ATTEND = sys.modules["qknorm.attention.attend"]  # the name `attend` in the package is the function
SETTINGS: list[dict[str, Any]] = [
    {},
    {"positions": "rotary", "kv_heads": 2},
    {"attention": Attention(cross_query_norm="width", scale_per_head=True)},
    {"norm_position": "post", "attention": Attention(p=3.0, normalize_values=True)},
]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Lets `auto` take the kernel in the interpreter too; the shapes of the queries that it got."""
    shapes: list[tuple[int, ...]] = []
    original = ATTEND._attend_few

    def counted(q: Tensor, *rest: Any, **how: Any) -> Tensor:
        shapes.append(tuple(q.shape))
        return original(q, *rest, **how)

    monkeypatch.setattr(ATTEND, "_attend_few", counted)
    if DEVICE == "cpu":
        monkeypatch.setattr(ATTEND, "may_fuse", lambda backend, x: torch.is_autocast_enabled("cpu"))
    return shapes


def without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ATTEND, "_takes_few", lambda *_: False)


@pytest.mark.parametrize(("options", "beam"), [(SETTINGS[0], 1), *((options, 3) for options in SETTINGS[1:])])
def test_steps_give_the_same_logits(
    monkeypatch: pytest.MonkeyPatch, taken: list[tuple[int, ...]], options: dict[str, Any], beam: int
) -> None:
    """In buffers that hold more sentences and tokens than the steps read, with hypotheses that change places."""
    model = make_model(options, 0, 2.0, DEVICE)
    source, _ = make_batch([4, 9, 1], 1)
    words = torch.randint(4, 29, (4, 3, beam), device=DEVICE)
    origins = torch.randint(0, beam, (4, 2, beam), device=DEVICE)
    results: list[list[Tensor]] = []
    for with_kernel in (True, False):
        if not with_kernel:
            without(monkeypatch)
        decoder = BeamDecoder(model, Extent(3, beam, 16, 32), torch.bfloat16)
        counters = Counters(beam, torch.device(DEVICE))
        decoder.source[:, : source.shape[1]] = source.to(DEVICE)
        results.append([])
        with torch.no_grad():
            decoder.read_source()
            taken.clear()
            for i in range(4):
                results[-1].append(decoder.logits(words[i, :2], 16, counters).clone())
                decoder.reorder(origins[i], 16)
                counters.count_on()
        assert taken == ([(2, 4, beam, 4)] * 4 * 2 * 2 if with_kernel else [])  # two layers, over itself and across
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=0.1, rtol=0.05)


def test_a_search_finds_the_same(monkeypatch: pytest.MonkeyPatch, taken: list[tuple[int, ...]]) -> None:
    model = make_model({}, 0, 1.0, DEVICE)
    source, limits = make_batch([2, 3], 2)
    found = RecordedSearch(model, torch.bfloat16)(source, limits, beam=2)
    count = len(taken)
    without(monkeypatch)
    expected = RecordedSearch(model, torch.bfloat16)(source, limits, beam=2)
    assert (2, 4, 2, 4) in taken and len(taken) == count
    for (mine, *_), (reference, *_) in zip(found, expected, strict=True):
        assert mine.score == pytest.approx(reference.score, abs=0.1)
