"""qknorm.MultiheadAttention, and whoever calls `qknorm.attend` by himself."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qknorm.attention import MultiheadAttention, QKNorm, lp_normalize
from qknorm.attention.adopting.family import real_queries
from qknorm.attention.arguments import by_head, by_key_head
from qknorm.attention.masks import plain_mask
from qknorm.attention.onlookers import ONLOOKERS
from qknorm.inspection.watching.call import Call
from qknorm.inspection.watching.tape import Frame, Tape, replaced, wrapping

_FORWARD = inspect.signature(MultiheadAttention.forward)


@contextmanager
def watch(model: nn.Module, tape: Tape) -> Iterator[None]:
    """Tells of every attention of ours in the model, by a look at `attend` itself, which computes as it always does."""
    ours = [module for module in model.modules() if isinstance(module, MultiheadAttention)]
    with ExitStack() as stack:
        for norm in {module.norm for module in ours}:
            stack.enter_context(replaced(norm, "scaled_query", wrapping(norm.scaled_query, _keep_raw(tape, "raw_q"))))
            stack.enter_context(replaced(norm, "key", wrapping(norm.key, _keep_raw(tape, "raw_k"))))
        stack.enter_context(_looking_on(_tell(tape, ours)))
        yield


@contextmanager
def _looking_on(onlooker: Callable[..., Any]) -> Iterator[None]:
    ONLOOKERS.append(onlooker)
    try:
        yield
    finally:
        ONLOOKERS.remove(onlooker)


def _keep_raw(tape: Tape, name: str) -> Callable[..., Tensor]:
    def normalise(original: Callable[..., Tensor], x_bhtd: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if tape.top is not None:
            tape.top.notes[name] = x_bhtd
        return original(x_bhtd, *args, **kwargs)

    return normalise


def _tell(tape: Tape, ours: list[MultiheadAttention]) -> Callable[..., Any]:
    def name_of(frame: Frame, scale: float | Tensor) -> str:
        """Of what runs; or, where that is no attention of ours, of the one whose scale it has, as in fused layers."""
        if isinstance(frame.module, MultiheadAttention):
            return frame.name
        return next((tape.names[module] for module in ours if module.norm.scale is scale), frame.name)

    def attend(
        original: Callable[..., Any],
        unit_keys: bool,
        q_bhtd: Tensor,
        k_bhsd: Tensor,
        v_bhsd: Tensor,
        **settings: Any,
    ) -> Any:
        frame = tape.top
        if frame is None or tape.is_claimed:
            return original(q_bhtd, k_bhsd, v_bhsd, **settings)
        name = name_of(frame, settings["scale"])
        tape.tell(name, lambda: _call(name, frame, q_bhtd, k_bhsd, v_bhsd, settings, unit_keys))
        with tape.claim():
            return original(q_bhtd, k_bhsd, v_bhsd, **settings)

    return attend


def _call(name: str, frame: Frame, q: Tensor, k: Tensor, v: Tensor, settings: dict[str, Any], unit_keys: bool) -> Call:
    module, scale = frame.module, settings["scale"]
    mask = plain_mask(settings.get("mask"))
    if mask is not None:
        mask = mask.view((1,) * (4 - mask.dim()) + mask.shape)
    t, s = q.shape[2], k.shape[2]
    itself = _attends_to_itself(frame)
    raw = {key: x for key, x in frame.notes.items() if key in ("raw_q", "raw_k")}
    call = Call(
        name,
        q,
        k,
        v,
        scale.detach() if isinstance(scale, Tensor) else scale,
        mask,
        settings.get("is_causal", False),
        queries=real_queries(mask, len(q), t, s) if itself else None,
        raw_q=raw.get("raw_q"),
        raw_k=raw["raw_k"] if "raw_k" in raw and raw["raw_k"].shape[2] == s else None,
        offset=s - t - module._extra_keys if itself and isinstance(module, MultiheadAttention) else None,
    )
    p = by_head(settings.get("p"), q.shape[1])
    if p is None:
        norm = getattr(module, "norm" if isinstance(module, MultiheadAttention) else "qk_norm", None)
        return scale_apart(call, norm) if isinstance(norm, QKNorm) else call
    if not unit_keys:
        call = dataclasses.replace(call, k=lp_normalize(k, by_key_head(p, k.shape[1])), raw_k=k)
    return dataclasses.replace(call, q=lp_normalize(q, p), raw_q=q, bounded=True)


def _attends_to_itself(frame: Frame) -> bool:
    """Whether keys are made of what queries are made of; values may be made of something else."""
    if type(frame.module).forward is not MultiheadAttention.forward:
        return frame.attends_to_itself
    given = _FORWARD.bind(frame.module, *frame.args, **frame.kwargs).arguments
    cache = given.get("cache")
    return given["query"] is given["key"] and (cache is None or not cache.fixed)


def scale_apart(call: Call, norm: QKNorm) -> Call:
    """The scale g out of the queries that carry it, so that q and k are the normalised ones."""
    g = norm.scale.detach()
    wide = torch.promote_types(call.q.dtype, torch.float32)
    carried, rest = (x.to(call.q.device, wide).view(-1, 1, 1) if isinstance(x, Tensor) else x for x in (g, call.scale))
    assert isinstance(carried, Tensor)
    q = call.q * (rest / torch.where(carried == 0, 1.0, carried))  # with g = 0 it is 0 as it is
    return dataclasses.replace(call, q=q, scale=g, bounded=norm.kind == "lp")
