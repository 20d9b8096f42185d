"""What the fused attentions of one training pass may share, so that none of them starts small kernels of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor


class TrainingPass(Protocol):
    """A seed for all dropout of a pass, and places where gradients of its parameters add up."""

    @property
    def seed(self) -> Tensor:
        """One int64 number on the device."""

    def next_site(self) -> int:
        """A number for each place that drops."""

    def gradient_place(self, weight: Tensor) -> Tensor | None:
        """Where to add the float32 gradient of a parameter, or of a view of one; None where autograd must carry it."""


_SHARED: ContextVar[TrainingPass | None] = ContextVar("shared_pass", default=None)


@contextmanager
def share(training_pass: TrainingPass) -> Iterator[None]:
    """Within it, fused attention draws from the pass's seed, and its backward adds the scale's gradient in place."""
    token = _SHARED.set(training_pass)
    try:
        yield
    finally:
        _SHARED.reset(token)


def shared_pass() -> TrainingPass | None:
    """The pass under way that shares, if one does; none for torch.compile, which knows nothing of it."""
    return None if torch.compiler.is_compiling() else _SHARED.get()
