r"""Draws dev loss and dev BLEU of several runs in one picture, and writes their evaluations as a compact CSV.

python benchmarks/compare_curves.py runs/qknorm-0 runs/baseline-0 --out docs/results/gl-en
python benchmarks/compare_curves.py runs/more --csv docs/results/gl-en/evaluations.csv --out docs/results/gl-en
python benchmarks/compare_curves.py --csv docs/results/gl-en/evaluations.csv --out docs/results/gl-en \
    --only qknorm-0 qknorm-1 float32-0 --picture fast-and-plain.png
"""

import argparse
import csv
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from qknorm.training.metrics import read_metrics

COLUMNS = ("run", "step", "dev_loss", "dev_bleu", "learning_rate", "elapsed")
Rows = dict[str, list[dict[str, float]]]


def from_runs(folders: list[Path]) -> Rows:
    rows: Rows = {}
    for folder in folders:
        evaluations = [row for row in read_metrics(folder) if row["kind"] == "evaluation"]
        rows[folder.name] = [
            {**{name: row[name] for name in COLUMNS[1:5]}, "elapsed": row["time"]["elapsed"]} for row in evaluations
        ]
    return rows


def from_csv(path: Path) -> Rows:
    rows: Rows = {}
    with path.open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            rows.setdefault(line["run"], []).append({name: float(line[name]) for name in COLUMNS[1:]})
    return rows


def write_csv(rows: Rows, path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for run, evaluations in rows.items():
            for each in evaluations:
                writer.writerow([run, int(each["step"]), *(f"{each[name]:.5g}" for name in COLUMNS[2:])])


def draw(rows: Rows, path: Path) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    loss, bleu = figure.subplots(1, 2)
    colours: dict[str, str] = {}  # runs that differ in their seed alone share one
    for run, evaluations in rows.items():
        system = run.rpartition("-")[0] or run
        label = None if system in colours else system
        colour = colours.setdefault(system, f"C{len(colours)}")
        steps = [each["step"] for each in evaluations]
        for axis, name in ((loss, "dev_loss"), (bleu, "dev_bleu")):
            axis.plot(steps, [each[name] for each in evaluations], color=colour, label=label, linewidth=1.1)
    last = [each["dev_loss"] for evaluations in rows.values() for each in evaluations if each["step"] > 2_000]
    if last:
        loss.set_ylim(min(last) - 0.05, max(last) + 0.3)
    loss.set(xlabel="step", ylabel="dev loss, nats a token")
    bleu.set(xlabel="step", ylabel="dev BLEU")
    for axis in (loss, bleu):
        axis.grid(alpha=0.3)
    bleu.legend(loc="lower right")  # of both; the other's lines are wherever it would stand
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument("--csv", type=Path, help="evaluations written before, to draw these too")
    parser.add_argument("--only", nargs="+", help="draw these runs alone")
    parser.add_argument("--picture", default="curves.png")
    parser.add_argument("--out", type=Path, required=True, help="folder for evaluations.csv and the picture")
    args = parser.parse_args()
    rows = (from_csv(args.csv) if args.csv else {}) | from_runs(args.runs)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.runs:
        write_csv(rows, args.out / "evaluations.csv")
    rows = {name: rows[name] for name in args.only or rows}
    draw(rows, args.out / args.picture)
    for run, evaluations in rows.items():
        best = max(evaluations, key=lambda each: each["dev_bleu"])
        end = evaluations[-1]
        print(
            f"{run}: best dev BLEU {best['dev_bleu']:.2f} at step {best['step']:,.0f}; last step {end['step']:,.0f} "
            f"after {end['elapsed']:,.0f} s at learning rate {end['learning_rate']:.1e}"
        )


if __name__ == "__main__":
    main()
