"""How kernels are spread over a GPU: tiles that cover everything, and the benchmark that compares them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from interpreted import require_kernels
from qknorm.models.launches import LAUNCHES, Launch

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "step_kernels.py"


@pytest.mark.parametrize("d", [5, 64, 130, 512, 1_000, 4_096])
@pytest.mark.parametrize("warps", [1, 4, 16])
@pytest.mark.parametrize("entries", [512, 8_192])
def test_tiles_of_whole_rows_cover_them(d: int, warps: int, entries: int) -> None:
    (programs,), tile = Launch(entries, warps, programs=7).over_rows(100, d)
    block, rows, apart = tile["BLOCK"], tile["ROWS"], tile["APART"]
    assert d <= block < 2 * max(d, 64) and block & (block - 1) == 0
    assert 1 <= programs <= 7 and rows >= 2 and rows % apart == 0 and rows & (rows - 1) == 0
    assert warps <= tile["num_warps"] <= 16


def test_programs_are_shared_by_columns_that_stand_side_by_side() -> None:
    launch = Launch(1_024, 2, programs=12, columns=64)
    assert launch.over_columns(1_000, 200)[0] == (3, 4)
    assert launch.over_columns(20, 200)[0] == (2, 4)
    assert launch._replace(programs=0).over_columns(1_000, 200)[0] == (63, 4)
    assert launch.over_columns(1_000, 2_000)[0] == (1, 32)


def test_kernels_that_do_not_walk_over_tiles_have_a_program_for_each() -> None:
    for kernel in ("add_norm_forward", "activation_forward", "embed_forward", "unit_rows"):
        assert LAUNCHES[kernel].programs == 0, kernel


@pytest.mark.slow
def test_the_benchmark_that_compares_launches_runs() -> None:
    require_kernels()
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--smoke", "--tune"],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stdout, done.stdout
    for kernel in set(LAUNCHES) - {"embed_forward", "embed_backward", "unit_rows"}:
        assert re.search(rf"^\| {kernel}, ", done.stdout, re.MULTILINE), kernel
    assert len(re.findall(r"^\| Launch\(.*← now \| [\d.]+ \|", done.stdout, re.MULTILINE)) == 15
