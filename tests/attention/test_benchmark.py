import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from interpreted import require_kernels

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "attention.py"


def test_padded_sources_are_like_those_of_a_development_set(monkeypatch: pytest.MonkeyPatch) -> None:
    require_kernels()
    monkeypatch.syspath_prepend(SCRIPT.parent)
    decoding = importlib.import_module("attention_decoding")
    lengths = decoding.source_lengths(693)
    assert lengths.max() == 175 and 28 < lengths.float().mean() < 30 and lengths.min() >= 2
    assert lengths.tolist() == sorted(lengths.tolist(), reverse=True) == decoding.source_lengths(693).tolist()
    masks = decoding.decoding_masks(693, "cpu")
    padded = masks["176 source, padded"]
    assert padded.shape == (693, 1, 1, 176) and decoding.keys_until_last(padded) == lengths.sum()
    assert torch.equal((padded == 0).sum(-1).flatten(), lengths) and padded.isinf().sum() == 693 * 176 - lengths.sum()
    assert decoding.keys_until_last(masks["256 own, 132 so far"]) <= 693 * 132


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
