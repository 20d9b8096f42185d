"""A training step of ours beside other toolkits' models: same sizes, same batch, same device, in one run.

    python benchmarks/training.py                                       # the paper's 6+6 model on this machine
    python benchmarks/training.py --only "ours, QKNorm" --seconds 240   # our own rows, each fused part by itself
    python benchmarks/training.py --only "+ all" --profile              # where the time of a step goes
    python benchmarks/training.py --preset paper-qknorm-gl-en --steps 10 --out docs/results/training-cpu.md
    python benchmarks/training.py --smoke                               # tiny, to see that everything still runs

A step is all of it: forward, loss, backward, clipping, optimiser. Every peer trains on real target tokens only. Rows
are measured in a process of their own that is started anew where one takes it down, so that the others go on.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from qknorm.attention.norm import Backend
from qknorm.config import Model, Training
from qknorm.models.fused_run import kernels_apply
from qknorm.models.translator import Translator
from qknorm.studies.recipes import preset
from qknorm.training.fast import Fast
from qknorm.training.fit import quick_kernels
from qknorm.training.objective import label_smoothed_loss
from qknorm.training.step import Objective, TrainingStep
from training_peers import ReleasedModel, Step, TorchModel, marian, plain_step, x_transformers
from training_profile import matrix_rate, print_profile

SMALL = {"width": 32, "feed_forward": 64, "encoder_layers": 1, "decoder_layers": 1, "heads": 2}
PARTS = {
    "linear": Fast(linear=True),
    "layers": Fast(layers=True),
    "loss": Fast(loss=True),
    "update": Fast(update=True),
    "linear, two streams": Fast(linear=True, overlap=True),
    "all": Fast.everything(),
}


def our_step(
    model: Translator, batch: tuple[Tensor, ...], half: bool, compiled: str = "no", fast: Fast | None = None
) -> Step:
    """Ours, with layers compiled one by one, or with the whole model compiled for this shape alone."""
    precision = "bfloat16" if half else "float32"
    settings = Training(precision=precision, compile=compiled == "layers")
    objective = Objective(label_smoothed_loss, (model.allowed, settings.label_smoothing))
    step = TrainingStep(model, model, settings, batch[0].device, objective, fast)
    if compiled == "whole":
        mode = "max-autotune-no-cudagraphs"
        model.forward = torch.compile(model.forward, mode=mode, dynamic=False)  # type: ignore[method-assign]
        step._loss = torch.compile(step._loss, mode=mode, dynamic=False)
    tokens = int((batch[2] != 0).sum())
    return lambda: step([batch], tokens, 1e-4)


def make_rows(args: argparse.Namespace, settings: Model, batch: tuple[Tensor, ...]) -> dict[str, Callable[[], Step]]:
    """What is measured, by name; what compiles for long comes last."""
    device, half, cuda = batch[0].device, args.dtype == "bfloat16", batch[0].is_cuda

    def ours(norm: str = "lp", compiled: str = "no", fast: Fast | None = None, backend: Backend = "auto") -> Step:
        attention = settings.attention.model_copy(update={"qk_norm": norm})
        model = Translator(
            args.vocabulary,
            settings.model_copy(update={"attention": attention}),
            scale_init=12.6 if norm == "lp" else None,
        )
        for attention_module in model.attentions().values():
            attention_module.backend = backend
        return our_step(model.to(device), batch, half, compiled, fast)

    def peer(make: Callable[..., nn.Module], half: bool = half, fused: bool = True, compiled: bool = False) -> Step:
        model = make(args.vocabulary, settings).to(device)
        return plain_step(torch.compile(model) if compiled else model, batch, half, fused)  # type: ignore[arg-type]

    rows: dict[str, Callable[[], Step]] = {"ours, QKNorm": ours}
    if kernels_apply(device):
        rows |= {f"ours, QKNorm + {name}": lambda fast=fast: ours(fast=fast) for name, fast in PARTS.items()}
        rows["ours, QKNorm + attention"] = lambda: ours(backend="fused")
        rows["ours, QKNorm + all + attention"] = lambda: ours(fast=Fast.everything(), backend="fused")
        one_stream = replace(Fast.everything(), overlap=False)
        rows["ours, QKNorm + all + attention, one stream"] = lambda: ours(fast=one_stream, backend="fused")
        rows["ours, dot product + all"] = lambda: ours("none", fast=Fast.everything())
    else:
        rows["ours, dot product"] = lambda: ours("none")
    rows["released code, restated (fp32)"] = lambda: peer(ReleasedModel, half=False, fused=False)
    rows["torch.nn.Transformer"] = lambda: peer(TorchModel)
    rows["Hugging Face Marian"] = lambda: peer(marian)
    rows["x-transformers, qk_norm"] = lambda: peer(x_transformers)
    if cuda or args.compile:
        rows["ours, QKNorm, compiled layers"] = lambda: ours(compiled="layers")
        rows["torch.nn.Transformer, compiled"] = lambda: peer(TorchModel, compiled=True)
        rows["Hugging Face Marian, compiled"] = lambda: peer(marian, compiled=True)
        rows["ours, QKNorm, compiled whole + update"] = lambda: ours(compiled="whole", fast=Fast(update=True))
    if cuda:
        rows["ours, dot product, compiled layers"] = lambda: ours("none", compiled="layers")
    chosen = args.only.split("|") if args.only else [""]
    return {name: make for name, make in rows.items() if any(part in name for part in chosen)}


def measure(make: Callable[[], Step], steps: int, cuda: bool) -> tuple[float, float, Step]:
    """Median milliseconds of a step, the seconds until the first one was done, and the step.

    On a GPU of ten in a row, since training does not wait for its steps.
    """
    began = time.perf_counter()
    step = make()
    step()
    if cuda:
        torch.cuda.synchronize()
    first = time.perf_counter() - began
    for _ in range(3):
        step()
    times, together = [], 10 if cuda else 1
    for _ in range(-(-steps // together) if steps < 3 * together else steps // together):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(together):
            step()
        if cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / together)
    return 1e3 * statistics.median(times), first, step


def work_of_step(settings: Model, tokens: int, length: int, vocabulary: int) -> float:
    """Floating-point operations of the matrix products: forward, and twice that backward."""
    width, d = settings.width, settings.encoder_layers + settings.decoder_layers
    attentions = settings.encoder_layers + 2 * settings.decoder_layers
    weights = attentions * 4 * width**2 + d * 2 * width * settings.feed_forward + vocabulary * width
    return 6.0 * tokens * weights + 12.0 * attentions * tokens * length * width


def measure_rows(args: argparse.Namespace, settings: Model, skip: list[str]) -> None:
    """Measures every row but those to skip, and says so line by line as JSON, for `main` to print."""
    device = torch.device(args.device)
    torch.manual_seed(0)
    ids = torch.randint(4, args.vocabulary, (args.rows, args.length), device=device)
    rows, cuda = make_rows(args, settings, (ids, ids, ids)), device.type == "cuda"
    if not skip:
        where = torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} CPU threads"
        say(about=where, rate=matrix_rate(device, torch.bfloat16 if args.dtype == "bfloat16" else torch.float32))
    for name in [name for name in rows if name not in skip]:
        say(begins=name)
        try:
            with quick_kernels(device):
                milliseconds, first, step = measure(rows[name], args.steps, cuda)
                memory = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
                say(name=name, milliseconds=milliseconds, first=first, gigabytes=memory)
                if args.profile:
                    print_profile(name, step, cuda)
        except ImportError as error:
            say(name=name, error=f"not installed ({error.name})")
        except Exception as error:
            say(name=name, error=f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")
        rows[name] = step = None  # type: ignore[assignment]
        torch.compiler.reset()
        if cuda:
            torch.cuda.synchronize()  # after an error that took the device down, this ends the process
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    say(ended=True)


def say(**facts: object) -> None:
    """One line for `main`, which every other line is shown as it is."""
    print("§" + json.dumps(facts), flush=True)


class Table:
    """Rows as they come in, printed at once and kept for a file."""

    def __init__(self, args: argparse.Namespace, settings: Model) -> None:
        self.args, self.settings, self.lines = args, settings, list[str]()
        self.rate, self.base, self.named, self.open = 0.0, 0.0, list[str](), ""
        self.milliseconds: dict[str, float] = {}

    def take(self, facts: dict[str, object]) -> None:
        """What a measuring process said."""
        args, settings = self.args, self.settings
        if "about" in facts:
            self.rate = float(facts["rate"])  # type: ignore[arg-type]
            self.add(
                f"{facts['about']}, {args.dtype}, {settings.encoder_layers}+{settings.decoder_layers} layers of "
                f"{settings.width}, batch {args.rows} × {args.length}, {args.vocabulary:,} types, PyTorch "
                f"{torch.__version__}, Python {platform.python_version()}; large matrix products here: "
                f"{self.rate / 1e12:,.2f} TFLOP/s",
                "",
                "| what | ms a step | target tokens/s | ratio to the first | of the matrix rate | first step after, s "
                "| GiB |",
                "|---|---|---|---|---|---|---|",
            )
        elif "begins" in facts:
            self.open = str(facts["begins"])
        elif "error" in facts:
            self.failed(str(facts["name"]), str(facts["error"]))
        elif "name" in facts:
            self.open = ""
            self.named.append(str(facts["name"]))
            milliseconds = float(facts["milliseconds"])  # type: ignore[arg-type]
            self.base = self.base or milliseconds
            self.milliseconds[str(facts["name"])] = milliseconds
            tokens = args.rows * args.length
            work = work_of_step(settings, tokens, args.length, args.vocabulary)
            self.add(
                f"| {facts['name']} | {milliseconds:.2f} | {tokens / milliseconds * 1e3:,.0f} | "
                f"{milliseconds / self.base:.2f}× | {work / milliseconds * 1e3 / self.rate:.1%} | "
                f"{facts['first']:.1f} | {facts['gigabytes']:.1f} |"
            )

    def failed(self, name: str, why: str) -> None:
        """A row without figures."""
        self.open = ""
        self.named.append(name)
        self.add(f"| {name} | {why} | | | | | |")

    def add(self, *lines: str) -> None:
        self.lines += lines
        print("\n".join(lines), flush=True)


def draw(milliseconds: dict[str, float], tokens: int, path: Path) -> None:
    """Target tokens a second of every row as bars, the fastest on top."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rates = sorted((1e3 * tokens / each, name) for name, each in milliseconds.items())
    figure = Figure(figsize=(9, 0.8 + 0.36 * len(rates)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colours = ["tab:blue" if name.startswith("ours") else "tab:grey" for _, name in rates]
    bars = axes.barh([name for _, name in rates], [rate for rate, _ in rates], color=colours)
    axes.bar_label(bars, [f"{round(rate, -3):,.0f}" for rate, _ in rates], padding=3)
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("target tokens a second")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def run_rows(table: Table, given: list[str], seconds: float, seconds_a_row: float) -> None:
    """Starts measuring processes until every row has its line or the time is up."""
    deadline = time.monotonic() + seconds
    while True:
        skip, before = ["--skip", json.dumps(table.named)], len(table.named)
        with subprocess.Popen(
            [sys.executable, __file__, *given, *skip], stdout=subprocess.PIPE, text=True, encoding="utf-8"
        ) as process:
            if follow(table, process, deadline, seconds_a_row):
                return
        if table.open:
            killed = process.returncode < 0
            table.failed(table.open, "took too long" if killed else f"ended its process (status {process.returncode})")
        elif len(table.named) == before:
            raise SystemExit(f"nothing could be measured: the process ended with status {process.returncode}")
        if time.monotonic() > deadline:
            table.add("", f"Rows after this one were left out: the {seconds:.0f} s were over.")
            return


def follow(table: Table, process: subprocess.Popen[str], deadline: float, seconds_a_row: float) -> bool:
    """Takes what a process says; whether it measured all there was. Ends it where a row takes too long."""
    assert process.stdout is not None
    ended, watch = False, None
    for line in process.stdout:
        if not line.startswith("§"):
            print(line, end="", flush=True)
            continue
        facts = json.loads(line[1:])
        ended = ended or "ended" in facts
        table.take(facts)
        if "begins" in facts:
            if watch is not None:
                watch.cancel()
            left = max(1.0, min(seconds_a_row, deadline - time.monotonic()))
            watch = threading.Timer(left, process.kill)
            watch.start()
    if watch is not None:
        watch.cancel()
    return ended


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--preset", default="paper-qknorm-en-vi")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=8_217)
    parser.add_argument("--steps", type=int, default=50 if cuda else 5)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--compile", action="store_true", help="measure compiled code on the CPU too")
    parser.add_argument("--only", help="measure only rows whose name contains this, or one of several between |")
    parser.add_argument("--profile", action="store_true", help="show where the time of each row's step goes")
    parser.add_argument("--seconds", type=float, default=3_600, help="start no more rows after so long")
    parser.add_argument("--row-seconds", type=float, default=600, help="give a row up after so long")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, two steps")
    parser.add_argument("--out", type=Path, help="write the table here too, as Markdown")
    parser.add_argument("--picture", type=Path, help="draw the rows here")
    parser.add_argument("--skip", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    settings = preset(args.preset).model
    if args.smoke:
        settings, args.rows, args.length, args.vocabulary, args.steps = settings.model_copy(update=SMALL), 4, 8, 50, 2
    if args.skip is not None:
        measure_rows(args, settings, args.skip)
        return
    table = Table(args, settings)
    run_rows(table, sys.argv[1:], args.seconds, args.row_seconds)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("\n".join(table.lines) + "\n")
    if args.picture and table.milliseconds:
        draw(table.milliseconds, args.rows * args.length, args.picture)


if __name__ == "__main__":
    main()
