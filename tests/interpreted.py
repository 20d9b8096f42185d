"""Cases of Triton kernels, run on the CPU by Triton's interpreter, which must be chosen before triton is imported."""

import functools
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def require_kernels() -> None:
    """Skips a test where there are no kernels: without Triton, or with a PyTorch that is too old for them."""
    from qknorm.attention.availability import HAS_KERNELS

    if not HAS_KERNELS:
        pytest.skip("needs Triton, and PyTorch 2.9 or newer")


def run_in_interpreter(*cases: Path) -> None:
    """Runs files of cases in a process of their own; fails with what it printed."""
    require_kernels()
    settings = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, cases)],
        # no case needs a plugin, and some take seconds to import
        env={**os.environ, **settings, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "failed" not in done.stdout


def patch_once_a_launch() -> None:
    """Has the interpreter put its functions into triton.language once a launch and module, not once a function call.

    Nothing undoes them before the launch ends, and looking for their places takes longer than what many kernels do.
    """
    try:
        from triton.runtime import interpreter

        patch_language, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
        patch_member, is_builtin = interpreter._patch_attr, interpreter.tl.core.is_builtin
    except (ImportError, AttributeError):  # no triton, or one that is made otherwise
        return
    patched: set[int] = set()

    def launch_anew(executor: Any, *inputs: Any, **options: Any) -> Any:
        patched.clear()
        return launch(executor, *inputs, **options)

    def patch_if_first(function: Any) -> Any:
        if id(function.__globals__) in patched:
            return None
        patched.add(id(function.__globals__))
        return patch_language(function)

    @functools.cache
    def builtins_of(module: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(module) if is_builtin(member)]

    def patch_builtins(module: Any, *how: Any) -> None:
        for name in builtins_of(module):
            if is_builtin(member := getattr(module, name)):
                patch_member(module, name, member, *how)

    interpreter._patch_lang, interpreter._patch_builtin = patch_if_first, patch_builtins
    interpreter.GridExecutor.__call__ = launch_anew
