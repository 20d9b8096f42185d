"""What BPE-dropout costs a training: seconds to cut an epoch, and what is left of them with processes that cut ahead.

python benchmarks/bpe_dropout.py data/gl-en [--workers 2] [--epochs 5] [--epoch-seconds 0.28]

`--epoch-seconds` is how long a training takes for an epoch: so long the benchmark waits between two epochs, as if it
trained on a GPU. "line by line" is the plain way, `Tokenizer.encode_with_dropout`.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from qknorm.text.batching import TrainingBatches
from qknorm.text.prepared import PreparedData


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a folder that qknorm prepare wrote")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--epoch-seconds", type=float, default=0.28)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--batch-tokens", type=int, default=4_096)
    given = parser.parse_args()
    data = PreparedData.load(given.data)
    print(
        f"{given.data}: {len(data.split('train')):,} pairs, {data.tokenizer.size:,} types, dropout {given.dropout:g}\n"
    )
    print("| | seconds | of them CPU time of this process |\n|---|---|---|")
    print_row("line by line, an epoch", [line_by_line(data, given.dropout, epoch) for epoch in (0, 1)][1:])
    for workers in (0, given.workers):
        measure(data, workers, given)


def measure(data: PreparedData, workers: int, given: argparse.Namespace) -> None:
    """Prints what starting an epoch takes, with so many processes that cut ahead."""
    who, made = f"workers: {workers}", []

    def begin() -> None:
        split, languages = data.split("train"), (data.source, data.target)
        made.append(
            TrainingBatches(split, data.tokenizer, languages, given.batch_tokens, 0, given.dropout, workers=workers)
        )

    print_row(f"{who}, the text and its first epoch", [clock(begin)])
    batches, times = made[0], []
    for epoch in range(1, given.epochs + 1):
        time.sleep(given.epoch_seconds if workers else 0)
        times.append(clock(lambda epoch=epoch: batches.start_epoch(epoch)))
    print_row(f"{who}, start of an epoch", times)
    print_row(f"{who}, all batches of an epoch", [clock(lambda: [batches.arrays(batch) for batch in batches.batches])])
    batches.close()


def line_by_line(data: PreparedData, dropout: float, epoch: int) -> tuple[float, float]:
    texts = [data.split("train").text(language) for language in (data.source, data.target)]
    rng = random.Random(epoch)
    return clock(lambda: [[data.tokenizer.encode_with_dropout(line, dropout, rng) for line in text] for text in texts])


def clock(job: Callable[[], object]) -> tuple[float, float]:
    """Seconds on the wall, and of CPU time in all threads of this process."""
    wall, own = time.perf_counter(), time.process_time()
    job()
    return time.perf_counter() - wall, time.process_time() - own


def print_row(name: str, times: list[tuple[float, float]]) -> None:
    wall, own = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"| {name} | {wall:.4f} | {own:.4f} |")


if __name__ == "__main__":
    main()
