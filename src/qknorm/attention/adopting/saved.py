"""Weights in a single file, as safetensors or torch.save wrote it; of a pickle only tensors are ever loaded."""

import importlib
import pickle
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PREFIXES = ("", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.")
"""What names in a state begin with where the model was wrapped: DistributedDataParallel, torch.compile, or both."""
_ONE_OF_SEVERAL = re.compile(r"-\d+-of-\d+\.")
_TAKEN = "state= takes a .safetensors file, or one that torch.save(model.state_dict(), …) wrote"


def read_file(path: Path, wanted: Collection[str]) -> dict[str, Tensor]:
    """Those of the wanted entries that are in a file, on the CPU; refuses what is no file of weights."""
    if _ONE_OF_SEVERAL.search(path.name):
        raise ValueError(f"{path} is one of several files of a model: give state= their folder, {path.parent}")
    state = _read_safetensors(path, wanted) if path.suffix == ".safetensors" else _read_torch(path)
    return {name: tensor for name, tensor in state.items() if name in wanted}


def _read_safetensors(path: Path, wanted: Collection[str]) -> dict[str, Tensor]:
    try:
        safetensors = importlib.import_module("safetensors")
    except ImportError:
        raise ValueError(f"{path} needs safetensors, which is not installed: pip install safetensors") from None
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys() if name in wanted}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path} cannot be read ({error}): {_TAKEN}") from None


def _read_torch(path: Path) -> Mapping[str, Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # its own words are a page, and advise to trust the file
        raise ValueError(f"{path} is no pickle of tensors alone, and no other is loaded: {_TAKEN}") from None
    except (OSError, EOFError, RuntimeError, ValueError, LookupError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read ({type(error).__name__}): {_TAKEN}") from None
    if _is_state(content):
        return content  # type: ignore[no-any-return]
    inner = [name for name, value in content.items() if _is_state(value)] if isinstance(content, Mapping) else []
    if inner:
        way = f"state=torch.load({str(path)!r}, weights_only=True)[{inner[0]!r}]"
        raise ValueError(f"{path} holds more than a state dict; give the one in it: {way}")
    raise ValueError(f"{path} holds a {type(content).__name__} and no state dict: {_TAKEN}")


def _is_state(content: Any) -> bool:
    """Whether it maps names to tensors; a module may add an entry of another kind by `get_extra_state`."""
    if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
        return False
    return any(isinstance(value, Tensor) for value in content.values())
