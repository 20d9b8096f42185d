"""The monitor on our own models and torch's: nothing changes, everything is seen, and only when it is due."""

import copy
import io
import itertools
import warnings
from typing import Any

import pytest
import torch
from direct import direct
from test_measures import agree
from torch import Tensor, nn
from torch.nn import functional as F

from qknorm.attention import KeyValueCache, MultiheadAttention
from qknorm.attention.rotary import rotary_angles, rotate
from qknorm.config import Model
from qknorm.inspection import monitor as monitor_module
from qknorm.inspection.monitor import AttentionMonitor, capture
from qknorm.inspection.watching.capture import compiled_parts
from qknorm.models.translator import Translator


def translator(**changes: Any) -> Translator:
    settings = Model(width=32, feed_forward=48, heads=4, encoder_layers=2, decoder_layers=2, **changes)
    return Translator(50, settings, scale_init=6.0)


def batch() -> tuple[Tensor, Tensor]:
    source, target = torch.randint(4, 50, (3, 7)), torch.randint(4, 50, (3, 5))
    source[1, 4:], target[2, 3:] = 0, 0
    return source, target


def step(model: nn.Module, *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(1)
    model.zero_grad()
    output = model(*inputs)
    output.masked_fill(output.isinf(), 0.0).square().mean().backward()
    return output.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_same(one: tuple[Tensor, list[Tensor]], other: tuple[Tensor, list[Tensor]]) -> None:
    assert torch.equal(one[0], other[0])
    assert one[1] and all(map(torch.equal, one[1], other[1]))


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


class OwnAttention(nn.Module):
    """Somebody's attention, by torch's function or by hand."""

    def __init__(self, by_hand: bool = False, **settings: Any) -> None:
        super().__init__()
        self.projection, self.by_hand, self.settings = nn.Linear(8, 24), by_hand, settings

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projection(x).chunk(3, dim=-1)
        if self.by_hand:
            return (q @ k.mT).softmax(dim=-1) @ v
        return F.scaled_dot_product_attention(q, k, v, **self.settings)


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


def test_what_cannot_be_read_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(OwnAttention()), torch.randn(2, 5, 8)
    before = step(model, x)

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(monitor_module.Call, "measure", fail)
    with AttentionMonitor(model, every=1) as monitor:
        assert_same(before, step(model, x))
    assert not monitor.latest and monitor.unseen == {"0": "it could not be read: out of memory"}


def test_an_error_of_the_model_passes_and_leaves_nothing_behind() -> None:
    model = nn.Sequential(OwnAttention())
    with AttentionMonitor(model, every=1) as monitor:
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 5, 9))
        model(torch.randn(2, 5, 8))
    assert not any("forward" in vars(module) for module in model.modules())
    assert [sample.step for sample in monitor.history] == []  # the step was tried once
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


def test_a_shared_module_is_measured_each_time() -> None:
    shared = OwnAttention()
    model = nn.Sequential(shared, nn.Linear(8, 8), shared)
    monitor = AttentionMonitor(model)
    monitor.probe(lambda: model(torch.randn(2, 5, 8)))
    assert list(monitor.latest) == ["0", "0#2"]


# ------------------------------------------------------------------ when


def samples(monitor: AttentionMonitor) -> list[int]:
    return [sample.step for sample in monitor.history]


def test_forward_passes_in_training_are_counted() -> None:
    model = nn.Sequential(OwnAttention()).train()
    x = torch.randn(2, 5, 8)
    with AttentionMonitor(model, every=3) as monitor:
        for _ in range(7):
            model(x)
            model.eval()
            model(x)
            model.train()
            with torch.no_grad():
                model(x)
    assert samples(monitor) == [0, 3, 6]
    model(x)
    assert len(monitor.history) == 3


def test_steps_may_be_counted_by_hand() -> None:
    model = nn.Sequential(OwnAttention()).train()
    with AttentionMonitor(model, every=2) as monitor:
        for _ in range(5):
            for _ in range(3):  # gradients gathered over three passes
                model(torch.randn(2, 5, 8))
            monitor.step()
    assert samples(monitor) == [0, 2, 4]


def test_between_samples_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = []
    real = monitor_module.watch
    monkeypatch.setattr(monitor_module, "watch", lambda *args, **more: watched.append(1) or real(*args, **more))
    model = nn.Sequential(OwnAttention()).train()
    with AttentionMonitor(model, every=100):
        for _ in range(50):
            model(torch.randn(2, 5, 8))
            assert "forward" not in vars(model[0])
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert len(watched) == 1


def test_only_the_first_sentences_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(OwnAttention()).train(), torch.randn(6, 5, 8)
    x[2:] *= 100
    with AttentionMonitor(model, every=1, batch=2) as monitor:
        model(x)
    with capture(model) as calls:
        model(x[:2])
    torch.testing.assert_close(monitor.latest["0"].stack(), calls[0].measure().stack())
    monkeypatch.setattr(monitor_module, "MOST_LOGITS", 30)  # long sentences: one alone
    with AttentionMonitor(model, every=1) as monitor:
        model(x)
    with capture(model) as calls:
        model(x[:1])
    torch.testing.assert_close(monitor.latest["0"].stack(), calls[0].measure().stack())


def test_copies_of_a_monitored_model_are_free_of_it() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).train()
    with AttentionMonitor(model, every=1) as monitor:
        copied = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        for other in (copied, loaded):
            assert other.forward.__self__ is other
            other(torch.randn(2, 5, 8))
        assert not monitor.history
        model(torch.randn(2, 5, 8))
    assert samples(monitor) == [0]


def test_two_monitors_of_one_model_may_end_in_any_order() -> None:
    model, x = nn.Sequential(OwnAttention()).train(), torch.randn(2, 5, 8)
    before = step(model, x)
    one, other = AttentionMonitor(model, every=1), AttentionMonitor(model, every=1)
    with one, other, capture(model) as calls:
        assert_same(before, step(model, x))
    assert samples(one) == samples(other) == [0] and len(calls) == 1
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    model(x)
    other.__exit__(None, None, None)
    model(x)
    assert samples(one) == [0] and samples(other) == [0, 1]


@pytest.mark.parametrize("settings", [{"every": 0}, {"batch": 0}, {"threshold": 1.0}])
def test_bad_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|between"):
        AttentionMonitor(nn.Identity(), **settings)


# ------------------------------------------------------------------ probing


def test_a_probe_leaves_modes_and_random_numbers_alone() -> None:
    model = translator(dropout={"residual": 0.5}).train()
    model.encoder[0].eval()
    inputs, monitor = batch(), AttentionMonitor(model)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    real = {"encoder": inputs[0] != 0, "decoder": inputs[1] != 0}
    found = monitor.probe(lambda: model(*inputs), step=70, real=real)
    assert torch.equal(torch.rand(4), expected)
    assert model.training and not model.encoder[0].training and model.encoder[1].training
    assert samples(monitor) == [70] * 6 and found == monitor.latest
    with capture(model.eval()) as calls, torch.no_grad():
        model(*inputs)
    cross = next(call for call in calls if call.name == "decoder.1.cross")
    given = {"scale": cross.scale, "mask": cross.mask, "queries": inputs[1] != 0}
    agree(found["decoder.1.cross"], direct(cross.q, cross.k, **given, raw_q=cross.raw_q, raw_k=cross.raw_k))


def test_compiled_models_are_probed() -> None:
    model = nn.Sequential(OwnAttention()).train()
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(2, 5, 8)
    with AttentionMonitor(compiled, every=1) as monitor:
        compiled(x)
        assert not monitor.latest and "compiled" in next(iter(monitor.unseen.values()))
        monitor.probe(lambda: compiled(x))
    assert list(monitor.latest) == ["0"] and not monitor.unseen
    ours = translator().train()
    assert not compiled_parts(ours)
    ours.compile_layers()
    assert compiled_parts(ours) == ["Translator"]
    monitor = AttentionMonitor(ours)
    monitor.probe(lambda: ours(*batch()))
    assert len(monitor.latest) == 6


# ------------------------------------------------------------------ in words


def test_the_table() -> None:
    model = translator()
    monitor = AttentionMonitor(model)
    monitor.probe(lambda: model(*batch()))
    lines = monitor.table().splitlines()
    assert lines[0].split()[:3] == ["attention", "largest", "logit"] and len(lines) == 7
    assert len({len(line) for line in lines}) == 1
    assert lines[4].startswith("decoder.0.cross")
    heads = monitor.table(heads=True).splitlines()
    assert len(heads) == 25 and heads[1].startswith("encoder.0.self head 1")
    assert not monitor.warnings()
