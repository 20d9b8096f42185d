import math
import re
from types import SimpleNamespace
from typing import Any

import naive
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qknorm import attend, attend_with_weights, lp_normalize
from qknorm.attention import causal_mask, rotary_angles, rotate
from qknorm.attention.attend import may_fuse

PS = [None, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, math.inf]
BACKENDS = ["reference", "sdpa", "auto"]
seeds = st.integers(0, 2**31)


def draw(seed: int, b: int = 2, h: int = 4, kv: int = 4, t: int = 5, s: int = 7, d: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(b, h, t, d), (b, kv, s, d), (b, kv, s, d)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def visible_to(case: str, b: int, h: int, t: int, s: int) -> Tensor | None:
    """The boolean (b, h, t, s) mask of a named case."""
    if case == "none":
        return None
    if case == "causal":
        return causal_mask(t, s).expand(b, h, t, s)
    generator = torch.Generator().manual_seed(t * s)
    mask = torch.rand(b, h, t, s, generator=generator) < 0.6
    mask[0, :, 0] = False  # a query that sees nothing
    return mask


@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ["none", "causal", "boolean", "additive"])
@pytest.mark.parametrize("kv", [4, 2, 1])
def test_values_and_gradients_equal_the_naive_computation(p: float | None, backend: str, case: str, kv: int) -> None:
    inputs = [x.requires_grad_() for x in draw(1, kv=kv)]
    scale = torch.tensor([0.5, 3.0, 7.0, 12.0], dtype=torch.float64, requires_grad=True)
    visible = visible_to(case, 2, 4, 5, 7)
    weight = torch.randn(2, 4, 5, 8, dtype=torch.float64)
    expected = naive.attention(*inputs, p=p, scale=scale, visible=visible)
    expected_gradients = torch.autograd.grad((expected * weight).sum(), [*inputs, scale])

    mask = visible if case in ("boolean", "additive") else None
    if case == "additive" and mask is not None:
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)
    found = attend(*inputs, scale=scale, p=p, mask=mask, is_causal=case == "causal", backend=backend)  # type: ignore[arg-type]
    gradients = torch.autograd.grad((found * weight).sum(), [*inputs, scale])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    for mine, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("s", [1, 2, 3, 64, 257])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_to_many_keys(s: int, backend: str) -> None:
    q, k, v = draw(2, s=s)
    expected = naive.attention(q, k, v, p=2.0, scale=12.0)
    torch.testing.assert_close(attend(q, k, v, scale=12.0, p=2.0, backend=backend), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 0.06), (torch.float16, 8e-3)])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("p", [None, 1.0, 2.0, 3.0])
def test_dtypes(dtype: torch.dtype, tolerance: float, backend: str, p: float | None) -> None:
    q, k, v = (x.to(dtype) for x in draw(3))
    expected = naive.attention(q.double(), k.double(), v.double(), p=p, scale=2.0)
    found = attend(q, k, v, scale=torch.tensor(2.0), p=p, backend=backend)  # type: ignore[arg-type]
    assert found.dtype == dtype
    error = (found.double() - expected).norm() / expected.norm()
    assert error < tolerance


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_boolean_and_an_additive_mask_join_the_causal_one(backend: str) -> None:
    q, k, v = draw(4, t=6, s=6)
    padding = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    padding[1, ..., 4:] = False
    expected = naive.attention(q, k, v, p=2.0, scale=9.0, visible=(padding & causal_mask(6, 6)).expand(2, 4, 6, 6))
    additive = torch.zeros(2, 1, 1, 6).masked_fill(~padding, -math.inf).expand(2, 1, 6, 6)
    for mask in (padding, additive):
        found = attend(q, k, v, scale=9.0, p=2.0, mask=mask, is_causal=True, backend=backend)  # type: ignore[arg-type]
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("t", "s"), [(1, 6), (2, 6), (6, 6), (6, 2)])
def test_causal_aligns_to_the_end(backend: str, t: int, s: int) -> None:
    q, k, v = draw(5, t=t, s=s)
    visible = torch.tensor([[j <= i + s - t for j in range(s)] for i in range(t)]).expand(2, 4, t, s)
    found = attend(q, k, v, scale=9.0, p=2.0, is_causal=True, backend=backend)  # type: ignore[arg-type]
    torch.testing.assert_close(found, naive.attention(q, k, v, p=2.0, scale=9.0, visible=visible))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("additive", [False, True])
def test_queries_that_see_nothing_get_zeros_and_no_nan(dtype: torch.dtype, backend: str, additive: bool) -> None:
    q, k, v = (x.to(dtype).requires_grad_() for x in draw(6))
    mask = torch.zeros(2, 1, 5, 7, dtype=torch.bool)
    mask[1] = True
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    output = attend(q, k, v, scale=9.0, p=2.0, mask=mask, backend=backend)  # type: ignore[arg-type]
    assert (output[0] == 0).all() and (output[1] != 0).any()
    output.sum().backward()
    for x in (q, k, v):
        assert x.grad is not None and x.grad.isfinite().all() and (x.grad[0] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_keeps_the_mean_and_changes_the_values(backend: str) -> None:
    q, k, v = (x.float() for x in draw(7, b=1, h=1, kv=1, t=1, s=4))
    repeated = [x.expand(4_000, -1, -1, -1) for x in (q, k, v)]
    dropped = attend(*repeated, scale=2.0, p=2.0, dropout=0.3, backend=backend)  # type: ignore[arg-type]
    assert dropped.std(dim=0).max() > 0.1
    torch.testing.assert_close(dropped.mean(0), attend(q, k, v, scale=2.0, p=2.0)[0], atol=0.08, rtol=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast(dtype: torch.dtype, backend: str) -> None:
    q, k, v = (x.float() for x in draw(8))
    with torch.autocast("cpu", dtype=dtype):
        found = attend(q, k, v, scale=torch.tensor([5.0] * 4), p=2.0, backend=backend)  # type: ignore[arg-type]
    torch.testing.assert_close(found.float(), attend(q, k, v, scale=5.0, p=2.0), atol=0.06, rtol=0.06)


def test_the_papers_example_of_saturation() -> None:
    # softmax sees only differences: both rows are [0.99962, 0.00034, 0.00005] in the paper
    v = torch.eye(3, dtype=torch.float64).view(1, 1, 3, 3)
    for row in ([760.0, 752.0, 750.0], [12.0, 4.0, 2.0]):
        k = torch.tensor(row, dtype=torch.float64).view(1, 1, 3, 1)
        q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
        weights = attend_with_weights(q, k, v, scale=1.0).weights.flatten()
        golden = [
            0.9996192824433974,
            0.0003353349113904853,
            4.5382645212155744e-05,
        ]  # e⁰, e⁻⁸ and e⁻¹⁰ over their sum, worked out with decimal to 40 digits
        assert weights.tolist() == pytest.approx(golden, abs=1e-12)
        assert [round(w, 5) for w in weights.tolist()] == [0.99962, 0.00034, 0.00005]
        assert attend(q, k, v, scale=1.0, backend="sdpa").flatten().tolist() == pytest.approx(golden, abs=1e-12)


@given(seed=seeds, sizes=st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=2), p=st.sampled_from(PS[1:]))
def test_the_size_of_a_query_or_key_changes_nothing(seed: int, sizes: list[float], p: float) -> None:
    q, k, v = draw(seed)
    before = attend(q, k, v, scale=10.0, p=p)
    q[1, 2, 3] *= sizes[0]
    k[0, 1, 2] *= sizes[1]
    torch.testing.assert_close(attend(q, k, v, scale=10.0, p=p), before)


@given(seed=seeds, p=st.sampled_from(PS[1:]), scale=st.floats(0.1, 100), exponent=st.floats(-20, 20))
def test_logits_are_bounded(seed: int, p: float, scale: float, exponent: float) -> None:
    q, k, v = draw(seed)
    logits = attend_with_weights(q * 10**exponent, k, v, scale=scale, p=p).logits
    bound = scale * max(1.0, q.shape[-1] ** (1 - 2 / p))
    assert logits.abs().max() <= bound * (1 + 1e-9)
    aligned = attend_with_weights(q, q, q, scale=scale, p=2.0).logits.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(aligned, torch.full_like(aligned, scale))  # and the bound is reached


@given(seed=seeds, p=st.sampled_from(PS), backend=st.sampled_from(BACKENDS))
def test_the_order_of_keys_does_not_matter(seed: int, p: float | None, backend: str) -> None:
    q, k, v = draw(seed)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
    shuffled = attend(q, k[:, :, order], v[:, :, order], scale=3.0, p=p, backend=backend)  # type: ignore[arg-type]
    torch.testing.assert_close(shuffled, attend(q, k, v, scale=3.0, p=p, backend=backend))  # type: ignore[arg-type]


finite = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**120), max_value=2.0**120)


@given(
    values=st.lists(finite, min_size=8, max_size=8),
    p=st.sampled_from(PS[1:]),
    backend=st.sampled_from(BACKENDS),
    scale=st.floats(0, 1000),
)
def test_no_nan_for_finite_queries_and_keys(values: list[float], p: float, backend: str, scale: float) -> None:
    q = torch.tensor(values[:4]).view(1, 1, 2, 2)
    k = torch.tensor(values[4:]).view(1, 1, 2, 2)
    v = torch.ones(1, 1, 2, 2)
    assert attend(q, k, v, scale=scale, p=p, backend=backend).isfinite().all()  # type: ignore[arg-type]


@pytest.mark.parametrize("p", [1.0, 2.0, 4.0])
def test_rotating_commutes_with_the_l2_norm_alone(p: float) -> None:
    q = draw(9)[0]
    angles = rotary_angles(torch.arange(5), 8)
    before, after = lp_normalize(rotate(q, angles), p), rotate(lp_normalize(q, p), angles)
    if p == 2.0:
        torch.testing.assert_close(before, after)
    else:
        assert (before - after).abs().max() > 0.01


def test_rotation_is_relative_and_keeps_length() -> None:
    q, k, _ = draw(10, b=1, h=1, kv=1, t=1, s=1)
    products = []
    for shift in (0, 3, 100):
        at = [rotate(x, rotary_angles(torch.tensor([i + shift]), 8)) for x, i in ((q, 5), (k, 2))]
        products.append((at[0] * at[1]).sum())
        torch.testing.assert_close(at[0].norm(), q.norm())
    torch.testing.assert_close(products[0], products[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(products[0], products[2], atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="even"):
        rotary_angles(torch.arange(3), 7)


def test_bad_shapes_are_named() -> None:
    q, k, v = draw(11)
    with pytest.raises(ValueError, match="batch, heads, time"):
        attend(q[0], k, v, scale=1.0)
    with pytest.raises(ValueError, match="agree"):
        attend(q, k, v[:, :, :3], scale=1.0)
    with pytest.raises(ValueError, match="head_dim"):
        attend(q[..., :4], k, v, scale=1.0)
    with pytest.raises(ValueError, match="share"):
        attend(q, k[:, :3], v[:, :3], scale=1.0)
    with pytest.raises(ValueError, match="one a head"):
        attend(q, k, v, scale=torch.ones(3))
    with pytest.raises(ValueError, match="backend"):
        attend(q, k, v, scale=1.0, backend="fast")  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mask_of_whole_numbers_or_of_another_shape_is_refused(backend: str) -> None:
    q, k, v = draw(11)
    (b, h, t, _), s = q.shape, k.shape[2]
    for dtype in (torch.int64, torch.int32, torch.uint8):  # a tokenizer's 0 and 1, which would be added to the logits
        with pytest.raises(ValueError, match=rf"mask is {dtype}; give bool \(True = may attend\)"):
            attend(q, k, v, scale=1.0, mask=torch.ones(t, s, dtype=dtype), backend=backend)  # type: ignore[arg-type]
    seen = torch.ones(b, h, t, s, dtype=torch.bool)
    for wrong in (seen[..., :-1], seen[:, :, :-1], seen[:, :3], seen[None]):
        shape = re.escape(str(tuple(wrong.shape)))
        with pytest.raises(ValueError, match=rf"{shape} does not fit .* {re.escape(str((b, h, t, s)))}"):
            attend(q, k, v, scale=1.0, mask=wrong, backend=backend)  # type: ignore[arg-type]
    plain = attend(q, k, v, scale=1.0, backend=backend)  # type: ignore[arg-type]
    for fits in (seen, seen[:1], seen[:, :1, :1], seen[0, 0], seen[0, 0, 0], seen[0, 0, 0, 0]):
        torch.testing.assert_close(attend(q, k, v, scale=1.0, mask=fits, backend=backend), plain)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "capability", "half"),
    [
        (torch.bfloat16, (9, 0), True),
        (torch.float16, (8, 0), True),
        (torch.float16, (7, 5), False),  # 64 KiB of shared memory, the backward kernel wants 128
        (torch.float32, (9, 0), False),
        (torch.float64, (9, 0), False),
    ],
)
def test_auto_thinks_of_the_attention_kernels_in_half_precision_on_gpus_that_can(
    dtype: torch.dtype, capability: tuple[int, int], half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    x: Any = SimpleNamespace(is_cuda=True, dtype=dtype, device=torch.device("cuda", 0))
    assert may_fuse("auto", x) is half and may_fuse("fused", x) and not may_fuse("sdpa", x)
    with torch.autocast("cpu"):
        assert may_fuse("auto", x) is half
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    assert may_fuse("auto", x) is (dtype != torch.float64 and capability >= (8, 0))
    assert not may_fuse("auto", torch.zeros(1, dtype=torch.bfloat16))


@pytest.mark.parametrize("kv", [4, 2])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.*:DeprecationWarning")
def test_it_can_be_traced(kv: int) -> None:
    first, second = draw(1, kv=kv), draw(2, kv=kv)
    traced = torch.jit.trace(lambda *x: attend(*x, scale=0.5), first)
    torch.testing.assert_close(traced(*second), attend(*second, scale=0.5))


@pytest.mark.parametrize(
    ("queries", "keys", "learns"), [(1, 90, False), (16, 7, False), (17, 7, False), (64, 64, True)]
)
def test_plain_products_on_the_cpu_are_what_pytorchs_kernels_give(queries: int, keys: int, learns: bool) -> None:
    q, k, v = (torch.randn(2, 4, n, 16, requires_grad=learns) for n in (queries, keys, keys))
    mask = torch.rand(2, 1, 1, keys) > 0.3
    mask[1] = False  # a sentence that nobody may look at
    results = []
    for backend in ("auto", "sdpa"):
        out = attend(q, k, v, scale=0.25, mask=mask, backend=backend)  # type: ignore[arg-type]
        results.append([out, *(torch.autograd.grad(out.square().sum(), (q, k, v)) if learns else ())])
    for plain, kernels in zip(*results, strict=True):
        torch.testing.assert_close(plain, kernels, atol=1e-5, rtol=1e-5)
    assert not results[0][0][1].any()


def test_a_function_in_the_place_of_pytorchs_changes_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(1, 2, n, 8) for n in (1, 5, 5))
    expected, real = attend(q, k, v, scale=1.0), torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *x, **how: real(*x, **how))
    assert torch.equal(attend(q, k, v, scale=1.0), expected)


def test_autocast_on_the_cpu_gives_half_precision_for_few_queries_too() -> None:
    q, k, v = (torch.randn(1, 2, n, 8) for n in (1, 5, 5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attend(q, k, v, scale=1.0).dtype == torch.bfloat16
