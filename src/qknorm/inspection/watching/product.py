"""Any module that calls torch.nn.functional.scaled_dot_product_attention, by whomever it was written.

The function is replaced, and nothing else followed: a mode that sees every function of torch's would have its encoders
leave their fast path, and code that is compiled compiled again.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qknorm.attention import QKNorm
from qknorm.attention.adopting.family import real_queries
from qknorm.inspection.watching.call import Call
from qknorm.inspection.watching.ours import scale_apart
from qknorm.inspection.watching.tape import Frame, Tape, replaced, wrapping


@contextmanager
def watch(model: nn.Module, tape: Tape) -> Iterator[None]:
    """Tells of every call of this function that no other source speaks for."""
    function = F.scaled_dot_product_attention
    told = wrapping(function, _tell(tape))
    with ExitStack() as stack:
        stack.enter_context(replaced(F, "scaled_dot_product_attention", told))
        for home, name in _imported(function, model):
            stack.enter_context(replaced(home, name, told))
        yield


def _imported(function: Callable[..., Any], model: nn.Module) -> list[tuple[ModuleType, str]]:
    """Where the packages that the model's classes come from know the function by a name of their own."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    packages = {kind.__module__.partition(".")[0] for kind in kinds} - {"torch", "builtins"}
    homes = [home for name, home in list(sys.modules.items()) if name.partition(".")[0] in packages]
    return [
        (home, name)
        for home in dict.fromkeys(homes)
        if isinstance(home, ModuleType)
        for name, value in list(vars(home).items())
        if value is function
    ]


def _tell(tape: Tape) -> Callable[..., Any]:
    def attend(
        original: Callable[..., Any],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> Any:
        frame = tape.top
        if frame is not None and not tape.is_claimed:
            tape.tell(frame.name, lambda: _call(frame, query, key, value, attn_mask, is_causal, more.get("scale")))
        return original(query, key, value, attn_mask, dropout_p, is_causal, **more)

    return attend


def _call(
    frame: Frame, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Call:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v, mask = _four_dimensional(q, k, v, mask)
    t, s = q.shape[2], k.shape[2]
    if is_causal and t != s:  # this function aligns the first query with the first key
        mask, is_causal = torch.ones(t, s, dtype=torch.bool, device=q.device).tril()[None, None], False
    queries = real_queries(mask, len(q), t, s) if frame.attends_to_itself else None
    call = Call(frame.name, q, k, v, scale, mask, is_causal, queries=queries, **frame.notes.get("raw", {}))
    norm = getattr(frame.module, "qk_norm", None)
    return scale_apart(call, norm) if isinstance(norm, QKNorm) else call


def _four_dimensional(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Without heads, one head; with more dimensions before the heads, these as one batch."""
    if q.dim() == 3:
        q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
        return q, k, v, mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask
    if q.dim() > 4:
        if mask is not None:
            mask = mask.expand(*q.shape[:-1], k.shape[-2]).flatten(0, -4)
        q, k, v = (x.flatten(0, -4) for x in (q, k, v))
    return q, k, v, mask if mask is None else mask.view((1,) * (4 - mask.dim()) + mask.shape)
