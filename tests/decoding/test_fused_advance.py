"""The kernel of a search step: its cases in Triton's interpreter, and on a GPU."""

from pathlib import Path

import pytest
import torch

from interpreted import run_in_interpreter

CASES = Path(__file__).with_name("fused_advance_cases.py")


@pytest.mark.slow
def test_the_kernels_in_tritons_interpreter() -> None:
    run_in_interpreter(CASES)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernels_on_the_gpu() -> None:
    assert pytest.main(["-q", str(CASES)]) == 0
