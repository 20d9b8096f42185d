"""A torchvision that was built for another torch, such as a CUDA build beside a CPU torch, must not stop transformers.

transformers and timm import torchvision where they find it, and such a one fails at that for want of two operators of
its own. Nothing that handles text calls them: declaring them lets it be imported.
"""

import importlib
from typing import Any

import torch

_declared: list[Any] = []  # operators live as long as the library object that declared them


def tolerate_any_torchvision() -> None:
    """Makes a torchvision that cannot be imported for that reason importable; does nothing otherwise."""
    try:
        importlib.import_module("torchvision")
    except ImportError:
        pass
    except RuntimeError:
        operators = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for operator in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, operator):
                signature = f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                operators.define(signature)  # type: ignore[no-untyped-call]
        _declared.append(operators)
