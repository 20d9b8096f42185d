import math
from collections.abc import Callable
from typing import Any

import naive
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from qknorm import QKNorm, attend, initial_scale, lp_normalize, matched_scale
from qknorm.attention import direction

PS = [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, math.inf]
sizes = st.floats(-30, 30)
seeds = st.integers(0, 2**31)


def rows(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@given(p=st.one_of(st.floats(1, 200), st.just(math.inf)), exponent=sizes, seed=seeds, dim=st.integers(1, 200))
def test_rows_of_any_size_come_out_with_length_one(p: float, exponent: float, seed: int, dim: int) -> None:
    x = (rows(seed, 4, dim, dtype=torch.float64) * 10**exponent).float()
    x = x[x.abs().amax(-1) > 1e-37]
    unit = lp_normalize(x, p).double()
    lengths = unit.abs().amax(-1) if math.isinf(p) else unit.abs().pow(p).sum(-1).pow(1 / p)
    np.testing.assert_allclose(lengths.numpy(), 1.0, rtol=1e-6)


@given(exponent=sizes, p=st.sampled_from(PS), seed=seeds)
def test_the_size_of_a_row_does_not_matter(exponent: float, p: float, seed: int) -> None:
    x = rows(seed, 3, 8)
    torch.testing.assert_close(lp_normalize(x * 10**exponent, p), lp_normalize(x, p), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("p", PS)
def test_values_and_gradients_equal_the_formula_in_float64(p: float) -> None:
    x = rows(1, 5, 7, dtype=torch.float64).requires_grad_()
    weight = rows(2, 5, 7, dtype=torch.float64)
    (expected,) = torch.autograd.grad((naive.normalize(x, p) * weight).sum(), x)
    (found,) = torch.autograd.grad((lp_normalize(x, p) * weight).sum(), x)
    torch.testing.assert_close(lp_normalize(x, p), naive.normalize(x, p), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: lp_normalize(x, p), x)
    assert torch.autograd.gradgradcheck(lambda x: lp_normalize(x, p), x)


def test_gradient_of_p_for_each_head() -> None:
    x = rows(3, 2, 3, 4, 5, dtype=torch.float64).requires_grad_()
    p = torch.tensor([1.2, 2.0, 3.7], dtype=torch.float64).view(3, 1, 1).requires_grad_()
    assert torch.autograd.gradcheck(lp_normalize, (x, p))
    weight = rows(4, 2, 3, 4, 5, dtype=torch.float64)
    (expected,) = torch.autograd.grad((naive.normalize(x, p) * weight).sum(), p)
    (found,) = torch.autograd.grad((lp_normalize(x, p) * weight).sum(), p)
    torch.testing.assert_close(found, expected)


def test_gradient_of_p_where_entries_are_zero() -> None:
    x = torch.tensor([[3.0, 0.0, -4.0], [0.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    p = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    lp_normalize(x, p)[0].sum().backward()
    assert x.grad is not None and p.grad is not None
    assert x.grad.isfinite().all() and p.grad.isfinite() and p.grad != 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("p", PS)
def test_a_row_of_padding_gives_zeros_and_a_zero_gradient(p: float, dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0, 0.0, 0.0], [3.0, 0.0, -4.0]], dtype=dtype, requires_grad=True)
    unit = lp_normalize(x, p)
    (unit * torch.tensor([1.0, 2.0, 3.0], dtype=dtype)).sum().backward()
    assert unit.dtype == dtype and x.grad is not None
    assert (unit[0] == 0).all() and (x.grad[0] == 0).all()
    assert x.grad.isfinite().all() and (x.grad[1] != 0).any()


def test_eps_sets_what_counts_as_padding() -> None:
    x = torch.tensor([[1e-6, 0.0], [1e-4, 0.0]])
    assert lp_normalize(x, eps=1e-5).tolist() == [[0.0, 0.0], [1.0, 0.0]]


def test_half_precision_is_computed_in_float32() -> None:
    x = torch.full((1, 64), 300.0, dtype=torch.float16)  # its squares and their sum overflow float16
    torch.testing.assert_close(lp_normalize(x), torch.full_like(x, 0.125))
    y = rows(5, 100, 64, dtype=torch.bfloat16)
    assert torch.equal(lp_normalize(y, 3.0), lp_normalize(y.float(), 3.0).bfloat16())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("p", PS)
def test_nan_and_infinity_stay_visible(p: float, bad: float) -> None:
    unit = lp_normalize(torch.tensor([[1.0, bad, 2.0], [1.0, 1.0, 1.0]]), p)
    assert unit[0].isnan().all() and unit[1].isfinite().all()


@pytest.mark.parametrize("p", [0.5, 0.0, -1.0, math.nan, -math.inf, torch.tensor([2.0, 0.5]), torch.tensor(math.nan)])
def test_p_below_one_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        lp_normalize(torch.ones(2, 2), p)


def test_integers_are_refused() -> None:
    with pytest.raises(TypeError, match="floating-point"):
        lp_normalize(torch.ones(2, 2, dtype=torch.int64))


@pytest.mark.parametrize("dim", [0, 1, -2])
def test_any_dimension(dim: int) -> None:
    x = rows(6, 3, 4, 5)
    torch.testing.assert_close(lp_normalize(x, 3.0, dim=dim), lp_normalize(x.movedim(dim, -1), 3.0).movedim(-1, dim))


@pytest.mark.parametrize("size", [1e-30, 1e-14, 1.0, 1e14, 1e30])
def test_plain_squares_give_what_safe_ones_give(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    x = (size * torch.randn(3, 5, 16)).requires_grad_()
    weight = torch.randn(3, 5, 16)
    plain = direction._plain_direction(x.detach(), -1, torch.finfo(torch.float32).tiny)
    assert (plain is not None) == (1e-15 < size < 1e15)
    found = lp_normalize(x)
    (gradient,) = torch.autograd.grad((found * weight).sum(), x)
    monkeypatch.setattr(direction, "_plain_direction", lambda *_: None)
    safe = lp_normalize(x)
    torch.testing.assert_close(found, safe, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient, torch.autograd.grad((safe * weight).sum(), x)[0], rtol=1e-5, atol=1e-6 / size)


def test_a_tensor_that_stands_for_others_is_not_looked_at() -> None:
    seen = make_fx(lambda x: lp_normalize(x))(torch.randn(2, 4))
    torch.testing.assert_close(seen(torch.zeros(2, 4)), torch.zeros(2, 4))  # traced with numbers that were in range
    assert direction._plain_direction(torch.empty(0, 4), -1, 0.0) is None
    assert direction._plain_direction(torch.empty(2, 4, device="meta"), -1, 0.0) is None


@pytest.mark.parametrize("p", [*PS, "learned"])
def test_derivatives_both_ways_and_in_every_order(p: float | str) -> None:
    x = rows(20, 3, 5, dtype=torch.float64)
    x[1] = 0.0  # padding: zeros, and no gradient of any order
    learned = torch.tensor([[1.7], [2.5], [3.0]], dtype=torch.float64)

    def loss(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return lp_normalize(x, q if p == "learned" else p).sin().sum()  # type: ignore[arg-type]

    def both(transform: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
        return transform(function, argnums=(0, 1))

    fwd, rev = torch.func.jacfwd, torch.func.jacrev
    first = both(rev, loss)(x, learned)
    assert bool((first[0][1] == 0).all()) and bool((first[0][0] != 0).any())
    for found, expected in zip(both(fwd, loss)(x, learned), first, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    twice = [sum(both(a, both(b, loss))(x, learned), ()) for a, b in ((rev, rev), (fwd, rev), (rev, fwd), (fwd, fwd))]
    assert all(bool(each.isfinite().all()) for each in twice[0])
    assert bool((twice[0][0][1] == 0).all()) and bool((twice[0][0][0] != 0).any())
    for order in twice[1:]:
        for found, expected in zip(order, twice[0], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    if p == "learned":
        x, learned = rows(20, 3, 5, dtype=torch.float64).requires_grad_(), learned.requires_grad_()
        assert torch.autograd.gradcheck(lp_normalize, (x, learned), check_forward_ad=True)
        assert torch.autograd.gradgradcheck(lp_normalize, (x, learned), check_fwd_over_rev=True)


@pytest.mark.parametrize("p", [3.0, 4.0])
def test_zeros_give_numbers_in_double_backward(p: float) -> None:
    """Single zeros in a row, where p is learned: the slope of xlogy there was no number."""
    x = torch.tensor([[1.0, 0.0, -2.0], [0.0, 0.0, 0.0], [0.0, 3.0, 0.0]], dtype=torch.float64, requires_grad=True)
    q = torch.full((3, 1), p, dtype=torch.float64, requires_grad=True)
    first = torch.autograd.grad(lp_normalize(x, q).sin().sum(), (x, q), create_graph=True)
    found = torch.autograd.grad(sum(each.square().sum() for each in first), (x, q))
    near = (x.detach() + 1e-7 * torch.tensor([[1.0], [0.0], [1.0]], dtype=torch.float64)).requires_grad_()
    first = torch.autograd.grad(lp_normalize(near, q).sin().sum(), (near, q), create_graph=True)
    expected = torch.autograd.grad(sum(each.square().sum() for each in first), (near, q))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert bool((found[0][1] == 0).all()) and float(found[1][1]) == 0


def test_attention_derives_forward() -> None:
    q = rows(21, 1, 2, 3, 4, dtype=torch.float64)

    def output(q: torch.Tensor) -> torch.Tensor:
        return attend(q, q.flip(2), q, scale=3.0, p=2.0)

    expected = torch.einsum("...bhtd,bhtd->...", torch.func.jacrev(output)(q), q + 1)
    torch.testing.assert_close(torch.func.jvp(output, (q,), (q + 1,))[1], expected)
    assert torch.func.hessian(lambda q: output(q).sin().sum())(q).shape == (*q.shape, *q.shape)


def test_a_p_for_each_under_vmap() -> None:
    x, p = rows(22, 3, 4, 5), torch.tensor([2.0, 3.0, 4.5])
    expected = torch.stack([lp_normalize(each, float(one)) for each, one in zip(x, p, strict=True)])
    torch.testing.assert_close(torch.func.vmap(lp_normalize)(x, p), expected)
    slopes = torch.func.vmap(torch.func.grad(lambda p, x: lp_normalize(x, p).sin().sum()))(p, x)
    q = p.clone().requires_grad_()
    torch.testing.assert_close(slopes, torch.autograd.grad(lp_normalize(x, q.view(3, 1, 1)).sin().sum(), q)[0])
    for transformed in (
        torch.func.vmap(lp_normalize),
        torch.func.grad(lambda x, p: lp_normalize(x, p[:, None, None]).sum()),
    ):
        with pytest.raises(ValueError, match="every p must be at least 1"):
            transformed(x, torch.tensor([2.0, 0.5, 3.0]))


def test_works_under_vmap() -> None:
    x = rows(7, 3, 4, 5)
    torch.testing.assert_close(torch.vmap(lp_normalize)(x), lp_normalize(x))


def test_initial_scale_is_the_papers() -> None:
    assert initial_scale(79) == pytest.approx(12.589, abs=5e-4)  # TED Galician–English
    assert initial_scale(2) == 1.0
    for length in (1, 0, -5, math.nan):
        with pytest.raises(ValueError, match="at least 2"):
            initial_scale(length)


@pytest.mark.parametrize(
    ("p", "ratio"), [(1.0, 0.02), (1.5, 0.31), (2.0, 1.0), (2.5, 1.95), (3.0, 2.96), (3.5, 3.91), (4.0, 4.75)]
)
def test_matched_scale_at_head_64(p: float, ratio: float) -> None:
    assert 1 / matched_scale(1.0, p, 64) == pytest.approx(ratio, abs=0.0065)


@pytest.mark.parametrize("head_dim", [1, 2, 3, 16, 128])
@pytest.mark.parametrize("p", [1.0, 1.7, 3.0, 8.0, math.inf])
def test_matched_scale_gives_gaussians_the_spread_of_p_2(p: float, head_dim: int) -> None:
    q, k = rows(8, 50_000, head_dim), rows(9, 50_000, head_dim)
    spread = (lp_normalize(q, p) * lp_normalize(k, p)).sum(-1).std() * matched_scale(12.0, p, head_dim)
    assert float(spread) == pytest.approx(12.0 / math.sqrt(head_dim), rel=0.01)


def test_matched_scale_of_two_dimensions_in_closed_form() -> None:
    # E[‖q‖₂²/‖q‖₁²] over the circle is 2/π, and E[‖q‖₂²/max²] is 4/π
    assert matched_scale(1.0, 1.0, 2) == pytest.approx(math.pi / 2, rel=1e-4)
    assert matched_scale(1.0, math.inf, 2) == pytest.approx(math.pi / 4, rel=1e-4)


def test_qknorm_starts_where_it_is_told() -> None:
    assert float(QKNorm(8, 2, length=79).scale) == pytest.approx(initial_scale(79))
    assert float(QKNorm(8, 2, scale_init=5.0).scale) == 5.0
    assert float(QKNorm(16, 2, kind="none").scale) == 0.25
    assert QKNorm(8, 2, scale_per_head=True).scale.shape == (2,) and QKNorm(8, 2).scale.shape == (1,)
    q = rows(9, 1, 2, 3, 8)
    assert QKNorm(8, 2, dtype=torch.float64).scaled_query(q).dtype == q.dtype
    with pytest.raises(ValueError, match="not from both"):
        QKNorm(8, 2, scale_init=5.0, length=79)
    with pytest.raises(ValueError, match="not by 'l2'"):
        QKNorm(8, 2, kind="l2")  # type: ignore[arg-type]


def test_qknorm_scale_learns_unless_told_otherwise() -> None:
    assert isinstance(QKNorm(8, 2).scale, torch.nn.Parameter)
    fixed = QKNorm(8, 2, scale_learned=False)
    assert not list(fixed.parameters()) and "scale" in fixed.state_dict()
    assert not isinstance(QKNorm(8, 2, kind="rms").scale, torch.nn.Parameter)


def test_learned_p_starts_at_p_and_shares_within_groups() -> None:
    norm = QKNorm(8, 4, p=3.0, p_learned=True, num_kv_heads=2)
    assert isinstance(norm.p, torch.Tensor) and norm.p.shape == (2,)
    q, k = rows(10, 1, 4, 5, 8), rows(11, 1, 2, 5, 8)
    torch.testing.assert_close(norm.query(q), lp_normalize(q, 3.0))
    with torch.no_grad():
        norm.p_raw.copy_(torch.tensor([-20.0, 2.0]))  # p of 1 and of about 3.13
    torch.testing.assert_close(norm.query(q)[:, :2], lp_normalize(q[:, :2], 1.0))
    torch.testing.assert_close(norm.key(k)[:, :1], lp_normalize(k[:, :1], 1.0))
    (norm.query(q) * q**3).sum().backward()
    assert norm.p_raw.grad is not None and (norm.p_raw.grad != 0).all()
    with pytest.raises(ValueError, match="learned p"):
        QKNorm(8, 4, p=1.0, p_learned=True)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_rms_and_layer_are_torchs_norms_over_the_head(kind: str) -> None:
    norm = QKNorm(8, 2, kind=kind)  # type: ignore[arg-type]
    with torch.no_grad():
        norm.q_norm.weight.copy_(torch.arange(8.0))
    q = rows(12, 2, 2, 3, 8, dtype=torch.float64)
    centred = q - q.mean(-1, keepdim=True) if kind == "layer" else q
    expected = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * torch.arange(8.0)
    torch.testing.assert_close(norm.query(q.float()).double(), expected, rtol=1e-5, atol=1e-5)
    assert float(norm.scale) == pytest.approx(8**-0.5)


def test_none_is_the_identity_and_values_stay_unless_asked() -> None:
    q, v = rows(13, 1, 2, 3, 8), rows(14, 1, 2, 3, 8)
    none = QKNorm(8, 2, kind="none")
    assert none.query(q) is q and none.value(v) is v
    assert QKNorm(8, 2).value(v) is v
    torch.testing.assert_close(QKNorm(8, 2, normalize_values=True).value(v), lp_normalize(v))


def test_repr_says_what_matters() -> None:
    assert repr(QKNorm(64, 8, scale_init=12.5)) == "QKNorm(lp, head_dim=64, heads=8, p=2, scale learned from 12.5)"
    shown = repr(QKNorm(64, 8, p=3, p_learned=True, num_kv_heads=2, scale_per_head=True, normalize_values=True))
    for part in ("kv_heads=2", "p=3 learned from there", "per head", "values normalised too"):
        assert part in shown
