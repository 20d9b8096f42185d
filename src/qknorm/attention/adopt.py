"""Gives QKNorm to a model that exists already: `adopt(model, length=512)`."""

import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qknorm.attention.adopting.calibration import Spread, loss_on
from qknorm.attention.adopting.family import Family, Shape
from qknorm.attention.adopting.hugging_face import (
    HuggingFace,
    read_settings,
    read_state,
    was_adopted,
    write_settings,
)
from qknorm.attention.adopting.saved import PREFIXES
from qknorm.attention.adopting.timm_vit import TimmVit
from qknorm.attention.adopting.torch_multihead import TorchMultihead
from qknorm.attention.norm import QKNorm, same_p, saved_p

_FAMILIES: tuple[Family, ...] = (TorchMultihead(), TimmVit(), HuggingFace())
_STARTS_ANEW = (
    "this model was saved with QKNorm, and the scales it had learned start anew now; adopt(model, state=…) with the"
    " folder or file it came from takes them from there"
)
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "OptimizedModule")


@dataclass(frozen=True)
class Changed:
    """One attention module that now has QKNorm. `start` is the mean over heads where each has a scale."""

    name: str
    kind: str
    heads: int
    kv_heads: int
    start: float
    norm: QKNorm


@dataclass(frozen=True)
class Left:
    """One attention module that is as it was, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Adoption:
    """What `adopt` changed and what it left; `print` it. The losses are those on the batch of `calibrate`, if any."""

    changed: tuple[Changed, ...]
    left: tuple[Left, ...]
    loss_before: float | None = None
    loss_after: float | None = None

    def parameters(self) -> Iterator[nn.Parameter]:
        """The new parameters, for an optimiser made earlier, or for a group of their own without weight decay."""
        for each in self.changed:
            yield from each.norm.parameters()

    def __str__(self) -> str:
        rows = [("attention", "kind", "heads", "scale starts at")]
        for each in self.changed:
            shared = f" over {each.kv_heads}" if each.kv_heads != each.heads else ""
            per_head = " (mean of heads)" if each.norm.scale_per_head else ""
            rows.append((_shown(each.name), each.kind, f"{each.heads}{shared}", f"{each.start:.4g}{per_head}"))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [f"QKNorm in {len(self.changed)} of {len(self.changed) + len(self.left)} attention modules"]
        lines += ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        lines += ["left as they were:"] if self.left else []
        lines += [f"  {_shown(each.name)}: {each.reason}" for each in self.left]
        if self.loss_before is not None and self.loss_after is not None:
            lines.append(f"loss on the calibration batch: {self.loss_before:.4g} before, {self.loss_after:.4g} after")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Found:
    name: str
    module: nn.Module
    family: Family
    shape: Shape

    @property
    def key(self) -> str:
        """How the entries of its QKNorm begin in a state dict."""
        return ".".join(part for part in (self.name, self.family.norm_name) if part)


def adopt(
    model: nn.Module,
    *,
    length: float | None = None,
    scale_init: float | None = None,
    calibrate: Any = None,
    loss: Callable[[Any], Any] | None = None,
    state: str | Path | Mapping[str, Tensor] | None = None,
    p: float | None = None,
    scale_per_head: bool = False,
    p_learned: bool = False,
    only: str | Iterable[str] | None = None,
) -> Adoption:
    """Gives every attention it knows in `model` QKNorm, in place and with its weights; tells what it did.

    It knows torch.nn.MultiheadAttention, whatever in Hugging Face transformers goes through the attention interface,
    and timm's Attention. q and k are normalised after rotary positions. A new scale starts in one of four ways:

    - `length`: log2(L² − L), the paper's; L is how long your sequences are (their 97.5th percentile).
    - `scale_init`: that number.
    - `calibrate`: where the spread of logits is what it was on this batch (a dict, a tuple or one tensor: what the
      model takes); the loss before and after is reported where the model returns one or `loss(output)` makes one.
    - `state`: as saved: a state dict, one file of it, or a folder of `save_pretrained`; settings are then those saved.

    `p` is 2 unless told. `only` is a pattern, or several, for the names of the modules to change ("encoder.*").
    """
    _check_start(loss, length=length, scale_init=scale_init, calibrate=calibrate, state=state)
    _check_unwrapped(model)
    if state is None and was_adopted(model):
        warnings.warn(_STARTS_ANEW, stacklevel=2)
    found, left = _survey(model, only)
    saved = None if state is None else _saved_entries(model, found, state)
    if saved is not None:
        left += [Left(one.name, "has no QKNorm in the saved state") for one in found if one.key not in saved]
        found = [one for one in found if one.key in saved]
    if not found:
        raise ValueError(_nothing_to_adopt(left))

    asked = {"p": p, "scale_per_head": scale_per_head, "p_learned": p_learned}
    if saved is None:
        settings = asked | {"length": length, "scale_init": scale_init, "p": 2.0 if p is None else p}
        norms = [_norm_for(one, settings) for one in found]
    else:
        norms = [_saved_norm(one, asked, read_settings(model), saved[one.key]) for one in found]
    before = None if calibrate is None else _calibrate(model, found, norms, calibrate, loss)
    for one, norm in zip(found, norms, strict=True):
        one.family.install(one.module, norm)
    write_settings(model)
    after = None if calibrate is None else loss_on(model, calibrate, loss)
    return Adoption(tuple(map(_changed, found, norms)), tuple(left), before, after)


def _check_start(loss: object, **starts: object) -> None:
    given = [name for name, value in starts.items() if value is not None]
    if not given:
        raise ValueError(
            "say where the scales start: length= (how long your sequences are, the 97.5th percentile), scale_init=,"
            " calibrate= (a batch), or state= (what was saved)"
        )
    if len(given) > 1:
        raise ValueError(f"the scales start in one way: give one of {' and '.join(f'{name}=' for name in given)}")
    for name in ("length", "scale_init"):
        value = starts[name]
        if isinstance(value, float | int) and not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive number, got {value}")
    if loss is not None and starts["calibrate"] is None:
        raise ValueError("loss= is for the report of calibrate=; give a batch there too, or leave loss out")


def _check_unwrapped(model: nn.Module) -> None:
    for module in model.modules():
        if (wrapper := type(module).__name__) in _WRAPPERS:
            raise ValueError(f"adopt before the model is wrapped: {wrapper} would not learn of the new scales")
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
            raise ValueError("adopt before the model is shared out: fully_shard would not learn of the new scales")


def _survey(model: nn.Module, only: str | Iterable[str] | None) -> tuple[list[_Found], list[Left]]:
    """The attention modules that can be changed and are asked for, and all others."""
    patterns = ["*"] if only is None else [only] if isinstance(only, str) else list(only)
    found: list[_Found] = []
    left: list[Left] = []
    for name, module in model.named_modules():
        verdict, family = _examine(module)
        if isinstance(verdict, str):
            left.append(Left(name, verdict))
        elif verdict is not None and family is not None:
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                found.append(_Found(name, module, family, verdict))
            else:
                left.append(Left(name, "not asked for by only="))
    # BertAttention holds BertSelfAttention: what holds an attention is not another one
    names = [one.name for one in found] + [each.name for each in left]
    left = [each for each in left if not any(_is_inside(name, each.name) for name in names)]
    if only is not None and names and not any(fnmatchcase(name, pattern) for name in names for pattern in patterns):
        known = ", ".join(map(_shown, names[:3])) + (", …" if len(names) > 3 else "")
        raise ValueError(f"only={only!r} fits no name of an attention module; they are {known}")
    return found, left


def _examine(module: nn.Module) -> tuple[Shape | str | None, Family | None]:
    for family in _FAMILIES:
        verdict = family.examine(module)
        if verdict is not None:
            return verdict, family
    if re.search("Attention|Attn|^XCA$", type(module).__name__):
        return f"{type(module).__name__} is not a kind of attention that adopt knows", None
    return None, None


def _is_inside(name: str, holder: str) -> bool:
    return name != holder and (holder == "" or name.startswith(f"{holder}."))


def _nothing_to_adopt(left: list[Left]) -> str:
    if not left:
        return (
            "there is no attention to adopt: known are torch.nn.MultiheadAttention, models of Hugging Face transformers"
            " and timm's Attention"
        )
    reasons = "; ".join(sorted({each.reason for each in left}))
    return f"there is nothing to adopt: of {len(left)} attention modules every one is left as it is ({reasons})"


def _saved_entries(
    model: nn.Module, found: list[_Found], state: str | Path | Mapping[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    """For every module that was adopted when `state` was saved, the entries of its QKNorm."""
    parts = ("scale", "p_raw", "p_fixed")
    wanted = [f"{one.key}.{name}" for one in found for name in parts]
    if isinstance(state, (str, Path)):
        tensors = read_state(model, Path(state), wanted)
    else:
        prefixes = {name: next((each for each in PREFIXES if f"{each}{name}" in state), None) for name in wanted}
        tensors = {name: state[f"{prefix}{name}"] for name, prefix in prefixes.items() if prefix is not None}
    saved = {
        one.key: {name: tensors[f"{one.key}.{name}"] for name in parts if f"{one.key}.{name}" in tensors}
        for one in found
        if f"{one.key}.scale" in tensors
    }
    if found and not saved:
        raise ValueError(
            f"the saved state has no scale for any attention of this {type(model).__name__} (such as"
            f" {found[0].key}.scale): was the model adopted when it was saved, and is it of the same class?"
        )
    return saved


def _norm_for(one: _Found, settings: dict[str, Any]) -> QKNorm:
    """A QKNorm at its start, on the device and in the dtype of the module it is for."""
    shape = one.shape
    return QKNorm(shape.head_dim, shape.heads, num_kv_heads=shape.kv_heads, **settings, **_place(one.module))


def _saved_norm(one: _Found, asked: dict[str, Any], noted: float | None, saved: dict[str, Tensor]) -> QKNorm:
    """A QKNorm as it was saved; refuses what was asked for besides and is not so. `noted` is the p of a config."""
    per_head, p_learned = saved["scale"].numel() > 1, "p_raw" in saved
    for name, held in (("scale_per_head", per_head), ("p_learned", p_learned)):
        if asked[name] and not held and (name == "p_learned" or one.shape.heads > 1):
            raise ValueError(f"{name}=True was asked for, but {one.key} was saved without; leave it out with state=")
    p = saved_p(saved["p_fixed"]) if "p_fixed" in saved else noted
    if p is not None and asked["p"] is not None and not same_p(p, asked["p"]):
        raise ValueError(f"{one.key} was saved with p = {p:g}, not {asked['p']:g}; leave p out where state= is given")
    p = next((each for each in (p, asked["p"]) if each is not None), 2.0)
    settings = {"scale_init": float(saved["scale"].float().mean()), "scale_per_head": per_head}
    norm = _norm_for(one, settings | {"p": p, "p_learned": p_learned})
    norm.load_state_dict(saved)
    return norm


def _place(module: nn.Module) -> dict[str, Any]:
    """Device and dtype of the module's weights; of quantised ones the dtype that is usual."""
    weights = list(module.parameters())
    floating = [weight for weight in weights if weight.is_floating_point() and weight.dtype.itemsize > 1]
    return {
        "device": weights[0].device if weights else None,
        "dtype": floating[0].dtype if floating else torch.float32,
    }


def _calibrate(
    model: nn.Module, found: list[_Found], norms: list[QKNorm], batch: Any, loss: Callable[[Any], Any] | None
) -> float | None:
    """Sets the scales from one look at the model as it is; returns its loss."""
    spreads = [Spread(norm) for norm in norms]
    with ExitStack() as watching:
        for one, spread in zip(found, spreads, strict=True):
            watching.enter_context(one.family.watch(one.module, spread.see))
        before = loss_on(model, batch, loss)
    for one, norm, spread in zip(found, norms, spreads, strict=True):
        scale = spread.matching_scale(_shown(one.name), norm.scale_per_head)
        norm.scale_init = float(scale.mean())  # what reset_parameters goes back to
        with torch.no_grad():
            norm.scale.copy_(scale)
    return before


def _changed(one: _Found, norm: QKNorm) -> Changed:
    shape = one.shape
    start = math.nan if norm.scale.is_meta else float(norm.scale.detach().float().mean())
    return Changed(one.name, shape.kind, shape.heads, shape.kv_heads, start, norm)


def _shown(name: str) -> str:
    return name or "(the model itself)"
