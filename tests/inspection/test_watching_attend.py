"""Our own attention under watch: it computes as it always does, and everybody who calls it is seen."""

import sys
from typing import Any

import pytest
import torch
from direct import direct
from small_models import assert_same, step
from test_measures import agree
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as product
from torch.utils.checkpoint import checkpoint

from qknorm import KeyValueCache, MultiheadAttention, QKNorm, adopt, attend, attend_with_weights, lp_normalize
from qknorm.attention.onlookers import ONLOOKERS
from qknorm.inspection.monitor import AttentionMonitor, capture

ATTEND = sys.modules["qknorm.attention.attend"]  # the name `attend` in the package is the function


class Own(nn.Module):
    """Somebody's module, which projects by itself and calls a function of ours."""

    def __init__(self, function: Any = attend, **settings: Any) -> None:
        super().__init__()
        self.projection, self.function, self.settings = nn.Linear(16, 48), function, settings

    def heads(self, x: Tensor) -> list[Tensor]:
        return [part.view(*part.shape[:2], 2, 8).transpose(1, 2) for part in self.projection(x).chunk(3, dim=-1)]

    def forward(self, x: Tensor, **more: Any) -> Tensor:
        found = self.function(*self.heads(x), **self.settings, **more)
        return (found if isinstance(found, Tensor) else found.output).transpose(1, 2).flatten(2)


class Itself(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.attention = MultiheadAttention(16, 2, batch_first=True, **settings)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def adopted(dropout: float = 0.0, layers: int = 2) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    adopt(model, length=8)
    return model


# ------------------------------------------------------------------ nothing changes


@pytest.mark.parametrize("length", [5, 40, 90])
@pytest.mark.parametrize("make", [Itself, adopted, lambda: Own(scale=3.0, p=2.0), lambda: Own(scale=0.3)])
def test_training_is_the_same_to_the_bit_over_rows_of_any_length(make: Any, length: int) -> None:
    model, x = make().train(), torch.randn(3, length, 16)
    before = step(model, x)
    with AttentionMonitor(model, every=1) as monitor:
        assert_same(before, step(model, x))
    assert monitor.latest and not monitor.unseen and not ONLOOKERS
    assert_same(before, step(model, x))


@pytest.mark.parametrize("queries", [1, 3])
def test_steps_with_a_cache_take_the_way_they_take_unwatched(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = MultiheadAttention(16, 2, batch_first=True).eval(), torch.randn(2, 6, 16)
    taken: list[Tensor] = []
    kept = ATTEND.attend_normalised_keys
    multihead = sys.modules["qknorm.attention.multihead"]
    monkeypatch.setattr(multihead, "attend_normalised_keys", lambda q, *k, **how: taken.append(q) or kept(q, *k, **how))

    def run() -> list[Tensor]:
        cache = KeyValueCache()
        parts = x.split(queries, dim=1)
        return [module(y, y, y, is_causal=True, need_weights=False, cache=cache)[0] for y in parts]

    with torch.no_grad():
        before = run()
        with capture(module) as calls:
            assert all(map(torch.equal, before, run()))
        whole = module._project_raw(x, x, x)
    assert len(taken) == 2 * len(calls) == 2 * 6 // queries
    last = calls[-1]
    torch.testing.assert_close(last.k, F.normalize(whole[1], dim=-1))
    torch.testing.assert_close(last.raw_q, whole[0][:, :, -queries:])
    torch.testing.assert_close(last.q, F.normalize(whole[0][:, :, -queries:], dim=-1))
    assert torch.equal(torch.as_tensor(last.scale), module.norm.scale) and last.bounded


def test_layers_that_are_computed_again_in_backward() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = adopted().layers

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    model, x = Again().train(), torch.randn(2, 5, 16)
    before = step(model, x)
    with AttentionMonitor(model, every=1) as monitor:
        assert_same(before, step(model, x))
    assert list(monitor.latest) == ["layers.0.self_attn", "layers.1.self_attn"]


def test_what_is_compiled_is_not_compiled_again_for_an_onlooker() -> None:
    graphs: list[int] = []
    compiled = torch.compile(
        lambda q: attend(q, q, q, scale=2.0, p=2.0, backend="reference"),
        backend=lambda graph, _: graphs.append(1) or graph,
    )
    q, other = torch.randn(1, 2, 4, 8), Itself()
    compiled(q)
    with capture(other) as calls:
        compiled(q)
        other(torch.randn(1, 3, 16))
    assert graphs == [1] and len(calls) == 1


def test_an_error_within_leaves_no_onlooker_and_no_name_behind() -> None:
    model = Own(scale=1.0)
    with pytest.raises(RuntimeError), capture(model):
        model(torch.randn(2, 5, 17))
    assert not ONLOOKERS and product is F.scaled_dot_product_attention


# ------------------------------------------------------------------ everybody is seen


@pytest.mark.parametrize("settings", [{}, {"dropout": 0.1}, {"backend": "sdpa"}, {"backend": "reference"}])
def test_whoever_calls_attend_is_seen(settings: dict[str, Any]) -> None:
    model, x = Own(scale=9.0, p=2.0, **settings).train(), torch.randn(3, 5, 16)
    before = step(model, x)
    with AttentionMonitor(model, every=1) as monitor:
        assert_same(before, step(model, x))
    q, k, _ = (y.detach() for y in model.heads(x))
    unit = [F.normalize(y, dim=-1) for y in (q, k)]
    assert list(monitor.latest) == ["Own"] and not monitor.unseen
    agree(monitor.latest["Own"], direct(*unit, scale=9.0, raw_q=q, raw_k=k))


def test_whoever_wants_the_weights_is_seen_too() -> None:
    model, x = (
        Own(attend_with_weights, scale=torch.tensor([1.0, 7.0]), p=torch.tensor([2.0, 3.0])),
        torch.randn(3, 5, 16),
    )
    with capture(model) as calls:
        model(x)
    q, k, v = model.heads(x)
    expected = attend_with_weights(q, k, v, **model.settings)
    (call,) = calls
    torch.testing.assert_close(call.weights(), expected.weights)
    torch.testing.assert_close(call.q, lp_normalize(q, torch.tensor([2.0, 3.0]).view(2, 1, 1)))


def test_what_kernels_compute_past_pytorchs_function_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def kernels(q: Tensor, k: Tensor, v: Tensor, scale: Any, p: Any, *rest: Any) -> Tensor:
        taken.append(1)
        return torch.softmax(scale * lp_normalize(q, p) @ lp_normalize(k, p).mT, dim=-1) @ v

    monkeypatch.setattr(ATTEND, "_slow_in_kernels", lambda *_: False)
    monkeypatch.setattr(ATTEND, "_worth_it", lambda *_: True)
    monkeypatch.setattr(ATTEND, "fused_attention_refusal", lambda *_, **__: None)
    monkeypatch.setattr(ATTEND, "_attend_fused", kernels)
    model, x = Own(scale=4.0, p=2.0), torch.randn(3, 5, 16)
    before = step(model, x)
    with AttentionMonitor(model, every=1) as monitor:
        assert_same(before, step(model, x))
    assert taken == [1, 1] and list(monitor.latest) == ["Own"]
    assert float(monitor.latest["Own"].largest_logit.max()) <= 4.0


class Imported(nn.Module):
    """Knows torch's function by a name of its own, as `from … import … as …` gives it."""

    def forward(self, x: Tensor) -> Tensor:
        return product(x, x, x, scale=2.0)


def test_torchs_function_is_seen_under_a_name_it_was_imported_by() -> None:
    model, x = nn.Sequential(Imported()), torch.randn(2, 5, 8)
    before = model(x)
    with capture(model) as calls, capture(model) as more:
        assert torch.equal(model(x), before)
    assert [(call.name, call.scale) for call in calls] == [(call.name, call.scale) for call in more] == [("0", 2.0)]
    assert product is F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


def test_a_reference_that_nobody_can_follow_is_not_said_to_be_absent() -> None:
    class KeptAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.function = product

        def forward(self, x: Tensor) -> Tensor:
            return self.function(x, x, x)

    model = nn.Sequential(KeptAttention())
    with capture(model) as calls:
        model(torch.randn(2, 5, 8))
    assert not calls and calls.unseen == {
        "0": "KeptAttention is no attention that is known, and no call of scaled_dot_product_attention was seen in it; "
        "one by its full name, torch.nn.functional.scaled_dot_product_attention(…), would be"
    }


@pytest.mark.parametrize("learned", [True, False])
def test_who_attends_for_a_module_of_ours_has_its_name(learned: bool) -> None:
    """As the fused layers do for cross-attention."""

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (MultiheadAttention(16, 2, scale_learned=learned) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.second._project_raw(x, x, x)
            out = attend(q, k, v, scale=self.second.norm.scale, p=2.0)
            return out + attend(q, k, v, scale=3.0, p=2.0)

    model, x = Beside(), torch.randn(3, 5, 16)
    with capture(model) as calls:
        model(x)
    assert [call.name for call in calls] == ["second", "Beside"] and not calls.unseen
    q = model.second._project_raw(x, x, x)[0]
    torch.testing.assert_close(calls[0].q, F.normalize(q, dim=-1))


# ------------------------------------------------------------------ what counts


@pytest.mark.parametrize("how", ["values apart", "mask by head", "unbatched"])
def test_queries_that_are_padding_do_not_count_where_keys_are_made_of_them(how: str) -> None:
    module = MultiheadAttention(16, 2, batch_first=True, scale_init=0.0)  # equal weights: as many keys as are seen
    x, hidden = torch.randn(2, 6, 16), torch.arange(6) >= torch.tensor([[6], [4]])
    place = x + torch.randn(6, 16)
    with capture(module) as calls:
        if how == "values apart":  # as DETR has it
            module(place, place, x, key_padding_mask=hidden)
        elif how == "mask by head":
            module(x, x, x, key_padding_mask=hidden, attn_mask=torch.zeros(4, 6, 6))
        else:
            one = x[1]
            module(one, one, one, key_padding_mask=hidden[1])
    (call,) = calls
    real = ~hidden if how != "unbatched" else ~hidden[1:]
    assert call.queries is not None and torch.equal(call.queries, real)
    expected = (6 * 6 + 4 * 4) / 10 if how != "unbatched" else 4
    assert call.measure().effective_keys.tolist() == pytest.approx([expected] * 2)


def test_queries_of_another_text_all_count() -> None:
    module = MultiheadAttention(16, 2, batch_first=True)
    x, memory, hidden = torch.randn(2, 6, 16), torch.randn(2, 6, 16), torch.arange(6) >= torch.tensor([[6], [4]])
    with capture(module) as calls:
        module(x, memory, memory, key_padding_mask=hidden)
        module(x, x, x, key_padding_mask=hidden, need_weights=False, cache=KeyValueCache(fixed=True))
    assert [call.queries for call in calls] == [None, None] and [call.offset for call in calls] == [None, None]


def test_a_norm_of_his_own_is_taken_apart() -> None:
    class Normed(Own):
        def __init__(self) -> None:
            super().__init__()
            self.qk_norm = QKNorm(8, 2, scale_per_head=True, scale_init=5.0)

        def forward(self, x: Tensor, **more: Any) -> Tensor:
            q, k, v = self.heads(x)
            return attend(*self.qk_norm(q, k), v, scale=self.qk_norm.scale)

    model, x = Normed(), torch.randn(2, 5, 16)
    with capture(model) as calls:
        model(x)
    assert calls[0].bounded and torch.equal(torch.as_tensor(calls[0].scale), model.qk_norm.scale)
    torch.testing.assert_close(calls[0].q, F.normalize(model.heads(x)[0], dim=-1))


# ------------------------------------------------------------------ what helps


def test_a_model_that_is_bounded_in_part_is_told_what_helps_each_attention() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bounded = MultiheadAttention(16, 2, batch_first=True, scale_init=900.0)
            self.free = nn.MultiheadAttention(16, 2, batch_first=True)
            self.mine = Own(scale=900.0, p=2.0)

        def forward(self, x: Tensor) -> Tensor:
            x = self.bounded(x, x, x)[0] + x
            return self.mine(self.free(x * 50, x * 50, x)[0] + x)

    model, x = Two(), torch.randn(3, 11, 16)
    with AttentionMonitor(model, every=1) as monitor:
        model(x)
    cures = {text.partition(",")[0]: text.rpartition("; ")[2] for text in monitor.warnings()}
    told = "lower the learning rate, or bound the logits with qknorm.adopt(model, length=11)"
    assert cures == {"bounded": "lower the learning rate", "free": told, "mine": "lower the learning rate"}
    exec(told.rpartition("with ")[2], {"model": model, "qknorm": sys.modules["qknorm"]})
    assert isinstance(model.free, MultiheadAttention)


def test_a_batch_whose_keys_are_all_hidden_says_nothing() -> None:
    module = MultiheadAttention(16, 2, batch_first=True).train()
    x, hidden = torch.randn(2, 5, 16), torch.zeros(2, 5, dtype=torch.bool)

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = module

        def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
            return self.attention(x, x, x, key_padding_mask=hidden)[0]

    model = Masked()
    with AttentionMonitor(model, every=1) as monitor:
        for blind in (False, True):
            model(x, hidden | blind)
        assert monitor.warnings() == []
        last = monitor.latest["attention"]
        assert last.largest_logit.isnan().all() and last.effective_keys.tolist() == [0.0, 0.0]
        with torch.no_grad():
            module.in_proj_weight.fill_(torch.nan)
        model(x, hidden)
    (warning,) = monitor.warnings()
    assert "heads 1 and 2: logits are no finite numbers any more, since step 2" in warning
