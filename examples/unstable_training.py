"""A small model that a high learning rate breaks, the monitor that shows why, and `qknorm.adopt`, which cures it.

python examples/unstable_training.py --out out/unstable-training [--quick]

The model is torch's own nn.TransformerEncoder and learns to say a random string once more. Every learning rate is tried
with dot products, with dot products and a warm-up, and with QKNorm, from several seeds; one learning rate is looked at
while it trains. It writes two pictures and results.json.
"""

import argparse
import json
import math
import multiprocessing
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from qknorm.attention.adopt import adopt
from qknorm.inspection.monitor import AttentionMonitor

matplotlib.use("Agg")
from matplotlib import pyplot as plt

SYMBOLS, STRING, WIDTH, HEADS, LAYERS, BATCH = 32, 16, 64, 2, 2, 32
CHANCE = math.log(SYMBOLS)
SYSTEMS = {"dot product": "tab:orange", "dot product, warm-up": "tab:brown", "QKNorm": "tab:green"}
RATES = [1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0]
LOOKED_AT = 1e-1
TRAINED_AT = 3e-3


class Copier(nn.Module):
    """A pre-norm decoder that reads a string and says it again; nothing of qknorm in it."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(2 * STRING, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.answer = nn.Linear(WIDTH, SYMBOLS)
        for part in self.layers.layers:  # nn.TransformerEncoder starts all layers as copies of one
            for weight in part.parameters():
                if weight.dim() > 1:
                    nn.init.xavier_uniform_(weight)
        for embedding in (self.symbols, self.places):
            nn.init.normal_(embedding.weight, std=0.5)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.answer(self.layers(self.symbols(ids) + self.places.weight[:length], mask=mask, is_causal=True))


@dataclass(frozen=True)
class Job:
    system: str
    rate: float
    seed: int
    steps: int
    look_every: int = 0


@dataclass
class Outcome:
    final_loss: float
    losses: list[float]
    looks: list[dict[str, float]]  # step, and of the layer worst off the largest logit, entropy and saturation
    warnings: list[str]


def train(job: Job) -> Outcome:
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    model = Copier()
    if job.system == "QKNorm":
        adopt(model, length=2 * STRING)
    warm_up = job.steps // 3 if "warm-up" in job.system else 0
    with AttentionMonitor(model, every=job.look_every or job.steps + 1) as monitor:
        losses = fit(model, job.rate, job.steps, warm_up)
    return Outcome(final(losses), losses, looks_of(monitor) if job.look_every else [], monitor.warnings())


def fit(model: nn.Module, rate: float, steps: int, warm_up: int = 0) -> list[float]:
    """The loss at every step. Strings are new at every step, so each is the loss on strings never seen."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(steps):
        warm = min(1.0, (step + 1) / warm_up) if warm_up else 1.0
        optimizer.param_groups[0]["lr"] = rate * warm * 0.5 * (1 + math.cos(math.pi * step / steps))
        ids = strings()
        loss = copying_loss(model(ids[:, :-1]), ids)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def strings() -> Tensor:
    string = torch.randint(SYMBOLS, (BATCH, STRING))
    return torch.cat([string, string], dim=1)


def copying_loss(said: Tensor, ids: Tensor) -> Tensor:
    """Cross-entropy of the second time the string is said."""
    return F.cross_entropy(said[:, STRING - 1 :].flatten(0, 1), ids[:, STRING:].flatten())


def final(losses: list[float]) -> float:
    return statistics.mean(losses[-max(1, len(losses) // 15) :])


def adopt_trained(steps: int) -> list[str]:
    """Gives QKNorm to a model that was trained without, calibrated on one batch, and trains on for a little."""
    torch.manual_seed(0)
    model = Copier()
    fit(model, TRAINED_AT, steps)
    ids = strings()
    adoption = adopt(model, calibrate=ids[:, :-1], loss=lambda said: copying_loss(said, ids))
    more = max(1, steps // 10)
    return [str(adoption), f"after {more} more steps: {fit(model, TRAINED_AT, more)[-1]:.4g}"]


def train_all(jobs: list[Job]) -> list[Outcome]:
    """On every core, one training a process: spawned, since a forked one may inherit locks that threads held."""
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        return list(track(pool.map(train, jobs), "training", total=len(jobs)))


def looks_of(monitor: AttentionMonitor) -> list[dict[str, float]]:
    looks: dict[int, dict[str, float]] = {}
    for step, _, measures in monitor.history:
        look = looks.setdefault(step, {"step": step, "logit": 0.0, "entropy": 1.0, "saturation": 0.0})
        look["logit"] = max(look["logit"], float(measures.largest_logit.max()))
        look["entropy"] = min(look["entropy"], float(measures.relative_entropy.min()))
        look["saturation"] = max(look["saturation"], float(measures.saturation.max()))
    return list(looks.values())


def settled(loss: float) -> float:
    """The loss, or that of chance where training ended above it or as NaN."""
    return min(loss, CHANCE) if math.isfinite(loss) else CHANCE


def sensitivity(finals: list[list[float]]) -> float:
    """How far, over all learning rates, the loss ends above the best one; a loss above chance counts as chance."""
    middle = [statistics.mean(map(settled, losses)) for losses in finals]
    return statistics.mean(middle) - min(middle)


def make_table(rates: list[float], finals: dict[str, list[list[float]]]) -> Table:
    seeds = len(finals["QKNorm"][0])
    table = Table(title=f"final loss, mean of {seeds} seeds ± half their range; chance is {CHANCE:.2f}")
    table.add_column("learning rate", justify="right")
    for system in finals:
        table.add_column(system, justify="right")
    for row, rate in enumerate(rates):
        cells = []
        for losses in finals.values():
            ends = losses[row]
            broken = sum(not math.isfinite(end) for end in ends)
            shown = f"{statistics.mean(ends):.4f} ± {(max(ends) - min(ends)) / 2:.4f}"
            cells.append(f"NaN in {broken} of {seeds}" if broken else shown)
        table.add_row(f"{rate:g}", *cells)
    table.add_section()
    table.add_row("sensitivity", *(f"{sensitivity(losses):.3f}" for losses in finals.values()))
    return table


def draw_sweep(rates: list[float], finals: dict[str, list[list[float]]], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    for system, ends_by_rate in finals.items():
        losses = [[end if math.isfinite(end) else CHANCE for end in ends] for ends in ends_by_rate]
        middle = [statistics.mean(ends) for ends in losses]
        reach = [
            [m - min(ends) for m, ends in zip(middle, losses, strict=True)],
            [max(ends) - m for m, ends in zip(middle, losses, strict=True)],
        ]
        style = "--" if "warm-up" in system else "-"
        axis.errorbar(rates, middle, reach, label=system, color=SYSTEMS[system], marker="o", capsize=3, linestyle=style)
        for rate, ends in zip(rates, ends_by_rate, strict=True):
            if not all(map(math.isfinite, ends)):
                axis.annotate("NaN", (rate, CHANCE), (-30, -16), textcoords="offset points", color=SYSTEMS[system])
    axis.axhline(CHANCE, color="gray", linewidth=1, linestyle=":")
    axis.annotate("chance: nothing learned", (rates[0], CHANCE), (0, 4), textcoords="offset points", color="gray")
    axis.set(xscale="log", xlabel="learning rate", ylabel="final loss (nats a symbol)")
    axis.set_ylim(top=max(axis.get_ylim()[1], CHANCE * 1.12))
    axis.legend(loc="center left")
    axis.set_title("the same model at every learning rate")
    figure.savefig(path, dpi=110)


def draw_looks(looked: dict[str, Outcome], rate: float, path: Path) -> None:
    panels = {
        "loss": "loss",
        "logit": "largest |logit|",
        "entropy": "relative entropy, lowest head",
        "saturation": "saturated queries, highest head",
    }
    figure, axes = plt.subplots(2, 2, figsize=(9, 6.2), layout="constrained", sharex=True)
    for axis, (key, title) in zip(axes.flat, panels.items(), strict=True):
        for system, outcome in looked.items():
            if key == "loss":
                axis.plot(outcome.losses, color=SYSTEMS[system], label=system, linewidth=1)
            else:
                steps = [look["step"] for look in outcome.looks]
                axis.plot(steps, [look[key] for look in outcome.looks], color=SYSTEMS[system], label=system)
        axis.set_title(title)
    axes[0, 1].set_yscale("log")
    axes[0, 0].axhline(CHANCE, color="gray", linewidth=1, linestyle=":")
    for axis in axes[1]:
        axis.set(ylim=(-0.04, 1.04), xlabel="step")
    axes[0, 0].legend()
    figure.suptitle(f"what attention does at a learning rate of {rate:g}")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/unstable-training"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--quick", action="store_true", help="one learning rate, one seed, few steps: seconds")
    arguments = parser.parse_args()
    out: Path = arguments.out
    rates, seeds, steps = (RATES, arguments.seeds, arguments.steps)
    if arguments.quick:
        rates, seeds, steps = [LOOKED_AT], 1, 12
    out.mkdir(parents=True, exist_ok=True)

    jobs = [Job(system, rate, seed, steps) for system in SYSTEMS for rate in rates for seed in range(seeds)]
    jobs += [Job(system, LOOKED_AT, 0, steps, look_every=max(1, steps // 60)) for system in SYSTEMS]
    outcomes = [train(job) for job in jobs] if arguments.quick else train_all(jobs)

    ends = iter(outcomes)
    finals = {system: [[next(ends).final_loss for _ in range(seeds)] for _ in rates] for system in SYSTEMS}
    looked = dict(zip(SYSTEMS, ends, strict=True))
    draw_sweep(rates, finals, out / "unstable-training-sweep.png")
    draw_looks(looked, LOOKED_AT, out / "unstable-training-monitor.png")
    # JSON has no NaN: null is a training that ended as one
    ends_in_json = {
        system: [[end if math.isfinite(end) else None for end in ends] for ends in losses]
        for system, losses in finals.items()
    }
    record = {"rates": rates, "final_loss": ends_in_json, "looks": {name: each.looks for name, each in looked.items()}}
    (out / "results.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    console = Console()
    console.print(make_table(rates, finals))
    for system, outcome in looked.items():
        console.print(f"[bold]{system}[/bold] at {LOOKED_AT:g}, as the monitor puts it:", highlight=False)
        for warning in outcome.warnings or ["nothing to worry about"]:
            console.print(f"  {warning}", highlight=False, markup=False)
    console.print(f"[bold]A model trained with dot products at {TRAINED_AT:g}, adopted[/bold]", highlight=False)
    for line in adopt_trained(steps):
        console.print(line, highlight=False, markup=False)
    console.print(f"Pictures and results.json: {out}")


if __name__ == "__main__":
    main()
