"""What `attend` makes of its arguments: p by head, and masks so low that the type it computes in cannot hold them."""

from typing import Any

import naive
import pytest
import torch
from torch import Tensor

from qknorm import MultiheadAttention, attend, attend_with_weights
from qknorm.attention import Visibility
from qknorm.attention.norm import Backend

BACKENDS: list[Backend] = ["reference", "sdpa", "auto"]


def draw(h: int = 4, kv: int = 4, d: int = 8, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(2, heads, n, d, dtype=dtype) for heads, n in ((h, 5), (kv, 7), (kv, 7))]


# ------------------------------------------------------------------ p and the scale by head


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("d", [8, 4])  # as many coordinates as heads, and more
def test_p_of_one_number_a_head_is_by_head(backend: Backend, d: int) -> None:
    q, k, v = draw(d=d)
    p = torch.tensor([1.0, 1.5, 2.0, 4.0], dtype=torch.float64, requires_grad=True)
    found = attend(q, k, v, scale=3.0, p=p, backend=backend)
    parts = [
        naive.attention(*(x[:, [i]] for x in (q, k, v)), p=each, scale=torch.tensor(3.0))
        for i, each in enumerate(p.tolist())
    ]
    torch.testing.assert_close(found, torch.cat(parts, dim=1))
    one = attend(q, k, v, scale=3.0, p=p.view(4, 1, 1), backend=backend)
    torch.testing.assert_close(found, one)
    for x, y in zip(*(torch.autograd.grad(x.square().sum(), p) for x in (found, one)), strict=True):
        torch.testing.assert_close(x, y)
    torch.testing.assert_close(attend_with_weights(q, k, v, scale=3.0, p=p).output, found)


def test_keys_that_heads_share_have_the_p_of_the_first() -> None:
    q, k, v = draw(kv=2)
    found = attend(q, k, v, scale=3.0, p=torch.tensor([1.0, 1.0, 3.0, 3.0]))
    for i, p in enumerate((1.0, 3.0)):
        part = attend(q[:, 2 * i : 2 * i + 2], k[:, [i]], v[:, [i]], scale=3.0, p=p)
        torch.testing.assert_close(found[:, 2 * i : 2 * i + 2], part)


@pytest.mark.parametrize("backend", BACKENDS)
def test_p_of_another_number_is_refused(backend: Backend) -> None:
    with pytest.raises(ValueError, match="p has 8 numbers for 4 heads; give one, or one a head"):
        attend(*draw(), scale=1.0, p=torch.full((8,), 2.0), backend=backend)
    torch.testing.assert_close(
        attend(*(xs := draw()), scale=1.0, p=torch.tensor([3.0]), backend=backend), attend(*xs, scale=1.0, p=3.0)
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("p", [None, 2.0])
def test_a_wider_scale_by_head_is_rounded_and_not_refused(backend: Backend, p: float | None) -> None:
    q, k, v = draw(dtype=torch.float32)
    scale = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)
    found = attend(q, k, v, scale=scale, p=p, backend=backend)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, attend(q, k, v, scale=scale.float(), p=p, backend=backend))


# ------------------------------------------------------------------ what hides


LOW = [
    (torch.float16, torch.float32, -1e9),
    (torch.bfloat16, torch.float32, torch.finfo(torch.float32).min),
    (torch.float32, torch.float64, -1e300),
]


def masks(dtype: torch.dtype, low: float, kind: str) -> Any:
    mask = torch.zeros(2, 1, 5, 7, dtype=dtype)
    mask[..., 4:] = low  # of most rows some keys
    mask[0, 0, 1] = low  # of one all
    return Visibility.of(mask) if kind == "ready" else mask


@pytest.mark.parametrize(("dtype", "mask_dtype", "low"), LOW)
@pytest.mark.parametrize("kind", ["plain", "ready"])
@pytest.mark.parametrize("causal", [False, True])
def test_numbers_too_low_for_the_queries_type_hide(
    dtype: torch.dtype, mask_dtype: torch.dtype, low: float, kind: str, causal: bool
) -> None:
    q, k, v = draw(dtype=dtype)
    visible = masks(mask_dtype, low, "plain") == 0
    expected = attend_with_weights(q, k, v, scale=0.5, p=2.0, mask=visible, is_causal=causal).output
    assert not expected[0, :, 1].any() and bool(expected[0, :, 2].any())
    for backend in BACKENDS:
        given = masks(mask_dtype, low, kind)
        found = attend(q, k, v, scale=0.5, p=2.0, mask=given, is_causal=causal, backend=backend)
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
        assert not found[0, :, 1].any()


def test_under_autocast_it_is_the_type_that_autocast_computes_in() -> None:
    q, k, v = draw(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.float16):
        rows = [attend(q, k, v, scale=0.5, mask=masks(torch.float32, -1e9, "plain"), backend=how) for how in BACKENDS]
    for found in rows:
        assert not found[0, :, 1].any() and bool(found[0, :, 2].any()) and bool(found.isfinite().all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_finite_numbers_hide_nothing_from_a_row_of_them(backend: Backend) -> None:
    q, k, v = draw(dtype=torch.float32)
    found = attend(q, k, v, scale=0.5, mask=masks(torch.float32, -1e9, "plain"), backend=backend)
    torch.testing.assert_close(found[0, :, 1], v[0].mean(dim=1), atol=1e-5, rtol=1e-5)


def test_the_module_does_as_attend_does() -> None:
    module = MultiheadAttention(16, 2, batch_first=True).half().eval()
    x = torch.randn(2, 5, 16).half()
    mask = torch.zeros(5, 5)
    mask[3] = -1e9
    with torch.no_grad():
        with_weights, weights = module(x, x, x, attn_mask=mask)
        without = module(x, x, x, attn_mask=mask, need_weights=False)[0]
    torch.testing.assert_close(with_weights, without, atol=1e-2, rtol=1e-2)
    assert weights is not None and not weights[:, 3].any()
    torch.testing.assert_close(without[:, 3], module.out_proj.bias.expand(2, -1))
