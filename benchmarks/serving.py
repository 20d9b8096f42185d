"""How a server holds up: many clients at once for a while, each sending its next sentence as soon as it has an answer.

    python benchmarks/serving.py --run out/demo/run                      # 50 clients for 60 s, sentences of the demo
    python benchmarks/serving.py --run runs/gl-en --input news.gl --quantize int8
    python benchmarks/serving.py --run out/demo/run --clients 4 --seconds 2

The server is the real command in a process of its own; its memory is read from its metrics after a warm-up and at the
end. Latencies are of whole requests, over the network of this machine, clients included.
"""

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx

from qknorm.text.demo_corpus import demo_splits
from qknorm.text.readers import read_lines


class Tally:
    """What the clients saw."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.failures: Counter[str] = Counter()


async def client(address: str, sentences: list[str], seed: int, until: float, tally: Tally) -> None:
    """Asks for one sentence after the other until time is up."""
    order = random.Random(seed)
    async with httpx.AsyncClient(base_url=address, timeout=60) as web:
        while time.monotonic() < until:
            began = time.perf_counter()
            try:
                answer = await web.post("/translate", json={"text": order.choice(sentences)})
                if answer.status_code != 200:
                    tally.failures[f"status {answer.status_code}"] += 1
                    continue
            except httpx.HTTPError as error:
                tally.failures[type(error).__name__] += 1
                continue
            tally.seconds.append(time.perf_counter() - began)


async def load(address: str, sentences: list[str], clients: int, seconds: float) -> Tally:
    """All clients at once."""
    tally = Tally()
    until = time.monotonic() + seconds
    await asyncio.gather(*(client(address, sentences, seed, until, tally) for seed in range(clients)))
    return tally


def metric(address: str, start: str) -> float:
    """The first sample of the server's metrics that begins so."""
    lines = httpx.get(f"{address}/metrics").text.splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(start))


def percentile(values: list[float], share: float) -> float:
    """The smallest value that so many are not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def show(tally: Tally, address: str, memory: tuple[float, float], seconds: float, clients: int) -> None:
    """One table, and how full the batches were."""
    count, failed = len(tally.seconds), sum(tally.failures.values())
    batches = metric(address, "qknorm_batch_sentences_count")
    filled = metric(address, "qknorm_batch_sentences_sum") / batches
    print(f"{clients} clients for {seconds:g} s: {count:,} answers, {failed} errors {dict(tally.failures) or ''}")
    print(f"{filled:.1f} sentences a batch on average\n")
    print("| sentences/s | p50 ms | p95 ms | p99 ms | largest ms | memory at start | at end |")
    print("|---|---|---|---|---|---|---|")
    times = [1000 * percentile(tally.seconds, share) for share in (0.5, 0.95, 0.99, 1.0)]
    cells = [
        f"{count / seconds:.0f}",
        *(f"{each:.0f}" for each in times),
        *(f"{each / 2**20:.0f} MiB" for each in memory),
    ]
    print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="run folder")
    parser.add_argument("--input", type=Path, help="file with one sentence a line; the demo's test set if not given")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--warm-up", type=float, default=5, help="seconds of the same load before anything is counted")
    parser.add_argument("--quantize", choices=["int8"])
    options = parser.parse_args()
    sentences = list(read_lines(options.input)) if options.input else [pair[0] for pair in demo_splits()["test"]]
    words = ["serve", str(options.run), "--port", "0", *(["--quantize", options.quantize] if options.quantize else [])]
    server = subprocess.Popen(
        [sys.executable, "-m", "qknorm", *words],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert server.stdout is not None
    try:
        found = re.search(r"http://\S+", server.stdout.readline())
        if found is None:
            raise SystemExit("the server did not start")
        address = found[0]
        asyncio.run(load(address, sentences, options.clients, min(options.warm_up, options.seconds)))
        before = metric(address, "process_resident_memory_bytes")
        tally = asyncio.run(load(address, sentences, options.clients, options.seconds))
        after = metric(address, "process_resident_memory_bytes")
        if not tally.seconds:
            raise SystemExit(f"no request was answered: {json.dumps(tally.failures)}")
        show(tally, address, (before, after), options.seconds, options.clients)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
