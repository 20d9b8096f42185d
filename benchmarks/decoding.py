"""How fast beam search decodes: 100 random sentences of 25 tokens, beam 4, 50 forced steps, the paper's size of model.

    python benchmarks/decoding.py                                        # the gl→en model on this machine
    python benchmarks/decoding.py --threads 1 --at-once 25               # on one core, in smaller batches
    python benchmarks/decoding.py --run runs/gl-en --split test          # a trained run on a split of its data
    python benchmarks/decoding.py --smoke                                # tiny, to see that everything still runs

The search of the paper's released code, as we restate it, does the same work beside ours; on the CPU CTranslate2 too,
with a model of the same size in its own layers (dot-product attention; it has no QKNorm), where it is installed. All
weights are random, and no sentence may end before its limit, so that each one takes the same number of steps.
"""

import argparse
import functools
import math
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from qknorm.config import Model
from qknorm.decoding.recorded_search import RecordedSearch
from qknorm.decoding.search import Stepper, beam_search
from qknorm.decoding.translate import ModelStepper
from qknorm.models.quantized import quantize
from qknorm.models.translator import Translator, start_of_scale
from qknorm.specials import END
from qknorm.studies.recipes import preset
from qknorm.training.fit import quick_kernels
from training_peers import ReleasedModel


class Uncached:
    """Decoding as it is first written down: every step reads the whole prefix again. The price of having no cache."""

    def __init__(self, model: Translator, source: Tensor, beam: int) -> None:
        self._model, self._memory, self._beam = model, model.encode(source), beam
        self._prefix: Tensor | None = None

    def step(self, tokens_bk: Tensor) -> Tensor:
        new = tokens_bk.reshape(-1, 1)
        self._prefix = new if self._prefix is None else torch.cat([self._prefix, new], dim=1)
        parts = []
        for place in range(self._beam):  # a memory row serves one hypothesis at a time here
            states = self._model.decode(self._prefix[place :: self._beam], self._memory)
            parts.append(self._model.score(states[:, -1:]).float().log_softmax(-1))
        return torch.cat(parts, dim=1)

    def reorder(self, origin_bk: Tensor) -> None:
        assert self._prefix is not None
        first = torch.arange(len(origin_bk), device=origin_bk.device).unsqueeze(1) * self._beam
        self._prefix = self._prefix[(first + origin_bk).flatten()]

    def keep(self, sentences: Tensor) -> None:
        raise AssertionError("no sentence ends before the others when all are held to one length")


def forced(make: Callable[[Tensor, int], Stepper], source: Tensor, beam: int, steps: int, at_once: int) -> None:
    """Decodes all sentences with a model that ends none, each in so many steps."""
    for part in source.split(at_once):
        limits = torch.full((len(part),), steps, device=part.device)
        found = beam_search(make(part, beam), len(part), limits, beam=beam)
        assert all(len(best.tokens) == steps for best, *_ in found)


def forced_whole(search: RecordedSearch, source: Tensor, args: argparse.Namespace) -> None:
    """The same by whole recorded steps."""
    for part in source.split(args.at_once):
        limits = torch.full((len(part),), args.steps)
        found = search(part, limits, beam=args.beam)
        assert all(len(best.tokens) == args.steps for best, *_ in found)


def measure(jobs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of every job, after one to warm up; in turns, so that a busy machine is so to all of them."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds + 1):
        for name, job in jobs.items():
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            began = time.perf_counter()
            job()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}


def profile(jobs: dict[str, Callable[[], object]]) -> None:
    """Prints the operations that take the most time in each job, after one to warm up."""
    for name, job in jobs.items():
        job()
        with torch.profiler.profile() as seen:
            job()
        print(f"{name}\n{seen.key_averages().table(sort_by='self_cpu_time_total', row_limit=14)}", flush=True)


def measure_run(args: argparse.Namespace) -> None:
    """Sentences a second of a trained run on a split of its data, all of `translate` included."""
    from qknorm.text.prepared import PreparedData
    from qknorm.training.run_folder import load_translator, read_run

    data = PreparedData.load(Path(read_run(args.run)[1].data))
    texts = data.split(args.split).text(data.source)
    translator = load_translator(args.run, device=args.device, precision=args.dtype, quantize=args.quantize)
    with quick_kernels(torch.device(args.device)):
        seconds = measure({"run": lambda: translator.translate(texts)}, args.rounds)["run"]
    print(f"{len(texts):,} sentences in {seconds:.2f} s: {len(texts) / seconds:.1f} sentences/s on {args.device}")


def our_jobs(args: argparse.Namespace, settings: Model) -> dict[str, Callable[[], object]]:
    """Our ways to decode, by name."""
    device = torch.device(args.device)
    model = Translator(args.vocabulary, settings, scale_init=start_of_scale(settings, 79)).to(device).eval()
    model.output_bias[END] = -math.inf
    source = torch.randint(4, args.vocabulary, (args.sentences, args.length), device=device)

    def job(make: Callable[[Tensor, int], Stepper], dtype: str) -> Callable[[], None]:
        def run() -> None:
            with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
                forced(make, source, args.beam, args.steps, args.at_once)

        return run

    stepper = functools.partial(ModelStepper, model)
    jobs: dict[str, Callable[[], object]] = {f"ours, {dtype}": job(stepper, dtype) for dtype in ("float32", "bfloat16")}
    if device.type == "cuda":
        for dtype in ("float32", "bfloat16"):
            whole = RecordedSearch(model, getattr(torch, dtype))
            jobs[f"ours, {dtype}, recorded search"] = functools.partial(forced_whole, whole, source, args)
    else:
        jobs["ours, int8"] = job(functools.partial(ModelStepper, quantize(model)), "float32")
    if args.uncached:
        jobs["no cache"] = job(functools.partial(Uncached, model), args.dtype)
    return jobs


def peer_jobs(args: argparse.Namespace, settings: Model) -> dict[str, Callable[[], object]]:
    """The released code's search on the same work, and on the CPU CTranslate2's, where it is installed."""
    from decoding_peers import CTranslate2Peer
    from decoding_released import ReleasedStepper

    ids = torch.randint(4, args.vocabulary, (args.sentences, args.length), device=args.device)
    model = ReleasedModel(args.vocabulary, settings).to(args.device).eval()
    model.bias[END] = -math.inf
    released = functools.partial(ReleasedStepper, model)
    jobs: dict[str, Callable[[], object]] = {
        "released code, restated (float32)": lambda: forced(released, ids, args.beam, args.steps, args.at_once)
    }
    if args.device != "cpu":
        return jobs
    longest = max(args.length, args.steps) + 1
    source = ids.tolist()
    for precision in ("float32", "int8"):
        try:
            peer = CTranslate2Peer(settings, args.vocabulary, precision, longest)
        except ImportError:
            print("CTranslate2 is left out: it is not installed (pip install ctranslate2)", flush=True)
            return jobs
        except ValueError as error:
            print(f"CTranslate2 in {precision} is left out: {error}", flush=True)
            continue
        jobs[f"CTranslate2, {precision}"] = functools.partial(peer.decode, source, args.beam, args.steps, args.at_once)
    return jobs


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="paper-qknorm-gl-en")
    parser.add_argument("--sentences", type=int, default=100)
    parser.add_argument("--at-once", type=int, default=100, help="sentences in a batch, ours and CTranslate2's")
    parser.add_argument("--length", type=int, default=25)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=3_164)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of PyTorch and of CTranslate2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of the rows without one")
    parser.add_argument("--run", type=Path)
    parser.add_argument("--split", default="test")
    parser.add_argument("--quantize", choices=["int8"], help="of a trained run")
    parser.add_argument("--uncached", action="store_true", help="measure decoding without a cache too, which is slow")
    parser.add_argument("--only", default="", help="measure only the rows whose names begin so")
    parser.add_argument("--profile", action="store_true", help="show where the time of each row goes instead")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", type=Path, help="write the table here too, as Markdown")
    return parser.parse_args()


@torch.no_grad()
def main() -> None:
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.run:
        measure_run(args)
        return
    settings = preset(args.preset).model
    if args.smoke:
        small = {"width": 32, "feed_forward": 64, "encoder_layers": 1, "decoder_layers": 1, "heads": 2}
        settings = settings.model_copy(update=small)
        args.sentences, args.steps, args.vocabulary, args.rounds, args.uncached = 4, 5, 50, 1, True
    torch.manual_seed(0)
    jobs = {**our_jobs(args, settings), **peer_jobs(args, settings)}
    jobs = {name: job for name, job in jobs.items() if name.startswith(args.only)}
    with quick_kernels(torch.device(args.device)):
        if args.profile:
            profile(jobs)
            return
        seconds = measure(jobs, args.rounds)
    first = next(iter(seconds))
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    lines = [
        f"{where}, {settings.encoder_layers}+{settings.decoder_layers} layers of {settings.width}, "
        f"{args.sentences} sentences of {args.length} tokens, {args.at_once} at once, beam {args.beam}, {args.steps} "
        f"forced steps, rows without a precision in {args.dtype}, PyTorch {torch.__version__}, "
        f"Python {platform.python_version()}",
        "",
        f"| what | seconds | sentences/s | speed, {first} = 1 |",
        "|---|---|---|---|",
        *(f"| {name} | {t:.2f} | {args.sentences / t:.2f} | {seconds[first] / t:.2f} |" for name, t in seconds.items()),
    ]
    print("\n".join(lines), flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
