"""How time and memory of a training step grow with length, batch, width and depth: each doubled four times.

    python benchmarks/growth.py --output docs/results/growth        # a table, growth.md, and a picture, growth.png
    python benchmarks/growth.py --precision bfloat16 --output docs/results/growth-h200    # on a GPU
    python benchmarks/growth.py --smoke                             # tiny, to see that everything still runs

One thing grows while the others stay. A step is all of it: forward, loss, backward, clipping, optimiser. An exponent of
1 is linear growth, 2 is quadratic; it is fitted to all five points, and given for the last doubling alone, where what
does not grow weighs least. Peak memory is that of tensors: on a GPU what torch.cuda.max_memory_allocated says, less
what was there before; on the CPU what the profiler of PyTorch saw allocated at most at one time, and what model and
optimiser held before the step.
"""

import argparse
import gc
import math
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qknorm.config import Training
from qknorm.models.translator import Translator, start_of_scale
from qknorm.studies.recipes import preset
from qknorm.training.fast import choose_fast
from qknorm.training.fit import quick_kernels
from qknorm.training.objective import label_smoothed_loss
from qknorm.training.step import Objective, TrainingStep

DOUBLINGS = 4
LARGEST_HEAD = 256  # that fast attention takes on a GPU
STEADY = {
    "cpu": {"length": 32, "batch": 8, "width": 128, "depth": 2},
    "cuda": {"length": 64, "batch": 32, "width": 512, "depth": 4},
}
STARTS = {
    "cpu": {"length": 32, "batch": 4, "width": 64, "depth": 1},
    "cuda": {"length": 64, "batch": 16, "width": 128, "depth": 1},
}
SMOKE = {"length": 4, "batch": 2, "width": 8, "depth": 1}
REASONS = {
    "length": "linear layers and the vocabulary grow with the tokens, attention with their square",
    "batch": "everything but the optimiser, which touches each weight once whatever the batch",
    "width": "activations grow with the width, weights and products with them by its square",
    "depth": "every layer is one more of the same; word vectors and logits stay",
}


@dataclass(frozen=True)
class Point:
    """A step of one size."""

    size: int
    milliseconds: float
    mebibytes: float


def make_step(
    sizes: dict[str, int], vocabulary: int, precision: str, device: torch.device
) -> tuple[TrainingStep, Tensor]:
    """A fresh model of the default recipe in these sizes, and ids (batch, length) to train it on."""
    torch.manual_seed(0)
    heads = max(4, sizes["width"] // LARGEST_HEAD)
    shape = {"width": sizes["width"], "feed_forward": 4 * sizes["width"], "heads": heads}
    shape |= {"encoder_layers": sizes["depth"], "decoder_layers": sizes["depth"]}
    settings = preset("low-resource").model.model_copy(update=shape)
    model = Translator(vocabulary, settings, scale_init=start_of_scale(settings, max(2, sizes["length"]))).to(device)
    training = Training(precision=precision, compile=None if device.type == "cuda" else False)  # type: ignore[arg-type]
    objective = Objective(label_smoothed_loss, (model.allowed, training.label_smoothing))
    step = TrainingStep(model, model, training, device, objective, choose_fast(model, training))
    return step, torch.randint(4, vocabulary, (sizes["batch"], sizes["length"]), device=device)


def measure(sizes: dict[str, int], args: argparse.Namespace, size: int) -> Point:
    """Median time and peak memory of steps of these sizes."""
    device = torch.device(args.device)
    gc.collect()  # the step before, whose parts refer to each other
    before = 0  # cuBLAS keeps the workspaces of every stream that there was
    if device.type == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    step, ids = make_step(sizes, args.vocabulary, args.precision, device)
    run = lambda: step([(ids, ids, ids)], ids.numel(), 1e-4)  # noqa: E731
    run()
    times = []
    for _ in range(args.rounds):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else held(step) + allocated_by(run)
    return Point(size, 1_000 * statistics.median(times), peak / 2**20)


def held(step: TrainingStep) -> int:
    """Bytes of weights, gradients and the moments of the optimiser."""
    tensors = [each for p in step.model.parameters() for each in (p, p.grad) if each is not None]
    tensors += [value for state in step.optimizer.state.values() for value in state.values() if value.dim()]
    return sum(tensor.nbytes for tensor in tensors)


def allocated_by(run: object) -> int:
    """The most bytes that a call had allocated at one time and not freed yet, on the CPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()  # type: ignore[operator]
    changes = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        now += change.nbytes()
        most = max(most, now)
    return most


def exponent(points: list[Point], what: str) -> float:
    """The slope of a straight line through the logarithms."""
    x, y = [math.log(point.size) for point in points], [math.log(getattr(point, what)) for point in points]
    return statistics.linear_regression(x, y).slope


def in_words(power: float) -> str:
    if power < 0.9:
        return "less than linear"
    if power <= 1.1:
        return "linear"
    return "more than linear" if power < 1.9 else "quadratic"


def as_table(curves: dict[str, list[Point]]) -> list[str]:
    """One row a point, then the exponents."""
    lines = ["| what grows | size | ms a step | peak MiB |", "|---|---|---|---|"]
    for name, points in curves.items():
        lines += [f"| {name} | {p.size:,} | {p.milliseconds:,.1f} | {p.mebibytes:,.1f} |" for p in points]
    lines += [
        "",
        "| what grows | time: exponent | last doubling | memory: exponent | last doubling | at the end | why |",
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, points in curves.items():
        fits = [exponent(part, what) for what in ("milliseconds", "mebibytes") for part in (points, points[-2:])]
        end = f"time {in_words(fits[1])}, memory {in_words(fits[3])}"
        lines.append(f"| {name} | {' | '.join(f'{fit:.2f}' for fit in fits)} | {end} | {REASONS[name]} |")
    return lines


def draw(curves: dict[str, list[Point]], path: Path) -> None:
    """Time and memory over size, both as multiples of the first point, with straight lines for powers 1 and 2."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    factors = [2**n for n in range(DOUBLINGS + 1)]
    titles = {"milliseconds": "time of a training step", "mebibytes": "peak memory of a training step"}
    for axes, (what, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        axes.plot(factors, factors, ":", color="grey", label="linear")
        axes.plot(factors, [factor**2 for factor in factors], "--", color="grey", label="quadratic")
        for name, points in curves.items():
            first = getattr(points[0], what)
            label = f"{name} from {points[0].size} (exponent {exponent(points, what):.2f})"
            axes.plot(factors, [getattr(point, what) / first for point in points], "o-", label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(factors, [f"×{factor}" for factor in factors])
        axes.yaxis.set_major_formatter(lambda value, _: f"×{value:g}")
        axes.set_title(title)
        axes.set_xlabel("size")
        axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--vocabulary", type=int, default=3_164)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the table to OUTPUT.md and the picture to OUTPUT.png")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    steady, starts = STEADY[args.device], STARTS[args.device]
    if args.smoke:
        steady = starts = SMOKE
        args.rounds, args.vocabulary = 1, 50
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    curves: dict[str, list[Point]] = {}
    with quick_kernels(torch.device(args.device)):
        measure(steady, args, 0)  # the first of a process is slower, whatever its size
        for name, start in starts.items():
            sizes = [start * 2**n for n in range(DOUBLINGS + 1)]
            curves[name] = [measure({**steady, name: size}, args, size) for size in sizes]
    lines = [
        f"{where}, {args.precision}; what does not grow: length {steady['length']}, batch {steady['batch']}, width "
        f"{steady['width']} (feed-forward four times that), depth {steady['depth']}+{steady['depth']}, "
        f"{args.vocabulary:,} types; PyTorch {torch.__version__}, Python {platform.python_version()}",
        "",
        *as_table(curves),
    ]
    print("\n".join(lines), flush=True)
    if args.output:
        picture = args.output.with_suffix(".png")
        draw(curves, picture)
        command = " ".join(["python benchmarks/growth.py", *sys.argv[1:]])
        head = ["# How a training step grows", "", f"`{command}`", ""]
        text = "\n".join([*head, *lines, "", f"![Time and memory over size]({picture.name})"])
        args.output.with_suffix(".md").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
