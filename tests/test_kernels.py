"""Triton kernels: every file of cases in Triton's interpreter, and on a GPU where there is one."""

from pathlib import Path

import pytest
import torch

from interpreted import run_in_interpreter

CASES = sorted(Path(__file__).parent.glob("*/fused*_cases.py"))

pytestmark = pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem)


def test_there_are_cases_for_every_room_that_has_kernels(cases: Path) -> None:
    rooms = {path.parent.name for path in CASES}
    assert rooms == {"attention", "decoding", "models", "training"} and "def test_" in cases.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_kernels_in_tritons_interpreter(cases: Path) -> None:
    run_in_interpreter(cases)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernels_on_the_gpu(cases: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    assert pytest.main(["-q", str(cases)]) == 0
