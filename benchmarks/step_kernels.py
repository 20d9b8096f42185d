"""The kernels of a training step one by one: their time, the least their bytes or operations allow, the plain way.

    python benchmarks/step_kernels.py                         # on a GPU, at the sizes of the paper's 6+6 model
    python benchmarks/step_kernels.py --tune                  # ways to launch those that memory bounds, best first
    TRITON_INTERPRET=1 python benchmarks/step_kernels.py --smoke   # tiny, on the CPU, to see that everything still runs

Times are medians of replayed CUDA graphs of ten calls, with inputs that fit the cache as they do within a step.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qknorm.attention import lp_normalize
from qknorm.models import fused_layers
from qknorm.models.fused_linear import add_column_sums, add_product
from qknorm.models.fused_run import FlatParameters, FusedRun, kernels_apply
from qknorm.training.flat_update import FlatUpdate
from qknorm.training.fused_loss import projected_loss
from qknorm.training.objective import label_smoothed_loss
from training_profile import matrix_rate

Job = Callable[[], object]


class Case(NamedTuple):
    """What is measured, how often a step has it, and what it cannot do without."""

    name: str
    times: int
    fused: Job
    plain: Job
    megabytes: float = 0.0
    gigaflops: float = 0.0


def seconds_of(job: Job, device: torch.device, repeat: int) -> float:
    """Median time of one call."""
    if device.type != "cuda":
        job()
        began = time.perf_counter()
        job()
        return time.perf_counter() - began
    for _ in range(3):
        job()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            job()
    found = []
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1e4)
    return statistics.median(found)


def both_ways(out: Callable[[], Tensor], inputs: list[Tensor]) -> Job:
    """Forward and backward of something whose result weighs each entry alike."""
    room: list[Tensor] = []

    def job() -> None:
        found = out()
        if not room:
            room.append(torch.ones_like(found))
        torch.autograd.grad(found, inputs, room[0])

    return job


def layer_cases(sizes: argparse.Namespace, device: torch.device, half: torch.dtype) -> list[Case]:
    """Residual, dropout and norm; bias, ReLU and dropout; word vectors."""
    tokens, width, wide, types = sizes.tokens, sizes.width, sizes.feed_forward, sizes.vocabulary
    run = FusedRun(torch.tensor([7], device=device), layers=True)
    norm = nn.LayerNorm(width, device=device)
    x = torch.randn(tokens, width, device=device, requires_grad=True)
    y = torch.randn(tokens, width, device=device, dtype=half, requires_grad=True)
    z = torch.randn(tokens, wide, device=device, dtype=half, requires_grad=True)
    bias = torch.randn(wide, device=device, requires_grad=True)
    table = torch.randn(types, width, device=device, requires_grad=True)
    ids = torch.randint(0, types, (1, tokens), device=device)
    positions, million = torch.randn(tokens, width, device=device), 1e6
    norms = [x, y, norm.weight, norm.bias]

    def plain_norm() -> Tensor:
        total = x + F.dropout(y, 0.3)
        return total + norm(total).to(half)

    def fused_norm() -> Tensor:
        with torch.autocast(device.type, half):
            total, out = fused_layers.add_norm(run, x, y, 0.3, norm)
        return total + out

    def plain_words() -> Tensor:
        return F.dropout(lp_normalize(table).index_select(0, ids[0]) * width**0.5 + positions, 0.3)

    def fused_words() -> Tensor:
        return fused_layers.embed(run, ids, table, None, positions, 0.3, factor=width**0.5, fixnorm=True)

    return [
        Case("residual, dropout, norm, both ways (and one sum)", 30, both_ways(fused_norm, norms),
             both_ways(plain_norm, norms), tokens * width * (24 + 28 + 18) / million),
        Case("bias, ReLU, dropout, both ways", 12,
             both_ways(lambda: fused_layers.bias_activation_dropout(run, "relu", z, bias, 0.3), [z, bias]),
             both_ways(lambda: F.dropout((z + bias.to(half)).relu(), 0.3), [z, bias]), tokens * wide * 10 / million),
        Case("word vectors, both ways", 2, both_ways(fused_words, [table]), both_ways(plain_words, [table]),
             (tokens * width * 24 + types * width * 4) / million),
        Case("table of unit rows, both ways", 1,
             both_ways(lambda: fused_layers.unit_rows(run, table, types + -types % 16, half), [table]),
             both_ways(lambda: lp_normalize(table).to(half), [table]), types * width * 20 / million),
        Case("sums of as many columns", 21, lambda: add_column_sums(bias, z.detach()),
             lambda: bias.detach().add_(z.detach().sum(0)), tokens * wide * 2 / million),
    ]  # fmt: skip


def loss_case(sizes: argparse.Namespace, device: torch.device, half: torch.dtype) -> Case:
    """From states to the gradients of states, table and bias."""
    run = FusedRun(torch.tensor([7], device=device), layers=True)
    tokens, width, types = sizes.tokens, sizes.width, sizes.vocabulary
    padded = types + -types % 16
    states = torch.randn(1, tokens, width, device=device, dtype=half, requires_grad=True)
    table = torch.randn(padded, width, device=device, dtype=half, requires_grad=True)
    bias = torch.zeros(types, device=device, requires_grad=True)
    targets, allowed = torch.randint(4, types, (1, tokens), device=device), torch.ones(types, device=device) > 0
    weight, inputs = torch.ones((), device=device) / tokens, [states, table, bias]

    def fused() -> None:
        found = projected_loss(run, states, table, bias, targets, allowed, 0.1, weight)
        torch.autograd.grad(found.weighted, inputs)

    def plain() -> None:
        logits = F.linear(states, table, F.pad(bias, (0, padded - types)).to(half))[..., :types]
        losses = label_smoothed_loss(logits.masked_fill(~allowed, -torch.inf), targets, allowed, 0.1)
        torch.autograd.grad(losses.smoothed * weight, inputs)

    work = 6e-9 * tokens * width * padded
    return Case("loss from states, both ways", 1, fused, plain, tokens * padded * 12 / 1e6, work)


def update_case(sizes: argparse.Namespace, device: torch.device) -> Case:
    """Clipping and AdamW over as many parameters as the model has."""
    parameters = [nn.Parameter(torch.randn(sizes.width, sizes.width, device=device)) for _ in range(sizes.matrices)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    cuda = device.type == "cuda"
    rate = torch.tensor(1e-4, device=device) if cuda else 1e-4
    optimizer = torch.optim.AdamW(parameters, lr=rate, fused=True, capturable=cuda)
    optimizer.step()
    flat = FlatParameters(parameters, torch.bfloat16)
    update = FlatUpdate(flat, optimizer, 1.0, torch.zeros(5, dtype=torch.float64, device=device))

    def plain() -> None:
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        flat.refresh()

    return Case("clipping and AdamW", 1, update, plain, flat.values.numel() * 38 / 1e6)


def product_cases(sizes: argparse.Namespace, device: torch.device, half: torch.dtype) -> list[Case]:
    """Every matrix product of the model: forward, to its input, and to its weight in place or by way of a copy."""
    tokens, width, wide = sizes.tokens, sizes.width, sizes.feed_forward
    shapes = {"queries, keys, values": (3 * width, width, 12), "one projection": (width, width, 24),
              "memory's keys and values": (12 * width, width, 1), "widen": (wide, width, 12),
              "narrow": (width, wide, 12)}  # fmt: skip
    cases = []
    for name, (n, k, times) in shapes.items():
        x, weight, to_out = (torch.randn(s, device=device, dtype=half) for s in ((tokens, k), (n, k), (tokens, n)))
        bias, room = torch.zeros(n, device=device, dtype=half), torch.zeros(n, k, device=device)
        work = 2e-9 * tokens * n * k

        def forward(x: Tensor = x, weight: Tensor = weight, bias: Tensor = bias) -> Tensor:
            return F.linear(x, weight, bias)

        def to_input(to_out: Tensor = to_out, weight: Tensor = weight) -> Tensor:
            return to_out @ weight

        def in_place(room: Tensor = room, x: Tensor = x, to_out: Tensor = to_out) -> None:
            add_product(room, to_out.t(), x)

        def by_copy(room: Tensor = room, x: Tensor = x, to_out: Tensor = to_out) -> None:
            room.add_((to_out.t() @ x).float())

        cases += [
            Case(f"{name} ({n} × {k})", times, forward, forward, 0.0, work),
            Case(f"{name}, to its input", times, to_input, to_input, 0.0, work),
            Case(f"{name}, to its weight", times, in_place, by_copy, 0.0, work),
        ]
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4_096)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--feed-forward", type=int, default=2_048)
    parser.add_argument("--vocabulary", type=int, default=8_217)
    parser.add_argument("--matrices", type=int, default=184, help="square ones, in place of the model's parameters")
    parser.add_argument("--terabytes", type=float, default=4.8, help="a second, that the memory can move")
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--tune", action="store_true", help="time candidates for qknorm/models/launches.py instead")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    args = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if not kernels_apply(device):
        raise SystemExit("the kernels need a GPU, or Triton's interpreter: set TRITON_INTERPRET=1 and give --smoke")
    if args.smoke:
        args.tokens, args.width, args.feed_forward, args.vocabulary, args.matrices = 6, 16, 24, 20, 2
    torch.manual_seed(0)
    if args.tune:
        from step_kernels_tuning import tune

        parameters = args.matrices * args.width**2
        tune(args.tokens, args.width, args.feed_forward, args.vocabulary, parameters, device)
        return
    half = torch.bfloat16
    rate = matrix_rate(device, half)
    print(f"matrix products: {rate / 1e12:,.1f} TFLOP/s\n")
    print("| kernels | a step | fused, µs | plain, µs | least, µs | fused in a step, ms | plain in a step, ms |")
    print("|---|---|---|---|---|---|---|")
    sums = [0.0, 0.0, 0.0]
    makers: list[Callable[[], list[Case]]] = [
        lambda: layer_cases(args, device, half),
        lambda: [loss_case(args, device, half)],
        lambda: [update_case(args, device)],
        lambda: product_cases(args, device, half),
    ]
    for case in (case for make in makers for case in make()):
        try:
            fused, plain = (1e6 * seconds_of(job, device, args.repeat) for job in (case.fused, case.plain))
        except Exception as error:
            print(
                f"| {case.name} | {type(error).__name__}: {' '.join(str(error).split())[:120]} | | | | | |", flush=True
            )
            continue
        least = max(case.megabytes / args.terabytes, 1e15 * case.gigaflops / rate)
        sums = [total + case.times * each / 1e3 for total, each in zip(sums, (fused, plain, least), strict=True)]
        in_step = " | ".join(f"{case.times * each / 1e3:.3f}" for each in (fused, plain))
        print(f"| {case.name} | {case.times} | {fused:.1f} | {plain:.1f} | {least:.1f} | {in_step} |", flush=True)
    print("\nTogether, without attention: {:.2f} ms fused, {:.2f} ms plain, {:.2f} ms at least.".format(*sums))


if __name__ == "__main__":
    main()
