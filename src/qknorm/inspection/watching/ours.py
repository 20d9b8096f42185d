"""qknorm.MultiheadAttention, and modules that `qknorm.adopt` has given a QKNorm."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qknorm.attention import MultiheadAttention, QKNorm, Visibility, multihead
from qknorm.inspection.watching.call import Call, real_queries
from qknorm.inspection.watching.tape import Tape, replaced, wrapping


@contextmanager
def watch(model: nn.Module, tape: Tape) -> Iterator[None]:
    """Tells of every attention of ours in the model."""
    found = [module for module in model.modules() if isinstance(module, MultiheadAttention)]
    if not found:
        yield
        return
    with ExitStack() as stack:
        for name in ("attend", "attend_valid", "attend_with_weights"):
            stack.enter_context(replaced(multihead, name, wrapping(getattr(multihead, name), _tell_product(tape))))
        for module in found:
            stack.enter_context(replaced(module, "_place", wrapping(module._place, _keep_raw(tape, module))))
        yield


def _keep_raw(tape: Tape, module: MultiheadAttention) -> Callable[..., Tensor]:
    def place(original: Callable[..., Tensor], x_bhtd: Tensor, past: Any, *, keys: bool) -> Tensor:
        frame = tape.frame_of(module)
        if frame is not None:
            frame.notes["raw_k" if keys else "raw_q"] = x_bhtd
        return original(x_bhtd, past, keys=keys)

    return place


def _tell_product(tape: Tape) -> Callable[..., Any]:
    def attend(original: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Any:
        frame = tape.top
        if frame is None or not isinstance(frame.module, MultiheadAttention) or tape.is_claimed:
            return original(q, k, v, **settings)
        module, notes = frame.module, frame.notes

        def make() -> Call:
            mask = _plain(settings.get("mask"))
            raw_k = notes.get("raw_k")
            t, s = q.shape[2], k.shape[2]
            itself = frame.attends_to_itself
            call = Call(
                frame.name,
                q,
                k,
                v,
                settings["scale"],
                mask,
                settings.get("is_causal", False),
                queries=real_queries(mask, len(q), t, s) if itself else None,
                raw_q=notes.get("raw_q"),
                raw_k=raw_k if raw_k is not None and raw_k.shape[2] == s else None,
                offset=s - t - module._extra_keys if itself else None,
            )
            if settings.get("p") is None:
                return scale_apart(call, module.norm)
            unit_q, unit_k, g = module.norm.query(q), module.norm.key(k), module.norm.scale.detach()
            return dataclasses.replace(call, q=unit_q, k=unit_k, scale=g, raw_q=q, raw_k=k)

        tape.tell(frame.name, make)
        with tape.claim():
            return original(q, k, v, **settings)

    return attend


def _plain(mask: Tensor | Visibility | None) -> Tensor | None:
    """A mask as it was before it was made ready for many calls."""
    if not isinstance(mask, Visibility):
        return mask
    if mask.nothing is None:
        return mask.mask
    return mask.mask.masked_fill(mask.nothing, False if mask.mask.dtype == torch.bool else -torch.inf)


def scale_apart(call: Call, norm: QKNorm) -> Call:
    """The scale g out of the queries that carry it, so that q and k are the normalised ones."""
    g = norm.scale.detach()
    carried = g.to(call.q.device, torch.promote_types(call.q.dtype, torch.float32)).view(-1, 1, 1)
    q = call.q * (call.scale / torch.where(carried == 0, 1.0, carried))  # with g = 0 it is 0 as it is
    return dataclasses.replace(call, q=q, scale=g)
