"""Whether a computation may depend on the numbers that its tensors hold."""

import torch
from torch import Tensor, nn


def may_look_at(*tensors: Tensor) -> bool:
    """Whether these hold numbers of their own, and nobody follows what is done with them to repeat it with others."""
    if torch.compiler.is_compiling() or any(type(x) not in (Tensor, nn.Parameter) for x in tensors):
        return False
    followed = torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None
    return not followed and not torch._C._len_torch_dispatch_stack()
