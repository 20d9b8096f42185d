"""Batches that calibrate: what their masks hide does not count, and those that cannot tell a scale are refused."""

import math

import pytest
import torch
from torch import Tensor, nn

from qknorm.attention.adopt import adopt

WIDTH, HEADS = 16, 4


@pytest.mark.parametrize("hides", [-1e9, -1e4, torch.finfo(torch.float32).min])
def test_calibration_does_not_count_what_a_float_mask_hides(hides: float) -> None:
    x = torch.randn(4, 8, WIDTH)
    x[:, 5:] *= 20
    starts = []
    for number in (-torch.inf, hides):
        torch.manual_seed(1)
        module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        padding = torch.zeros(4, 8)
        padding[:, 5:] = number
        masks = {"key_padding_mask": padding, "attn_mask": torch.full((8, 8), number).triu(1)}
        batch = {"query": x, "key": x, "value": x, **masks}
        starts.append(adopt(module, calibrate=batch).changed[0].start)
    assert starts[1] == pytest.approx(starts[0])


@pytest.mark.parametrize("causal", [False, True])
def test_queries_of_padding_do_not_count(causal: bool) -> None:
    x = torch.randn(4, 8, WIDTH)
    starts = []
    for pad in (0, 24):
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True)
        source = torch.cat([x, torch.full((4, pad, WIDTH), 5.0)], dim=1)
        hidden = (torch.arange(8 + pad) >= 8).expand(4, -1)
        later = torch.ones(8 + pad, 8 + pad, dtype=torch.bool).triu(1) if causal else None
        batch = {"src": source, "src_mask": later, "src_key_padding_mask": hidden}
        starts.append(adopt(layer, calibrate=batch).changed[0].start)
    assert starts[1] == pytest.approx(starts[0])


def test_in_cross_attention_padding_of_the_keys_says_nothing_of_the_queries() -> None:
    x, y = torch.randn(2, 4, 8, WIDTH)
    hidden = (torch.arange(8) >= 5).expand(4, -1)
    starts = []
    for times in (1.0, 20.0):
        torch.manual_seed(1)
        module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        x[:, 5:] *= times
        batch = {"query": x, "key": y, "value": y, "key_padding_mask": hidden}
        starts.append(adopt(module, calibrate=batch).changed[0].start)
    assert starts[1] > 5 * starts[0]


def test_calibration_that_cannot_be() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = (nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x, x, x)[0]

    model = Unused()
    with pytest.raises(ValueError, match="the calibration batch never reached idle"):
        adopt(model, calibrate=torch.randn(2, 5, WIDTH))
    with pytest.raises(ValueError, match="the logits of used do not vary"):
        adopt(model, calibrate=torch.randn(2, 1, WIDTH), only="used")
    with pytest.raises(ValueError, match="are not finite"):
        adopt(model, calibrate=torch.full((2, 5, WIDTH), math.nan), only="used")
    assert type(model.used) is type(model.idle) is nn.MultiheadAttention
    assert not model.used._forward_pre_hooks
    adopt(model, calibrate=(torch.randn(2, 5, WIDTH),), only="used")
