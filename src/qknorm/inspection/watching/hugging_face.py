"""Models of Hugging Face transformers: every attention that asks the library's interface for its function."""

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qknorm.attention import QKNorm
from qknorm.attention.adopting.family import HIDES_BELOW, real_queries
from qknorm.inspection.watching.call import Call
from qknorm.inspection.watching.ours import scale_apart
from qknorm.inspection.watching.tape import Frame, Tape, replaced, wrapping

_ARGUMENTS = ("module", "query", "key", "value", "attention_mask")
_READ = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4")
"""Implementations whose masks are understood. Another one may call one of these in the end, which is then told of."""


@contextmanager
def watch(model: nn.Module, tape: Tape) -> Iterator[None]:
    """Tells of every attention of the model that goes through the interface."""
    if "transformers" not in sys.modules:
        yield
        return
    interface = importlib.import_module("transformers.modeling_utils").AttentionInterface
    if not hasattr(interface, "get_interface"):
        yield  # its attentions are named as unseen
        return

    def get_interface(original: Callable[..., Any], self: Any, implementation: str | None, default: Any) -> Any:
        function = original(self, implementation, default)
        return wrapping(function, _tell(tape, implementation or "eager"))

    with ExitStack() as stack:
        stack.enter_context(replaced(interface, "get_interface", wrapping(interface.get_interface, get_interface)))
        for module in model.modules():
            for name in ("q_norm", "k_norm"):
                norm = getattr(module, name, None)
                if type(module).__module__.startswith("transformers.") and isinstance(norm, nn.Module):
                    stack.enter_context(replaced(norm, "forward", wrapping(norm.forward, _keep(tape, module, name[0]))))
        yield


def _keep(tape: Tape, module: nn.Module, which: str) -> Callable[..., Any]:
    """Keeps what goes into a norm of queries or keys that the model has of its own, as Qwen3 does."""

    def forward(original: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        frame = tape.frame_of(module)
        if frame is not None:
            frame.notes.setdefault("raw", {})[f"raw_{which}"] = x
        return original(x, *args, **kwargs)

    return forward


def _tell(tape: Tape, implementation: str) -> Callable[..., Any]:
    def attend(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
        frame = tape.frame_of(given["module"])
        if frame is None or tape.is_claimed:
            return original(*args, **kwargs)
        if implementation not in _READ:
            frame.notes["raw"] = {"raw_q": given["query"], "raw_k": given["key"]}
            before = frame.calls
            output = original(*args, **kwargs)
            if frame.calls == before:
                tape.miss(
                    frame.name, f"its attention is {implementation}; set_attn_implementation('sdpa') lets it be seen"
                )
            return output
        if "s_aux" in given and given["s_aux"] is not None:
            tape.miss(frame.name, "its softmax has sinks, logits that belong to no key")
        else:
            tape.tell(frame.name, lambda: _call(frame, implementation, given))
        with tape.claim():
            return original(*args, **kwargs)

    return attend


def _call(frame: Frame, implementation: str, given: dict[str, Any]) -> Call:
    q, k, v = given["query"], given["key"], given["value"]
    scale = given.get("scaling")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    t, s = q.shape[2], k.shape[2]
    mask, is_causal = _mask(frame.module, implementation, given, t)
    if is_causal and s > t and implementation == "sdpa":  # keys of a static cache beyond the queries are still empty
        k, v, s = k[:, :, :t], v[:, :, :t], t
    bias = given.get("position_bias")
    itself = frame.attends_to_itself
    real = real_queries(mask, len(q), t, s) if itself else None
    if bias is not None:
        mask = _with_bias(mask, bias[..., :s])
    call = Call(
        frame.name,
        q,
        k,
        v,
        scale,
        mask,
        is_causal,
        queries=real,
        offset=s - t if itself else None,
        softcap=given.get("softcap"),
    )
    norm = getattr(frame.module, "qk_norm", None)
    raw = frame.notes.pop("raw", {})
    call = dataclasses.replace(call, raw_q=_by_head(raw.get("raw_q"), call.q), raw_k=_by_head(raw.get("raw_k"), call.k))
    return scale_apart(call, norm) if isinstance(norm, QKNorm) else call


def _by_head(x: Tensor | None, like: Tensor) -> Tensor | None:
    """Vectors before a norm in the layout of those after it; None where a cache has added to these."""
    b, h, t, d = like.shape
    if x is None or x.numel() != like.numel():
        return None
    if x.shape == (b, t, h, d):
        return x.transpose(1, 2)
    return x.view(b, t, h, d).transpose(1, 2) if x.dim() == 3 else x


def _mask(module: Any, implementation: str, given: dict[str, Any], queries: int) -> tuple[Tensor | None, bool]:
    """The mask by the rules of the implementation, and whether it is causal beside it."""
    mask: Tensor | None = given.get("attention_mask")
    if implementation == "eager":
        return mask, False
    causal = given.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal) and queries > 1
    if implementation == "sdpa":
        return mask, causal and mask is None
    if mask is not None and mask.dim() == 2:
        mask = mask.bool()[:, None, None, :]
    window = given.get("sliding_window")
    if window is not None:
        raise ValueError(f"a sliding window of {window} keys inside {implementation}")
    return mask, causal


def _with_bias(mask: Tensor | None, bias: Tensor) -> Tensor:
    """A position bias with what the mask hides hidden."""
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return bias.masked_fill(~mask, -torch.inf)
    return (bias + mask).masked_fill(mask <= HIDES_BELOW, -torch.inf)
