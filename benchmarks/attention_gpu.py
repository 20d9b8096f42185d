"""The rows of `attention.py` on a GPU, and the search for the best blocks of the attention kernels.

Every number is the median of replays of a recorded CUDA graph, as training runs it: what is compared is the work of the
card and not of Python. Inputs come from the cache where they fit, as they do behind a projection. The error stands
beside it: ‖found − exact‖ / ‖exact‖ over the output and the gradients of q, k and v, against float64.

    python benchmarks/attention_gpu.py --decoding             # steps of a beam search: the kernel beside PyTorch's
    python benchmarks/attention_gpu.py --decoding --tune      # and other ways to launch it
"""

import argparse
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from qknorm import attend, attend_with_weights
from qknorm.attention import fused_tuning
from qknorm.attention.fused import normalize_scaled

Job = Callable[[], Tensor]
Step = Callable[[], list[Tensor]]
PLAIN, FUSED = "plain SDPA", "QKNorm, fused"
HEADER = "| length × batch, heads | what | forward, ms | ratio | forward+backward, ms | ratio | peak MiB | error |"


class Measured(NamedTuple):
    """A median, its spread ((third − first quartile) / median) and the memory it took."""

    milliseconds: float
    spread: float
    peak_mib: float


class Regime(NamedTuple):
    """A shape that a target speaks of, or one on the way of the lengths."""

    batch: int
    heads: int
    length: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.length:,} × {self.batch}, {self.heads} × {self.head_dim}"


TARGETS = [Regime(8, 16, 2_048, 128), Regime(64, 8, 64, 64)]


@dataclass
class Row:
    """One peer in one regime, on a GPU."""

    name: str
    forward: Measured
    both: Measured
    error: float


def gpu_jobs(q: Tensor, k: Tensor, v: Tensor, scale: Tensor, compiled: bool) -> dict[str, Job]:
    """Peers over the same q, k and v, each as one would call it; the others are compared with the first."""

    def plain(*backends: SDPBackend) -> Job:
        def job() -> Tensor:
            with sdpa_kernel(list(backends)):
                return F.scaled_dot_product_attention(q, k, v)

        return job

    def one_pass() -> Tensor:
        unit = normalize_scaled(q, 2.0, scale), normalize_scaled(k, 2.0, 1.0)
        return F.scaled_dot_product_attention(*unit, v, scale=1.0)

    jobs: dict[str, Job] = {
        PLAIN: lambda: F.scaled_dot_product_attention(q, k, v),
        "plain SDPA, flash": plain(SDPBackend.FLASH_ATTENTION),
        "plain SDPA, cuDNN": plain(SDPBackend.CUDNN_ATTENTION),
        "QKNorm, eager + SDPA": lambda: attend(q, k, v, scale=scale, p=2.0, backend="sdpa"),
        "QKNorm, one pass + SDPA": one_pass,
        FUSED: lambda: attend(q, k, v, scale=scale, p=2.0, backend="fused"),
    }
    if compiled:
        fast = torch.compile(attend, fullgraph=True)
        jobs["QKNorm, compiled + SDPA"] = lambda: fast(q, k, v, scale=scale, p=2.0, backend="sdpa")
    return jobs


def make_step(job: Job, inputs: list[Tensor], to_out: Tensor, backward: bool) -> Step:
    """The output, and with `backward` the gradients of the inputs (None where one is not used)."""

    def step() -> list[Tensor]:
        if not backward:
            with torch.no_grad():
                return [job()]
        output = job()
        return [output, *torch.autograd.grad(output, inputs, to_out, allow_unused=True)]

    return step


def recorded(step: Step) -> Callable[[], None]:
    """The step as a CUDA graph, recorded after a warm-up that compiles what must be compiled."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def peak_mib(step: Step) -> float:
    """Most MiB that one step, not recorded, holds over what was held before."""
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def milliseconds(replay: Callable[[], None], times: int) -> float:
    """Mean of a few replays in a row, so that the gap before the first counts little."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / times


def measure_steps(steps: dict[str, Step], rounds: int) -> dict[str, Measured]:
    """Medians of interleaved rounds, of the steps that run at all on this card.

    In another order each time: a card near its limit of power is slower after one that took much of it.
    """
    replays, peaks = {}, {}
    for name, step in steps.items():
        try:
            peaks[name] = peak_mib(step)
            replays[name] = recorded(step)
        except Exception as problem:  # not for this card or shape; Triton's own errors have no narrower class
            if name == PLAIN:
                raise
            warn(f"{name}: {type(problem).__name__}: {str(problem).partition(chr(10))[0]}")
    counts = {name: max(1, int(1.0 / max(1e-3, milliseconds(replay, 2)))) for name, replay in replays.items()}
    times: dict[str, list[float]] = {name: [] for name in replays}
    order, rng = list(replays), random.Random(0)
    for _ in range(max(2, rounds)):
        rng.shuffle(order)
        for name in order:
            times[name].append(milliseconds(replays[name], counts[name]))
    measured = {}
    for name, values in times.items():
        first, median, third = statistics.quantiles(values, n=4)
        measured[name] = Measured(median, (third - first) / median, peaks[name])
    return measured


def error_of(step: Step, inputs: list[Tensor], to_out: Tensor, normalised: bool) -> float:
    """Relative error of the first head's output and gradients against float64."""
    found = [x[:1, :1].double() for x in step()[:4]]
    exact = [x.detach()[:1, :1].double().requires_grad_() for x in inputs[:3]]
    how = {"scale": inputs[3].item(), "p": 2.0} if normalised else {"scale": inputs[0].shape[-1] ** -0.5}
    output = attend_with_weights(*exact, **how).output  # type: ignore[arg-type]
    wanted = [output, *torch.autograd.grad(output, exact, to_out[:1, :1].double())]
    # each tensor counts alike, whatever its size
    parts = [((x - y).norm() / y.norm()).item() ** 2 for x, y in zip(found, wanted, strict=True)]
    return (sum(parts) / len(parts)) ** 0.5


def draw_inputs(regime: Regime, device: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """q, k, v and the scale, and a gradient of the output."""
    shape = regime.batch, regime.heads, regime.length, regime.head_dim
    q, k, v, to_out = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    inputs = [q, k, v, torch.tensor(12.5, device=device)]
    return [x.requires_grad_() for x in inputs], to_out


def measure_regime(regime: Regime, args: argparse.Namespace) -> list[Row]:
    """All peers in one regime."""
    inputs, to_out = draw_inputs(regime, args.device, getattr(torch, args.dtype))
    jobs = gpu_jobs(*inputs, compiled=args.compile and regime in TARGETS)  # compiling every length takes minutes
    forward = measure_steps({name: make_step(job, inputs, to_out, False) for name, job in jobs.items()}, args.rounds)
    steps = {name: make_step(job, inputs, to_out, True) for name, job in jobs.items() if name in forward}
    both = measure_steps(steps, args.rounds)
    return [
        Row(name, forward[name], both[name], error_of(steps[name], inputs, to_out, name.startswith("QKNorm")))
        for name in both
    ]


def gpu_table(results: dict[Regime, list[Row]]) -> list[str]:
    """One table of times, ratios, memory and errors."""
    lines = [HEADER, "|---|---|---|---|---|---|---|---|"]
    for regime, rows in results.items():
        base = rows[0]
        for row in rows:
            f, b = row.forward, row.both
            lines.append(
                f"| {regime} | {row.name} | {f.milliseconds:.3f} | {f.milliseconds / base.forward.milliseconds:.2f}× | "
                f"{b.milliseconds:.3f} ± {b.spread / 2:.0%} | **{b.milliseconds / base.both.milliseconds:.2f}×** | "
                f"{b.peak_mib:,.0f} ({b.peak_mib / base.both.peak_mib:.2f}×) | {row.error:.1e} |"
            )
    return lines


def warn(line: str) -> None:
    """Says at once what a run that is cut short would not come to say."""
    Console(stderr=True).print(line, soft_wrap=True, markup=False, highlight=False)


def draw_figure(results: dict[Regime, list[Row]], path: Path) -> None:
    """Forward+backward relative to plain SDPA over length, at the heads of the first regime."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    heads = next(iter(results))[1::2]
    along = sorted((regime for regime in results if regime[1::2] == heads), key=lambda regime: regime.length)
    names = list(dict.fromkeys(row.name for regime in along for row in results[regime]))
    for name in names:
        points = [
            (regime.length, row.both.milliseconds / results[regime][0].both.milliseconds)
            for regime in along
            for row in results[regime]
            if row.name == name
        ]
        axes.plot(*zip(*points, strict=True), marker="o", linewidth=2.5 if name == FUSED else 1.2, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks([regime.length for regime in along], [f"{regime.length:,}" for regime in along])
    axes.set_yscale("log", base=2)
    axes.set_yticks([1, 1.25, 1.5, 2, 3, 4, 8], ["1×", "1.25×", "1.5×", "2×", "3×", "4×", "8×"], minor=False)
    axes.set(xlabel="length", ylabel="time relative to plain SDPA")
    axes.set_title(f"forward + backward, {heads[0]} heads of {heads[1]}", loc="left")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def measure_training(args: argparse.Namespace, where: str) -> list[str]:
    """Attention as translators train it: dropout, padding, few heads; the ways that `auto` chooses between."""
    lines = [
        where,
        "",
        "| length × batch, heads | seen | one pass + SDPA, ms | fused, ms | ratio |",
        "|---|---|---|---|---|",
    ]
    for heads, head_dim in ((8, 64), (4, 128), (16, 32)):
        for length in (16, 32, 64, 96, 128, 192, 256, 512):
            regime = Regime(max(1, 4_096 // length), heads, length, head_dim)
            inputs, to_out = draw_inputs(regime, args.device, getattr(torch, args.dtype))
            q, k, v, scale = inputs
            real = torch.arange(length, device=args.device) < torch.linspace(
                length // 2, length, regime.batch, device=args.device
            ).view(-1, 1, 1, 1)
            for seen, how in {"unpadded keys": {"mask": real}, "earlier keys": {"is_causal": True}}.items():
                settings = {"scale": scale, "p": 2.0, "dropout": 0.3, **how}
                unit = lambda: (normalize_scaled(q, 2.0, scale), normalize_scaled(k, 2.0, 1.0))  # noqa: B023, E731
                jobs = {
                    PLAIN: lambda: attend(*unit(), v, **{**settings, "scale": 1.0, "p": None}),  # noqa: B023
                    FUSED: lambda: attend(q, k, v, **settings, backend="fused"),  # noqa: B023
                }
                found = measure_steps({name: make_step(job, inputs, to_out, True) for name, job in jobs.items()}, 10)
                plain, fused = (found[name].milliseconds for name in (PLAIN, FUSED))
                lines.append(f"| {regime} | {seen} | {plain:.3f} | {fused:.3f} | **{fused / plain:.2f}×** |")
                warn(lines[-1])
    return lines


def tune(args: argparse.Namespace) -> list[str]:
    """Lines for the table of `fused_tuning`: the fastest candidate for each kernel, head dimension and length."""
    lines = []
    for regime in (TARGETS[0], Regime(32, 16, 512, 128), Regime(8, 16, 2_048, 64), Regime(64, 8, 512, 64)):
        inputs, to_out = draw_inputs(regime, args.device, getattr(torch, args.dtype))
        job = gpu_jobs(*inputs, compiled=False)[FUSED]
        for role, candidates in fused_tuning.CANDIDATES.items():
            key = role, regime.head_dim, regime.length > fused_tuning.SHORT
            before, times = fused_tuning.CHOSEN[key], {}
            for blocks in dict.fromkeys([before, *candidates]):
                fused_tuning.CHOSEN[key] = blocks
                try:
                    replay = recorded(make_step(job, inputs, to_out, role != "forward"))
                except Exception as problem:  # too large for the card; Triton's own errors have no narrower class
                    warn(f"{key}: {blocks}: {type(problem).__name__}: {str(problem).partition(chr(10))[0]}")
                    continue
                times[blocks] = statistics.median(milliseconds(replay, 5) for _ in range(args.rounds))
            best = min(times, key=times.__getitem__) if times else before
            fused_tuning.CHOSEN[key] = best
            others = ", ".join(f"{tuple(blocks)} {time:.3f}" for blocks, time in times.items() if blocks != best)
            lines.append(f"    {key}: {best},  # {times.get(best, float('nan')):.3f} ms; {others}")
            warn(lines[-1])
    return lines


def measure_all(args: argparse.Namespace, where: str) -> list[str]:
    """The targets' two shapes and the lengths asked for."""
    by_length = [Regime(max(1, args.tokens // n), args.heads, n, args.head_dim) for n in args.lengths]
    results: dict[Regime, list[Row]] = {}
    for regime in dict.fromkeys([*TARGETS, *by_length]):
        results[regime] = measure_regime(regime, args)
        for line in gpu_table({regime: results[regime]})[2:]:
            warn(line)
        torch.compiler.reset()
        torch.cuda.empty_cache()
    if args.figure:
        draw_figure(results, args.figure)
    return [where, "", *gpu_table(results)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decoding", action="store_true", required=True, help="the rest is in attention.py")
    parser.add_argument("--sentences", type=int, default=693)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    from attention_decoding import measure_decoding  # which measures by what stands here

    with torch.no_grad():
        measure_decoding(args.sentences, args.tune, args.rounds)


if __name__ == "__main__":
    main()
