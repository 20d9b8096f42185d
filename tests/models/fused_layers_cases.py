"""The kernels of the layers against their plain reference: on a GPU, or in Triton's interpreter (test_fused.py)."""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from qknorm.attention.norm import lp_normalize
from qknorm.config import Dropout, Model
from qknorm.models import fused_layers
from qknorm.models.fused_linear import add_column_sums, fused_linears, linear, linear_side_by_side
from qknorm.models.fused_run import FlatParameters, FusedRun, current_run, use_fused
from qknorm.models.launches import LAUNCHES, Launch
from qknorm.models.layers import FeedForward, Residual, make_norm
from qknorm.models.translator import Translator

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABULARY = 21


def make_run(**parts) -> FusedRun:
    return FusedRun(torch.tensor([2**40 + 12_345], device=DEVICE), **parts)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def drawn_norm(kind: str, width: int) -> nn.Module:
    norm = make_norm(Model(width=width, heads=1, norm=kind)).to(DEVICE)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return norm


def assert_gradients_agree(fast: list[Tensor], plain: list[Tensor], **tolerance: float) -> None:
    assert len(fast) == len(plain)
    for mine, reference in zip(fast, plain, strict=True):
        torch.testing.assert_close(mine, reference, **(tolerance or {"rtol": 1e-4, "atol": 2e-5}))


@pytest.mark.parametrize("kind", ["layer", "scale", "rms"])
@pytest.mark.parametrize(("rows", "width"), [(7, 24), (1, 16), (33, 130)])
def test_sum_and_norm_equal_the_reference(kind, rows, width):
    torch.manual_seed(width)
    norm, x, y = drawn_norm(kind, width), draw(rows, width).requires_grad_(), draw(rows, width).requires_grad_()
    weights, bias = (draw(rows, width), draw(rows, width)), draw(width).requires_grad_()
    inputs = [x, y, bias, *norm.parameters()]
    fast = fused_layers.add_norm(make_run(), x, y, 0.0, norm, bias)
    plain = x + (y + bias), norm(x + (y + bias))
    for mine, reference in zip(fast, plain, strict=True):
        torch.testing.assert_close(mine, reference, rtol=2e-5, atol=2e-6)
    found, expected = (
        torch.autograd.grad((total * weights[0]).sum() + (out * weights[1]).sum(), inputs)
        for total, out in (fast, plain)
    )
    assert_gradients_agree(found, expected)


@pytest.mark.parametrize("kind", ["layer", "scale", "rms"])
def test_the_first_norm_has_nothing_to_add(kind):
    norm, x, weight = drawn_norm(kind, 24), draw(5, 24).requires_grad_(), draw(5, 24)
    total, found = fused_layers.add_norm(make_run(), x, None, 0.3, norm)
    assert total is x
    inputs = [x, *norm.parameters()]
    torch.testing.assert_close(found, norm(x), rtol=2e-5, atol=2e-6)
    assert_gradients_agree(
        torch.autograd.grad((found * weight).sum(), inputs), torch.autograd.grad((norm(x) * weight).sum(), inputs)
    )


@pytest.mark.parametrize("used", ["sum", "norm"])
def test_either_result_may_be_the_only_one_used(used):
    norm = drawn_norm("layer", 16)
    x, y = draw(4, 16).requires_grad_(), draw(4, 16).requires_grad_()
    total, out = fused_layers.add_norm(make_run(), x, y, 0.0, norm)
    chosen, reference = (total, x + y) if used == "sum" else (out, norm(x + y))
    assert_gradients_agree(
        torch.autograd.grad(chosen.pow(2).sum(), [x, y]), torch.autograd.grad(reference.pow(2).sum(), [x, y])
    )


def test_rows_of_zeros_and_nan_stay_what_they_are():
    x = draw(3, 16)
    x[0], x[1, 3] = 0.0, math.nan
    x.requires_grad_()
    for kind in ("layer", "scale", "rms"):
        norm = drawn_norm(kind, 16)
        found = fused_layers.add_norm(make_run(), x, None, 0.0, norm)[1]
        torch.testing.assert_close(found[[0, 2]], norm(x)[[0, 2]], rtol=2e-5, atol=2e-6)
        assert found[1].isnan().all()
        (gradient,) = torch.autograd.grad(found[[0, 2]].sum(), x)
        assert gradient[[0, 2]].isfinite().all()


def kept_by_sum(run: FusedRun, rows: int, width: int, share: float) -> Tensor:
    norm = drawn_norm("layer", width)
    return fused_layers.add_norm(
        run, torch.zeros(rows, width, device=DEVICE), draw(rows, width).abs() + 1, share, norm
    )[0]


def test_dropout_has_its_share_and_falls_where_the_gradient_falls():
    share, run = 0.3, make_run()
    x, y = draw(128, 64).requires_grad_(), (draw(128, 64).abs() + 1).requires_grad_()
    total, out = fused_layers.add_norm(run, x, y, share, norm := drawn_norm("layer", 64))
    added = (total - x).detach()
    kept = added.abs() > 1e-3
    assert float(kept.float().mean()) == pytest.approx(1 - share, abs=0.02)
    torch.testing.assert_close(added[kept], (y / (1 - share))[kept].detach(), rtol=1e-4, atol=1e-4)
    weight = draw(128, 64)
    plain = x + torch.where(kept, y / (1 - share), 0.0)
    inputs = [x, y, *norm.parameters()]
    assert_gradients_agree(
        torch.autograd.grad((out * weight).sum() + total.sum(), inputs),
        torch.autograd.grad((norm(plain) * weight).sum() + plain.sum(), inputs),
        rtol=1e-3, atol=1e-3,
    )  # fmt: skip


def test_places_seeds_and_neighbours_draw_independently():
    run, other = make_run(), FusedRun(torch.tensor([7], device=DEVICE))
    masks = [kept_by_sum(each, 128, 64, 0.5) > 0 for each in (run, run, other)]
    flat = torch.stack([mask.flatten().float() for mask in masks])
    assert float((flat.corrcoef() - torch.eye(3, device=DEVICE)).abs().max()) < 0.05
    for lag in (1, 2, 4, 8, 64):
        pair = torch.stack([flat[0, :-lag], flat[0, lag:]])
        assert float(pair.corrcoef()[0, 1].abs()) < 0.05
    again = kept_by_sum(make_run(), 128, 64, 0.5) > 0
    assert torch.equal(again, masks[0])


@pytest.mark.parametrize("kind", ["layer", "scale"])
@pytest.mark.parametrize(
    "launch",
    [
        Launch(1_024, 4, 3),
        Launch(512, 2, 2),
        Launch(4_096, 4, 3),
        Launch(2_048, 16, 3, stages=2),
        Launch(256, 1),
    ],
)
def test_however_rows_are_spread_dropout_and_gradients_are_the_same(kind, launch, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setitem(LAUNCHES, "add_norm_backward", launch)
    share, width = 0.25, 130
    norm, x, bias = drawn_norm(kind, width), draw(37, width).requires_grad_(), draw(width).requires_grad_()
    y, weight = (draw(37, width).abs() + 3 + bias.detach().abs().max()).requires_grad_(), draw(37, width)
    total, out = fused_layers.add_norm(make_run(), x, y, share, norm, bias)
    kept = (total - x).detach().abs() > 1e-3
    plain = x + torch.where(kept, (y + bias) / (1 - share), 0.0)
    inputs = [x, y, bias, *norm.parameters()]
    assert_gradients_agree(
        torch.autograd.grad((out * weight).sum() + (total * weight).sum(), inputs),
        torch.autograd.grad((norm(plain) * weight).sum() + (plain * weight).sum(), inputs),
        rtol=1e-3, atol=1e-3,
    )  # fmt: skip


@pytest.mark.parametrize("launch", [Launch(256, 1, 4, 64), Launch(2_048, 4, 2, 128, stages=2), Launch(128, 2, 0, 64)])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_however_columns_are_spread_sums_are_the_same(activation, launch, monkeypatch):
    for kernel in ("relu_backward", "gelu_backward", "column_sum"):
        monkeypatch.setitem(LAUNCHES, kernel, launch)
    z, bias, weight = draw(70, 140).requires_grad_(), draw(140).requires_grad_(), draw(70, 140)
    found = fused_layers.bias_activation_dropout(make_run(), activation, z, bias, 0.25)
    plain = getattr(nn.functional, activation)(z + bias)
    plain = torch.where((found == 0) & (plain != 0), 0.0, plain / 0.75)
    assert_gradients_agree(
        torch.autograd.grad((found * weight).sum(), [z, bias]),
        torch.autograd.grad((plain * weight).sum(), [z, bias]),
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip
    room = torch.ones(140, device=DEVICE)
    add_column_sums(room, weight)
    torch.testing.assert_close(room, 1 + weight.sum(0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_feed_forward_at_once_passes_on_what_is_no_number(dtype):
    part = FeedForward(Model(width=64, feed_forward=256, heads=4)).to(DEVICE, dtype).eval()
    x = draw(5, 64).to(dtype)
    with torch.no_grad(), use_fused(DEVICE, layers=True):
        assert (fused_layers.linear_relu(x, part.widen) is None) == (dtype == torch.float32)
        sound = part(x)
        part.widen.weight[7, 3] = float("nan")
        broken = part(x)
    assert sound.isfinite().all() and broken.isnan().all()


@pytest.mark.parametrize(("rows", "width"), [(5, 40), (70, 640)])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_bias_activation_dropout(activation, rows, width, with_bias):
    z, bias = draw(rows, width).requires_grad_(), draw(width).requires_grad_()
    weight, share = draw(rows, width), 0.4
    inputs, bias = ([z, bias], bias) if with_bias else ([z], None)
    plain = getattr(nn.functional, activation)(z if bias is None else z + bias)
    found = fused_layers.bias_activation_dropout(make_run(), activation, z, bias, 0.0)
    dropped = fused_layers.bias_activation_dropout(make_run(), activation, z, bias, share)
    kept = (dropped != 0) | (plain == 0)
    if rows * width > 1_000:
        assert float(kept[plain != 0].float().mean()) == pytest.approx(1 - share, abs=0.02)
    for out, reference in ((found, plain), (dropped, torch.where(kept, plain / (1 - share), 0.0))):
        torch.testing.assert_close(out, reference, rtol=1e-4, atol=1e-5)
        assert_gradients_agree(
            torch.autograd.grad((out * weight).sum(), inputs),
            torch.autograd.grad((reference * weight).sum(), inputs, retain_graph=True),
            rtol=1e-4, atol=1e-3,
        )  # fmt: skip


@pytest.mark.parametrize("fixnorm", [True, False])
@pytest.mark.parametrize("extras", ["", "fixed", "learned"])
def test_word_vectors(fixnorm, extras):
    table, language = draw(9, 24).requires_grad_(), draw(24).requires_grad_()
    ids, positions, weight = torch.randint(0, 9, (3, 5), device=DEVICE), draw(5, 24), draw(3, 5, 24)
    positions.requires_grad_(extras == "learned")
    rows = (lp_normalize(table) if fixnorm else table)[ids] * 5.0
    plain = rows + language + positions if extras else rows
    inputs = [table, *([language] if extras else []), *([positions] if extras == "learned" else [])]

    def embed(share: float) -> Tensor:
        return fused_layers.embed(
            make_run(), ids, table, language if extras else None, positions if extras else None, share, factor=5.0,
            fixnorm=fixnorm,
        )  # fmt: skip

    torch.testing.assert_close(embed(0.0), plain, rtol=1e-5, atol=1e-5)
    kept = embed(0.25) != 0
    for found, reference in ((embed(0.0), plain), (embed(0.25), torch.where(kept, plain / 0.75, 0.0))):
        torch.testing.assert_close(found, reference, rtol=1e-4, atol=1e-4)
        assert_gradients_agree(
            torch.autograd.grad((found * weight).sum(), inputs),
            torch.autograd.grad((reference * weight).sum(), inputs, retain_graph=True),
            rtol=1e-4, atol=1e-4,
        )  # fmt: skip


def test_a_table_of_unit_rows_has_zeros_at_its_end():
    table, weight = draw(9, 24).requires_grad_(), draw(16, 24)
    found = fused_layers.unit_rows(make_run(), table, 16, torch.float32)
    assert (found[9:] == 0).all()
    torch.testing.assert_close(found[:9], lp_normalize(table), rtol=1e-5, atol=1e-6)
    assert_gradients_agree(
        torch.autograd.grad((found * weight).sum(), [table]),
        torch.autograd.grad((lp_normalize(table) * weight[:9]).sum(), [table]),
    )


@pytest.mark.parametrize("flat", [True, False])
def test_linear_maps_side_by_side(flat):
    module = nn.Linear(24, 40).to(DEVICE)
    x, weight = draw(3, 5, 24).requires_grad_(), draw(3, 5, 60)
    parameters = [module.weight, module.bias]
    plain = torch.cat([module(x), nn.functional.linear(x, module.weight[20:], module.bias[20:])], dim=-1)
    expected = torch.autograd.grad((plain * weight).sum(), [x, *parameters])
    run = make_run(flat=FlatParameters(parameters) if flat else None)
    weights, biases = [module.weight, module.weight[20:]], [module.bias, module.bias[20:]]
    found = linear_side_by_side(run, x, weights, biases)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)
    (found * weight).sum().backward()
    assert_gradients_agree([x.grad, *(parameter.grad for parameter in parameters)], expected)
    x.grad = None
    (linear(run, x, *parameters) * weight[..., :40]).sum().backward()  # gradients add up
    assert not torch.allclose(module.weight.grad, expected[1])


def test_sums_of_columns_of_a_slice():
    x, room = draw(150, 300), torch.ones(170, device=DEVICE)
    add_column_sums(room, x[:, 100:270])
    torch.testing.assert_close(room, 1 + x[:, 100:270].sum(0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("columns", [slice(0, 37), slice(11, 48), slice(3, 40)])
def test_sums_of_columns_know_nothing_of_their_neighbours(columns):
    x = torch.full((50, 48), math.nan, device=DEVICE)
    x[:, columns] = draw(50, 37)
    room = torch.zeros(37, device=DEVICE)
    add_column_sums(room, x[:, columns])
    torch.testing.assert_close(room, x[:, columns].sum(0), rtol=1e-5, atol=1e-4)


def test_every_linear_is_ours_within_and_none_after():
    module, x, run = nn.Linear(16, 8).to(DEVICE), draw(2, 16), make_run()
    with fused_linears(run):
        assert "_Linear" in type(module(x).grad_fn).__name__
        assert module(draw(16)).shape == (8,)
    assert "_Linear" not in type(module(x).grad_fn).__name__


@pytest.mark.parametrize("biases", [True, False])
def test_feed_forward(biases):
    layer = FeedForward(Model(width=16, feed_forward=24, dropout=Dropout.everywhere(0.0))).to(DEVICE)
    if not biases:
        layer.widen.bias = layer.narrow.bias = None
    x = draw(3, 16).requires_grad_()
    inputs = [x, *layer.parameters()]
    plain = layer(x)
    with use_fused(DEVICE, layers=True) as run:
        assert current_run() is run
        found = layer(x)
        assert run.sites == 1
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)
    assert_gradients_agree(
        torch.autograd.grad(found.pow(2).sum(), inputs), torch.autograd.grad(plain.pow(2).sum(), inputs)
    )


@pytest.mark.parametrize("ours", [True, False])
def test_the_last_bias_of_a_sublayer_is_added_once_whoever_adds_it(ours):
    module, around = nn.Linear(16, 16).to(DEVICE), Residual(Model(width=16, dropout=Dropout.everywhere(0.0)))
    around, final, x = around.to(DEVICE), drawn_norm("layer", 16), draw(3, 16)
    run = make_run(linear=True)
    with fused_linears(run) if ours else nullcontext():
        found = fused_layers.run_pre_norm(run, x, [fused_layers.Part(around, module, module.bias)], final)
    assert run.bias_to_leave is None
    torch.testing.assert_close(found, final(around(x, module)), rtol=1e-4, atol=1e-5)


SETTINGS = [
    {},
    {"norm": "scale", "fixnorm": False, "tie": "none"},
    {"norm": "rms", "positions": "rotary", "language_vectors": False, "tie": "target"},
    {"activation": "gelu", "kv_heads": 1, "attention": {"qk_norm": "none"}},
    {"attention": {"cross_query_norm": "width"}},
    {"norm_position": "post"},
]


BOTH = {"linear": True, "layers": True}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [({}, {"linear": True}), ({}, {"layers": True}), *((changes, BOTH) for changes in SETTINGS)],
)
def test_the_translator_is_the_same_with_any_part(changes, parts):
    torch.manual_seed(0)
    sizes = {"width": 16, "feed_forward": 24, "encoder_layers": 1, "decoder_layers": 2, "heads": 2}
    settings = Model(**{**sizes, "dropout": Dropout.everywhere(0.0, word=0.0), **changes})
    model = Translator(VOCABULARY, settings, scale_init=3.0).to(DEVICE).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    source, target = (torch.randint(4, VOCABULARY, (2, 5), device=DEVICE) for _ in range(2))
    source[1, 3:] = 0
    plain = model(source, target)
    plain.pow(2).sum().backward()
    other = copy.deepcopy(model)
    other.zero_grad()
    flat = FlatParameters(other.parameters()) if parts.get("linear") else None
    with use_fused(DEVICE, flat=flat, **parts):
        found = other(source, target)
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)
    found.pow(2).sum().backward()
    for (name, mine), reference in zip(other.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(
            mine.grad, reference.grad, rtol=1e-3, atol=1e-3, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_half_precision_stays_near_float32():
    torch.manual_seed(0)
    settings = Model(width=32, feed_forward=48, encoder_layers=1, decoder_layers=1, heads=2,
                     dropout=Dropout.everywhere(0.0, word=0.0))  # fmt: skip
    model = Translator(VOCABULARY, settings, scale_init=3.0).to(DEVICE).train()
    ids = torch.randint(4, VOCABULARY, (2, 6), device=DEVICE)
    exact = model(ids, ids)
    flat = FlatParameters(model.parameters(), torch.bfloat16)
    with torch.autocast(DEVICE.type, torch.bfloat16), use_fused(DEVICE, linear=True, layers=True, flat=flat):
        found = model(ids, ids)
    assert found.dtype == torch.bfloat16
    assert float(((found - exact).norm() / exact.norm()).detach()) < 2e-2
    found.float().pow(2).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_dropout_is_drawn_anew_each_pass_and_repeats_with_the_seed():
    settings = Model(width=16, feed_forward=24, encoder_layers=1, decoder_layers=1, heads=2,
                     dropout=Dropout(residual=0.3, attention=0.0, feed_forward=0.3, word=0.0))  # fmt: skip
    model = Translator(VOCABULARY, settings).to(DEVICE).train()
    ids = torch.randint(4, VOCABULARY, (2, 5), device=DEVICE)

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        with use_fused(DEVICE, layers=True):
            return model(ids, ids)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
