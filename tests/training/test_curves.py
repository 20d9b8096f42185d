"""The picture of a training: the panels that have data, and only those."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from qknorm.errors import InputError
from qknorm.training import curves
from qknorm.training.curves import draw_curves, save_figure
from qknorm.training.record import Recorder

PNG = b"\x89PNG\r\n\x1a\n"
KINDS = ("decoder.N.cross", "decoder.N.self", "encoder.N.self")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Every figure that is drawn, to look into."""
    drawn: list[Figure] = []

    def remember(*given: Any, **named: Any) -> Figure:
        drawn.append(Figure(*given, **named))
        return drawn[-1]

    monkeypatch.setattr(curves, "Figure", remember)
    return drawn


def step_rows(count: int) -> list[dict[str, Any]]:
    return [{"kind": "step", "step": i, "loss": 9 - i / count, "learning_rate": 1e-4 * i} for i in range(1, count + 1)]


def evaluation_rows(count: int, **changes: Any) -> list[dict[str, Any]]:
    scales = {kind.replace("N", str(i)): 12.0 + i for kind in KINDS for i in range(11)}
    return [
        {"kind": "evaluation", "step": 10 * i, "dev_loss": 5.0, "dev_bleu": 20.0 + i % 3, "scales": scales} | changes
        for i in range(1, count + 1)
    ]


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws what a run would that has these metrics."""
    run = path.parent / f"{path.stem} of"
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw_curves(run, path)


def titles(figure: Figure) -> list[str]:
    return [axes.get_title().split(" (")[0] for axes in figure.axes]


def test_a_whole_run_has_four_panels(tmp_path: Path, figures: list[Figure]) -> None:
    with Recorder(tmp_path / "run", quiet=True) as recorder:
        for row in step_rows(200):
            recorder.log_step(row["step"], 1, row["loss"], 2.0, 3.0, row["learning_rate"], None)
        for row in evaluation_rows(30):
            recorder.log_evaluation(row)
    draw_curves(tmp_path / "run", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG)
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == ["curves.png"]
    assert titles(figures[0]) == ["Loss", "Dev BLEU", "Learning rate", "Scale g of every layer"]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (evaluation_rows(1), ["Loss", "Dev BLEU", "Scale g of every layer"]),
        (evaluation_rows(2, dev_bleu=None, scales={}), ["Loss"]),
        (evaluation_rows(2, dev_bleu=math.nan, scales=None, dev_loss=None), []),
        (step_rows(1), ["Loss", "Learning rate"]),
        (step_rows(5) + evaluation_rows(1, scales={"0.self": [3.0, None], "1.self": None}), None),
        ([{"kind": "step", "step": 1, "loss": None, "learning_rate": 0.0}], ["Learning rate"]),
        ([{"kind": "other", "step": 1}, {"step": 2}, {"kind": "step", "loss": 1.0}], []),
        ([], []),
    ],
)
def test_panels_without_data_are_left_out(
    tmp_path: Path, figures: list[Figure], rows: list[dict[str, Any]], expected: list[str] | None
) -> None:
    if expected == []:
        with pytest.raises(InputError, match=r"nothing to draw in .*metrics\.jsonl"):
            draw(rows, tmp_path / "curves.png")
        assert not (tmp_path / "curves.png").exists()
        return
    draw(rows, tmp_path / "curves.png")
    four = ["Loss", "Dev BLEU", "Learning rate", "Scale g of every layer"]
    assert titles(figures[0]) == (expected or four)


def test_the_best_is_the_one_marked_last_or_else_the_highest(tmp_path: Path, figures: list[Figure]) -> None:
    rows = evaluation_rows(4)
    draw(rows, tmp_path / "a.png")
    rows[0]["best"] = rows[2]["best"] = True
    draw(rows, tmp_path / "b.png")
    assert figures[0].axes[1].get_title() == "Dev BLEU (best: 22.00 at step 20)"
    assert figures[1].axes[1].get_title() == "Dev BLEU (best: 20.00 at step 30)"


def test_every_scale_has_a_line_and_every_kind_a_look(tmp_path: Path, figures: list[Figure]) -> None:
    draw(evaluation_rows(3), tmp_path / "curves.png")
    axes = figures[0].axes[-1]
    assert len(axes.lines) == 33
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "encoder self",
        "decoder self",
        "decoder cross",
    ]
    heights = [float(np.asarray(line.get_ydata())[0]) for line in axes.lines[:11]]
    assert heights == [12.0 + i for i in range(11)], "layers stand in the order of their numbers"
    assert len({str(line.get_color()) for line in axes.lines}) == 33
    assert len({str(line.get_linestyle() + str(line._dash_pattern)) for line in axes.lines}) == 3


def test_the_running_mean_is_a_mean() -> None:
    values = np.sin(np.arange(200.0))
    steps, means = curves._running_mean((np.arange(200.0), values))
    assert np.array_equal(steps, np.arange(200.0))
    assert means[100] == pytest.approx(values[97:104].mean())
    assert means[0] == pytest.approx(values[:4].mean())
    assert means[199] == pytest.approx(values[196:].mean())


def test_a_place_that_cannot_be_written_and_a_run_without_metrics_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    draw(step_rows(2), tmp_path / "curves.png")
    with pytest.raises(InputError, match=r"cannot write .*curves\.png"):
        draw_curves(tmp_path / "curves of", tmp_path / "file" / "curves.png")
    with pytest.raises(InputError, match=r"nothing to draw in .*metrics\.jsonl"):
        draw_curves(tmp_path, tmp_path / "curves.png")


def test_a_picture_of_another_kind_is_refused_by_its_name(tmp_path):
    with pytest.raises(InputError, match=r"curves\.jpg: a picture's name ends in \.png or \.svg"):
        save_figure(Figure(), tmp_path / "curves.jpg")


def test_drawing_leaves_the_global_state_of_matplotlib_alone() -> None:
    code = "import sys, qknorm.training.curves; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
