"""The attention kernels against the reference in float64: on a GPU, or in Triton's interpreter (test_fused.py)."""

import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from qknorm import MultiheadAttention, attend, attend_with_weights
from qknorm.attention import Visibility, causal_mask, fused_tuning, lp_normalize
from qknorm.attention.attend import fused_attention_refusal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@pytest.fixture(params=["small", "long"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which kernels run; the long ones in blocks so small that a few keys make several."""
    if request.param == "long":
        monkeypatch.setattr(fused_tuning, "SMALL", 0)
        for key in fused_tuning.CHOSEN:
            monkeypatch.setitem(fused_tuning.CHOSEN, key, fused_tuning.Blocks(32, 32, 4, 1))  # 16 × 16 in float32
    return str(request.param)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def draw_all(
    t: int, s: int, d: int, *, h: int = 2, kv: int = 2, b: int = 1, dtype: Any = torch.float32
) -> list[Tensor]:
    return [draw(b, n, x, d, dtype=dtype) for n, x in ((h, t), (kv, s), (kv, s))]


def padding(b: int, s: int) -> Tensor:
    """Some keys hidden from everyone, and all of them in the last sentence."""
    mask = torch.rand(b, 1, 1, s, device=DEVICE) < 0.6
    mask[..., 0] = True
    mask[-1] = False
    return mask


def check(inputs: list[Tensor], scale: Tensor, tolerance: float | None = None, **how: Any) -> None:
    """Values and gradients of q, k, v and the scale, and of p where it learns, each by its relative error."""
    learnt = [x.detach().clone().requires_grad_() for x in (*inputs, scale)]
    wide = [x.detach().double().requires_grad_() for x in (*inputs, scale)]
    p = how.pop("p", 2.0)
    ps = (
        [p.detach().clone().requires_grad_(), p.detach().double().requires_grad_()] if isinstance(p, Tensor) else [p, p]
    )
    extra = [[x] if isinstance(x, Tensor) else [] for x in ps]
    found = attend(*learnt[:3], scale=learnt[3], p=ps[0], backend="fused", **how)
    expected = attend_with_weights(*wide[:3], scale=wide[3], p=ps[1], **how).output
    weight = torch.randn_like(expected)
    to_found = torch.autograd.grad((found.double() * weight).sum(), learnt + extra[0])
    to_expected = torch.autograd.grad((expected * weight).sum(), wide + extra[1])
    assert found.dtype == inputs[2].dtype
    for mine, theirs in zip((found, *to_found), (expected, *to_expected), strict=True):
        # what many rows add up to, for the scale and for p, is small by cancelling alone
        size = theirs.norm().clamp(min=(0.05 if theirs.numel() <= 4 else 0.01) * expected.numel() ** 0.5)
        assert (mine.double() - theirs).norm() <= (tolerance or TOLERANCE[inputs[0].dtype]) * size
        assert not mine.isnan().any()


@pytest.mark.parametrize(
    ("t", "s", "d", "kv", "causal", "masked"),
    [
        (5, 7, 8, 2, False, False),
        (20, 37, 24, 2, True, False),
        (37, 20, 16, 1, True, False),  # the first queries see nothing
        (18, 32, 48, 1, False, True),
        (33, 33, 16, 2, True, True),
        (1, 18, 32, 2, True, False),
    ],
)
def test_values_and_gradients(path: str, t: int, s: int, d: int, kv: int, causal: bool, masked: bool) -> None:
    b = 2 if masked else 1
    inputs = draw_all(t, s, d, kv=kv, b=b)
    scale = torch.tensor([2.0, 12.5], device=DEVICE)
    check(inputs, scale, is_causal=causal, mask=padding(b, s) if masked else None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(path: str, dtype: torch.dtype) -> None:
    check(draw_all(20, 37, 32, dtype=dtype), torch.tensor(6.0, device=DEVICE), is_causal=True)


@pytest.mark.parametrize("p", [1.0, 3.0, math.inf])
def test_other_ps(p: float) -> None:
    check(draw_all(9, 12, 16), torch.tensor(5.0, device=DEVICE), tolerance=1e-4, p=p)


def test_a_p_that_learns(path: str) -> None:
    p = torch.tensor([1.3, 2.7], device=DEVICE).view(2, 1, 1)
    check(draw_all(9, 12, 16), torch.tensor(5.0, device=DEVICE), tolerance=2e-4, p=p)


@pytest.mark.parametrize("g", [-20.0, 0.0, 32.0, 34.0, 200.0, 1e4])
def test_a_scale_of_any_size_even_where_every_key_is_opposite(path: str, g: float) -> None:
    q, k, v = draw_all(18, 34, 16, h=1, kv=1)
    q = k.mean(2, keepdim=True) + 0.2 * q + 2.0
    k = -math.copysign(1.0, g) * (2.0 + 0.1 * k)  # the largest logit is near −g: exp(logit − g) is exp(−2g)
    error = 3e-5 * max(1.0, abs(g) / 20)
    check([q, k, v], torch.tensor(g, device=DEVICE), tolerance=error, is_causal=True)
    check([k[:, :, :18].clone(), k, v], torch.tensor(g, device=DEVICE), tolerance=error)  # and where it is near g


def test_float16_weights_do_not_underflow(path: str) -> None:
    q, k, v = draw_all(18, 34, 16, h=1, kv=1, dtype=torch.float16)
    check([q * 0.1 + 1, k * 0.1 - 1, v], torch.tensor(14.0, device=DEVICE))


def test_zeros_any_size_and_nan(path: str) -> None:
    q, k, v = draw_all(18, 34, 16, h=1, kv=1)
    q[0, 0, 3], k[0, 0, 4] = 0.0, 0.0
    q[0, 0, 5] *= 1e30
    k[0, 0, 17] *= 1e-30
    found = attend(q, k, v, scale=9.0, p=2.0, backend="fused")
    torch.testing.assert_close(found, attend(q, k, v, scale=9.0, p=2.0, backend="reference"), atol=1e-5, rtol=1e-4)
    q[0, 0, 6, 2] = math.nan
    found = attend(q, k, v, scale=9.0, p=2.0, backend="fused")
    assert found[0, 0, 6].isnan().all() and found.isnan().any(-1).sum() == 1
    k[0, 0, 20, 1] = math.inf
    assert attend(q, k, v, scale=9.0, p=2.0, backend="fused").isnan().all()
    mask = torch.ones(1, 1, 1, 34, dtype=torch.bool, device=DEVICE)
    mask[..., 20] = False
    hidden = attend(q, k, v, scale=9.0, p=2.0, mask=mask, backend="fused")
    assert hidden.isnan().any(-1).sum() == 1


def test_a_row_of_zeros_has_no_gradient(path: str) -> None:
    q, k, v = (x.requires_grad_() for x in draw_all(18, 20, 16, h=1, kv=1))
    with torch.no_grad():
        q[0, 0, 3], k[0, 0, 4] = 0.0, 0.0
    to_q, to_k = torch.autograd.grad(attend(q, k, v, scale=9.0, p=2.0, backend="fused").square().sum(), [q, k])
    assert to_q.isfinite().all() and to_k.isfinite().all()
    assert (to_q[0, 0, 3] == 0).all() and (to_k[0, 0, 4] == 0).all() and (to_q[0, 0, 2] != 0).any()


def test_a_mask_made_ready_means_the_same(path: str) -> None:
    inputs = [x.requires_grad_() for x in draw_all(6, 18, 16, h=1, kv=1, b=3)]
    mask = padding(3, 18)
    results = []
    for form in (mask, Visibility.of(mask)):
        output = attend(*inputs, scale=9.0, p=2.0, mask=form, is_causal=True, backend="fused")
        results.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
    for plain, ready in zip(*results, strict=True):
        assert torch.equal(plain, ready)
    assert (results[0][0][-1] == 0).all() and (results[0][0][0] != 0).any()


def test_any_strides(path: str) -> None:
    packed = draw(2, 18, 6, 16)
    strided = [packed[:, :, i : i + 2].transpose(1, 2).detach().requires_grad_() for i in (0, 2, 4)]
    dense = [x.detach().contiguous().requires_grad_() for x in strided]
    results = []
    for inputs in (strided, dense):
        output = attend(*inputs, scale=9.0, p=2.0, is_causal=True, backend="fused")
        results.append([output, *torch.autograd.grad(output.sum(), inputs)])  # the gradient comes with strides of 0
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)
    assert results[0][0].transpose(1, 2).is_contiguous()  # so that joining the heads moves nothing
    across = draw(1, 2, 16, 18).transpose(2, 3)  # the last dimension is not the dense one
    same = attend(across.contiguous(), across, across, scale=9.0, p=2.0, backend="fused")
    assert torch.equal(attend(across, across, across, scale=9.0, p=2.0, backend="fused"), same)
    one = draw(1, 2, 4, 16).expand(3, -1, -1, -1)
    repeated = attend(one, one, one, scale=9.0, p=2.0, backend="fused")
    assert torch.equal(repeated[0], repeated[2])


def dropped_weights(q: Tensor, k: Tensor, share: float, seed: int, **how: Any) -> Tensor:
    """Weights after dropout, read off by values that are unit vectors."""
    s, d = k.shape[2], k.shape[3]
    v = torch.eye(s, d, device=DEVICE).expand(*k.shape[:2], s, d)
    torch.manual_seed(seed)
    return attend(q, k, v, scale=3.0, p=2.0, dropout=share, backend="fused", **how)[..., :s]


def test_dropout_forward_and_backward(path: str) -> None:
    q, k, v = draw_all(20, 30, 32, kv=1)
    staying = (dropped_weights(q, k, 0.4, seed=3) > 0).double()
    assert 0.45 < staying.mean() < 0.75
    found, expected = ([x.to(kind).requires_grad_() for x in (q, k, v)] for kind in (torch.float32, torch.float64))
    torch.manual_seed(3)
    output = attend(*found, scale=3.0, p=2.0, dropout=0.4, backend="fused")
    weights = attend_with_weights(*expected, scale=3.0, p=2.0).weights * staying / 0.6
    reference = weights @ expected[2].repeat_interleave(2, dim=1)
    torch.testing.assert_close(output.double(), reference, rtol=1e-4, atol=1e-5)
    weight = torch.randn_like(reference)
    gradients = torch.autograd.grad((output.double() * weight).sum(), found)
    for mine, theirs in zip(gradients, torch.autograd.grad((reference * weight).sum(), expected), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-3, atol=1e-4)


def test_dropout_follows_the_seed_and_keeps_the_mean() -> None:
    q, k, _ = draw_all(64, 64, 64, h=4, kv=4)
    first, again, other = (dropped_weights(q, k, 0.3, seed) for seed in (5, 5, 6))
    assert torch.equal(first, again) and not torch.equal(first, other)
    full = attend_with_weights(q, k, k, scale=3.0, p=2.0).weights
    torch.testing.assert_close(first[first > 0], (full / 0.7)[first > 0], rtol=1e-3, atol=1e-6)
    staying = (first > 0).float()
    assert abs(staying.mean() - 0.7) < 0.02  # 16,384 draws: over five standard deviations
    # rows, columns and heads draw each for themselves: no pair agrees more than chance has it
    by_row, by_column = staying.flatten(0, 2) - 0.7, staying.permute(0, 1, 3, 2).flatten(0, 2) - 0.7
    for table in (by_row, by_column):
        alike = (table @ table.T / 64 / 0.21).fill_diagonal_(0.0)
        assert alike.abs().max() < 0.9


def test_no_gradient_wanted_gives_the_same(path: str) -> None:
    q, k, v = draw_all(18, 20, 16)
    with torch.no_grad():
        plain = attend(q, k, v, scale=9.0, p=2.0, backend="fused")
    assert torch.equal(plain, attend(q.requires_grad_(), k, v, scale=9.0, p=2.0, backend="fused"))


def test_a_second_derivative_is_refused_not_wrong() -> None:
    q, k, v = (x.requires_grad_() for x in draw_all(3, 4, 8))
    output = attend(q, k, v, scale=1.0, p=2.0, backend="fused")
    (gradient,) = torch.autograd.grad(output.pow(3).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_tangent_is_refused_not_lost(which: int) -> None:
    inputs = draw_all(3, 4, 8)
    with forward_ad.dual_level():
        inputs[which] = forward_ad.make_dual(inputs[which], torch.ones_like(inputs[which]))
        with pytest.raises((RuntimeError, NotImplementedError), match="jvp"):
            attend(*inputs, scale=1.0, p=2.0, backend="fused")


def test_kernels_start_on_the_gpu_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Tensor] = []
    device_of = torch.cuda.device_of
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: entered.append(x) or device_of(x))
    q, k, v = draw_all(3, 4, 8)
    attend(q, k, v, scale=1.0, p=2.0, backend="fused")
    attend(q.requires_grad_(), k, v, scale=1.0, p=2.0, backend="fused")
    assert [x.device for x in entered] == [q.device] * 2


def test_compiled(path: str) -> None:
    p = 3.0 if path == "small" else 2.0

    def call(q: Tensor, k: Tensor, v: Tensor, scale: Tensor, mask: Tensor) -> Tensor:
        return attend(q, k, v, scale=scale, p=p, mask=Visibility.of(mask), is_causal=True, dropout=0.2, backend="fused")

    inputs = [x.requires_grad_() for x in (*draw_all(6, 18, 16, h=1, kv=1, b=2), torch.tensor(9.0, device=DEVICE))]
    mask = padding(2, 18)
    torch.compiler.reset()
    results = []
    for way in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(4)
        output = way(*inputs, mask)
        results.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "settings", [{}, {"p": 3.0, "p_learned": True, "scale_per_head": True}, {"rotary": "before_norm"}]
)
def test_the_module(settings: dict[str, Any]) -> None:
    module = MultiheadAttention(32, 2, batch_first=True, num_kv_heads=1, backend="fused", **settings).to(DEVICE)
    x = draw(2, 6, 32)
    hidden = torch.zeros(2, 6, dtype=torch.bool, device=DEVICE)
    hidden[1, 4:] = True
    results = []
    for backend in ("fused", "reference"):
        module.backend = backend  # type: ignore[assignment]
        output = module(x, x, x, key_padding_mask=hidden, need_weights=False, is_causal=True)[0]
        results.append([output, *torch.autograd.grad(output.square().sum(), list(module.parameters()))])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    module.backend = "fused"
    with pytest.raises(ValueError, match="does not hide the same keys from all queries"):
        module(x, x, x, attn_mask=~causal_mask(6, 6, DEVICE), need_weights=False)


@pytest.mark.parametrize("rotary", ["none", "before_norm"])
@pytest.mark.parametrize("extra", [False, True])
def test_the_module_on_the_last_queries_alone(rotary: Any, extra: bool) -> None:
    module = MultiheadAttention(32, 2, batch_first=True, rotary=rotary, add_zero_attn=extra, add_bias_kv=extra)
    module, x = module.to(DEVICE), draw(2, 6, 32)
    whole = module(x, x, x, is_causal=True)[0]
    module.backend = "fused"
    if extra:  # whose mask differs from query to query where it is to be causal
        found = module(x[:, -2:], x, x, need_weights=False)[0]
        expected = module(x[:, -2:], x, x)[0]
    else:
        found, expected = module(x[:, -2:], x, x, need_weights=False, is_causal=True)[0], whole[:, -2:]
        hint = {"attn_mask": ~causal_mask(6, 6, DEVICE), "is_causal": True, "need_weights": False}
        torch.testing.assert_close(module(x, x, x, **hint)[0], whole, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_autocast_gives_what_it_gives_elsewhere() -> None:
    q, k, v = draw_all(5, 7, 16)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        found = attend(q, k, v, scale=5.0, p=2.0, backend="fused")
        assert found.dtype == attend(q, k, v, scale=5.0, p=2.0, backend="sdpa").dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), attend(q, k, v, scale=5.0, p=2.0), atol=0.06, rtol=0.06)


def test_what_they_cannot_take_is_named() -> None:
    q, k, v = draw_all(3, 5, 16)
    mask = torch.ones(1, 1, 3, 5, dtype=torch.bool, device=DEVICE)
    for expected, inputs, how in [
        ("float64 is not computed", [q.double(), k.double(), v.double()], {}),
        ("differ in dtype", [q, k, v.half()], {}),
        ("values of 8 numbers", [q, k, v[..., :8]], {}),
        ("over 256", draw_all(3, 5, 272), {}),
        ("empty", [q[:, :, :0], k, v], {}),
        ("over the 65,535", [torch.zeros(1, device=DEVICE).expand(2**14, 4, 200, 16)] * 3, {}),
        ("neither one nor one for each", [q, k, v], {"scale": torch.ones(3, device=DEVICE)}),
        ("not in", [q, k, v], {"dropout": 1.0}),
        ("added to the logits", [q, k, v], {"mask": mask.float()}),
        ("does not hide the same keys", [q, k, v], {"mask": mask}),
    ]:
        with pytest.raises(ValueError, match=expected):
            attend(*inputs, **{"scale": 1.0, **how}, p=2.0, backend="fused")  # type: ignore[arg-type]
    assert fused_attention_refusal(q, k, v, scale=1.0, mask=mask[:, :, :1]) is None


def test_auto_does_not_take_them_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["qknorm.attention.attend"]  # the name `attend` in the package is the function
    monkeypatch.setattr(module, "_attend_fused", lambda *_: pytest.fail("auto took the kernels"))
    q, k, v = draw_all(3, 5, 16)
    expected = torch.softmax(lp_normalize(q) @ lp_normalize(k).transpose(2, 3) * 9.0, dim=-1) @ v
    torch.testing.assert_close(attend(q, k, v, scale=9.0, p=2.0), expected)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [32, 48, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(
    ("t", "s", "causal", "masked"), [(64, 64, True, True), (1000, 1300, True, False), (2048, 2048, False, True)]
)
def test_sizes_of_real_models(dtype: torch.dtype, d: int, t: int, s: int, causal: bool, masked: bool) -> None:
    inputs = draw_all(t, s, d, h=4, kv=2, b=2, dtype=dtype)
    check(inputs, torch.full((4,), 9.0, device=DEVICE), is_causal=causal, mask=padding(2, s) if masked else None)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_recorded_in_a_cuda_graph_dropout_draws_anew() -> None:
    q, k, v = (x.requires_grad_() for x in draw_all(64, 64, 64, h=8, kv=8, b=4, dtype=torch.bfloat16))
    scale = torch.tensor(9.0, device=DEVICE, requires_grad=True)

    def step() -> list[Tensor]:
        output = attend(q, k, v, scale=scale, p=2.0, dropout=0.3, backend="fused")
        return [output, *torch.autograd.grad(output.float().square().sum(), [q, k, v, scale])]

    beside = torch.cuda.Stream()
    with torch.cuda.stream(beside):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    graph.replay()
    first = [x.clone() for x in results]
    graph.replay()
    assert not torch.equal(first[0], results[0])
    assert all(x.isfinite().all() for x in (*first, *results))
