"""Every way that was thought of to launch the memory-bound kernels of a training step, timed; the best goes into
`qknorm/models/launches.py`. Part of `step_kernels.py --tune`.

Times are medians of replayed CUDA graphs of twenty calls. The inputs of norms and ReLUs rotate, so that most of them
come from memory, as within a step; sums of columns read what was written just before, and so read the cache.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qknorm.models import fused_kernels
from qknorm.models.launches import LAUNCHES, Launch
from qknorm.training import flat_update

CALLS, REPLAYS, THREADS, ROTATING, SHOWN = 20, 15, 14, 3, 8
DROPPED, SITE, HALF = 19_661, 3, torch.bfloat16

Job = Callable[[int], None]
"""Takes the number of the call, by which inputs rotate."""


class Table(NamedTuple):
    """One kernel at one size: what it must move, and a job for each way to launch it."""

    name: str
    megabytes: float
    jobs: dict[str, Job]


def label(launch: Launch) -> str:
    """A launch as it would be typed into the table."""
    usual = Launch(0, 0)._asdict()
    extra = [f"{key}={value!r}" for key, value in launch._asdict().items() if value != usual[key]]
    return f"Launch({', '.join([f'{launch.entries:_}', str(launch.warps), *extra[2:]])})"


def ways(kernel: str, launches: list[Launch], make: Callable[[Launch], Job]) -> dict[str, Job]:
    """Jobs by label: the launch that is in the table now, and the candidates."""
    now = LAUNCHES[kernel]
    found = {f"{label(now)} ← now": make(now)}
    found |= {label(each): make(each) for each in launches if each != now}
    return found


def draw(count: int, d: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Several inputs to take turns."""
    return [torch.randn(count, d, device=device).to(dtype) for _ in range(ROTATING)]


class Norm:
    """Inputs of residual, dropout and norm, and what its kernels take."""

    def __init__(self, count: int, d: int, device: torch.device) -> None:
        self.count, self.d = count, d
        self.x, self.to_sum, self.to_x = (draw(count, d, torch.float32, device) for _ in range(3))
        self.y, self.to_out, self.to_y = (draw(count, d, HALF, device) for _ in range(3))
        self.weight, self.bias, *self.rooms = torch.randn(5, d, device=device)
        self.mean, self.inverse = torch.randn(count, device=device), torch.rand(count, device=device)
        self.drop = (torch.tensor([7], device=device), SITE, DROPPED, 65_536 / (65_536 - DROPPED), count)
        self.flags = {"HAS_Y": True, "HAS_Y_BIAS": True, "DROPS": True, "KIND": 0, "HAS_BIAS": True}

    def forward(self, i: int) -> tuple[Any, ...]:
        i %= ROTATING
        out = (self.to_x[i], self.to_y[i], self.mean, self.inverse)
        return (self.x[i], self.y[i], self.bias, *out, self.weight, self.bias, *self.drop)

    def backward(self, i: int) -> tuple[Any, ...]:
        i %= ROTATING
        known = (self.x[i], self.to_sum[i], self.to_out[i], self.mean, self.inverse, self.weight)
        return (*known, self.to_x[i], self.to_y[i], *self.rooms, *self.drop)


def norm_backward_table(norm: Norm) -> Table:
    """Residual, dropout and norm, backward."""

    def make(launch: Launch, **changes: bool) -> Job:
        grid, tile = launch.over_rows(norm.count, norm.d)
        more = {**norm.flags, "HAS_SUM": True, "STAGES": launch.stages, **tile, **changes}
        return lambda i: fused_kernels.add_norm_backward[grid](*norm.backward(i), **more)

    launches = [Launch(4_096, 4, programs) for programs in (132, 264, 396, 528)]
    launches += [Launch(2_048, 4, programs) for programs in (132, 264, 396, 528, 792, 1_056)]
    launches += [Launch(2_048, 4, programs, stages=2) for programs in (132, 264, 396, 528)]
    launches += [Launch(2_048, 4, 264, stages=3), Launch(4_096, 4, 264, stages=2)]
    launches += [Launch(1_024, 4, programs) for programs in (264, 528, 1_056)]
    launches += [Launch(8_192, 8, 132), Launch(4_096, 8, 132), Launch(4_096, 8, 264), Launch(4_096, 8, 132, stages=2)]
    launches += [Launch(2_048, 2, 528), Launch(8_192, 16, 132)]
    jobs = ways("add_norm_backward", launches, make)
    fewer = make(LAUNCHES["add_norm_backward"], HAS_Y_BIAS=False, HAS_BIAS=False)
    jobs["now, but one of three sums over rows"] = fewer  # what the atomic additions cost
    return Table(f"add_norm_backward, {norm.count} × {norm.d}", norm.count * norm.d * 16 / 1e6, jobs)


def norm_forward_table(norm: Norm) -> Table:
    """Residual, dropout and norm, forward."""

    def make(launch: Launch) -> Job:
        grid, tile = launch.over_rows(norm.count, norm.d)
        return lambda i: fused_kernels.add_norm_forward[grid](*norm.forward(i), 1e-5, **norm.flags, **tile)

    launches = [Launch(1_024, 2), Launch(1_024, 4), Launch(2_048, 4), Launch(4_096, 8), Launch(4_096, 4)]
    jobs = ways("add_norm_forward", launches, make)
    return Table(f"add_norm_forward, {norm.count} × {norm.d}", norm.count * norm.d * 12 / 1e6, jobs)


def norm_tables(count: int, d: int, device: torch.device) -> list[Table]:
    """Both of them."""
    norm = Norm(count, d, device)
    return [norm_backward_table(norm), norm_forward_table(norm)]


def relu_tables(count: int, d: int, device: torch.device) -> Iterator[Table]:
    """Bias, ReLU and dropout: backward, then forward."""
    z, out, to_out, to_z = (draw(count, d, HALF, device) for _ in range(4))
    bias, room = torch.randn(2, d, device=device)
    drop = (torch.tensor([7], device=device), SITE, DROPPED, 1.4, count, d)

    def back(launch: Launch) -> Job:
        grid, tile = launch.over_columns(count, d)
        return lambda i: fused_kernels.relu_backward[grid](*arguments(i), HAS_BIAS=True, **tile)

    def arguments(i: int) -> tuple[Any, ...]:
        i %= ROTATING
        return (out[i], to_out[i], to_z[i], room, 1.4, count, d)

    launches = [Launch(8_192, 8, programs, columns) for columns in (128, 256) for programs in (0, 264, 528)]
    launches += [Launch(8_192, 4, 528, 256), Launch(16_384, 8, 0, 128), Launch(16_384, 8, 264, 256)]
    launches += [Launch(4_096, 4, programs, 256) for programs in (0, 528, 1_056)]
    launches += [Launch(2_048, 1, programs, 256) for programs in (1_056, 2_112)]
    launches += [Launch(8_192, 8, 264, 256, stages=2)]
    jobs = ways("relu_backward", launches, back)
    yield Table(f"relu_backward, {count} × {d}", count * d * 6 / 1e6, jobs)

    def forth(launch: Launch) -> Job:
        grid, tile = launch.over_columns(count, d)
        return lambda i: fused_kernels.activation_forward[grid](
            z[i % ROTATING], bias, out[i % ROTATING], *drop, GELU=False, HAS_BIAS=True, DROPS=True, **tile
        )

    launches = [Launch(entries, warps, columns=512) for entries, warps in ((2_048, 4), (4_096, 4), (8_192, 8))]
    launches += [Launch(4_096, 4, columns=1_024), Launch(2_048, 2, columns=512), Launch(4_096, 4, columns=256)]
    jobs = ways("activation_forward", launches, forth)
    yield Table(f"activation_forward, {count} × {d}", count * d * 4 / 1e6, jobs)


def gelu_tables(count: int, d: int, device: torch.device) -> Iterator[Table]:
    """GELU without bias or dropout, as language models have it: backward, then forward."""
    z, out, to_out = (draw(count, d, HALF, device) for _ in range(3))
    seed = torch.tensor([7], device=device)
    flags = {"HAS_BIAS": False, "DROPS": False}

    def back(launch: Launch) -> Job:
        grid, tile = launch.over_columns(count, d)
        return lambda i: fused_kernels.gelu_backward[grid](
            z[i % ROTATING], z[0], to_out[i % ROTATING], out[i % ROTATING], out[0], seed, SITE, 0, 1.0, count, d,
            **flags, **tile,
        )  # fmt: skip

    def forth(launch: Launch) -> Job:
        grid, tile = launch.over_columns(count, d)
        return lambda i: fused_kernels.activation_forward[grid](
            z[i % ROTATING], z[0], out[i % ROTATING], seed, SITE, 0, 1.0, count, d, GELU=True, **flags, **tile
        )

    launches = [
        Launch(entries, warps, columns=512) for entries, warps in ((1_024, 4), (2_048, 4), (4_096, 8), (2_048, 2))
    ]
    launches += [Launch(2_048, 4, columns=256), Launch(2_048, 4, 1_056, 512)]
    yield Table(f"gelu_backward, {count} × {d}", count * d * 6 / 1e6, ways("gelu_backward", launches, back))
    launches = launches[:-1]  # the forward kernel does not walk
    jobs = ways("activation_forward", launches, forth)
    yield Table(f"activation_forward, GELU, {count} × {d}", count * d * 4 / 1e6, jobs)


def sum_table(count: int, d: int, device: torch.device) -> Table:
    """Sums of columns, of rows that have room for a multiple of 16."""
    padded = -(-d // 16) * 16
    x, room = torch.randn(count, padded, device=device).to(HALF)[:, :d], torch.zeros(d, device=device)

    def make(launch: Launch) -> Job:
        grid, tile = launch.over_columns(count, d)
        return lambda _: fused_kernels.column_sum[grid](x, room, count, d, padded, padded, **tile)

    launches = [Launch(8_192, 8, programs, columns) for columns in (64, 128) for programs in (0, 132, 264)]
    launches += [Launch(8_192, 4, 0, 64), Launch(4_096, 4, 0, 64), Launch(8_192, 4, 0, 128), Launch(16_384, 8, 0, 64)]
    launches += [Launch(16_384, 8, 0, 128), Launch(4_096, 1, 0, 64), Launch(8_192, 4, 0, 256)]
    return Table(f"column_sum, {count} × {d}", count * d * 2 / 1e6, ways("column_sum", launches, make))


def update_tables(count: int, device: torch.device) -> Iterator[Table]:
    """AdamW, and the norm of the gradients."""
    value, gradient, first = torch.randn(3, count, device=device)
    second, half = torch.rand(count, device=device), torch.empty(count, device=device, dtype=HALF)
    decision, rate = torch.tensor([1.0, 0.5, 1.1, 1.2], device=device), torch.tensor(1e-4, device=device)
    parts = torch.zeros(flat_update.PARTS, device=device)
    numbers = {"BETA1": 0.9, "REST1": 0.1, "BETA2": 0.98, "REST2": 0.02, "DECAY": 0.01, "EPS": 1e-9, "HAS_HALF": True}
    arguments = (value, gradient, first, second, half, decision, rate, count)

    def spread(launch: Launch) -> dict[str, Any]:
        return {"BLOCK": launch.entries, "EVICT": launch.evict, "STAGES": launch.stages, "num_warps": launch.warps}

    def adam(launch: Launch) -> Job:
        grid = (launch.share(-(-count // launch.entries)),)
        return lambda _: flat_update._adam_kernel[grid](*arguments, **numbers, **spread(launch))

    sizes = ((512, 4), (1_024, 4), (1_024, 2), (2_048, 4), (2_048, 8), (4_096, 8), (4_096, 4))
    launches = [Launch(entries, warps) for entries, warps in sizes]
    launches += [Launch(entries, warps, evict="evict_first") for entries, warps in sizes[1:5]]
    launches += [Launch(2_048, 4, programs) for programs in (528, 1_056)] + [Launch(2_048, 4, 264, stages=3)]
    launches += [Launch(4_096, 8, 132, stages=2), Launch(1_024, 4, 1_056, evict="evict_first")]
    yield Table(f"adam, {count:,}", count * 34 / 1e6, ways("adam", launches, adam))

    def squares(launch: Launch) -> Job:
        grid = (min(flat_update.PARTS, launch.share(-(-count // launch.entries))),)
        return lambda _: flat_update._squares_kernel[grid](gradient, parts, count, **spread(launch))

    launches = [Launch(4_096, 8, programs) for programs in (264, 528, 1_024)]
    launches += [Launch(8_192, 8, 528), Launch(2_048, 4, 1_024), Launch(8_192, 16, 264), Launch(4_096, 4, 528)]
    launches += [Launch(4_096, 8, 528, stages=3), Launch(4_096, 8, 528, evict="evict_first")]
    jobs = ways("squares", launches, squares)
    yield Table(f"squares, {count:,}", count * 4 / 1e6, jobs)


def seconds_of(job: Job, device: torch.device) -> float:
    """Median time of one call."""
    if device.type != "cuda":
        began = time.perf_counter()
        job(0)
        return time.perf_counter() - began
    job(0)  # where a compiler's thread lost a race, before anything is recorded
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(CALLS):
            job(number)
    graph.replay()
    found = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3 / CALLS)
    return statistics.median(found)


def compile_all(tables: list[Table], device: torch.device) -> dict[tuple[str, str], str]:
    """Runs every job once, compilers side by side; errors by table and label."""
    errors: dict[tuple[str, str], str] = {}

    def first(table: str, way: str, job: Job) -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
                torch.zeros(1, device=device)  # a thread has no CUDA context before it asks for something
            job(0)
        except Exception as error:
            errors[table, way] = f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"

    with ThreadPoolExecutor(THREADS if device.type == "cuda" else 1) as pool:
        for table in tables:
            for way, job in table.jobs.items():
                pool.submit(first, table.name, way, job)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return errors


def print_table(table: Table, errors: dict[tuple[str, str], str], device: torch.device) -> None:
    """Best first: some of the best, the launch that is used now, and what has no launch to type in."""
    found = {}
    for way, job in table.jobs.items():
        if (table.name, way) not in errors:
            try:
                found[way] = 1e6 * seconds_of(job, device)
            except Exception as error:
                errors[table.name, way] = f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"
    print(f"\n| {table.name} ({table.megabytes:,.1f} MB) | µs | TB/s |\n|---|---|---|")
    for place, (way, spent) in enumerate(sorted(found.items(), key=lambda each: each[1])):
        if place < SHOWN or not way.endswith(")"):
            print(f"| {way} | {spent:.2f} | {table.megabytes / spent:.2f} |")
    for (name, way), error in errors.items():
        if name == table.name:
            print(f"| {way} | {error} | |")
    print(end="", flush=True)


def tune(tokens: int, width: int, feed_forward: int, vocabulary: int, parameters: int, device: torch.device) -> None:
    """Prints a table for each kernel and size, those first that a step spends most time in."""
    began = time.perf_counter()
    groups: list[Callable[[], list[Table]]] = [
        lambda: norm_tables(tokens, width, device),
        lambda: list(update_tables(parameters, device)),
        lambda: [sum_table(tokens, d, device) for d in (width, 3 * width, vocabulary)],
        lambda: list(relu_tables(tokens, feed_forward, device)),
        lambda: list(gelu_tables(tokens, feed_forward, device)),
        functools.partial(_wide_tables, tokens, 2 * width, device),
    ]
    made = [make() for make in groups]
    errors = compile_all([table for group in made for table in group], device)
    print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
    for group in made:
        for table in group:
            print_table(table, errors, device)
    print(f"\n{time.perf_counter() - began:.0f} s in all")


def _wide_tables(tokens: int, width: int, device: torch.device) -> list[Table]:
    return [*norm_tables(tokens, width, device), *relu_tables(tokens, width, device)]
