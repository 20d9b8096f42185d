"""The kernels against their reference: on a GPU, or on the CPU in Triton's interpreter (test_fused.py starts it so)."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qknorm import MultiheadAttention, attend, lp_normalize
from qknorm.attention.cut import cut_heads, cut_heads_with_room
from qknorm.attention.fused import normalize_scaled

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PS = [1.0, 1.5, 2.0, 2.7, 3.0, 3.5, 4.0, math.inf]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def packed_heads(d: int) -> Tensor:
    """Queries as they come from one packed projection: (b, h, t, d) with the strides of (b, t, 3·h, d)."""
    return draw(2, 5, 9 * d).view(2, 5, 9, d)[:, :, 3:6].transpose(1, 2).detach().requires_grad_()


@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("d", [8, 24, 64])
@pytest.mark.parametrize("per_head", [False, True])
def test_values_and_gradients_equal_the_reference(p: float, d: int, per_head: bool) -> None:
    torch.manual_seed(d)
    x = packed_heads(d)
    with torch.no_grad():
        x[0, 1, 1, 3] = 0.0
    scale = torch.tensor([1.0, 2.0, 12.5] if per_head else 7.0, device=DEVICE, requires_grad=True)
    weight = draw(2, 3, 5, d)
    found = normalize_scaled(x, p, scale)
    expected = lp_normalize(x, p) * (scale.view(3, 1, 1) if per_head else scale)
    torch.testing.assert_close(found, expected, rtol=3e-6, atol=1e-6)
    gradients = torch.autograd.grad((found * weight).sum(), [x, scale])
    for mine, reference in zip(gradients, torch.autograd.grad((expected * weight).sum(), [x, scale]), strict=True):
        torch.testing.assert_close(mine, reference, rtol=2e-5, atol=2e-5)


def test_gradient_of_p_for_each_head() -> None:
    p = torch.tensor([1.2, 2.0, 3.7], device=DEVICE).view(3, 1, 1).requires_grad_()
    x, weight = draw(2, 3, 4, 16).requires_grad_(), draw(2, 3, 4, 16)
    found = torch.autograd.grad((normalize_scaled(x, p, 5.0) * weight).sum(), [x, p])
    expected = torch.autograd.grad((lp_normalize(x, p) * 5.0 * weight).sum(), [x, p])
    for mine, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("p_by_head", [False, True])
@pytest.mark.parametrize("scale_by_head", [False, True])
def test_p_and_scale_learn_together_each_one_number_or_one_a_head(p_by_head: bool, scale_by_head: bool) -> None:
    x, weight = draw(2, 3, 40, 16).requires_grad_(), draw(2, 3, 40, 16)  # rows of several programs, the last not full
    p = torch.full((3, 1, 1) if p_by_head else (), 2.6, device=DEVICE, requires_grad=True)
    scale = torch.full((3,) if scale_by_head else (), 4.0, device=DEVICE, requires_grad=True)
    plain = lp_normalize(x, p) * (scale.view(3, 1, 1) if scale_by_head else scale)
    found = torch.autograd.grad((normalize_scaled(x, p, scale) * weight).sum(), [x, p, scale])
    for mine, reference in zip(found, torch.autograd.grad((plain * weight).sum(), [x, p, scale]), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-4)


def test_gradients_come_to_their_room_once_however_often_a_part_is_used() -> None:
    joined = draw(2, 5, 6 * 8).requires_grad_()

    def gradient(cut: Callable[..., tuple[Tensor, ...]], normalize: Callable[..., Tensor], twice: bool) -> Tensor:
        q, k, v = cut(joined, (3, 2, 1), 8)
        out = normalize(q, 3.0, 2.0).sin().sum() + (normalize(k, 1.5, 2.0) * v).sin().sum()
        out = out + (normalize(q, 2.0, 5.0) * q).sum() if twice else out
        return torch.autograd.grad(out, joined)[0]

    for twice in (False, True):
        expected = gradient(cut_heads, lambda x, p, scale: lp_normalize(x, p) * scale, twice)
        found = gradient(cut_heads_with_room, normalize_scaled, twice)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("p", PS)
def test_rows_of_any_size_padding_and_nan(p: float) -> None:
    x = draw(1, 1, 5, 16)
    x[0, 0, 0] *= 1e30
    x[0, 0, 1] *= 1e-30
    x[0, 0, 2] = 0.0
    x[0, 0, 3, 7] = math.nan
    x[0, 0, 4, 7] = math.inf
    x.requires_grad_()
    found = normalize_scaled(x, p, 1.0)
    torch.testing.assert_close(found[:, :, :3], lp_normalize(x, p)[:, :, :3], rtol=3e-6, atol=1e-6)
    assert found[:, :, 3:].isnan().all()
    (gradient,) = torch.autograd.grad(found[:, :, :3].sum(), x)
    assert (gradient[0, 0, 2] == 0).all() and gradient[0, 0, 0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    x = draw(2, 3, 5, 32, dtype=dtype)
    found = normalize_scaled(x, 2.0, 12.5)
    assert found.dtype == dtype
    torch.testing.assert_close(found, (lp_normalize(x.float()) * 12.5).to(dtype), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("p", [2.0, 3.0])
@pytest.mark.parametrize("kv", [4, 2])
def test_attention_through_the_kernels_equals_the_reference(p: float, kv: int) -> None:
    q, k, v = draw(2, 4, 5, 16), draw(2, kv, 7, 16), draw(2, kv, 7, 16)
    results = []
    for backend in ("reference", "fused"):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        scale = torch.tensor(9.0, device=DEVICE, requires_grad=True)
        output = attend(*inputs, scale=scale, p=p, is_causal=True, backend=backend)  # type: ignore[arg-type]
        results.append([output, *torch.autograd.grad(output.pow(2).sum(), [*inputs, scale])])
    for reference, found in zip(*results, strict=True):
        torch.testing.assert_close(found, reference, rtol=1e-3, atol=1e-4)


def test_a_second_derivative_is_refused_not_wrong() -> None:
    x = draw(1, 1, 2, 8).requires_grad_()
    (gradient,) = torch.autograd.grad(normalize_scaled(x, 2.0, 1.0).pow(3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


def test_bad_p_is_refused_here_too() -> None:
    q = draw(1, 2, 3, 8)
    with pytest.raises(ValueError, match="at least 1"):
        attend(q, q, q, scale=1.0, p=0.5)


def test_the_module_uses_them_and_gives_the_same() -> None:
    module = MultiheadAttention(32, 4, batch_first=True, p=3.0, p_learned=True, scale_per_head=True).to(DEVICE)
    x = draw(2, 6, 32)
    fast = module(x, x, x, need_weights=False)[0]
    fast_gradients = torch.autograd.grad(fast.pow(2).sum(), list(module.parameters()))
    q = module._project(x, x, x, None)[0]
    with torch.no_grad():
        plain = module.norm.query(module._heads(x @ module.in_proj_weight[:32].T, 4)) * module.norm.scale.view(4, 1, 1)  # type: ignore[index]
    torch.testing.assert_close(q.detach(), plain, rtol=1e-4, atol=1e-5)
    assert all(gradient.isfinite().all() for gradient in fast_gradients)
