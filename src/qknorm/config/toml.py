"""TOML in, and errors in words."""

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from qknorm.config.group import Settings
from qknorm.config.training import Train
from qknorm.errors import InputError

SettingsKind = TypeVar("SettingsKind", bound=Settings)


def read_settings(path: Path, kind: type[SettingsKind], base: SettingsKind | None = None) -> SettingsKind:
    """Settings from a TOML file, over those of `base` where the file is silent."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); name a TOML file of settings") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no TOML: {error}") from None
    merged = given if base is None else merge(base.model_dump(exclude_unset=False), given)
    try:
        return kind.model_validate(merged)
    except ValidationError as error:
        raise InputError(explain_validation(error, str(path), kind)) from None


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` over it, group by group."""
    merged = dict(base)
    for name, value in changes.items():
        inner = merged.get(name)
        both_groups = isinstance(inner, Mapping) and isinstance(value, Mapping)
        merged[name] = merge(inner, value) if both_groups else value  # type: ignore[arg-type]
    return merged


def explain_validation(error: ValidationError, where: str, kind: type[BaseModel] = Train) -> str:
    """The first mistake as a sentence: an unknown name with the nearest known one, or what is wrong with a value."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"]]
    name = ".".join(place)
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, list(setting_names(kind)), n=1, cutoff=0.5) or difflib.get_close_matches(
            place[-1], [known for known in setting_names(kind) if "." not in known], n=1
        )
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"{where}: there is no setting {name}{hint}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":  # raised by the checks above, which name the settings themselves
        return f"{where}: {message}"
    return f"{where}: {name}: {message}"


def setting_names(kind: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted name of a tree of settings."""
    for name, entry in kind.model_fields.items():
        yield prefix + name
        if isinstance(entry.annotation, type) and issubclass(entry.annotation, BaseModel):
            yield from setting_names(entry.annotation, f"{prefix}{name}.")
