"""The pictures of docs/guides/theory.md: what the size of logits depends on, and what it does to softmax.

python examples/theory.py --out out/theory
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import matplotlib
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from qknorm import initial_scale, lp_normalize, matched_scale

matplotlib.use("Agg")
from matplotlib import pyplot as plt

LENGTH, WIDTH, HEAD = 79, 512, 64
G = initial_scale(LENGTH)
COLOURS = {"dot product": "tab:red", "dot product / √d": "tab:orange", "QKNorm": "tab:green"}
WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dot product": lambda q, k: q @ k.mT,
    "dot product / √d": lambda q, k: q @ k.mT / math.sqrt(q.shape[-1]),
    "QKNorm": lambda q, k: G * lp_normalize(q) @ lp_normalize(k).mT,
}


def gaussian(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def draw_spread(path: Path) -> None:
    """Standard deviation of logits: against the width of a head, and as queries and keys grow in training."""
    figure, (by_width, by_growth) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    widths, growths = [2**n for n in range(2, 11)], [2**n for n in range(7)]
    theory = {
        "dot product": lambda d: math.sqrt(d),
        "dot product / √d": lambda d: 1.0,
        "QKNorm": lambda d: G / math.sqrt(d),
    }
    pairs = {d: (gaussian(400, d), gaussian(400, d)) for d in widths}
    q, k = pairs[HEAD]
    for name, logits in WAYS.items():
        by_width.plot(widths, [logits(*pairs[d]).std() for d in widths], "o", color=COLOURS[name], label=name)
        by_width.plot(widths, [theory[name](d) for d in widths], color=COLOURS[name], linewidth=1)
        by_growth.plot(growths, [logits(q * f, k * f).std() for f in growths], "o-", color=COLOURS[name], linewidth=1)
    for axis in (by_width, by_growth):
        axis.axhline(G, color="gray", linestyle=":", linewidth=1)
        axis.set_yscale("log")
        axis.set_xscale("log", base=2)
    by_width.annotate("g, which no logit of QKNorm exceeds", (widths[0], G), (0, 4), textcoords="offset points")
    by_width.set(xlabel="width of a head, d", ylabel="standard deviation of logits", title="at the start")
    by_growth.set(xlabel="q and k times", title=f"as queries and keys grow, d = {HEAD}")
    by_width.legend(loc="upper left")
    figure.savefig(path, dpi=110)


def softmax_slope(w: Tensor) -> Tensor:
    """‖diag(w) − wwᵀ‖_F of every row of weights, without subtracting numbers that are nearly alike."""
    others = 1 - torch.eye(w.shape[-1], dtype=w.dtype)
    diagonal = w * (w @ others)  # w(1 − w)
    beside_it = w.unsqueeze(-1) * w.unsqueeze(-2) * others
    return (diagonal.square().sum(-1) + beside_it.square().sum((-2, -1))).sqrt()


def draw_gradient(z: Tensor, path: Path) -> None:
    """How much of a gradient a softmax over L keys lets through, and how many rows are saturated, as logits spread."""
    spreads = torch.logspace(-1, 3, 50, dtype=torch.float64)
    weights = [(z * spread).softmax(-1) for spread in spreads]
    slopes = torch.stack([softmax_slope(w) for w in weights]).clamp(min=1e-30)
    figure, (passed, saturated) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharex=True)
    passed.plot(spreads, slopes.median(dim=1).values, color="tab:blue", label="median row")
    low, high = (slopes.quantile(share, dim=1) for share in (0.1, 0.9))
    passed.fill_between(spreads, low, high, color="tab:blue", alpha=0.15, label="from 10% to 90% of rows")
    saturated.plot(spreads, [(w.amax(-1) > 0.99).double().mean() for w in weights], color="tab:red")
    for axis in (passed, saturated):
        axis.axvline(G / math.sqrt(HEAD), color="tab:green", linestyle="--", linewidth=1, label="QKNorm at the start")
        axis.axvline(G, color="tab:green", linestyle=":", linewidth=1, label="g: QKNorm cannot pass it")
        axis.set(xscale="log", xlabel="standard deviation of logits")
    passed.set(yscale="log", ylim=(1e-12, 3), title=f"‖∂ softmax / ∂ logits‖ over {LENGTH} keys")
    passed.legend(loc="lower left", fontsize=8)
    saturated.set(title="share of rows with a weight above 0.99")
    figure.savefig(path, dpi=110)


INITS = {
    "N(0, 0.02²)\nGPT-2": 0.02**2,
    "N(0, 2/(5D))\nHenry et al.": 2 / (5 * WIDTH),
    "Xavier, packed\nnn.MultiheadAttention": 2 / (4 * WIDTH),
    "N(0, 1/D)\nLeCun": 1 / WIDTH,
    "N(0, 2/D)\nHe": 2 / WIDTH,
    "N(0, 8/D)\n2 × He": 8 / WIDTH,
}


def measure_inits() -> list[tuple[str, float, float, float]]:
    """For every init: ‖QKᵀ‖_F/√d measured, L·D·variance as theory has it, and ‖g Q̂K̂ᵀ‖_F measured."""
    x = torch.nn.functional.layer_norm(gaussian(LENGTH, WIDTH), (WIDTH,))
    rows = []
    for name, variance in INITS.items():
        dots, cosines = [], []
        for _ in range(16):
            q, k = (x @ gaussian(WIDTH, HEAD) * math.sqrt(variance) for _ in range(2))
            dots.append(WAYS["dot product / √d"](q, k).norm())
            cosines.append(WAYS["QKNorm"](q, k).norm())
        measured, normed = (float(torch.stack(each).mean()) for each in (dots, cosines))
        rows.append((name, measured, LENGTH * WIDTH * variance, normed))
    return rows


def draw_inits(rows: list[tuple[str, float, float, float]], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(8, 4.2), layout="constrained")
    places = range(len(rows))
    axis.bar([i - 0.2 for i in places], [row[1] for row in rows], 0.4, color="tab:orange", label="‖QKᵀ‖_F / √d")
    axis.bar([i + 0.2 for i in places], [row[3] for row in rows], 0.4, color="tab:green", label="‖g Q̂K̂ᵀ‖_F")
    axis.plot(
        [i - 0.2 for i in places], [row[2] for row in rows], "k_", markersize=14, label="theory: L · D · variance"
    )
    axis.axhline(G * LENGTH / math.sqrt(HEAD), color="black", linewidth=0.8, linestyle=":", label="theory: g · L / √d")
    axis.set_xticks(list(places), [row[0] for row in rows], fontsize=8)
    axis.set(yscale="log", ylim=(8, 1_500), ylabel="size of all logits together")
    axis.set_title(f"what the init of W_q and W_k does, D = {WIDTH}, d = {HEAD}, L = {LENGTH}")
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def top_weight(g: float, length: int, others: float) -> float:
    """The weight of a key at cosine 1 among length − 1 keys at cosine `others`."""
    return 1 / (1 + (length - 1) * math.exp(g * (others - 1)))


def draw_certainty(path: Path) -> None:
    lengths = [2**n for n in range(1, 14)]
    scales = {
        "g = 1": (lambda _: 1.0, "tab:red"),
        "g = ln(L² − L)": (lambda length: math.log(length * length - length), "tab:blue"),
        "g = log2(L² − L)": (lambda length: initial_scale(length), "tab:green"),
    }
    figure, axis = plt.subplots(figsize=(8.6, 4.2), layout="constrained")
    for name, (g_of, colour) in scales.items():
        for others, style in ((0.0, "-"), (-1.0, "--")):
            left = [1 - top_weight(g_of(length), length, others) for length in lengths]
            axis.plot(
                lengths, left, style, color=colour, label=f"{name}, others at cosine {others:g}".replace("-", "−")
            )
    axis.set(yscale="log", ylim=(1e-12, 2), xlabel="keys in a row, L")
    axis.set_xscale("log", base=2)
    axis.set(ylabel="weight left for all other keys", title="how certain a row can be: 1 − top weight")
    figure.legend(fontsize=8, loc="outside right center")
    figure.savefig(path, dpi=110)


def draw_p(path: Path) -> None:
    """What p does at the same scale, and what the matched scale makes of it."""
    ps = [1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 6, 8]
    q, k = gaussian(1_000, HEAD), gaussian(1_000, HEAD)
    measured = [float((lp_normalize(q, p) @ lp_normalize(k, p).mT).std()) for p in ps]
    at_two = measured[ps.index(2)]
    fine = torch.linspace(1, 8, 57).tolist()
    bound = [HEAD ** max(0.0, 1 - 2 / p) for p in fine]
    spread = [1 / matched_scale(1.0, p, HEAD) for p in fine]
    figure, (same, matched) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    same.plot(fine, spread, color="tab:green", label="spread of q̂·k̂, over that at p = 2")
    same.plot(ps, [each / at_two for each in measured], "o", color="tab:green", label="the same, measured")
    same.plot(fine, bound, color="tab:purple", label="largest |q̂·k̂| there can be: d^max(0, 1 − 2/p)")
    same.axhline(1, color="gray", linestyle=":", linewidth=1)
    same.set(yscale="log", xlabel="p", title=f"at the same scale, d = {HEAD}")
    same.legend(fontsize=8)
    matched.plot(fine, [G * b for b in bound], color="tab:purple", label="largest logit, scale g₀")
    matched.plot(fine, [matched_scale(G, p, HEAD) * b for p, b in zip(fine, bound, strict=True)], "--",
                 color="tab:purple", label="largest logit, matched scale")  # fmt: skip
    matched.plot(fine, [matched_scale(G, p, HEAD) for p in fine], color="tab:blue", label="matched scale")
    matched.set(yscale="log", xlabel="p", title=f"g₀ = {G:.2f} and the scale that keeps the spread of p = 2")
    matched.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def make_table(inits: list[tuple[str, float, float, float]]) -> Table:
    table = Table(title=f"logits of one head at the start, D = {WIDTH}, d = {HEAD}, L = {LENGTH}, g = {G:.3f}")
    for column in ("init of W_q, W_k", "‖QKᵀ‖_F / √d", "L · D · variance", "‖g Q̂K̂ᵀ‖_F"):
        table.add_column(column, justify="left" if column.startswith("init") else "right")
    for name, measured, theory, normed in inits:
        table.add_row(name.replace("\n", ", "), f"{measured:.1f}", f"{theory:.1f}", f"{normed:.1f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/theory"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    inits = measure_inits()
    draw_spread(out / "theory-spread.png")
    rows = gaussian(500, LENGTH)
    draw_gradient(rows, out / "theory-gradient.png")
    draw_inits(inits, out / "theory-init.png")
    draw_certainty(out / "theory-certainty.png")
    draw_p(out / "theory-p.png")
    console = Console()
    console.print(make_table(inits))
    for spread in (0.1, G / math.sqrt(HEAD), 5.0, G, 100.0):
        slope = softmax_slope((rows * spread).softmax(-1)).median()
        console.print(f"median gradient through softmax where logits have a spread of {spread:.2f}: {slope:.2g}")
    for others in (0.0, -1.0):
        console.print(
            f"top weight of a row of {LENGTH} keys, others at cosine {others:g}: {top_weight(G, LENGTH, others):.8f}"
        )
    console.print(f"Pictures: {out}")


if __name__ == "__main__":
    main()
