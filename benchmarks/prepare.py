"""Time and peak memory of `prepare` on a large corpus: real text, repeated, with a word that varies added to each line.

QKNORM_DATA=… python benchmarks/prepare.py [--pairs 1000000]
"""

import argparse
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

from qknorm.config import Prepare
from qknorm.text.prepare import prepare
from qknorm.text.readers import Pair, read_pairs

_SYLLABLES = ("ba", "de", "fi", "go", "hu", "ka", "le", "mi", "no", "pu", "ra", "se", "ti", "vo", "zu", "xe")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=1_000_000)
    pairs = parser.parse_args().pairs
    if "QKNORM_DATA" not in os.environ:
        sys.exit("set QKNORM_DATA to the folder that holds the corpora iwslt14-de-en and multi30k-en-de")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = write_corpus(folder, Path(os.environ["QKNORM_DATA"]), pairs)
        size = sum(path.stat().st_size for path in paths) / 1e6
        start, cpu = time.perf_counter(), time.process_time()
        report = prepare(Prepare(source="de", target="en", train=paths), folder / "out", progress=StageClock())
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        tokens = report.splits["train"].source_tokens + report.splits["train"].target_tokens
    print(f"{pairs:,} pairs, {size:,.0f} MB of text: {seconds:.1f} s, peak {peak_memory():,.0f} MB, {cpu:.0f} s of CPU")
    print(f"kept {report.cleaning.kept:,}; {report.vocabulary:,} types; {tokens:,} training tokens")


def write_corpus(folder: Path, data: Path, pairs: int) -> tuple[Path, Path]:
    """Pairs that are all different, as two plain text files."""
    paths = folder / "large.de", folder / "large.en"
    with paths[0].open("w", encoding="utf-8") as source, paths[1].open("w", encoding="utf-8") as target:
        for number, pair in enumerate(islice(cycle(given_pairs(data)), pairs)):
            source.write(f"{pair.source} {made_up_word(number)}\n")
            target.write(f"{pair.target} {made_up_word(number)}\n")
    return paths


def given_pairs(data: Path) -> Iterator[Pair]:
    yield from read_pairs([data / "iwslt14-de-en/train.de", data / "iwslt14-de-en/train.en"], "de", "en")
    yield from read_pairs([data / "multi30k-en-de/train.de", data / "multi30k-en-de/train.en"], "de", "en")


def made_up_word(number: int) -> str:
    """A word that no other number has."""
    word = _SYLLABLES[number % 16]
    while number := number // 16:
        word += _SYLLABLES[number % 16]
    return word


def peak_memory() -> float:
    """Peak memory of this process in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3


class StageClock:
    """Prints when each stage ends."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        if done == total:
            print(f"{time.perf_counter() - self.start:7.1f} s  {stage}")


if __name__ == "__main__":
    main()
