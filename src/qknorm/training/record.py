"""Everything a training prints and writes down: a live line, a table of evaluations, metrics.jsonl, TensorBoard."""

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from qknorm.training.metrics import (
    BLEU,
    METRICS_FILE,
    Criterion,
    MetricsFile,
    TensorBoardFile,
    read_metrics,
    scale_numbers,
    to_strict_json,
)

__all__ = ["Recorder", "read_metrics"]

WALL_CLOCK = ("seconds", "seconds_left", "tokens_per_second")
SECONDS_BETWEEN_PLAIN_LINES = 10.0
SECONDS_BETWEEN_REFRESHES = 0.1
SHORT = {"epoch": "ep", "tok/s": "t/s"}


class Recorder:
    """Prints what a training reports and appends it to the run's metrics.jsonl.

    Fields that depend on the clock stand under `time` in every line, so that all the rest repeats with the seed.
    """

    def __init__(
        self,
        run: Path,
        *,
        tensorboard: bool = False,
        quiet: bool = False,
        console: Console | None = None,
        criterion: Criterion = BLEU,
    ) -> None:
        self._curves = TensorBoardFile(run / "tensorboard") if tensorboard else None
        self._metrics = MetricsFile(run / METRICS_FILE)
        self._display = _Display(console or Console(highlight=False), quiet, criterion)

    def log_step(
        self,
        step: int,
        epoch: int,
        loss: float,
        perplexity: float,
        tokens_per_second: float,
        learning_rate: float,
        seconds_left: float | None,
        **more: Any,
    ) -> None:
        """Shows the step and writes it down."""
        self._display.show(_step_fields(step, epoch, loss, perplexity, tokens_per_second, learning_rate, seconds_left))
        measured = {"loss": loss, "perplexity": perplexity, "learning_rate": learning_rate, **more}
        clock = {"tokens_per_second": tokens_per_second, "seconds_left": seconds_left}
        self._write({"kind": "step", "step": step, "epoch": epoch, **measured, **clock}, durable=False)

    def log_attention(self, step: int, heads: Mapping[str, Any], means: Mapping[str, Any]) -> None:
        """Writes down what attention does: each head to metrics.jsonl, each attention's mean to TensorBoard."""
        row = {"kind": "attention", "step": step}
        self._write({**row, "attention": heads}, durable=False, curves={**row, "attention": means})

    def show_step(self, step: int, epoch: int, learning_rate: float, loss: float | None = None) -> None:
        """Shows a step that is not written down."""
        known = [] if loss is None else [("loss", f"{loss:.3f}", "")]
        rate = ("lr", _rate(learning_rate), "")
        self._display.show([("step", f"{step:,}", ""), ("epoch", f"{epoch:,}", ""), *known, rate])

    def log_evaluation(self, row: Mapping[str, Any]) -> None:
        """Writes an evaluation down and prints it as a row of a table.

        Known fields: step, epoch, loss, dev_loss, that of the criterion, learning_rate, seconds, best, scales; any may
        be absent but the step, and any other may be added.
        """
        self._write({"kind": "evaluation", **row}, durable=True)
        self._display.add_row(row)

    def show_progress(self, stage: str, done: int, total: int | None) -> None:
        """Shows how far a stage between steps has come, such as the translation of the dev set."""
        self._display.show([(stage, f"{done:,}" if total is None else f"{done:,} / {total:,}", "")], passing=True)

    def message(self, text: str, style: str = "") -> None:
        """Prints a sentence above the live line, quiet or not."""
        self._display.say(text, style)

    @staticmethod
    def tell_of_signal(name: str) -> None:
        """Says on standard error that a training is about to leave; safe within a handler of signals."""
        text = f"{name}: the training saves and leaves; a second signal leaves at once, without saving\n"
        with suppress(OSError, ValueError, AttributeError):  # closed, or none at all
            lead = "\n" if sys.stderr.isatty() else ""  # the live line stands where it is
            os.write(sys.stderr.fileno(), (lead + text).encode())

    def truncate_to(self, step: int) -> None:
        """Forgets what was recorded after `step`, for a training that goes on from there; −1 forgets everything."""
        self._metrics.truncate_to(step)
        if self._curves:
            self._curves.truncate_to(step)

    def close(self) -> None:
        """Ends the live line and closes the files; a second call does nothing."""
        self._display.close()
        self._metrics.close()
        if self._curves:
            self._curves.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, row: dict[str, Any], *, durable: bool, curves: dict[str, Any] | None = None) -> None:
        clock = {name: row.pop(name) for name in WALL_CLOCK if name in row}
        clock = {"at": datetime.now(UTC).isoformat(timespec="seconds"), **clock, **row.pop("time", {})}
        plain = {**to_strict_json(row), "time": to_strict_json(clock)}
        self._metrics.append(plain, durable)
        if self._curves:
            self._curves.append(plain if curves is None else to_strict_json(curves))


# ------------------------------------------------------------------ the terminal

Field = tuple[str, str, str]  # what stands before the value, the value, what stands after it


class _Display:
    """A live line below a growing table; where there is no terminal, a plain line every few seconds."""

    def __init__(self, console: Console, quiet: bool, criterion: Criterion) -> None:
        self._columns = _columns(criterion)
        self._console = console
        self._quiet = quiet
        self._live: Live | None = None
        self._shown_at = -math.inf
        self._headed = False
        self._latest = Text()

    def show(self, fields: list[Field], passing: bool = False) -> None:
        """What is `passing` does not stay as the last line."""
        if self._quiet:
            return
        line = _line(fields, self._console.width if self._console.is_terminal else None)
        self._latest = self._latest if passing else line
        now = time.monotonic()
        if now - self._shown_at < (
            SECONDS_BETWEEN_REFRESHES if self._console.is_terminal else SECONDS_BETWEEN_PLAIN_LINES
        ):
            return
        self._shown_at = now
        if not self._console.is_terminal:
            self._print(line)
        elif self._live is None:
            # no thread redraws it: it would run on beside forked workers, and nothing changes between two calls
            self._live = Live(line, console=self._console, auto_refresh=False)
            self._live.start(refresh=True)
        else:
            self._live.update(line, refresh=True)

    def add_row(self, row: Mapping[str, Any]) -> None:
        if self._quiet:
            return
        if not self._headed:
            self._print(Text("  ".join(f"{column.head:>{column.width}}" for column in self._columns), style="bold"))
        self._headed = True
        text = "  ".join(f"{column.cell(row):>{column.width}}" for column in self._columns)
        self._print(Text(f"{text}  best", style="bold green") if row.get("best") else Text(text))

    def say(self, text: str, style: str) -> None:
        self._print(Text(text, style=style))

    def close(self) -> None:
        if self._live is not None:
            self._live.update(self._latest, refresh=True)
            self._live.stop()
        self._live = None

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True, highlight=False)


def _step_fields(
    step: int,
    epoch: int,
    loss: float,
    perplexity: float,
    tokens_per_second: float,
    learning_rate: float,
    seconds_left: float | None,
) -> list[Field]:
    return [
        ("step", f"{step:,}", ""),
        ("epoch", f"{epoch:,}", ""),
        ("loss", f"{loss:.3f}", ""),
        ("ppl", _quantity(perplexity), ""),
        ("", _quantity(tokens_per_second), "tok/s"),
        ("lr", _rate(learning_rate), ""),
        ("", _clock(seconds_left), "left"),
    ]


def _line(fields: list[Field], width: int | None) -> Text:
    """The fields in a line, with shorter words where `width` is short of room."""
    if width is not None and sum(len(" ".join(filter(None, field))) + 2 for field in fields) - 2 > width:
        fields = [(SHORT.get(before, before), value, SHORT.get(after, after)) for before, value, after in fields]
    line = Text(no_wrap=True, overflow="ellipsis")
    for index, (before, value, after) in enumerate(fields):
        line.append("  " if index else "")
        line.append(f"{before} " if before else "", style="dim")
        line.append(value, style="bold")
        line.append(f" {after}" if after else "", style="dim")
    return line


class _Column(NamedTuple):
    """A column of the table of evaluations."""

    head: str
    width: int
    field: str
    form: Callable[[Any], str]

    def cell(self, row: Mapping[str, Any]) -> str:
        return "-" if row.get(self.field) is None else self.form(row[self.field])


def _columns(criterion: Criterion) -> list[_Column]:
    return [
        _Column("step", 8, "step", "{:,}".format),
        _Column("epoch", 5, "epoch", "{:,}".format),
        _Column("loss", 6, "loss", "{:.3f}".format),
        _Column("dev loss", 8, "dev_loss", "{:.3f}".format),
        _Column(criterion.column, max(6, len(criterion.column)), criterion.field, f"{{:.{criterion.digits}f}}".format),
        _Column("lr", 7, "learning_rate", _rate),
        _Column("scale g", 11, "scales", _span),
        _Column("time", 8, "seconds", _clock),
    ]


def _span(scales: Mapping[str, Any]) -> str:
    numbers = [number for scale in scales.values() for number in scale_numbers(scale)]
    if not numbers:
        return "-"
    low, high = f"{min(numbers):.1f}", f"{max(numbers):.1f}"
    return low if low == high else f"{low} - {high}"


def _quantity(number: float) -> str:
    """Three digits: 9.87, 51.2k, 125M."""
    if not math.isfinite(number):
        return str(number)
    short = number
    for unit in ("", "k", "M", "G"):
        if abs(short) < 999.5:
            return f"{short:.{2 if abs(short) < 9.995 else 1 if abs(short) < 99.95 else 0}f}{unit}"
        short /= 1000
    return f"{number:.1e}"


def _rate(learning_rate: float) -> str:
    mantissa, _, exponent = f"{learning_rate:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def _clock(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24:02}h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
