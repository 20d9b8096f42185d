"""The benchmarks still run: a tiny model, a few steps, one table."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from qknorm.config import Prepare
from qknorm.text.prepare import prepare

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
        ("lp_overhead.py", ["plain"]),
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


def test_bpe_dropout_smoke(tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text("".join(f"a{i} casa {i}\tthe house {i}\n" for i in range(60)))
    prepare(Prepare(source="gl", target="en", train=(tmp_path / "pairs.tsv",)), tmp_path / "data")
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "bpe_dropout.py"), str(tmp_path / "data"), "--workers", "1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for row in ("line by line, an epoch", "workers: 0, start of an epoch", "workers: 1, start of an epoch"):
        assert re.search(rf"^\| {row} \| \d+\.\d+ \| \d+\.\d+ \|", done.stdout, re.MULTILINE), done.stdout
