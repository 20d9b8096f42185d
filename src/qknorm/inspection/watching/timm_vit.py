"""timm's Attention, whose places for norms of q and k (Identity without) see both right before the product."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from qknorm.attention import QKNorm
from qknorm.attention.adopting.family import real_queries
from qknorm.inspection.watching.call import Call
from qknorm.inspection.watching.ours import scale_apart
from qknorm.inspection.watching.tape import Frame, Tape, replaced, wrapping


@contextmanager
def watch(model: nn.Module, tape: Tape) -> Iterator[None]:
    """Tells of timm's attentions that are not fused, and remembers what came before the norms of those that are."""
    with ExitStack() as stack:
        for module in model.modules():
            if _is_known(module):
                stack.enter_context(replaced(module, "forward", wrapping(module.forward, _note_mask(tape, module))))
                for name in ("q_norm", "k_norm"):
                    norm = getattr(module, name)
                    stack.enter_context(replaced(norm, "forward", wrapping(norm.forward, _see(tape, module, name))))
        yield


def _is_known(module: nn.Module) -> bool:
    """The Attention of timm's plain vision transformers; others of its kind do more between norm and product."""
    kind = type(module)
    home = kind.__module__ in ("timm.layers.attention", "timm.models.vision_transformer")
    return home and kind.__name__ == "Attention" and all(hasattr(module, x) for x in ("q_norm", "k_norm", "fused_attn"))


def _note_mask(tape: Tape, module: nn.Module) -> Callable[..., Any]:
    signature = inspect.signature(module.forward)

    def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        frame = tape.frame_of(module)
        if frame is not None:
            frame.notes["given"] = signature.bind(*args, **kwargs).arguments
        return original(*args, **kwargs)

    return forward


def _see(tape: Tape, module: Any, name: str) -> Callable[..., Any]:
    def forward(original: Callable[..., Tensor], x: Tensor) -> Tensor:
        normalised = original(x)
        frame = tape.frame_of(module)
        if frame is not None:
            frame.notes.setdefault("raw", {})[f"raw_{name[0]}"] = x
            frame.notes[name] = normalised
            if name == "k_norm" and not module.fused_attn:
                tape.tell(frame.name, lambda: _call(frame, module))
        return normalised

    return forward


def _call(frame: Frame, module: Any) -> Call:
    given = frame.notes["given"]
    q, k, is_causal = frame.notes["q_norm"], frame.notes["k_norm"], given.get("is_causal", False)
    mask = None if is_causal else given.get("attn_mask")
    real = real_queries(mask, len(q), q.shape[2], k.shape[2])
    call = Call(frame.name, q, k, None, module.scale, mask, is_causal, queries=real, **frame.notes["raw"])
    return scale_apart(call, module.qk_norm) if isinstance(getattr(module, "qk_norm", None), QKNorm) else call
