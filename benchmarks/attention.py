"""What QKNorm costs beside plain attention: time and peak memory, forward and forward+backward, all in one run.

python benchmarks/attention.py                                   # lengths 64 … 8,192 on this machine
python benchmarks/attention.py --lengths 1024 2048 --out attention.md
python benchmarks/attention.py --figure attention.png            # on a GPU: ratios over length as a picture
python benchmarks/attention.py --training                        # on a GPU: with dropout and padding, short sentences
python benchmarks/attention.py --tune                            # on a GPU: the best blocks of the attention kernels
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from qknorm import MultiheadAttention, attend

Job = Callable[[], Tensor]
HEADER = "| length × batch | what | forward, ms | ratio | forward+backward, ms | ratio | peak MiB |"


@dataclass
class Measured:
    milliseconds: float
    spread: float  # (third − first quartile) / median
    peak_mib: float


def make_jobs(q: Tensor, k: Tensor, v: Tensor, scale: Tensor, compiled: bool) -> dict[str, Job]:
    """Peers over the same q, k and v (the first is what the others are compared with)."""
    jobs: dict[str, Job] = {
        "plain SDPA": lambda: F.scaled_dot_product_attention(q, k, v),
        "QKNorm sdpa": lambda: attend(q, k, v, scale=scale, p=2.0, backend="sdpa"),
        "QKNorm sdpa, p = 3": lambda: attend(q, k, v, scale=scale, p=3.0, backend="sdpa"),
    }
    if compiled:
        fast = torch.compile(attend, fullgraph=True)
        jobs["QKNorm sdpa, compiled"] = lambda: fast(q, k, v, scale=scale, p=2.0, backend="sdpa")
    if q.shape[-2] <= 2_048:  # beyond that its length × length matrices take gigabytes
        jobs["QKNorm reference"] = lambda: attend(q, k, v, scale=scale, p=2.0, backend="reference")
    return jobs


def make_modules(x: Tensor, heads: int) -> dict[str, Job]:
    """Whole modules with their projections, over the same input."""
    width = x.shape[-1]
    place = {"device": x.device, "dtype": x.dtype}
    theirs = torch.nn.MultiheadAttention(width, heads, batch_first=True, **place)
    ours = MultiheadAttention(width, heads, batch_first=True, **place)
    return {
        "torch.nn.MultiheadAttention": lambda: theirs(x, x, x, need_weights=False)[0],
        "qknorm.MultiheadAttention": lambda: ours(x, x, x, need_weights=False)[0],
    }


def measure(jobs: dict[str, Job], inputs: list[Tensor], backward: bool, seconds: float) -> dict[str, Measured]:
    """Medians of interleaved rounds: what disturbs the machine then disturbs every peer alike."""
    cuda = inputs[0].is_cuda
    times: dict[str, list[float]] = {name: [] for name in jobs}
    peaks: dict[str, float] = {}
    for name, job in jobs.items():  # warm-up, compilation and memory
        for _ in range(3):
            peaks[name] = run(job, inputs, backward, cuda)[1]
        if not cuda:
            peaks[name] = cpu_peak(job, inputs, backward)
    started = time.perf_counter()
    while time.perf_counter() - started < seconds * len(jobs) or min(map(len, times.values())) < 5:
        for name, job in jobs.items():
            times[name].append(run(job, inputs, backward, cuda)[0])
    measured = {}
    for name, values in times.items():
        first, _, third = statistics.quantiles(values, n=4)
        median = statistics.median(values)
        measured[name] = Measured(median, (third - first) / median, peaks[name])
    return measured


def run(job: Job, inputs: list[Tensor], backward: bool, cuda: bool) -> tuple[float, float]:
    """Milliseconds of one call, and on a GPU its peak MiB."""
    for x in inputs:
        x.grad = None
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
    began = time.perf_counter()
    if backward:
        output = job()
        output.backward(torch.ones_like(output))
    else:
        with torch.no_grad():
            job()
    if not cuda:
        return (time.perf_counter() - began) * 1e3, float("nan")
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end), (torch.cuda.max_memory_allocated() - before) / 2**20


def cpu_peak(job: Job, inputs: list[Tensor], backward: bool) -> float:
    """Most MiB that tensors made by a call hold at a time, as PyTorch's profiler sees them between operations."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run(job, inputs, backward, cuda=False)
    held = most = 0
    for event in sorted(profiler.events(), key=lambda event: event.time_range.end):
        held += event.self_cpu_memory_usage
        most = max(most, held)
    return most / 2**20


def rows_of(length: int, args: argparse.Namespace) -> list[str]:
    """Table rows for one length; batch × length stays near `--tokens`, so that every length does like work."""
    batch = max(1, args.tokens // length)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    q, k, v = (
        torch.randn(batch, args.heads, length, args.head_dim, device=device, dtype=dtype, requires_grad=True)
        for _ in range(3)
    )
    scale = torch.tensor(12.5, device=device, requires_grad=True)
    x = torch.randn(batch, length, args.heads * args.head_dim, device=device, dtype=dtype, requires_grad=True)
    groups = [
        (make_jobs(q, k, v, scale, args.compile), [q, k, v, scale]),
        (make_modules(x, args.heads), [x]),
    ]
    rows = []
    for jobs, inputs in groups:
        forward = measure(jobs, inputs, backward=False, seconds=args.seconds)
        both = measure(jobs, inputs, backward=True, seconds=args.seconds)
        base = next(iter(jobs))
        for name in jobs:
            f, b = forward[name], both[name]
            memory = f"{b.peak_mib:,.0f} ({b.peak_mib / both[base].peak_mib:.2f}×)"
            rows.append(
                f"| {length:,} × {batch} | {name} | {f.milliseconds:.2f} | "
                f"{f.milliseconds / forward[base].milliseconds:.2f}× | {b.milliseconds:.2f} ± {b.spread / 2:.0%} | "
                f"**{b.milliseconds / both[base].milliseconds:.2f}×** | {memory} |"
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 1024, 2048, 4096, 8192])
    parser.add_argument("--tokens", type=int, default=65_536 if cuda else 2_048, help="batch × length")
    parser.add_argument("--heads", type=int, default=16 if cuda else 8)
    parser.add_argument("--head-dim", type=int, default=128 if cuda else 64)
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--seconds", type=float, default=0.5, help="measuring time for each number")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, help="write the table here too, as Markdown")
    parser.add_argument("--figure", type=Path, help="draw the ratios over length here (GPU)")
    parser.add_argument("--rounds", type=int, default=30, help="interleaved rounds for each number (GPU)")
    parser.add_argument("--tune", action="store_true", help="only look for the best blocks of the kernels (GPU)")
    parser.add_argument("--training", action="store_true", help="only as translators train: dropout, padding (GPU)")
    args = parser.parse_args()
    torch.manual_seed(0)
    console = Console()

    def show(line: str) -> None:
        console.print(line, soft_wrap=True, markup=False, highlight=False)

    where = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    made_with = f"{args.dtype}, PyTorch {torch.__version__}, Python {platform.python_version()}"
    if args.device == "cuda":
        from attention_gpu import measure_all, measure_training, tune

        title = f"{where}, {made_with}; ratios are to the first of each group"
        lines = tune(args) if args.tune else (measure_training if args.training else measure_all)(args, title)
        for line in lines:
            show(line)
    else:
        lines = [
            f"{where}, {args.heads} heads of {args.head_dim}, {made_with}; ratios are to the first of each group",
            "",
            HEADER,
            "|---|---|---|---|---|---|---|",
        ]
        for line in lines:
            show(line)
        for length in args.lengths:
            for row in rows_of(length, args):
                lines.append(row)
                show(row)
            torch.compiler.reset()
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
