"""What every group of settings is: frozen, and strict about names."""

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, model_validator


class Settings(BaseModel):
    """A frozen group of settings; a name it does not know is an error.

    TOML has no null, so that "none" stands for it where a setting may be left open: a file can undo a preset's value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _read_none(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {name: None if value == "none" and _may_be_open(cls, name) else value for name, value in given.items()}


def _may_be_open(kind: type[BaseModel], name: str) -> bool:
    return name in kind.model_fields and type(None) in get_args(kind.model_fields[name].annotation)
