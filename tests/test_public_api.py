"""`import qknorm` is light, and everything it promises is there."""

import ast
import functools
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import qknorm

HEAVY = ("matplotlib", "rich", "tokenizers", "sacrebleu", "sacremoses", "pydantic", "tyro", "safetensors")


@functools.cache
def modules_after(code: str) -> frozenset[str]:
    """The names of all modules that a fresh interpreter has after running the code."""
    printed = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return frozenset(printed.stdout.split())


def test_importing_qknorm_imports_nothing_heavy() -> None:
    """Some torch versions import a few of these themselves; only what qknorm adds counts."""
    added = modules_after("import qknorm; qknorm.attend; dir(qknorm)") - modules_after("import torch")
    assert "qknorm.attention" in added
    assert not [name for name in added if name.split(".")[0] in HEAVY]
    ours = {name for name in added if name.startswith("qknorm.") and not name.startswith("qknorm.attention")}
    assert ours == {"qknorm.errors", "qknorm.version"}


def test_importing_qknorm_imports_no_torch() -> None:
    assert not [name for name in modules_after("import qknorm; dir(qknorm)") if name.split(".")[0] == "torch"]


def test_asking_for_a_name_imports_only_its_own_part() -> None:
    added = modules_after("import qknorm; qknorm.score") - modules_after("import torch")
    assert "sacrebleu" in added
    assert not {"matplotlib", "tyro", "qknorm.models.translator", "qknorm.training.fit"} & added


@pytest.mark.parametrize("name", qknorm.__all__)
def test_every_public_name_resolves_and_is_listed(name: str) -> None:
    assert getattr(qknorm, name) is not None
    assert name in dir(qknorm)


def test_type_checkers_see_what_the_interpreter_gives() -> None:
    """The imports written for type checkers name the same objects as those made when asked for."""
    tree = ast.parse(Path(qknorm.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    declared = {
        alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert declared, "the names for type checkers are gone"
    eager = {"InputError", "__version__"}
    assert set(qknorm.__all__) - eager == set(declared)
    for name, home in declared.items():
        assert getattr(qknorm, name) is getattr(importlib.import_module(str(home)), name), name


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="'qknorm' has no attribute 'tranlate'"):
        qknorm.tranlate  # noqa: B018
    assert not hasattr(qknorm, "nothing")
