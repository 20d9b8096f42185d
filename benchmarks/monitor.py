"""What it costs to watch attention while a model trains: AttentionMonitor, and the observer of `qknorm train`.

    python benchmarks/monitor.py                                    # the models below on this machine
    python benchmarks/monitor.py --seconds 20 --out docs/results/monitor.md
    python benchmarks/monitor.py --smoke                            # tiny, to see that everything still runs

A step is forward, loss, backward and update; a measurement is what a forward pass takes more that is measured. Steps,
plain passes and measured ones take turns, so that what disturbs the machine disturbs all alike; figures are medians.
The share of training time is a measurement spread over the interval, and what the monitor takes in every other step:
the latter is timed by itself, on a model that does nothing, since it is too small to be seen in a step.
"""

import argparse
import importlib
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from qknorm.config import Training
from qknorm.inspection.monitor import AttentionMonitor
from qknorm.inspection.observer import AttentionObserver
from qknorm.models.translator import Translator
from qknorm.studies.recipes import preset
from qknorm.training.objective import label_smoothed_loss
from qknorm.training.step import Objective, TrainingStep

Step = Callable[[], object]


class Encoder(nn.Module):
    """A language model of torch's own parts."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1], device=input_ids.device)
        return self.layers(self.words(input_ids), mask=mask, is_causal=True) @ self.words.weight.T


def gpt2(vocabulary: int, width: int, heads: int, layers: int) -> nn.Module:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    transformers = importlib.import_module("foreign_models").library("transformers")
    config = transformers.GPT2Config(
        vocab_size=vocabulary, n_embd=width, n_head=heads, n_layer=layers, n_positions=4096, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def plain_step(model: nn.Module, ids: Tensor) -> Step:
    """Forward, loss, backward, update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        output = model(input_ids=ids)
        logits = getattr(output, "logits", output)
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def medians(jobs: dict[str, Step], seconds: float, device: torch.device) -> dict[str, float]:
    """Milliseconds of each, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    began = time.perf_counter()
    while min(map(len, times.values())) < 4 or time.perf_counter() - began < seconds:
        for name, job in jobs.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            job()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def idle_cost() -> float:
    """Milliseconds that a monitor adds to a forward pass that it does not measure."""
    model, rounds = nn.Identity(), 20_000
    x = torch.zeros(1)

    def run() -> float:
        start = time.perf_counter()
        for _ in range(rounds):
            model(x)
        return (time.perf_counter() - start) * 1e3 / rounds

    bare = min(run() for _ in range(5))
    with AttentionMonitor(model, every=1 << 60) as monitor:
        monitor.step()
        return min(run() for _ in range(5)) - bare


def watched(name: str, model: nn.Module, ids: Tensor, args: argparse.Namespace, idle: float) -> str:
    """The row of a model that trains under a monitor."""
    step = plain_step(model.train().to(args.device), ids.to(args.device))

    ids = ids.to(args.device)

    def forward() -> None:
        model(input_ids=ids)

    def measured() -> None:
        with AttentionMonitor(model, every=1):
            model(input_ids=ids)

    jobs: dict[str, Step] = {"step": step, "forward": forward, "measured": measured}
    found = medians(jobs, args.seconds, torch.device(args.device))
    extra = found["measured"] - found["forward"]
    return row(name, ids.shape, found["step"], extra, (extra / args.every + idle) / found["step"])


def trained(args: argparse.Namespace) -> str:
    """The row of `qknorm train`, whose observer has a pass of its own."""
    settings = preset("demo" if args.smoke else "low-resource").model
    device = torch.device(args.device)
    model = Translator(8_000, settings, scale_init=12.0).to(device).train()
    sentences, length = (4, 16) if args.smoke else (4_096 // 32, 32)
    batch = tuple(torch.randint(4, 8_000, (sentences, length), device=device) for _ in range(3))
    training, observer, steps = Training(), AttentionObserver(), iter(range(1 << 60))
    objective = Objective(label_smoothed_loss, (model.allowed, training.label_smoothing))
    stepper = TrainingStep(model, model, training, device, objective)

    def step() -> None:
        stepper([batch], sentences * length, 1e-4)

    def observe() -> None:
        with stepper.autocast():
            observer(next(steps), model, *batch[:2])

    found = medians({"step": step, "observed": observe}, args.seconds, device)
    share = found["observed"] / args.every / found["step"]
    return row("qknorm train, low-resource", (sentences, length), found["step"], found["observed"], share)


def row(name: str, shape: tuple[int, ...], step: float, extra: float, share: float) -> str:
    return f"| {name} | {shape[0]} × {shape[1]} | {step:.1f} | {extra:.1f} | **{share:.2%}** |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--every", type=int, default=100, help="steps from one measurement to the next")
    parser.add_argument("--seconds", type=float, default=20.0, help="measuring time for each model")
    parser.add_argument("--smoke", action="store_true", help="tiny models, no figures to keep")
    parser.add_argument("--out", type=Path, help="write the table here too, as Markdown")
    args = parser.parse_args()
    args.seconds = 0.0 if args.smoke else args.seconds
    torch.manual_seed(0)
    sizes, shapes = (8_000, 512, 8, 6), [(64, 64), (4, 1_024)]
    if args.device == "cpu":
        sizes, shapes = (8_000, 256, 4, 4), [(32, 64), (2, 1_024)]
    if args.smoke:
        sizes, shapes = (300, 32, 4, 2), [(4, 16)]
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    idle = idle_cost()
    lines = [
        f"{where}, PyTorch {torch.__version__}, Python {platform.python_version()}; every {args.every} steps; between "
        f"them the monitor takes {idle * 1e3:.1f} µs a step",
        "",
        "| model | batch | step, ms | a measurement, ms | share of training time |",
        "|---|---|---|---|---|",
    ]
    console = Console()
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    jobs: list[Callable[[], str]] = [lambda: trained(args)]
    for shape in shapes:
        ids = torch.randint(0, sizes[0], shape)
        jobs.append(lambda ids=ids: watched("torch.nn.TransformerEncoder", Encoder(*sizes), ids, args, idle))
        jobs.append(lambda ids=ids: watched("transformers GPT-2", gpt2(*sizes), ids, args, idle))
    for job in jobs:
        lines.append(job())
        console.print(lines[-1], soft_wrap=True, markup=False, highlight=False)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
