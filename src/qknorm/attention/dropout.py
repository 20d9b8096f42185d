"""Dropout that does not wait for random numbers on the CPU, where PyTorch draws them slower than layers compute."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def dropout(x: Tensor, p: float) -> Tensor:
    """`x` with a share `p` of its entries set to zero and the others scaled up; repeatable by PyTorch's seed.

    On the CPU one draw of 64 bits decides on four entries, so that the share is a multiple of 1/65,536; transforms of
    torch.func, of which vmap has its own rules for random numbers, get PyTorch's.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"a share is between 0 and 1, got {p}")
    if p == 0 or x.numel() == 0:
        return x
    if p == 1:
        return x * 0.0
    if x.device.type != "cpu" or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return F.dropout(x, p)
    dropped = min(65_535, round(p * 65_536))
    draws = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    keep = draws.view(torch.int16)[: x.numel()].view(x.shape) >= dropped - 32_768
    return x * keep.to(x.dtype).mul_(65_536 / (65_536 - dropped))


class Dropout(nn.Module):
    """`dropout` in training, nothing otherwise."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p) if self.training else x

    def extra_repr(self) -> str:
        return f"p={self.p}"
