"""The benchmarks still run: a tiny model, a few steps, one table."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "rows"),
    [
        (
            "training.py",
            ["ours, QKNorm", "ours, dot product", "released code, restated (fp32)", "torch.nn.Transformer"],
        ),
        ("decoding.py", ["ours, float32", "ours, bfloat16", "ours, int8", "no cache"]),
        ("evaluation.py", ["dev loss", "search", "of it encoding", "text", "BLEU", "whole evaluation"]),
        ("lp_overhead.py", ["side-by-side, plain", "stacked, plain"]),
    ],
)
def test_smoke(script: str, rows: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), "--smoke", "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for row in rows:
        assert re.search(rf"^\| {re.escape(row)} \| \d+\.\d+ \| [\d,.]+ \|", done.stdout, re.MULTILINE), done.stdout
