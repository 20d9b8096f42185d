"""The idea in one picture: queries and keys grow, dot-product attention turns winner-take-all, QKNorm stays put.

python examples/saturation.py --out out/saturation.png
"""

import argparse
import math
from pathlib import Path
from typing import NamedTuple

import matplotlib
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from qknorm import MultiheadAttention, attend_with_weights

matplotlib.use("Agg")
from matplotlib import pyplot as plt

TOKENS, WIDTH, HEADS = 32, 512, 8
FACTORS = [1, 2, 4, 8, 16, 32, 64]
SHOWN = [1, 4, 16, 64]


class Measured(NamedTuple):
    largest_logit: float
    entropy: float  # relative to attending to every token alike
    saturated: float  # share of queries that give one token more than 99% of their weight
    weights: Tensor


@torch.no_grad()
def measure(attention: MultiheadAttention, x: Tensor, factor: float) -> Measured:
    """One self-attention over x, its queries and keys made `factor` times as large."""
    q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in project(attention, x))
    q, k = attention.norm(q * factor, k * factor)
    _, weights, logits = attend_with_weights(q, k, v, scale=attention.norm.scale)
    entropy = -torch.special.xlogy(weights, weights).sum(-1).mean() / math.log(TOKENS)
    saturated = (weights.amax(-1) > 0.99).float().mean()
    numbers = (logits.abs().max(), entropy, saturated)
    return Measured(*(number.item() for number in numbers), weights[0])


def project(attention: MultiheadAttention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.nn.functional.linear(x, attention.in_proj_weight, attention.in_proj_bias).chunk(3, dim=-1)


def make_table(dot: list[Measured], norm: list[Measured]) -> Table:
    table = Table(title=f"one random attention layer, {TOKENS} tokens, {HEADS} heads of {WIDTH // HEADS}")
    table.add_column("q, k", justify="right")
    for system, style in (("dot product", "yellow"), ("QKNorm", "green")):
        for column in ("top logit", "entropy", "saturated"):
            table.add_column(f"{system}\n{column}", justify="right", style=style)
    for factor, *both in zip(FACTORS, dot, norm, strict=True):
        cells = []
        for m in both:
            cells += [f"{m.largest_logit:,.1f}", f"{m.entropy:.1%}", f"{m.saturated:.0%}"]
        table.add_row(f"× {factor}", *cells)
    return table


def draw(dot: list[Measured], norm: list[Measured], path: Path) -> None:
    figure, axes = plt.subplots(2, len(SHOWN), figsize=(2.6 * len(SHOWN), 5.6), layout="constrained")
    for row, (title, measured) in zip(axes, (("dot product", dot), ("QKNorm", norm)), strict=True):
        for axis, factor in zip(row, SHOWN, strict=True):
            one = measured[FACTORS.index(factor)]
            image = axis.imshow(one.weights[0], cmap="magma", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[], title=f"q, k × {factor}", xlabel=f"saturated queries: {one.saturated:.0%}")
        row[0].set_ylabel(title, fontsize=14)
    figure.colorbar(image, ax=axes, shrink=0.7, label="attention weight")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/saturation.png"))
    out = parser.parse_args().out
    torch.manual_seed(0)
    normed = MultiheadAttention(WIDTH, HEADS, batch_first=True, length=TOKENS)
    plain = MultiheadAttention(WIDTH, HEADS, batch_first=True, qk_norm="none")
    plain.load_state_dict(normed.state_dict() | plain.norm.state_dict(prefix="norm."))
    x = torch.randn(1, TOKENS, WIDTH)
    dot, norm = ([measure(attention, x, factor) for factor in FACTORS] for attention in (plain, normed))
    draw(dot, norm, out)
    console = Console()
    console.print(make_table(dot, norm))
    console.print(
        "[dim]entropy: of the weights, 100% = all tokens alike; saturated: queries with one weight over 0.99[/dim]"
    )
    console.print(f"The attention weights of one head, as a picture: {out}")


if __name__ == "__main__":
    main()
