"""Whether Triton's kernels can be had, known without importing it."""

import importlib.util
import os

from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter is chosen, which runs kernels on any device; to be done before anything is imported."""


def why_no_kernels(x: Tensor) -> str | None:
    """Why kernels cannot run on tensors that are where this one is; None if they can."""
    if not (x.is_cuda or INTERPRETED):
        return f"the tensors are on {x.device.type}, not on a GPU"
    return None if HAS_TRITON else "triton is not installed"
