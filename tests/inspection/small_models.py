"""Small models and steps of training that tests of the inspection share."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qknorm.config import Model
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
    assert one[1] and len(one[1]) == len(other[1])
    assert all(map(torch.equal, one[1], other[1]))


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
