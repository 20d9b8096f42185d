"""A training that is watched measures its attentions as it goes, and learns what it would have learned unwatched."""

from pathlib import Path

import pytest
from tasks import Tiny, checkpoint_bytes, metrics, succeed

from qknorm.inspection.measures import Measures


def test_watching_writes_measures_and_changes_nothing(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = [row for row in metrics(tiny.run) if row["kind"] == "attention"]
    assert [row["step"] for row in seen] == [6, 12, 18]
    for row in seen:
        assert list(row["attention"]) == ["encoder.0.self", "decoder.0.self", "decoder.0.cross"]
        for numbers in row["attention"].values():
            assert set(numbers) == set(Measures.names())
            assert all(len(column) == 2 for column in numbers.values())
    unwatched = tmp_path / "run"
    words = ["--config", tiny.config, "--device", "cpu", "--training.inspect-every", 0]
    told = succeed(capsys, "train", tiny.data, "--run", unwatched, *words)
    assert "on a CPU the default is the preset low-resource-small" in told
    assert checkpoint_bytes(unwatched, 20) == checkpoint_bytes(tiny.run, 20)
    assert metrics(unwatched) == [row for row in metrics(tiny.run) if row["kind"] != "attention"]
