"""Counts and times in the text format that Prometheus reads."""

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)

Labels = tuple[tuple[str, str], ...]


class Counter:
    """A number that grows, for every set of labels."""

    kind = "counter"

    def __init__(self, name: str, about: str) -> None:
        self.name, self.about = name, about
        self._values: dict[Labels, float] = defaultdict(float)

    def add(self, amount: float = 1, **labels: str) -> None:
        """Makes it larger."""
        self._values[tuple(labels.items())] += amount

    def lines(self) -> list[str]:
        """Its samples."""
        return [_sample(self.name, labels, value) for labels, value in sorted(self._values.items())]


class Gauge:
    """A number that is asked for when it is read."""

    kind = "gauge"

    def __init__(self, name: str, about: str, read: Callable[[], float]) -> None:
        self.name, self.about, self._read = name, about, read

    def lines(self) -> list[str]:
        """Its sample."""
        return [_sample(self.name, (), self._read())]


class Histogram:
    """How often a number fell below each of some bounds, for every set of labels."""

    kind = "histogram"

    def __init__(self, name: str, about: str, bounds: Sequence[float]) -> None:
        self.name, self.about, self._bounds = name, about, bounds
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = defaultdict(float)

    def observe(self, value: float, **labels: str) -> None:
        """Counts a number."""
        key = tuple(labels.items())
        counts = self._counts.setdefault(key, [0] * (len(self._bounds) + 1))
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[key] += value

    def lines(self) -> list[str]:
        """Its samples: a running total for each bound, the sum and the count."""
        lines = []
        for labels, counts in sorted(self._counts.items()):
            total = 0
            for bound, count in zip((*map(_number, self._bounds), "+Inf"), counts, strict=True):
                total += count
                lines.append(_sample(f"{self.name}_bucket", (*labels, ("le", bound)), total))
            lines.append(_sample(f"{self.name}_sum", labels, self._sums[labels]))
            lines.append(_sample(f"{self.name}_count", labels, total))
        return lines


class Metrics:
    """All that a server counts."""

    def __init__(self) -> None:
        self.requests = Counter("qknorm_requests_total", "Requests answered, by path and status.")
        self.seconds = Histogram("qknorm_request_seconds", "How long requests took, by path.", SECONDS)
        self.sentences = Counter("qknorm_sentences_total", "Sentences translated, by pair.")
        self.batch_sizes = Histogram("qknorm_batch_sentences", "Sentences in a batch.", SIZES)
        self.batch_seconds = Histogram("qknorm_batch_seconds", "How long the model took for a batch.", SECONDS)
        self.dropped = Counter("qknorm_dropped_total", "Requests given up, by reason: the client left, or time was up.")
        self._all: list[Counter | Gauge | Histogram] = [
            self.requests, self.seconds, self.sentences, self.batch_sizes, self.batch_seconds, self.dropped,
        ]  # fmt: skip
        self._lock = threading.Lock()
        if resident_bytes() is not None:
            self.gauge("process_resident_memory_bytes", "Memory of this process.", lambda: resident_bytes() or 0)

    def gauge(self, name: str, about: str, read: Callable[[], float]) -> None:
        """Adds a number that is asked for when it is read."""
        self._all.append(Gauge(name, about, read))

    def saw_request(self, path: str, status: int, seconds: float) -> None:
        """Counts an answer."""
        with self._lock:
            self.requests.add(path=path, status=str(status))
            self.seconds.observe(seconds, path=path)

    def saw_batch(self, pair: str, sentences: int, seconds: float) -> None:
        """Counts a batch, from the thread of the models."""
        with self._lock:
            self.sentences.add(sentences, pair=pair)
            self.batch_sizes.observe(sentences)
            self.batch_seconds.observe(seconds)

    def saw_drop(self, reason: str) -> None:
        """Counts a request that was given up."""
        with self._lock:
            self.dropped.add(reason=reason)

    def text(self) -> str:
        """Everything, as Prometheus reads it."""
        with self._lock:
            return "".join(
                f"# HELP {each.name} {each.about}\n# TYPE {each.name} {each.kind}\n"
                + "".join(f"{line}\n" for line in each.lines())
                for each in self._all
            )


def resident_bytes() -> int | None:
    """Memory that this process holds; None where the system does not say."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _sample(name: str, labels: Labels, value: float) -> str:
    inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels)
    return f"{name}{{{inside}}} {_number(value)}" if inside else f"{name} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
