"""Who else may be there when `auto` takes the kernel of decoding steps: watchers, tracers, other kinds of tensors."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from qknorm import MultiheadAttention, attend, attend_with_weights
from qknorm.attention import KeyValueCache, Visibility
from qknorm.attention.attend import few_refusal
from qknorm.attention.fused_decode import MOST_ENTRIES, attend_few, why_not
from qknorm.inspection.watching.capture import capture

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ATTEND = sys.modules["qknorm.attention.attend"]  # the name `attend` in the package is the function


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).bfloat16()


def draw_all(b: int = 2, h: int = 2, t: int = 3, s: int = 20) -> list[Tensor]:
    return [draw(b, h, n, 16) for n in (t, s, s)]


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lets `auto` take the kernel in the interpreter too; how often it did."""
    calls: list[int] = []
    original = ATTEND._attend_few
    monkeypatch.setattr(ATTEND, "_attend_few", lambda *x, **how: (calls.append(1), original(*x, **how))[1])
    if DEVICE == "cpu":
        monkeypatch.setattr(ATTEND, "may_fuse", lambda backend, x: backend == "auto")
    return calls


class Own(nn.Module):
    """Somebody's module, whose name says nothing of attention."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, scale=0.5)


def test_who_watches_sees_what_a_module_of_his_own_attends_to(taken: list[int]) -> None:
    q, k, v = draw_all()
    with capture(Own()) as calls:
        found = Own()(q, k, v)  # not the one that is watched
    assert not calls and taken == [1]
    with capture(module := Own()) as calls:
        watched = module(q, k, v)
    assert len(calls) == 1 and taken == [1, 1] and not calls.unseen
    assert torch.equal(calls[0].k, k) and torch.equal(calls[0].q, q) and calls[0].scale == 0.5
    assert torch.equal(watched, found)


@pytest.mark.parametrize("settings", [{}, {"rotary": "before_norm", "num_kv_heads": 1}, {"p": 3.0}])
def test_who_watches_sees_queries_and_keys_that_kernels_normalise(settings: dict[str, Any]) -> None:
    module = MultiheadAttention(32, 2, batch_first=True, backend="fused", **settings).to(DEVICE, torch.bfloat16).eval()
    x = draw(2, 5, 32)
    with torch.no_grad():
        found = module(x, x, x, need_weights=False, is_causal=True)[0]
        with capture(module) as calls:
            watched = module(x, x, x, need_weights=False, is_causal=True)[0]
        q, k, _ = module._project(x, x, x, None)
    assert torch.equal(watched, found) and len(calls) == 1 and not calls.unseen
    call = calls[0]
    assert torch.equal(torch.as_tensor(call.scale), module.norm.scale) and call.raw_q is not None
    for seen, expected in ((call.q, q.float() / module.norm.scale.float()), (call.k, k.float())):
        torch.testing.assert_close(seen.float(), expected, atol=2e-2, rtol=2e-2)
    assert not torch.allclose(call.raw_q.float(), call.q.float(), atol=0.1)


def test_a_place_of_a_subclass_is_used() -> None:
    class Doubled(MultiheadAttention):
        def _place(self, x_bhtd: Tensor, past: int | Tensor, *, keys: bool) -> Tensor:
            return super()._place(x_bhtd, past, keys=keys) * 2

    module, x, memory = Doubled(32, 2, batch_first=True).to(DEVICE, torch.bfloat16), draw(2, 1, 32), draw(2, 9, 32)
    results = []
    for need_weights in (False, True):  # which takes the reference
        with torch.no_grad():
            cache = KeyValueCache(fixed=True)
            results.append(module(x, memory, memory, need_weights=need_weights, cache=cache)[0])
    torch.testing.assert_close(*results, atol=2e-2, rtol=2e-2)


def test_tensors_that_hold_no_numbers(taken: list[int]) -> None:
    q, k, v = draw_all()
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (q, k, v)]
        assert few_refusal(*fake, scale=0.5) == "the tensors stand for others"
        assert attend(*fake, scale=0.5).shape == q.shape
    assert not taken


def test_who_follows_every_operation_gets_them_all(taken: list[int]) -> None:
    q, k, v = draw_all()
    graph = make_fx(lambda *x: attend(*x, scale=0.5))(q, k, v)
    assert not taken
    q = draw(2, 2, 3, 16)
    torch.testing.assert_close(graph(q, k, v), attend(q, k, v, scale=0.5), atol=2e-2, rtol=2e-2)
    assert taken == [1]


def test_sequences_of_many_lengths_in_one_tensor() -> None:
    rows = [draw(n, 2, 16) for n in (3, 5)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    assert few_refusal(nested, nested, nested, scale=0.5) == "the tensors stand for others"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_lowest_number_hides_nothing_from_a_query_that_has_nothing_else(dtype: torch.dtype) -> None:
    q, k, v = draw_all()
    mask = torch.full((2, 1, 3, 20), torch.finfo(dtype).min, dtype=dtype, device=DEVICE)
    mask[:, :, 1, 7] = 0.0
    found = attend_few(q, k, v, 0.5, mask=mask)
    expected = attend_with_weights(q.double(), k.double(), v.double(), scale=0.5, mask=mask.double()).output
    torch.testing.assert_close(found[:, :, 1], v[:, :, 7])
    torch.testing.assert_close(found[:, :, 1].double(), expected[:, :, 1])
    mean = v.double().mean(2)  # in float32, as in the reference, nothing is left of logits beside the lowest number
    for row in (0, 2):
        if dtype != torch.float16:
            torch.testing.assert_close(found[:, :, row].double(), mean, atol=1e-2, rtol=1e-2)
        else:
            assert (found[:, :, row] != 0).any()
    ready = Visibility.of(mask)
    assert torch.equal(attend_few(q, k, v, 0.5, mask=ready.mask, nothing=ready.nothing), found)


def test_a_scale_by_sentence_is_not_one_by_head(taken: list[int]) -> None:
    q, k, v = draw_all()
    for shape, by_head in (((2,), True), ((2, 1, 1), True), ((1, 2, 1, 1), True), ((2, 1, 1, 1), False)):
        scale = torch.tensor([0.2, 2.0], device=DEVICE).view(shape)
        assert (why_not(q, k, v, scale, None) is None) == by_head
        found = attend(q, k, v, scale=scale)
        expected = attend_with_weights(q, k, v, scale=scale).output
        torch.testing.assert_close(found, expected, atol=3e-2, rtol=3e-2)
    assert taken == [1] * 3


def test_many_narrow_queries_are_more_than_a_program_can_hold() -> None:
    q, k, v = draw(1, 16, 16, 16), draw(1, 1, 5, 16), draw(1, 1, 5, 16)
    assert q.numel() <= MOST_ENTRIES and "can hold" in str(why_not(q, k, v, 1.0, None))
    assert why_not(q[:, :8], k, v, 1.0, None) is None
