"""Models of Hugging Face transformers: every attention that goes through its AttentionInterface.

The attention module asks its config which implementation to use and hands it q and k after rotary positions and cache.
An adopted module has a config that answers "qknorm", a function registered with that interface; it normalises q and k
and calls the implementation the model is set to, with a scale of 1. The rest of the model sees the config as it is, so
masks, caches, generation and `set_attn_implementation` go on as before. The cache holds keys that are not normalised.
"""

import dis
import importlib
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qknorm.attention.adopting.family import See, Shape, attends_to_itself, own_norm, real_queries, visible_keys
from qknorm.attention.adopting.saved import PREFIXES, read_file
from qknorm.attention.masks import causal_mask
from qknorm.attention.norm import QKNorm

NAME = "qknorm"
OLDEST = 5
"""The first transformers whose interface can be asked which attention a model is set to."""
_SEVERAL = "several"  # each attention has its own, in its state
_DISPATCHING = {"ALL_ATTENTION_FUNCTIONS", "get_interface", "config", "_attn_implementation"}
_NO_SCALE = (
    "its eager attention divides by √d whatever scale it is given, so that QKNorm's logits would be wrong; "
    "use another, by model.set_attn_implementation('sdpa')"
)
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_query_heads")
_HEAD_DIM = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size")


class HuggingFace:
    """Any attention of transformers ≥ 5 that dispatches through the AttentionInterface."""

    norm_name = "qk_norm"

    def examine(self, module: nn.Module) -> Shape | str | None:
        if "transformers" not in sys.modules or not _is_of_transformers(module):
            return None
        if isinstance(getattr(module, "qk_norm", None), QKNorm):
            return "has QKNorm already"
        if _dispatcher(type(module)) is None:
            if "Attention" not in type(module).__name__:
                return None
            version = importlib.import_module("transformers").__version__
            if int(version.partition(".")[0]) < OLDEST:
                return f"transformers {version} is too old; its attention can be changed from {OLDEST} on"
            return f"transformers' {type(module).__name__} does not go through the library's attention interface"
        if (norm := own_norm(module)) is not None:
            return f"normalises queries and keys already ({norm})"
        if hasattr(module, "qk_norm"):
            return "has a setting of its own called qk_norm"
        attention: Any = module
        if AdoptedConfig(attention.config, type(module)).refusal() is not None:
            return _NO_SCALE
        heads, head_dim = _first_number(attention, _HEADS), _first_number(attention, _HEAD_DIM)
        if heads is None:
            return f"how many heads {type(module).__name__} has is not known"
        if head_dim is None:
            head_dim = int(attention.config.hidden_size) // heads
        groups = getattr(module, "num_key_value_groups", 1) or 1
        return Shape(f"transformers {type(module).__name__}", heads, heads // groups, head_dim)

    @contextmanager
    def watch(self, module: nn.Module, see: See) -> Iterator[None]:
        attention: Any = module
        config = attention.config
        watched = attention.config = WatchedConfig(config, type(module), see)
        handle = module.register_forward_pre_hook(watched.before_forward, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
            attention.config = config

    def install(self, module: nn.Module, norm: QKNorm) -> None:
        attention: Any = module
        module.register_module("qk_norm", norm)
        attention.config = AdoptedConfig(attention.config, type(module))


class AdoptedConfig:
    """A model's config as an adopted attention sees it: the same in everything but the implementation to use."""

    _attn_implementation = NAME

    def __init__(self, wrapped: Any, attention_class: type[nn.Module]) -> None:
        dispatcher = _dispatcher(attention_class)
        assert dispatcher is not None
        self._own(wrapped=wrapped, attention_class=attention_class)
        # models may bring an interface of their own, and always bring their own eager function
        eager = _eager_function(dispatcher)
        self._own(interface=dispatcher.__globals__["ALL_ATTENTION_FUNCTIONS"], eager=eager)
        self._own(eager_has_own_scale=eager is not None and not _reads(eager, "scaling"))
        importlib.import_module("transformers").AttentionInterface.register(NAME, _attend_as_configured)

    def _own(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped":  # asked for before there is one, by copy or pickle
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.wrapped, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.wrapped, self.attention_class)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.wrapped!r})"

    def implementation(self) -> Callable[..., Any]:
        """The attention function the model is set to."""
        function: Callable[..., Any] = self.interface.get_interface(self.wrapped._attn_implementation, self.eager)
        return function

    def refusal(self) -> str | None:
        """Why the attention function the model is set to cannot be used: it takes no scale; None if it can."""
        return _NO_SCALE if self.eager_has_own_scale and self.implementation() is self.eager else None

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None, **rest: Any
    ) -> Any:
        """Cosines times g instead of dot products times `scaling`."""
        if (refusal := self.refusal()) is not None:
            raise ValueError(f"{type(module).__name__}: {refusal}")
        norm: QKNorm = module.qk_norm
        per_head = norm.scale_per_head or norm.p_raw is not None
        if per_head and (query.shape[1], key.shape[1]) != (norm.num_heads, norm.num_kv_heads):
            raise ValueError(
                f"{type(module).__name__} was adopted for {norm.num_heads} heads over {norm.num_kv_heads} key heads and"
                f" now has {query.shape[1]} over {key.shape[1]}; adopt it without scale_per_head and p_learned"
            )
        return self.implementation()(module, norm.scaled_query(query), norm.key(key), value, mask, scaling=1.0, **rest)


class WatchedConfig(AdoptedConfig):
    """Leaves attention as it is and tells of its queries and keys."""

    def __init__(self, wrapped: Any, attention_class: type[nn.Module], see: See) -> None:
        super().__init__(wrapped, attention_class)
        self._own(see=see, itself=False)

    def before_forward(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Of self-attention alone does the mask of the keys tell which queries are padding."""
        self._own(itself=attends_to_itself(args, kwargs))

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None, **rest: Any
    ) -> Any:
        causal = rest.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        seen = _as_visible(mask, bool(causal), query, key)
        real = real_queries(seen, len(query), query.shape[2], key.shape[2]) if self.itself else None
        self.see(query, key, query.shape[-1] ** -0.5 if scaling is None else scaling, seen, real)
        return self.implementation()(module, query, key, value, mask, scaling=scaling, **rest)


def _attend_as_configured(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    **rest: Any,
) -> Any:
    """The function registered with transformers: the module's config knows what to do."""
    return module.config.attend(module, query, key, value, attention_mask, scaling, **rest)


def _as_visible(mask: Any, is_causal: bool, query: Tensor, key: Tensor) -> Tensor | None:
    """Masks of transformers: none, (b, keys), or (b, heads or 1, queries, keys); flex's block masks show everything."""
    t, s = query.shape[2], key.shape[2]
    causal = causal_mask(t, s, query.device) if is_causal and t > 1 else None
    if mask is None:
        return causal
    if not isinstance(mask, Tensor):
        return None
    if mask.dim() == 2:
        padding = mask.bool()[:, None, None, :]
        return padding if causal is None else padding & causal
    return visible_keys(mask if mask.is_floating_point() else mask.bool())


def _is_of_transformers(module: nn.Module) -> bool:
    """Whether it is written for transformers, by that library or by a class derived from one of its own."""
    if type(module).__module__.startswith("transformers."):
        return True
    return _dispatcher(type(module)) is not None


def _dispatcher(attention_class: type[nn.Module]) -> Any:
    """The method that asks config and interface for an attention function; None if there is none."""
    for method in vars(attention_class).values():
        function = inspect.unwrap(method) if callable(method) else None
        code = getattr(function, "__code__", None)
        if code is not None and {*code.co_names} >= _DISPATCHING:
            return function
    for base in attention_class.__bases__:
        if issubclass(base, nn.Module) and base is not nn.Module and (found := _dispatcher(base)) is not None:
            return found
    return None


def _eager_function(dispatcher: Any) -> Any:
    """The model's own plain attention: the function it names as what to use where the interface has no answer."""
    names = [name for name in dispatcher.__code__.co_names if name.endswith("eager_attention_forward")]
    return dispatcher.__globals__.get(names[0]) if names else None


def _reads(function: Any, name: str) -> bool:
    """Whether the code of a function uses what it is given under this name, or unnamed among the rest."""
    code = inspect.unwrap(function).__code__
    named = code.co_argcount + code.co_kwonlyargcount
    if name not in code.co_varnames[:named]:
        if not code.co_flags & inspect.CO_VARKEYWORDS:
            return True  # what it does not take, it is not given in silence
        name = code.co_varnames[named + bool(code.co_flags & inspect.CO_VARARGS)]
    loads = (each.argval for each in dis.get_instructions(code) if each.opname.startswith("LOAD_"))
    return any(name in loaded if isinstance(loaded, tuple) else name == loaded for loaded in loads)


def _first_number(module: Any, names: tuple[str, ...]) -> int | None:
    for owner in (module, module.config):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def write_settings(model: nn.Module) -> None:
    """Notes p in the config of every model that `save_pretrained` saves; the rest can be read off the saved tensors."""
    for module in model.modules():
        config = _own_config(module)
        noted = {norm.p_init for norm in module.modules() if isinstance(norm, QKNorm)}
        if config is not None and noted and hasattr(module, "save_pretrained"):
            p = noted.pop() if len(noted) == 1 else _SEVERAL
            config.qknorm = {"p": "inf" if p == math.inf else p}


def read_settings(model: nn.Module) -> float | None:
    """The p that was saved with the model, where it has a config that names one."""
    noted = getattr(_own_config(model), "qknorm", None)
    return None if noted is None or noted["p"] == _SEVERAL else float(noted["p"])


def was_adopted(model: nn.Module) -> bool:
    """Whether a config that was loaded says that QKNorm was there when it was saved, and none is now."""
    if any(isinstance(module, QKNorm) for module in model.modules()):
        return False
    # without a path the note is one of adopt, on a model made of the same config before
    configs = [config for module in model.modules() if getattr(config := _own_config(module), "_name_or_path", None)]
    return any(getattr(config, "qknorm", None) is not None for config in configs)


def _own_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    return config if type(model).__module__.startswith("transformers.") or hasattr(config, "to_json_string") else None


def read_state(model: nn.Module, path: Path, wanted: Iterable[str]) -> dict[str, Tensor]:
    """Those of the wanted entries that are in a file of weights, or in a folder that `save_pretrained` wrote."""
    own_names = {_name_in_files(model, name): name for name in wanted}
    if path.is_file():
        # as a state dict has them, perhaps of a model that was wrapped
        own_names |= {f"{prefix}{name}": name for name in [*own_names.values()] for prefix in PREFIXES}
        return {own_names[name]: tensor for name, tensor in read_file(path, own_names).items()}
    files = sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))
    if not files:
        lacks = "" if path.exists() else ", which does not exist"
        raise ValueError(
            f"there are no weights in {path}{lacks}: state= is a folder of save_pretrained, a file of weights, or a "
            f"state dict"
        )
    load = importlib.import_module("transformers.modeling_utils").load_state_dict
    state: dict[str, Tensor] = {}
    for file in files:
        state |= {own_names[name]: tensor for name, tensor in load(str(file)).items() if name in own_names}
    return state


def _name_in_files(model: nn.Module, name: str) -> str:
    """What `save_pretrained` calls an entry: where a model's modules have new names, as ViT's, files keep the old."""
    if not hasattr(model, "save_pretrained"):
        return name
    loading = importlib.import_module("transformers.core_model_loading")
    (saved_as,) = loading.revert_weight_conversion(model, {name: torch.empty(())})
    return str(saved_as)
