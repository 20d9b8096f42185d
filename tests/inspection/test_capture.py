"""Attention of our models, of torch's and of anybody's: everything is seen, and nothing changes."""

import itertools
import warnings
from typing import Any

import pytest
import torch
from direct import direct
from small_models import OwnAttention, assert_same, batch, step, translator
from test_measures import agree
from torch import Tensor, nn
from torch.nn import functional as F

from qknorm.attention import KeyValueCache, MultiheadAttention
from qknorm.attention.rotary import rotary_angles, rotate
from qknorm.inspection.monitor import AttentionMonitor, capture

# ------------------------------------------------------------------ our models


@pytest.mark.parametrize("changes", [{}, {"kv_heads": 2, "positions": "rotary"}, {"attention": {"qk_norm": "rms"}}])
def test_training_of_ours_is_the_same_to_the_bit(changes: dict[str, Any]) -> None:
    model = translator(**changes).train()
    inputs = batch()
    before = step(model, *inputs)
    with AttentionMonitor(model, every=1) as monitor:
        assert_same(before, step(model, *inputs))
    assert list(monitor.latest) == [
        "encoder.0.self", "encoder.1.self", "decoder.0.self", "decoder.0.cross", "decoder.1.self", "decoder.1.cross",
    ]  # fmt: skip
    assert not monitor.unseen
    assert_same(before, step(model, *inputs))


def test_ours_against_projections_of_its_own() -> None:
    module = MultiheadAttention(
        32, 4, num_kv_heads=2, batch_first=True, scale_per_head=True, rotary="after_norm"
    ).double()
    with torch.no_grad():
        module.norm.scale.copy_(torch.tensor([2.0, 5.0, 9.0, 14.0]))
    x, hidden = torch.randn(2, 6, 32).double(), torch.arange(6) >= torch.tensor([[6], [4]])
    with capture(module) as calls:
        module(x, x, x, key_padding_mask=hidden, need_weights=False)
    projected = F.linear(x, module.in_proj_weight, module.in_proj_bias).detach()
    q, k = projected[..., :48].split([32, 16], dim=-1)
    q, k = (y.view(2, 6, -1, 8).transpose(1, 2) for y in (q, k))
    angles = rotary_angles(torch.arange(6), 8)
    turned = [rotate(F.normalize(y, dim=-1), angles) for y in (q, k)]
    given = {"scale": module.norm.scale.detach(), "mask": ~hidden[:, None, None, :], "queries": ~hidden}
    agree(calls[0].measure(), direct(*turned, **given, raw_q=q, raw_k=k), 1e-9)
    assert calls[0].name == "MultiheadAttention"
    assert float(calls[0].measure().largest_logit[3]) <= 14.0 + 1e-9


def test_weights_and_caches_of_ours() -> None:
    module = MultiheadAttention(32, 4, batch_first=True).eval()
    x = torch.randn(2, 6, 32)
    with torch.no_grad(), capture(module) as calls:
        _, weights = module(x, x, x, is_causal=True, average_attn_weights=False)
        cache = KeyValueCache()
        for at in range(6):
            here = x[:, at : at + 1]
            module(here, here, here, is_causal=True, need_weights=False, cache=cache)
    torch.testing.assert_close(calls[0].weights(), weights)
    assert [call.k.shape[2] for call in calls] == [6, 1, 2, 3, 4, 5, 6]
    torch.testing.assert_close(calls[-1].weights(), weights[:, :, 5:])
    torch.testing.assert_close(calls[-1].measure().diagonal_share, weights[:, :, 5, 5].mean(dim=0))
    torch.testing.assert_close(calls[1].k, calls[-1].k[:, :, :1])  # a copy: the cache went on


def test_an_unknown_scale_of_zero_does_no_harm() -> None:
    module = MultiheadAttention(32, 4, batch_first=True, scale_init=0.0)
    x = torch.randn(2, 6, 32)
    with capture(module) as calls:
        module(x, x, x)
    assert calls[0].measure().numbers["relative_entropy"] == pytest.approx([1.0] * 4)


# ------------------------------------------------------------------ torch's models


@pytest.mark.parametrize(("training", "norm_first", "padded"), list(itertools.product([True, False], repeat=3)))
def test_encoders_of_torch_are_the_same_to_the_bit_on_their_fast_path_too(
    training: bool, norm_first: bool, padded: bool
) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, norm_first=norm_first)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of nested tensors
        model = nn.TransformerEncoder(layer, 2).train(training)
        x, hidden = torch.randn(3, 6, 32), torch.arange(6) >= torch.tensor([[6], [4], [2]])
        given = {"src_key_padding_mask": hidden if padded else None}

        def run() -> Tensor:
            torch.manual_seed(1)
            return model(x, **given)

        with torch.set_grad_enabled(training):
            before = run()
            with capture(model) as calls:
                after = run()
    assert torch.equal(before, after)
    assert [call.name for call in calls] == ["layers.0.self_attn", "layers.1.self_attn"] and not calls.unseen
    first = model.layers[0]
    inner = first.norm1(x) if norm_first else x
    q, k = (
        part.view(3, 6, 4, 8).transpose(1, 2)
        for part in F.linear(inner, first.self_attn.in_proj_weight, first.self_attn.in_proj_bias).chunk(3, dim=-1)[:2]
    )
    more = {"mask": ~hidden[:, None, None, :], "queries": ~hidden} if padded else {}
    agree(calls[0].measure(), direct(q.detach(), k.detach(), scale=8**-0.5, **more))


def test_the_fast_path_is_taken_under_a_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    fast = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *args: taken.append(1) or fast(*args))
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True).eval()
    with torch.no_grad(), AttentionMonitor(layer) as monitor:
        monitor.probe(lambda: layer(torch.randn(2, 5, 32)))
        assert list(monitor.latest) == ["self_attn"] and taken == [1]
        layer(torch.randn(2, 5, 32))
    assert taken == [1, 1]


def test_a_whole_transformer_of_torch() -> None:
    model = nn.Transformer(32, 4, 1, 1, 48, batch_first=True).eval()
    source, target, mask = (
        torch.randn(2, 6, 32),
        torch.randn(2, 5, 32),
        nn.Transformer.generate_square_subsequent_mask(5),
    )
    with torch.no_grad():
        before = model(source, target, tgt_mask=mask)
        with capture(model) as calls:
            assert torch.equal(model(source, target, tgt_mask=mask), before)
    assert [(call.name, call.k.shape[2]) for call in calls] == [
        ("encoder.layers.0.self_attn", 6), ("decoder.layers.0.self_attn", 5), ("decoder.layers.0.multihead_attn", 6),
    ]  # fmt: skip
    assert torch.equal(calls[1].weights()[0, 0] > 0, torch.ones(5, 5).tril().bool())


@pytest.mark.parametrize("shape", ["batch first", "time first", "unbatched"])
@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 20, "vdim": 20}])
def test_multihead_attention_of_torch(shape: str, extra: dict[str, Any]) -> None:
    module = nn.MultiheadAttention(32, 4, batch_first=shape == "batch first", **extra)
    query, key = torch.randn(2, 5, 32), torch.randn(2, 7, extra.get("kdim", 32))
    hidden, mask = torch.zeros(2, 7), torch.rand(2 * 4, 5, 7)
    hidden[1, 4:] = -torch.inf
    if shape == "time first":
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    if shape == "unbatched":
        query, key, hidden, mask = query[0], key[0], hidden[0], mask[:4]
    with capture(module) as calls:
        _, weights = module(query, key, key, key_padding_mask=hidden, attn_mask=mask, average_attn_weights=False)
    torch.testing.assert_close(calls[0].weights(), weights if shape != "unbatched" else weights[None])


# ------------------------------------------------------------------ models of anybody


def test_whatever_calls_torchs_function_is_seen_and_what_does_not_is_named() -> None:
    model = nn.Sequential(OwnAttention(is_causal=True), OwnAttention(by_hand=True), OwnAttention(scale=3.0))
    x = torch.randn(2, 5, 8)
    before = model(x)
    with capture(model) as calls:
        assert torch.equal(model(x), before)
    assert [(call.name, call.scale) for call in calls] == [("0", 8**-0.5), ("2", 3.0)]
    assert torch.equal(calls[0].weights()[0, 0] > 0, torch.ones(5, 5).tril().bool())
    assert list(calls.unseen) == ["1"] and "scaled_dot_product_attention" in calls.unseen["1"]


class Product(nn.Module):
    """Torch's function as a module without parts."""

    def forward(self, q: Tensor, k: Tensor, **settings: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, **settings)


def test_a_derived_attention_with_a_forward_of_its_own_is_named() -> None:
    class Derived(nn.MultiheadAttention):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x, x, x)[0]

    with capture(nn.Sequential(Derived(32, 4, batch_first=True))) as calls:
        nn.Sequential(Derived(32, 4))(torch.randn(2, 5, 32))
    assert not calls and not calls.unseen  # another model
    model = nn.Sequential(Derived(32, 4, batch_first=True))
    with capture(model) as calls:
        model(torch.randn(2, 5, 32))
    assert not calls and list(calls.unseen) == ["0"]


def test_masks_and_shapes_of_torchs_function() -> None:
    model = Product()
    q, k, mask = torch.randn(2, 3, 4, 5, 8), torch.randn(2, 3, 4, 9, 8), torch.rand(5, 9) < 0.6
    mask[:, 0] = True
    bias = torch.randn(3, 1, 5, 9)
    with capture(model) as calls:
        model(q[0, 0], k[0, 0], attn_mask=mask)
        model(q, k, attn_mask=bias)
        model(q[0], k[0], is_causal=True)
        model(q[0], k[0, :, :2], enable_gqa=True)
    plain = q @ k.mT * 8**-0.5
    expected = [
        plain[0, 0].masked_fill(~mask, -torch.inf).softmax(dim=-1).unsqueeze(1),
        (plain + bias).softmax(dim=-1).flatten(0, 1),
        plain[0].masked_fill(~torch.ones(5, 9).tril().bool(), -torch.inf).softmax(dim=-1),
        (q[0] @ k[0, :, [0, 0, 1, 1]].mT * 8**-0.5).softmax(dim=-1),
    ]
    assert [call.name for call in calls] == ["Product"] * 4 and not calls.unseen
    for call, weights in zip(calls, expected, strict=True):
        torch.testing.assert_close(call.weights(), weights)
