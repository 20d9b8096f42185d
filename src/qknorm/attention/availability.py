"""Whether Triton and our kernels can be had, known without importing it."""

import importlib.util
import os

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
OLDEST_WITH_KERNELS = "2.9"
"""The PyTorch that brings Triton 3.5: earlier ones do not compile all of our kernels, or into more shared memory."""
HAS_KERNELS = HAS_TRITON and torch.__version__ >= OLDEST_WITH_KERNELS
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter is chosen, which runs kernels on any device; to be done before anything is imported."""


def why_no_kernels(x: Tensor) -> str | None:
    """Why kernels cannot run on tensors that are where this one is; None if they can."""
    if not (x.is_cuda or INTERPRETED):
        return f"the tensors are on {x.device.type}, not on a GPU"
    if HAS_KERNELS:
        return None
    return (
        f"PyTorch {torch.__version__} is older than {OLDEST_WITH_KERNELS}" if HAS_TRITON else "triton is not installed"
    )
