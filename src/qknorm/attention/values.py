"""Whether a computation may depend on the numbers that its tensors hold, and what is asked of it beyond them."""

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
"""Whether torch.export looks on; PyTorch 2.6 does not tell it from torch.compile."""


def may_look_at(*tensors: Tensor) -> bool:
    """Whether these hold numbers of their own, and nobody follows what is done with them to repeat it with others."""
    if torch.compiler.is_compiling() or stand_for_others(*tensors) or someone_follows():
        return False
    return not any(x.is_meta for x in tensors)


def stand_for_others(*tensors: Tensor) -> bool:
    """Whether some are fake, nested, of another subclass, or batched or traced by a transform."""
    if any(type(x) not in (Tensor, nn.Parameter) for x in tensors):
        return True
    return torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None


def someone_follows() -> bool:
    """Whether a dispatch mode sees every operation."""
    return bool(torch._C._len_torch_dispatch_stack())


def derives_forward() -> bool:
    """Whether forward-mode derivatives may be asked for, as by torch.func.jvp, jacfwd and hessian."""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def numbers_of(x: Tensor) -> Tensor:
    """What a tensor holds beneath the wrappers of torch.func, all that vmap goes over included."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x
