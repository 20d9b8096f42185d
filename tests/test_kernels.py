"""Triton kernels: every file of cases in Triton's interpreter, and on a GPU where there is one."""

from pathlib import Path

import pytest
import torch

from interpreted import require_kernels, run_in_interpreter

CASES = sorted(Path(__file__).parent.glob("*/fused*_cases.py"))
PAIRS = [CASES[first :: len(CASES) // 2] for first in range(len(CASES) // 2)]
"""Files that share a process: half as many take seconds to start."""


def test_there_are_cases_for_every_room_that_has_kernels() -> None:
    assert {path.parent.name for path in CASES} == {"attention", "decoding", "models", "training"}
    assert all("def test_" in path.read_text(encoding="utf-8") for path in CASES)
    assert sorted(path for pair in PAIRS for path in pair) == CASES


@pytest.mark.slow
@pytest.mark.parametrize("cases", PAIRS, ids=lambda pair: " and ".join(path.stem for path in pair))
def test_the_kernels_in_tritons_interpreter(cases: list[Path]) -> None:
    run_in_interpreter(*cases)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem)
def test_the_kernels_on_the_gpu(cases: Path) -> None:
    require_kernels()
    assert pytest.main(["-q", str(cases)]) == 0
