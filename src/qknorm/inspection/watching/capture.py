"""A model under watch, for a time."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from qknorm.inspection.watching import hugging_face, ours, product, timm_vit, torch_native
from qknorm.inspection.watching.call import Call
from qknorm.inspection.watching.tape import Tape, module_names, replaced, wrapping

_SOURCES = (product, ours, torch_native, timm_vit, hugging_face)
WATCHING = threading.RLock()
"""Held while anything is watched: functions that all models share are replaced then, and put back in reverse order."""


class Calls(list[Call]):
    """The attentions that ran, in order; `unseen` names those that ran and could not be seen, with the reason."""

    def __init__(self) -> None:
        super().__init__()
        self.unseen: dict[str, str] = {}


@contextmanager
def capture(model: nn.Module) -> Iterator[Calls]:
    """Collects a `Call` for every attention that runs within it; outputs and gradients of the model stay the same.

    The calls hold copies: use it for a few forward passes at a time, and `AttentionMonitor` to watch a training.
    """
    calls = Calls()
    with watch(model, lambda call: calls.append(call.copied())) as tape:
        calls.unseen = tape.unseen
        yield calls


@contextmanager
def watch(
    model: nn.Module,
    on_call: Callable[[Call], None],
    sentences: Callable[[Call], int] = lambda call: len(call.q),
    *,
    eager: bool = False,
) -> Iterator[Tape]:
    """Tells `on_call` of every attention that runs within it, cut to its first `sentences`, before it is computed.

    What is compiled is left alone and named as unseen, unless `eager` promises that it runs as it was written.
    """
    tape = Tape(model, on_call, sentences)
    compiled = [] if eager else compiled_parts(model)
    tape.unseen |= dict.fromkeys(compiled, "it is compiled; AttentionMonitor.probe looks inside, in a pass of its own")
    if compiled:  # replacing anything would have it compiled again
        yield tape
        return
    with WATCHING, ExitStack() as stack:
        for source in _SOURCES:
            stack.enter_context(source.watch(model, tape))
        for module in model.modules():
            if _may_be_followed(module):
                stack.enter_context(replaced(module, "forward", wrapping(module.forward, _follow(tape, module))))
        yield tape


def compiled_parts(model: nn.Module) -> list[str]:
    """The names of modules that torch.compile made, or whose call or parts it compiled."""
    names = module_names(model)
    return [
        names[module]
        for module in model.modules()
        if type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
        or (hasattr(module, "uncompiled") and module.training and getattr(module, "_compiled", None))  # our models
    ]


def _follow(tape: Tape, module: nn.Module) -> Callable[..., Any]:
    def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with tape.run(module, args, kwargs):
            return original(*args, **kwargs)

    return forward


def _may_be_followed(module: nn.Module) -> bool:
    """Whether attention may happen in it: it has parts, or is somebody's own."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    return next(module.children(), None) is not None or not type(module).__module__.startswith("torch.nn.")
