"""Blocks of keys that nobody sees, in the kernel of decoding steps: on a GPU, or in Triton's interpreter."""

import math

import pytest
import torch
from fused_decode_cases import DEVICE, check, draw_all, exact
from torch import Tensor

from qknorm.attention.fused_decode import Launch, attend_few

BLOCKS = Launch(16, 4, 2)
HIDDEN = {
    "start": [(0, 32)],
    "middle": [(16, 48)],
    "end": [(48, 80)],
    "end, within a block": [(37, 80)],
    "start and end": [(0, 16), (40, 80)],
    "all but one": [(0, 20), (21, 80)],
    "everywhere": [(0, 80)],
}


def draw_mask(where: str, kind: str, rows: int, s: int) -> Tensor:
    """Hidden there from every query, and from the first one everywhere if each has a row of its own."""
    mask = torch.randn(2, 1, rows, s, device=DEVICE)
    for first, last in HIDDEN[where]:
        mask[..., first:last] = -math.inf
    if rows > 1:
        mask[:, :, 0] = -math.inf
    return mask > -math.inf if kind == "bool" else mask.to(getattr(torch, kind))


@pytest.mark.parametrize("where", HIDDEN)
@pytest.mark.parametrize(("kind", "s"), [("bool", 80), ("bool", 75), ("bfloat16", 75), ("float32", 80)])
@pytest.mark.parametrize("rows", [1, 5])
def test_values_are_those_of_the_reference(where: str, kind: str, rows: int, s: int) -> None:
    q, k, v = draw_all(5, s, 16, h=4)
    mask = draw_mask(where, kind, rows, s)
    mask[1] = mask[1].flip(-1)  # another sentence, which sees other keys
    found = attend_few(q, k, v, 0.5, mask=mask, launch=BLOCKS)
    check(found, exact(q, k, v, 0.5, mask))
    if where == "everywhere":
        assert (found == 0).all()
    if rows > 1:
        assert (found[:, :, 0] == 0).all()


@pytest.mark.parametrize("kind", ["bool", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("last", [1, 16, 17, 63, 64, 70])
def test_after_the_last_key_that_someone_sees_nothing_is_read(kind: str, rows: int, last: int) -> None:
    q, k, v = draw_all(5, 70, 16)
    mask = torch.zeros(2, 1, rows, 70, device=DEVICE)
    mask[..., last:] = -math.inf
    mask[:, :, : rows - 1, last - 1] = -math.inf  # which only the last query sees
    mask[:, :, 0, 0] = 0.0
    mask = mask > -math.inf if kind == "bool" else mask.to(torch.bfloat16)
    expected = exact(q, k, v, 0.5, mask)
    k[:, :, last:], v[:, :, last:] = math.nan, math.inf
    for launch in (BLOCKS, None):
        check(attend_few(q, k, v, 0.5, mask=mask, launch=launch), expected)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("kind", ["bool", "float32"])
def test_nobody_who_sees_nothing_reads_what_is_not_a_number(rows: int, kind: str) -> None:
    q, k, v = draw_all(5, 70, 16)
    mask = torch.zeros(2, 1, rows, 70, device=DEVICE)
    mask[1] = -math.inf
    mask = mask > -math.inf if kind == "bool" else mask
    expected = exact(q, k, v, 0.5, mask)
    k[1], v[1] = math.nan, math.nan
    found = attend_few(q, k, v, 0.5, mask=mask)
    check(found, expected)
    assert (found[1] == 0).all()


def test_a_hidden_value_before_a_seen_key_still_spoils_all() -> None:
    q, k, v = draw_all(3, 70, 16, b=1)
    mask = torch.ones(1, 1, 1, 70, dtype=torch.bool, device=DEVICE)
    mask[..., 16:48] = False
    v[:, :, 20] = math.nan
    assert attend_few(q, k, v, 0.5, mask=mask, launch=BLOCKS).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_lowest_number_hides_no_block(dtype: torch.dtype) -> None:
    """It may be all that a query has."""
    q, k, v = draw_all(3, 80, 16)
    lowest = torch.finfo(dtype).min
    mask = torch.full((2, 1, 1, 80), -math.inf, dtype=dtype, device=DEVICE)
    mask[..., 64] = lowest
    found = attend_few(q, k, v, 0.5, mask=mask, launch=BLOCKS)
    torch.testing.assert_close(found, v[:, :, 64:65].expand(-1, -1, 3, -1))
    mask[..., 3] = 0.0
    found = attend_few(q, k, v, 0.5, mask=mask, launch=BLOCKS)
    torch.testing.assert_close(found, v[:, :, 3:4].expand(-1, -1, 3, -1))


def test_a_mask_that_is_not_a_number_is_told() -> None:
    q, k, v = draw_all(3, 80, 16)
    mask = torch.full((2, 1, 3, 80), -math.inf, device=DEVICE)
    mask[..., 2], mask[:, :, 1, 70] = 0.0, math.nan
    found = attend_few(q, k, v, 0.5, mask=mask, launch=BLOCKS)
    assert found[:, :, 1].isnan().all() and not found[:, :, ::2].isnan().any()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 4])
def test_padded_sources_and_rooms_of_real_models(rows: int) -> None:
    q, k, v = draw_all(4, 176, 64, h=8, kv=8, b=100)
    lengths = torch.randint(1, 177, (100, 1, 1, 1), device=DEVICE)
    seen = torch.arange(176, device=DEVICE) < lengths
    mask = torch.zeros(100, 1, rows, 176, device=DEVICE, dtype=torch.bfloat16).masked_fill(~seen, -math.inf)
    expected = exact(q, k, v, 0.5, mask)
    hidden = ~seen[:, 0, 0][:, None, :, None]
    k, v = k.masked_fill(hidden, math.nan), v.masked_fill(hidden, math.nan)
    check(attend_few(q, k, v, 0.5, mask=mask), expected)
    check(attend_few(q, k, v, 0.5, mask=seen.expand(-1, -1, rows, -1)), expected)
