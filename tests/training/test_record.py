"""What a training prints and writes: strict JSON, the same after a resume, readable in 80 columns."""

import io
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from qknorm.errors import InputError
from qknorm.training import record
from qknorm.training.record import Recorder, read_metrics


def plain_console() -> tuple[Console, io.StringIO]:
    output = io.StringIO()
    return Console(file=output, width=80, highlight=False), output


def log_step(recorder: Recorder, step: int, **changes: Any) -> None:
    fields: dict[str, Any] = {
        "epoch": step // 10,
        "loss": 3.412,
        "perplexity": 30.34,
        "tokens_per_second": 51234.0,
        "learning_rate": 4.94e-4,
        "seconds_left": 5025.0,
    }
    recorder.log_step(step=step, **(fields | changes))


def evaluation(step: int, **changes: Any) -> dict[str, Any]:
    row = {"step": step, "epoch": 3, "loss": 3.2, "dev_loss": 3.5, "dev_bleu": 23.456, "learning_rate": 4.9e-4}
    return (
        row | {"seconds": 83.0, "best": False, "scales": {"encoder.0.self": 12.6, "decoder.0.cross": 14.01}} | changes
    )


def without_clock(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "time"} for row in rows]


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not strict JSON")

    return json.loads(text, parse_constant=refuse)


# ------------------------------------------------------------------ metrics.jsonl


def test_rows_are_written_with_the_clock_apart(tmp_path: Path) -> None:
    with Recorder(tmp_path / "new" / "run", quiet=True) as recorder:
        for step in (2, 4):
            log_step(recorder, step, gradient_norm=0.5)
        recorder.log_evaluation(evaluation(4, time={"decoding": 1.5}))
    rows = read_metrics(tmp_path / "new" / "run")
    assert [(row["kind"], row["step"]) for row in rows] == [("step", 2), ("step", 4), ("evaluation", 4)]
    assert without_clock(rows)[0] == {
        "kind": "step",
        "step": 2,
        "epoch": 0,
        "loss": 3.412,
        "perplexity": 30.34,
        "learning_rate": 4.94e-4,
        "gradient_norm": 0.5,
    }
    assert rows[0]["time"].keys() == {"at", "tokens_per_second", "seconds_left"}
    assert rows[2]["time"].keys() == {"at", "seconds", "decoding"}
    assert rows[2]["scales"] == {"encoder.0.self": 12.6, "decoder.0.cross": 14.01}


def test_a_line_is_on_its_way_before_the_next_one(tmp_path: Path) -> None:
    with Recorder(tmp_path, quiet=True) as recorder:
        log_step(recorder, 1)
        assert len(read_metrics(tmp_path)) == 1


def test_what_json_cannot_hold_becomes_null_or_a_plain_number(tmp_path: Path) -> None:
    scales = {"encoder.0.self": torch.tensor(12.5), "encoder.1.self": [math.nan, 3.0]}
    with Recorder(tmp_path, quiet=True) as recorder:
        log_step(recorder, 1, loss=math.nan, perplexity=np.float64(math.inf), learning_rate=-math.inf)
        recorder.log_evaluation(
            {"step": np.int64(2), "best": np.bool_(True), "scales": scales, "note": "“ñ”\n\u2028\udc80"}
        )
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").split("\n")
    step, evaluated = (strict(line) for line in lines[:2])
    assert lines[2:] == [""]
    assert (step["loss"], step["perplexity"], step["learning_rate"]) == (None, None, None)
    assert (evaluated["step"], evaluated["best"]) == (2, True)
    assert evaluated["scales"] == {"encoder.0.self": 12.5, "encoder.1.self": [None, 3.0]}
    assert evaluated["note"] == "“ñ”\n\u2028\udc80"


@settings(max_examples=25)
@given(stop=st.integers(0, 12), resume=st.integers(0, 12), half=st.integers(0, 60))
def test_a_resumed_run_ends_with_the_metrics_of_one_never_stopped(
    tmp_path_factory: pytest.TempPathFactory, stop: int, resume: int, half: int
) -> None:
    whole, broken = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("broken")

    def train(run: Path, first: int, last: int) -> None:
        with Recorder(run, quiet=True) as recorder:
            recorder.truncate_to(first - 1)
            for step in range(first, last + 1):
                if step % 3 == 0:
                    log_step(recorder, step, loss=1 / (step + 1))
                if step % 4 == 0:
                    recorder.log_evaluation(evaluation(step))

    train(whole, 0, 12)
    train(broken, 0, stop)
    with (broken / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": "step", "step": 11, "loss": 0.25, "perplexity": 1.284})[:half])
    train(broken, min(resume, stop + 1), 12)
    assert without_clock(read_metrics(broken)) == without_clock(read_metrics(whole))


def test_half_a_last_line_is_never_read_nor_written_on(tmp_path: Path) -> None:
    with Recorder(tmp_path, quiet=True) as recorder:
        log_step(recorder, 1)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "step", "st\0\0')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]
    with Recorder(tmp_path, quiet=True) as recorder:
        log_step(recorder, 2)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]


@pytest.mark.parametrize("line", [b"{nonsense}", b"[1, 2]", b"\xff", b'{"step": "one"}', b"[" * 100_000])
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"kind": "step", "step": 1}\n' + line + b"\n")
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 2 is not a JSON object"):
        read_metrics(tmp_path)
    with Recorder(tmp_path, quiet=True) as recorder, pytest.raises(InputError, match="line 2"):
        recorder.truncate_to(5)


def test_a_run_without_metrics_has_none_and_no_run_is_an_error(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    with pytest.raises(InputError, match="no run folder"):
        read_metrics(tmp_path / "nowhere")


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write .*metrics\.jsonl"):
        Recorder(tmp_path / "file")


def test_a_full_disk_leaves_only_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Recorder(tmp_path, quiet=True) as recorder:
        log_step(recorder, 1)
        really_write = os.write
        calls: list[int] = []

        def write_a_part(descriptor: int, content: bytes) -> int:
            calls.append(len(content))
            if len(calls) == 2:
                raise OSError(28, "No space left on device")
            return really_write(descriptor, content[:10])

        with monkeypatch.context() as patched:
            patched.setattr("os.write", write_a_part)
            with pytest.raises(InputError, match=r"cannot write .*metrics\.jsonl: No space left on device"):
                log_step(recorder, 2)
        log_step(recorder, 3)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 3]


# ------------------------------------------------------------------ the terminal


def test_without_a_terminal_a_plain_line_comes_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console, output = plain_console()
    now = 0.0
    monkeypatch.setattr(record.time, "monotonic", lambda: now)
    with Recorder(tmp_path, console=console) as recorder:
        for step in range(1, 26):
            log_step(recorder, step)
            now += 1.0
    assert [line.split()[1] for line in output.getvalue().splitlines()] == ["1", "11", "21"]
    expected = "step 1  epoch 0  loss 3.412  ppl 30.3  51.2k tok/s  lr 4.9e-4  1:23:45 left"
    assert output.getvalue().splitlines()[0] == expected
    assert "\x1b" not in output.getvalue()


def test_a_step_between_logs_is_shown_and_not_written(tmp_path: Path) -> None:
    console, output = plain_console()
    with Recorder(tmp_path, console=console) as recorder:
        recorder.show_step(1_200, 3, 4.94e-4, loss=3.412)
    assert output.getvalue() == "step 1,200  epoch 3  loss 3.412  lr 4.9e-4\n"
    assert read_metrics(tmp_path) == []


def test_the_last_line_is_of_a_step_not_of_an_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(record, "SECONDS_BETWEEN_REFRESHES", 0.0)
    output = io.StringIO()
    with Recorder(tmp_path, console=Console(file=output, width=80, force_terminal=True, color_system=None)) as recorder:
        recorder.show_step(7, 0, 1e-3)
        recorder.show_progress("translate", 50, 50)
    shown = [line for line in re.split(r"[\r\n]|\x1b\[[?\d;]*[A-Za-z]", output.getvalue()) if line]
    assert shown[0] == shown[-1] == "step 7  epoch 0  lr 1.0e-3"
    assert shown[1] == "translate 50 / 50"


def test_evaluations_are_rows_under_one_header_with_the_best_marked(tmp_path: Path) -> None:
    console, output = plain_console()
    with Recorder(tmp_path, console=console) as recorder:
        recorder.log_evaluation(evaluation(1_200, best=True))
        recorder.log_evaluation(evaluation(12_000, dev_bleu=None, scales={}, loss=math.nan, seconds=90_000))
        recorder.log_evaluation({"step": 3})
    assert output.getvalue().splitlines() == [
        "    step  epoch    loss  dev loss    BLEU       lr      scale g      time",
        "   1,200      3   3.200     3.500   23.46   4.9e-4  12.6 - 14.0      1:23  best",
        "  12,000      3     nan     3.500       -   4.9e-4            -  25:00:00",
        "       3      -       -         -       -        -            -         -",
    ]


def test_scales_by_head_are_spanned_too(tmp_path: Path) -> None:
    console, output = plain_console()
    with Recorder(tmp_path, console=console) as recorder:
        recorder.log_evaluation({"step": 1, "scales": {"0": torch.tensor([3.0, 9.0]), "1": [math.nan, 5.0]}})
    assert "3.0 - 9.0" in output.getvalue()


@pytest.mark.parametrize("step", [1, 999_999])
def test_the_live_line_fits_80_columns(tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    output = io.StringIO()
    console = Console(file=output, width=80, force_terminal=True, color_system=None)
    with Recorder(tmp_path, console=console) as recorder:
        log_step(recorder, step, epoch=123)
        recorder.message("a [warning] in brackets")
        recorder.show_progress("translating the dev set", 1_200, 4_000)
        log_step(recorder, step, epoch=123)
    text = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", output.getvalue())
    lines = [line for line in re.split(r"[\r\n]", text) if "loss" in line]
    assert all(len(line) <= 80 and "…" not in line for line in lines)
    assert all(
        part in lines[-1] for part in (f"step {step:,}", "123", "3.412", "30.3", "51.2k", "4.9e-4", "1:23:45 left")
    )
    assert "a [warning] in brackets" in text


def test_a_narrow_terminal_cuts_the_line_instead_of_wrapping_it(tmp_path: Path) -> None:
    output = io.StringIO()
    console = Console(file=output, width=30, force_terminal=True, color_system=None)
    with Recorder(tmp_path, console=console) as recorder:
        log_step(recorder, 1)
    assert "…" in output.getvalue()
    assert "left" not in output.getvalue()


def test_quiet_prints_messages_only(tmp_path: Path) -> None:
    console, output = plain_console()
    with Recorder(tmp_path, console=console, quiet=True) as recorder:
        log_step(recorder, 1)
        recorder.show_progress("evaluating", 1, None)
        recorder.log_evaluation(evaluation(1))
        recorder.message("the disk is nearly full", "yellow")
    assert output.getvalue() == "the disk is nearly full\n"


def test_an_exception_closes_the_live_line_and_shows_the_cursor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    output = io.StringIO()
    recorder = Recorder(tmp_path, console=Console(file=output, width=80, force_terminal=True))
    log_step(recorder, 1)
    with pytest.raises(KeyboardInterrupt), recorder:
        raise KeyboardInterrupt
    assert output.getvalue().rstrip("\n").endswith("\x1b[?25h")
    recorder.close()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "?"), (math.inf, "?"), (-3, "0:00"), (59.6, "1:00"), (3_600, "1:00:00"), (200_000, "2d 07h")],
)
def test_times_are_told_as_a_clock_would(seconds: float | None, text: str) -> None:
    assert record._clock(seconds) == text


@given(st.floats(0.0, 1e11))
def test_quantities_stay_short_and_true(number: float) -> None:
    text = record._quantity(number)
    value = float(text.rstrip("kMG")) * {"k": 1e3, "M": 1e6, "G": 1e9}.get(text[-1], 1.0)
    assert len(text) <= 5
    assert value == pytest.approx(number, rel=0.006, abs=0.006)


@pytest.mark.parametrize(
    ("number", "text"), [(math.nan, "nan"), (math.inf, "inf"), (999.7, "1.00k"), (1e30, "1.0e+30")]
)
def test_odd_quantities(number: float, text: str) -> None:
    assert record._quantity(number) == text


# ------------------------------------------------------------------ TensorBoard


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Recorder(tmp_path, tensorboard=True, quiet=True) as recorder:
        log_step(recorder, 1, loss=3.5)
        log_step(recorder, 2, loss=math.nan)
        recorder.log_evaluation(evaluation(2))
    with Recorder(tmp_path, tensorboard=True, quiet=True) as recorder:
        recorder.truncate_to(1)
        log_step(recorder, 2, loss=0.25)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 3.5), (2, 0.25)]
    assert "dev/scales/encoder.0.self" in events.Tags()["scalars"]


def test_tensorboard_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError, match=r"pip install 'qknorm\[tensorboard\]'"):
        Recorder(tmp_path, tensorboard=True)
    assert not (tmp_path / "metrics.jsonl").exists()
