"""When a loss is no number any more: which part of the model went first."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn


def name_first_bad_part(model: nn.Module, *inputs: Tensor) -> str:
    """In words, the first module in the order of computation whose output is not finite, and what went into it."""
    first: list[str] = []
    hooks = []

    def watch(name: str) -> Any:
        def look(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if first:
                return
            outputs = [x for x in (output if isinstance(output, tuple) else (output,)) if isinstance(x, Tensor)]
            if any(not x.isfinite().all() for x in outputs if x.is_floating_point()):
                sizes = [
                    float(x.detach().abs().max()) for x in inputs if isinstance(x, Tensor) and x.is_floating_point()
                ]
                largest = f" (largest input {max(sizes):.3g})" if sizes else ""
                first.append(f"the activations of {name} went first{largest}")

        return look

    for name, module in model.named_modules():
        if name and not list(module.children()):
            hooks.append(module.register_forward_hook(watch(name)))
    try:
        with torch.no_grad(), getattr(model, "uncompiled", nullcontext)():
            logits = model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    if first:
        return first[0]
    if logits.isnan().any() or logits.isposinf().any():  # −∞ stands where a type may not be produced
        return "the logits went first: all activations before them are finite"
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():  # torch's attention on the CPU makes zeros of queries that are NaN
            return f"{name} itself is not finite"
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            return f"all activations are finite, but the gradient of {name} is not"
    return "activations are finite when computed again, so it was the step's own dropout or rounding"
