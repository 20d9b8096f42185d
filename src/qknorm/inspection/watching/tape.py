"""What a watched model tells: its modules as they are entered, and every attention among them."""

import functools
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from qknorm.attention.adopting.family import attends_to_itself
from qknorm.inspection.watching.call import Call
from qknorm.inspection.watching.versions import SUPPORTED, out_of_range

_WRAPPERS = re.compile(r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")
_LOOKS_LIKE_ATTENTION = re.compile(r"attention|attn|^XCA$", re.IGNORECASE)  # timm's XCA attends over channels


@dataclass
class Frame:
    """A module that is running."""

    module: nn.Module
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    calls: int = 0
    """Attentions seen in it and below."""
    missed: bool = False
    """Whether something below it looks like attention and was not seen."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What sources keep while it runs."""

    @property
    def attends_to_itself(self) -> bool:
        """Whether keys are made of what queries are made of."""
        return attends_to_itself(self.args, self.kwargs)


class _Running(threading.local):
    """Of each thread on its own: what another one runs meanwhile is no part of this model, or another pass of it."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.claims = 0


class Tape:
    """Collects what sources tell of one model. Whatever fails is noted as unseen: watching never stops a model."""

    def __init__(self, model: nn.Module, on_call: Callable[[Call], None], sentences: Callable[[Call], int]) -> None:
        self.names = module_names(model)
        self.unseen: dict[str, str] = {}
        self._on_call, self._sentences = on_call, sentences
        self._running = _Running()

    @property
    def _frames(self) -> list[Frame]:
        return self._running.frames

    @property
    def top(self) -> Frame | None:
        """The innermost module that is running."""
        return self._frames[-1] if self._frames else None

    def frame_of(self, module: nn.Module) -> Frame | None:
        """The innermost run of this module, if it is running."""
        return next((frame for frame in reversed(self._frames) if frame.module is module), None)

    @property
    def is_claimed(self) -> bool:
        """Whether some source speaks for what runs now, so that others are to be silent."""
        return self._running.claims > 0

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Within it, `is_claimed`."""
        self._running.claims += 1
        try:
            yield
        finally:
            self._running.claims -= 1

    def tell(self, name: str, make: Callable[[], Call | None]) -> None:
        """Hands on the attention that `make` describes, of as many sentences as are wanted."""
        for frame in self._frames:
            frame.calls += 1
        try:
            with torch.no_grad():
                call = make()
                if call is not None:
                    self._on_call(call.first(self._sentences(call)))
        except Exception as error:
            self.miss(name, f"it could not be read: {error}")

    def miss(self, name: str, reason: str) -> None:
        """Notes an attention that ran and could not be seen."""
        for frame in self._frames:
            frame.calls += 1
        self.unseen.setdefault(name, reason)

    @contextmanager
    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Frame]:
        """A module runs; if it looks like attention and none was told of, that is noted."""
        frame = Frame(module, self.names[module], args, kwargs)
        self._frames.append(frame)
        try:
            yield frame
        finally:
            self._frames.pop()
        if not frame.calls and not frame.missed and looks_like_attention(module) and not self.is_claimed:
            self.unseen.setdefault(frame.name, why_unseen(module))
            frame.missed = True
        if frame.missed and self._frames:
            self._frames[-1].missed = True


def module_names(model: nn.Module) -> dict[nn.Module, str]:
    """Every module by the name people know it by: no wrappers, and in our models what it is."""
    names: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        plain = _WRAPPERS.sub("", name).lstrip(".")
        names.setdefault(module, plain or type(module).__name__)
    for module in model.modules():
        if _is_ours(module):
            names |= {attention: name for name, attention in module.attentions().items()}  # type: ignore[operator]
    return names


def _is_ours(module: nn.Module) -> bool:
    """A translator or language model of ours, which knows its attentions."""
    return type(module).__module__.startswith("qknorm.models.") and hasattr(module, "attentions")


def looks_like_attention(module: nn.Module) -> bool:
    """By the name of its class, or of one that it is derived from."""
    return any(_LOOKS_LIKE_ATTENTION.search(kind.__name__) for kind in type(module).__mro__)


def why_unseen(module: nn.Module) -> str:
    """The reason for an attention that ran and told nothing, and what helps."""
    kind, library = type(module).__name__, type(module).__module__.partition(".")[0]
    if library in SUPPORTED and (complaint := out_of_range(library)) is not None:
        return complaint
    if library == "transformers":
        return f"transformers' {kind} computes its weights by itself, past the library's attention interface"
    if library == "timm":
        # what could call scaled_dot_product_attention says by this name that it does not; some does so on trial alone
        can_be_fused = getattr(module, "fused_attn", None) is False
        helps = "; timm.layers.set_fused_attn(True, experimental=True) before it is made helps" if can_be_fused else ""
        return f"timm's {kind} computes its weights by itself{helps}"
    return (
        f"{kind} is no attention that is known, and no call of scaled_dot_product_attention was seen in it; one by its "
        f"full name, torch.nn.functional.scaled_dot_product_attention(…), would be"
    )


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within it, the attribute is another; after it, all is as it was, an attribute of its class too."""
    own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def wrapping(function: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    """`around(function, …)`, looking like `function` to whoever asks for its signature."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(function, *args, **kwargs)

    return call
