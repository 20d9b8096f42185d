import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "attention.py"


@pytest.mark.slow
def test_smoke_on_the_cpu(tmp_path: Path) -> None:
    shape = ["--lengths", "16", "32", "--tokens", "64", "--heads", "2", "--head-dim", "8", "--seconds", "0.01"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--device", "cpu", "--no-compile", "--out", str(tmp_path / "table.md"), *shape],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "table.md").read_text()
    for length in (16, 32):
        for name in ("plain SDPA", "QKNorm sdpa", "qknorm.MultiheadAttention"):
            assert re.search(rf"^\| {length} × {64 // length} \| {name} \| \d+\.\d+ \|", table, re.MULTILINE), table
    assert table.strip() in done.stdout
