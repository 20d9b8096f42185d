"""What the guide on looking at attention runs."""

import re
from pathlib import Path
from typing import Any

import pytest

from qknorm.inspection.report import Report

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "inspect.md"


def test_python_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    reports: list[Report] = []
    made = Report.__post_init__
    monkeypatch.setattr(Report, "__post_init__", lambda self: (made(self), reports.append(self))[0])
    names: dict[str, Any] = {}
    exec(compile(blocks[0], "inspect.md", "exec"), names)
    page = (tmp_path / "attention.html").read_text(encoding="utf-8")
    assert "decoder.layers.1.multihead_attn" in page and "gato" in page and "cat" in page
    (sentence,) = reports[0].models[0].sentences
    sides = {one.name: (one.queries, one.keys) for one in sentence.attentions}
    assert not names["calls"].unseen and sides == {
        "encoder.layers.0.self_attn": ("source", "source"),
        "encoder.layers.1.self_attn": ("source", "source"),
        "decoder.layers.0.self_attn": ("target", "target"),
        "decoder.layers.0.multihead_attn": ("target", "source"),
        "decoder.layers.1.self_attn": ("target", "target"),
        "decoder.layers.1.multihead_attn": ("target", "source"),
    }
