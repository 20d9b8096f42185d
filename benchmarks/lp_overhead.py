"""What a step of the Lp study costs: models in one stack, processes, and p ≠ 2 against p = 2.

    python benchmarks/lp_overhead.py                                        # everything, on this machine's device
    python benchmarks/lp_overhead.py --only fused --models 1 2 5
    python benchmarks/lp_overhead.py --skip-processes --out docs/results/lp/overhead.md
    python benchmarks/lp_overhead.py --smoke --device cpu                   # tiny, to see that everything still runs

Every way is measured in a process of its own, so that one that fails takes no other down. Times are medians of rounds,
in milliseconds of a whole step (data, forward, backward, clipping, AdamW) per model.
"""

import argparse
import dataclasses
import json
import multiprocessing
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from qknorm.studies.lp.corpus import Text, find_text
from qknorm.studies.lp.design import LpStudy, Run, make_run, quick_study, resolve_precision
from qknorm.studies.lp.stack import Stack
from qknorm.studies.lp.training import Execution, make_stack
from qknorm.studies.published import LP_EXPONENTS
from training_profile import print_profile

WAYS = {
    "plain": Execution(),
    "fused": Execution(layers="fused"),
    "fused, 1 stream": Execution(layers="fused", streams=1),
    "fused, 2 streams": Execution(layers="fused", streams=2),
}
RUNS_OF_AN_ARM, RUNS_OF_ALL_ARMS = 70, 140  # p = 2 is shared by two arms, and dot products have no p


def main() -> None:
    options = read_options()
    if options.child:
        measure_way(options)
        return
    lines = [f"`{' '.join(['python', *sys.argv])}` on {machine(options.device)}, PyTorch {torch.__version__}", ""]
    ways = [way for way in WAYS if options.only in way and (options.gpu_ways or "plain" in way)]
    stacks = {way: ask_child(options, way) for way in ways}
    lines += show_stacks(stacks, options)
    if not options.skip_processes:
        lines += show_processes(options)
    if not options.skip_overhead:
        lines += show_overhead(stacks, options)
    text = "\n".join(lines)
    print(text)
    if options.profile:
        way = "fused" if options.gpu_ways else "plain"
        stack = stack_of([Run("same-scale", options.p, 0)], options, WAYS[way])
        stack.run(options.steps)
        print_profile(way, lambda: stack.run(1), options.device == "cuda")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n", encoding="utf-8")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, nargs="+", default=[1, 2, 5, 7, 10])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", default="", help="only ways whose name has this in it")
    parser.add_argument("--p", type=float, default=3.0, help="p of the stacks")
    parser.add_argument("--steps", type=int, default=20, help="steps in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--skip-processes", action="store_true")
    parser.add_argument("--skip-overhead", action="store_true")
    parser.add_argument("--profile", action="store_true", help="show where the time of one model's step goes")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for all stacks of one way")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.gpu_ways = options.device == "cuda" and not options.smoke
    if options.smoke:
        options.models, options.processes, options.steps, options.rounds = [1, 2], [1], 2, 2
    return options


def machine(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {device}"


def study_of(options: argparse.Namespace) -> LpStudy:
    """The real settings, or the quick ones; one data order of as many steps as are measured."""
    study = quick_study() if options.smoke else LpStudy()
    steps = (options.rounds + 1) * options.steps
    return resolve_precision(study.model_copy(update={"iterations": steps}), torch.device(options.device))


def stack_of(runs: list[Run], options: argparse.Namespace, way: Execution) -> Stack:
    study = study_of(options)
    text: Text = find_text(options.text, study.characters)
    folds = [make_run(run.arm, run.p, run.fold % study.fold_count) for run in runs]
    execution = dataclasses.replace(way, device=options.device)
    return make_stack(folds, study, text, execution)


def round_ms(stack: Stack, steps: int) -> float:
    """Milliseconds a step and model."""
    wait(stack.device)
    started = time.perf_counter()
    stack.run(steps)
    wait(stack.device)
    return (time.perf_counter() - started) * 1_000 / steps / stack.size


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# ------------------------------------------------------------------ stacks


def measure_way(options: argparse.Namespace) -> None:
    """In a child: a line of JSON for every number of models, as soon as it is known."""
    for models in options.models:
        started = time.perf_counter()
        stack = stack_of([Run("same-scale", options.p, fold) for fold in range(models)], options, WAYS[options.child])
        stack.run(options.steps)
        wait(stack.device)
        ready = time.perf_counter() - started
        times = [round_ms(stack, options.steps) for _ in range(options.rounds)]
        peak = torch.cuda.max_memory_reserved() / 2**30 if options.device == "cuda" else 0.0
        print(json.dumps({"models": models, "ms": statistics.median(times), "ready": ready, "gib": peak}), flush=True)
        del stack


def ask_child(options: argparse.Namespace, way: str) -> dict[int, dict[str, float]]:
    words = [sys.executable, __file__, "--child", way, "--device", options.device, "--p", str(options.p)]
    words += ["--steps", str(options.steps), "--rounds", str(options.rounds)]
    words += [] if options.text is None else ["--text", str(options.text)]
    if options.smoke:
        words.append("--smoke")
    else:
        words += ["--models", *map(str, options.models)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=options.timeout, check=False)
        out, error = done.stdout, done.stderr if done.returncode else ""
    except subprocess.TimeoutExpired as late:
        out, error = (late.stdout or b"").decode(), f"not ready after {options.timeout:g} s"
    if error:
        print(f"{way}: {error.strip().splitlines()[-1]}", file=sys.stderr)
    found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    for each in found:
        print(f"{way}, {each['models']} at a time: {each['ms']:.2f} ms", file=sys.stderr, flush=True)
    return {each["models"]: each for each in found}


def show_stacks(stacks: dict[str, dict[int, dict[str, float]]], options: argparse.Namespace) -> list[str]:
    head = [f"{models} models" if models > 1 else "1 model" for models in options.models]
    lines = [
        f"Milliseconds a step and model, p = {options.p:g}:",
        "",
        f"| way | {' | '.join(head)} | ready after (s) | memory (GiB) |",
        f"|---|{'---|' * (len(head) + 2)}",
    ]
    for way, found in stacks.items():
        cells = [f"{found[models]['ms']:.2f}" if models in found else "failed" for models in options.models]
        first, last = (found[min(found)], found[max(found)]) if found else (None, None)
        ready, memory = (f"{first['ready']:.0f}" if first else "–"), (f"{last['gib']:.1f}" if last else "–")
        lines.append(f"| {way} | {' | '.join(cells)} | {ready} | {memory} |")
    times = [(each["ms"], way, models) for way, found in stacks.items() for models, each in found.items()]
    if times:
        best, way, models = min(times)
        minutes = [best * LpStudy().iterations * runs / 60_000 for runs in (1, RUNS_OF_AN_ARM, RUNS_OF_ALL_ARMS)]
        lines += [
            "",
            f"Best: {way} with {models}, {best:.2f} ms. At {LpStudy().iterations:,} iterations, evaluations left out: "
            f"{60 * minutes[0]:.0f} s a run, {minutes[1]:.0f} minutes for an arm of {RUNS_OF_AN_ARM} runs, "
            f"{minutes[2]:.0f} for three arms ({RUNS_OF_ALL_ARMS} runs).",
        ]
    return [*lines, ""]


# ------------------------------------------------------------------ processes


def show_processes(options: argparse.Namespace) -> list[str]:
    way = WAYS["fused" if options.gpu_ways else "plain"]
    lines = ["One model in each of several processes:", "", "| processes | ms a step and model |", "|---|---|"]
    context = multiprocessing.get_context("spawn")
    for count in options.processes:
        together, answers = context.Barrier(count), context.Queue()
        crew = [context.Process(target=one_process, args=(options, way, together, answers)) for _ in range(count)]
        for process in crew:
            process.start()
        for process in crew:
            process.join(options.timeout)
            if process.is_alive():
                process.terminate()
                process.join()
        seconds = [answers.get(timeout=5) for process in crew if process.exitcode == 0]
        steps = options.rounds * options.steps
        cell = f"{max(seconds) * 1_000 / steps / count:.2f}" if len(seconds) == count else "failed"
        lines.append(f"| {count} | {cell} |")
    return [*lines, ""]


def one_process(options: argparse.Namespace, way: Execution, together: Any, answers: Any) -> None:
    """Seconds for all steps but the first, while the others run theirs."""
    torch.set_num_threads(1)
    stack = stack_of([Run("same-scale", options.p, 0)], options, way)
    stack.run(options.steps)
    wait(stack.device)
    together.wait(options.timeout)
    answers.put(round_ms(stack, options.rounds * options.steps) * options.rounds * options.steps / 1_000)


# ------------------------------------------------------------------ p


def show_overhead(stacks: dict[str, dict[int, dict[str, float]]], options: argparse.Namespace) -> list[str]:
    """Every p in turn, round by round, so that what disturbs the machine disturbs all alike."""
    good = [(found[1]["ms"], way) for way, found in stacks.items() if 1 in found]
    way = min(good)[1] if good else "plain"
    cases: dict[str, Stack] = {"dot product": stack_of([Run("dot-product", None, 0)], options, WAYS[way])}
    for p in (2.0, 3.0) if options.smoke else LP_EXPONENTS:
        cases[f"p = {p:g}"] = stack_of([Run("same-scale", p, 0)], options, WAYS[way])
    for stack in cases.values():
        stack.run(options.steps)
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(options.rounds):
        for name, stack in cases.items():
            times[name].append(round_ms(stack, options.steps))
    base = statistics.median(times["p = 2"])
    lines = [f"One model, {way}:", "", "| attention | ms a step | over p = 2 |", "|---|---|---|"]
    for name, values in times.items():
        median = statistics.median(values)
        lines.append(f"| {name} | {median:.3f} | {100 * (median / base - 1):+.1f}% |")
    return [*lines, ""]


if __name__ == "__main__":
    main()
