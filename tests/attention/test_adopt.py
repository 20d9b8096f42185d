"""adopt on models of torch.nn: the formula by hand, masks, fast paths, starts, calibration, refusals, round trips."""

import copy
import io
import math
from pathlib import Path

import pytest
import torch
from adopt_by_hand import by_hand, causal, heads
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from qknorm.attention import MultiheadAttention, QKNorm, initial_scale
from qknorm.attention.adopt import adopt
from qknorm.attention.adopting import calibration

WIDTH, HEADS, HEAD = 16, 4, 4


def parts(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """q, k and v of a torch.nn.MultiheadAttention by head, from its weights; inputs batch first."""
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    return [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]


@pytest.mark.parametrize("p", [2.0, 3.0, math.inf])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_one_module_is_the_formula(p: float, bias: bool, batch_first: bool) -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=batch_first, kdim=12, vdim=20).double()
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    query, key, value = (torch.randn(2, n, d, dtype=torch.float64) for n, d in ((5, WIDTH), (7, 12), (7, 20)))
    q, k, v = (heads(x, HEAD) for x in parts(module, query, key, value))
    expected = module.out_proj(by_hand(q, k, v, 3.0, p=p))

    identity = id(module)
    adopt(module, scale_init=3.0, p=p)
    given = (query, key, value) if batch_first else tuple(x.transpose(0, 1) for x in (query, key, value))
    output, averaged = module(*given)
    torch.testing.assert_close(output if batch_first else output.transpose(0, 1), expected, rtol=1e-12, atol=1e-12)
    assert averaged is not None and averaged.shape == (2, 5, 7)
    assert id(module) == identity and isinstance(module, MultiheadAttention)
    for name, value in weights.items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=0, atol=0)
    assert {*module.state_dict()} - {*weights} == {"norm.scale"} | ({"norm.p_fixed"} if p != 2 else set())


def test_extra_keys_are_kept() -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True, add_zero_attn=True, batch_first=True).double()
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    q, k, v = parts(module, x, x, x)
    k, v = (torch.cat([y, b.expand(2, 1, -1)], dim=1) for y, b in ((k, module.bias_k), (v, module.bias_v)))
    k, v = (torch.cat([heads(y, HEAD), torch.zeros(2, HEADS, 1, HEAD, dtype=torch.float64)], dim=2) for y in (k, v))
    q = heads(q, HEAD)
    unit_q, unit_k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True).clamp(min=1e-300)
    expected = module.out_proj((5.0 * unit_q @ unit_k.mT).softmax(-1).matmul(v).transpose(1, 2).flatten(2))
    adopt(module, scale_init=5.0)
    torch.testing.assert_close(module(x, x, x, need_weights=False)[0], expected, rtol=1e-12, atol=1e-12)


def encoder(layers: int = 2, **changes: object) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True, **changes)
    model = nn.TransformerEncoder(layer, layers)
    for each in model.parameters():
        if each.dim() > 1:
            nn.init.xavier_uniform_(each, gain=2.0)
    return model


def encoder_layer_by_hand(layer: nn.Module, x: Tensor, g: float, added: Tensor | None) -> Tensor:
    q, k, v = (heads(y, HEAD) for y in parts(layer.self_attn, x, x, x))
    x = layer.norm1(x + layer.self_attn.out_proj(by_hand(q, k, v, g, added)))
    return layer.norm2(x + layer.linear2(layer.linear1(x).relu()))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_an_encoder_on_every_path(training: bool, grad: bool) -> None:
    """In eval mode without gradients torch's layers would go past our forward; they may not."""
    model = encoder().double()
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    adopt(model, length=6)
    g = initial_scale(6)
    expected = x
    for layer in model.layers:
        expected = encoder_layer_by_hand(layer, expected, g, causal(6))
    model.train(training)
    with torch.set_grad_enabled(grad):
        output = model(x, mask=nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64), is_causal=True)
    torch.testing.assert_close(output, expected, rtol=1e-11, atol=1e-11)


def test_padding_in_eval_mode() -> None:
    """Torch's encoder packs padded input into a nested tensor then; the rows that count are the same."""
    model = encoder().double().eval()
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    adopt(model, length=6)
    added = torch.zeros(2, 1, 1, 6, dtype=torch.float64).masked_fill(padding[:, None, None], -torch.inf)
    expected = x
    for layer in model.layers:
        expected = encoder_layer_by_hand(layer, expected, initial_scale(6), added)
    with torch.no_grad():
        output = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(output[~padding], expected[~padding], rtol=1e-11, atol=1e-11)


def test_a_whole_transformer_lists_its_attentions() -> None:
    model = nn.Transformer(WIDTH, HEADS, 1, 2, 32, batch_first=True)
    adoption = adopt(model, length=20)
    assert [each.name for each in adoption.changed] == [
        "encoder.layers.0.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.multihead_attn",
        "decoder.layers.1.self_attn",
        "decoder.layers.1.multihead_attn",
    ]
    assert not adoption.left
    assert all(each.start == pytest.approx(math.log2(380)) and each.heads == HEADS for each in adoption.changed)
    assert "decoder.layers.1.multihead_attn  torch.nn.MultiheadAttention  4      8.57" in str(adoption)
    source, target = torch.randn(2, 5, WIDTH), torch.randn(2, 3, WIDTH)
    model(source, target).sum().backward()
    assert len([*adoption.parameters()]) == 5
    assert all(each.grad is not None and each.grad != 0 for each in adoption.parameters())


def test_only_some() -> None:
    model = nn.Transformer(WIDTH, HEADS, 1, 1, 32, batch_first=True)
    adoption = adopt(model, length=20, only="decoder.*")
    assert [each.name for each in adoption.left] == ["encoder.layers.0.self_attn"]
    assert adoption.left[0].reason == "not asked for by only="
    assert "encoder.layers.0.self_attn: not asked for" in str(adoption)
    second = adopt(model, length=9, only=["encoder.*"])
    assert [each.name for each in second.changed] == ["encoder.layers.0.self_attn"]
    with pytest.raises(ValueError, match=r"only='dcoder\.\*' fits no name.*encoder\.layers\.0\.self_attn"):
        adopt(nn.Transformer(WIDTH, HEADS, 1, 1, 32, batch_first=True), length=20, only="dcoder.*")


class Odd(nn.MultiheadAttention):
    pass


class HomeMadeAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.known, self.odd = nn.MultiheadAttention(WIDTH, HEADS), Odd(WIDTH, HEADS)
        self.own, self.plain = MultiheadAttention(WIDTH, HEADS), MultiheadAttention(WIDTH, HEADS, qk_norm="none")
        self.home_made = HomeMadeAttention()


def test_what_is_left_and_why() -> None:
    adoption = adopt(Block(), length=10)
    assert [each.name for each in adoption.changed] == ["known"]
    reasons = {each.name: each.reason for each in adoption.left}
    assert {*reasons} == {"odd", "own", "plain", "home_made"}
    assert "Odd derives from torch.nn.MultiheadAttention" in reasons["odd"]
    assert reasons["own"] == "has QKNorm already"
    assert "qk_norm='none'" in reasons["plain"]
    assert "HomeMadeAttention is not a kind of attention that adopt knows" in reasons["home_made"]
    assert str(adoption).startswith("QKNorm in 1 of 5 attention modules\n")


def test_refusals() -> None:
    model = encoder()
    with pytest.raises(ValueError, match="say where the scales start"):
        adopt(model)
    with pytest.raises(ValueError, match="one of length= and scale_init="):
        adopt(model, length=10, scale_init=3.0)
    with pytest.raises(ValueError, match="loss= is for the report of calibrate="):
        adopt(model, length=10, loss=lambda output: 0.0)
    with pytest.raises(ValueError, match="p must be at least 1"):
        adopt(model, length=10, p=0.5)
    with pytest.raises(ValueError, match="no attention to adopt"):
        adopt(nn.Linear(3, 3), length=10)
    with pytest.raises(ValueError, match="adopt before the model is wrapped: DataParallel"):
        adopt(nn.Sequential(nn.DataParallel(model)), length=10)
    for start in ({"scale_init": 0.0}, {"scale_init": math.nan}, {"length": math.inf}, {"length": -3}):
        with pytest.raises(ValueError, match=f"{next(iter(start))} must be a positive number"):
            adopt(model, **start)
    assert all(type(layer.self_attn) is nn.MultiheadAttention for layer in model.layers)
    adopt(model, length=10)
    with pytest.raises(ValueError, match=r"nothing to adopt: of 2 .* \(has QKNorm already\)"):
        adopt(model, length=10)


def spread(logits: Tensor, visible: Tensor) -> Tensor:
    """Standard deviation about the mean of each row, over visible keys, row by row as a loop."""
    squares = []
    for row, seen in zip(logits.flatten(0, -2), visible.expand(logits.shape).flatten(0, -2), strict=True):
        kept = row[seen]
        squares += [(kept - kept.mean()).square()]
    return torch.cat(squares).mean().sqrt()


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(("p", "at_once"), [(2.0, 1 << 22), (3.0, 3 * 8 * HEADS)])  # all queries at once, or three
def test_calibration_matches_the_spread(
    per_head: bool, p: float, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "LOGITS_AT_ONCE", at_once)
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).double()
    x = torch.randn(3, 8, WIDTH, dtype=torch.float64)
    hidden = torch.zeros(3, 8, dtype=torch.bool)
    hidden[2, 5:] = True
    mask = torch.ones(8, 8, dtype=torch.bool).triu(1)
    q, k, _ = (heads(y, HEAD) for y in parts(module, x, x, x))
    visible = (~mask & ~hidden[:, None, None] & ~hidden[:, None, :, None]).expand(3, HEADS, 8, 8)

    batch = {"query": x, "key": x, "value": x, "attn_mask": mask, "key_padding_mask": hidden}
    adoption = adopt(module, calibrate=batch, p=p, scale_per_head=per_head)
    unit_q, unit_k = (y / torch.linalg.vector_norm(y, ord=p, dim=-1, keepdim=True) for y in (q, k))
    dot, cosine = q @ k.mT / 2, unit_q @ unit_k.mT
    if per_head:
        expected = torch.stack(
            [spread(dot[:, h], visible[:, h]) / spread(cosine[:, h], visible[:, h]) for h in range(HEADS)]
        )
    else:
        expected = (spread(dot, visible) / spread(cosine, visible)).view(1)
    torch.testing.assert_close(module.norm.scale.detach(), expected, rtol=1e-6, atol=0)
    assert adoption.loss_before is adoption.loss_after is None


def test_calibration_leaves_no_trace_and_reports_the_loss() -> None:
    model = encoder(2)
    model.train()
    model.layers[1].eval()
    x, target = torch.randn(4, 6, WIDTH), torch.randn(4, 6, WIDTH)
    before_state, loss = torch.get_rng_state(), lambda output: F.mse_loss(output, target)
    with torch.no_grad():
        expected = loss(model(x)).item()
    adoption = adopt(model, calibrate=x, loss=loss)
    assert torch.equal(torch.get_rng_state(), before_state)
    assert model.training and model.layers[0].self_attn.training and not model.layers[1].self_attn.training
    assert torch.backends.mha.get_fastpath_enabled()
    assert adoption.loss_before == pytest.approx(expected, rel=1e-5)
    with torch.no_grad():
        assert adoption.loss_after == pytest.approx(loss(model(x)).item(), rel=1e-5)
    assert f"{adoption.loss_before:.4g} before, {adoption.loss_after:.4g} after" in str(adoption)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_states_come_back() -> None:
    x = torch.randn(2, 6, WIDTH)
    model = encoder(2)
    adopt(model, calibrate=x, scale_per_head=True, p=3.0, p_learned=True, only="layers.1.*")
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)

    again = encoder(2)
    adoption = adopt(again, state=state, p=3.0)
    assert [each.name for each in adoption.changed] == ["layers.1.self_attn"]
    assert adoption.left[0].reason == "has no QKNorm in the saved state"
    again.load_state_dict(state)
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)

    same = encoder(2)
    adopt(same, length=9, scale_per_head=True, p=3.0, p_learned=True, only="layers.1.*")
    same.load_state_dict(state)
    torch.testing.assert_close(same(x), model(x), rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"no scale for any attention of this TransformerEncoder.*norm\.scale"):
        adopt(encoder(2), state=encoder(2).state_dict())


@pytest.mark.parametrize("name", ["model.pt", "model.bin", "weights", "model.safetensors"])
def test_states_come_back_from_a_file(name: str, tmp_path: Path) -> None:
    x = torch.randn(2, 6, WIDTH)
    model = encoder(2)
    adopt(model, calibrate=x, scale_per_head=True, only="layers.1.*")
    file = tmp_path / name
    if name.endswith("safetensors"):
        save_file(model.state_dict(), file)
    else:
        torch.save(model.state_dict(), file)
    for state in (file, str(file)):
        again = encoder(2)
        assert [each.name for each in adopt(again, state=state).changed] == ["layers.1.self_attn"]
        again.load_state_dict(model.state_dict())
        torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)


class Unsafe:
    """Tells whether it was unpickled."""

    loaded = 0

    def __setstate__(self, state: object) -> None:
        Unsafe.loaded += 1


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        (
            "model.pt",
            {"model": {"x": torch.ones(2)}, "step": 3},
            r"give the one in it: state=torch\.load\(.*\)\['model'\]",
        ),
        ("model.pt", {"step": 3}, "holds a dict and no state dict: state= takes a .safetensors file, or one that"),
        ("model.pt", torch.ones(2), "holds a Tensor and no state dict"),
        ("model.pt", {"x": Unsafe()}, "is no pickle of tensors alone, and no other is loaded"),
        ("model.pt", {"x": torch.ones(2)}, "has no scale for any attention"),
        ("model.pt", b"", r"model\.pt cannot be read \(EOFError\)"),
        ("model.pt", b"PK\x03\x04 is cut", r"model\.pt cannot be read \(RuntimeError\)"),
        ("model.index.json", b'{"weight_map": {}}', "is no pickle of tensors alone"),
        ("model.safetensors", b"no header", r"model\.safetensors cannot be read \(.*\): state= takes"),
        ("model-00001-of-00002.safetensors", b"", "is one of several files of a model: give state= their folder"),
        ("other/model.pt", None, "there are no weights in .*, which does not exist: state= is a folder of"),
    ],
)
def test_files_that_are_no_states(name: str, content: object, told: str, tmp_path: Path) -> None:
    file = tmp_path / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        torch.save(content, file)
    model = encoder(1)
    with pytest.raises(ValueError, match=told) as refusal:
        adopt(model, state=file)
    assert "\n" not in str(refusal.value) and Unsafe.loaded == 0
    assert type(model.layers[0].self_attn) is nn.MultiheadAttention


def test_copies_dtypes_and_older_checkpoints() -> None:
    model = encoder(1).bfloat16()
    old = model.state_dict()
    adopt(model, length=30)
    assert model.layers[0].self_attn.norm.scale.dtype == torch.bfloat16
    twin = copy.deepcopy(model).double()
    assert twin.layers[0].self_attn.norm.scale.dtype == torch.float64
    with torch.no_grad():
        twin.layers[0].self_attn.norm.scale.fill_(1.0)
    assert model.layers[0].self_attn.norm.scale.item() == pytest.approx(initial_scale(30), rel=1e-2)
    model.load_state_dict(old)  # from before: the scale stays where it is
    assert model.layers[0].self_attn.norm.scale.item() == pytest.approx(initial_scale(30), rel=1e-2)


def test_one_module_in_two_places_is_changed_once() -> None:
    shared = nn.MultiheadAttention(WIDTH, HEADS)
    model = nn.ModuleDict({"a": shared, "b": shared})
    assert len(adopt(model, length=5).changed) == 1
    assert model["a"] is model["b"] and isinstance(model["a"], MultiheadAttention)


def test_compiled_and_trained() -> None:
    model = encoder(1)
    x = torch.randn(2, 6, WIDTH)
    adoption = adopt(model, length=6, p_learned=True)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [each.detach().clone() for each in adoption.parameters()]
    assert isinstance(model.layers[0].self_attn.norm, QKNorm) and len(before) == 2
    (compiled(x) * torch.randn(2, 6, WIDTH)).sum().backward()
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, adoption.parameters(), strict=True))
