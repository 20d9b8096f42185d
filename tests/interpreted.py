"""Cases of Triton kernels, run on the CPU by Triton's interpreter, which must be chosen before triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_in_interpreter(cases: Path) -> None:
    """Runs a file of cases in a process of its own; fails with what it printed."""
    pytest.importorskip("triton", reason="triton is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "failed" not in done.stdout
