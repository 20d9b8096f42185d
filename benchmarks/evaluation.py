"""How long an evaluation in training takes, part by part: dev loss, encoding, search, text, BLEU; cold and warm.

    python benchmarks/evaluation.py --run runs/gl-en --split dev         # a trained run on a split of its data
    python benchmarks/evaluation.py --data data/gl-en                    # random weights: sentences run to their limits
    python benchmarks/evaluation.py --run runs/gl-en --batch-tokens 131072 --dtype bfloat16 --profile
    python benchmarks/evaluation.py --smoke                              # tiny, to see that everything still runs

The first evaluation records its steps (on a GPU), the others replay them. Between two of them all weights change a
little, as they do in training. `--plain` measures the search without recordings beside it, `--sdpa` the recorded one
with PyTorch's attention in its steps.
"""

import argparse
import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from qknorm.config import Decoding, Model, Prepare, Subwords
from qknorm.decoding.graphs import Graphs
from qknorm.decoding.recorded_search import RecordedSearch
from qknorm.decoding.translate import translate_ids
from qknorm.models.translator import Translator, start_of_scale
from qknorm.studies.recipes import preset
from qknorm.text.prepare import prepare
from qknorm.text.prepared import PreparedData
from qknorm.training.evaluation import Evaluator
from qknorm.training.fit import quick_kernels

PARTS = ("dev loss", "search", "of it encoding", "text", "BLEU", "whole evaluation")


class Clock:
    """Seconds by name, of each round."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []

    def next_round(self) -> None:
        self.rounds.append(dict.fromkeys(PARTS, 0.0))

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        wait()
        began = time.perf_counter()
        yield
        wait()
        self.rounds[-1][name] += time.perf_counter() - began


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def encoding_timed(clock: Clock) -> Iterator[None]:
    """Within it, reading the source is timed by itself."""
    run = Graphs.run

    def timed(graphs: Graphs, name: Hashable, job: Callable[[], None]) -> None:
        if not (isinstance(name, tuple) and name[0] == "open"):
            run(graphs, name, job)
            return
        with clock.time("of it encoding"):
            run(graphs, name, job)

    Graphs.run = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        Graphs.run = run  # type: ignore[method-assign]


def shake(model: Translator) -> None:
    """Another step of training, for all that a recording can tell."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0 + 1e-4)


def measure(evaluator: Evaluator, model: Translator, rounds: int) -> Clock:
    """Part by part, then as a whole, in every round; the first one is cold."""
    clock = Clock()
    for _ in range(rounds + 1):
        clock.next_round()
        with encoding_timed(clock), clock.time("search"):
            found = evaluator.search(model)
        with clock.time("text"):
            texts = evaluator.texts(found)
        with clock.time("BLEU"):
            bleu = evaluator.bleu(texts)
        with clock.time("dev loss"):
            loss = evaluator.loss(model)
        shake(model)
        with clock.time("whole evaluation"):
            whole = evaluator(model)
        shake(model)
        print(f"loss {loss:.4f}, BLEU {bleu:.2f}, then {whole.loss:.4f}, {whole.bleu:.2f}", flush=True)
    return clock


def open_run(args: argparse.Namespace) -> tuple[PreparedData, Translator, Decoding]:
    """A trained run's data, model and settings, or data with random weights."""
    from qknorm.training.run_folder import load_translator, read_run

    if args.run:
        settings, about = read_run(args.run)
        data = PreparedData.load(args.data or Path(about.data))
        return data, load_translator(args.run, device=args.device).model, settings.decoding
    data = PreparedData.load(args.data)
    chosen = preset(args.preset)
    shape: Model = chosen.model
    if args.smoke:
        small = {"width": 32, "feed_forward": 64, "encoder_layers": 1, "decoder_layers": 1, "heads": 2}
        shape = shape.model_copy(update=small)
    model = Translator(data.tokenizer.size, shape, scale_init=start_of_scale(shape, 79)).to(args.device).eval()
    return data, model, chosen.decoding


def tiny_data(folder: Path) -> Path:
    """Enough to see that everything runs."""
    for language in ("gl", "en"):
        lines = [f"{language} {n % 7} {n % 5} {n} .\n" for n in range(60)]
        (folder / f"a.{language}").write_text("".join(lines))
    files = (folder / "a.gl", folder / "a.en")
    subwords = Subwords(merges=20, pretokenized=True)
    prepare(
        Prepare(source="gl", target="en", train=files, dev_pairs=8, test_pairs=8, subwords=subwords), folder / "out"
    )
    return folder / "out"


def profile(job: Callable[[], object]) -> None:
    """Prints the kernels that take the most time, and the operations of the host."""
    with torch.profiler.profile() as seen:
        job()
        wait()
    for key in ("self_cuda_time_total", "self_cpu_time_total"):
        print(seen.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=70), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--data", type=Path, help="a prepared folder; the one of the run if not given")
    parser.add_argument("--preset", default="paper-qknorm-gl-en", help="of random weights")
    parser.add_argument("--split", default="dev")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of the search")
    parser.add_argument("--batch-tokens", type=int, help="source tokens times beam at a time")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plain", action="store_true", help="measure the plain search too")
    parser.add_argument("--sdpa", action="store_true", help="measure it with PyTorch's attention in its steps too")
    parser.add_argument("--no-kernel", action="store_true", help="make the search's part of a step by plain operations")
    parser.add_argument("--profile", action="store_true", help="show where the time of a warm search goes")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", type=Path, help="write the table here too, as Markdown")
    return parser.parse_args()


def report(args: argparse.Namespace, clock: Clock, evaluator: Evaluator, count: int) -> list[str]:
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    recordings = 0 if evaluator.recorded is None else evaluator.recorded.recordings
    warm = clock.rounds[1:]
    lines = [
        f"{where}, {count} sentences of {args.split}, search in {args.dtype}, {recordings} recordings, "
        f"PyTorch {torch.__version__}",
        "",
        "| part | cold, ms | warm, ms |",
        "|---|---|---|",
    ]
    for part in PARTS:
        middle = statistics.median(each[part] for each in warm)
        lines.append(f"| {part} | {1000 * clock.rounds[0][part]:.1f} | {1000 * middle:.1f} |")
    return lines


def main() -> None:
    args = parse()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, quick_kernels(torch.device(args.device)):
        if args.smoke:
            args.data, args.run, args.rounds = tiny_data(Path(folder)), None, 2
        data, model, decoding = open_run(args)
        if args.batch_tokens:
            decoding = decoding.model_copy(update={"batch_tokens": args.batch_tokens})
        precision = getattr(torch, args.dtype)
        evaluator = Evaluator(data, args.split, decoding, precision=precision)
        if args.no_kernel and args.device == "cuda":
            evaluator.recorded = RecordedSearch(model, precision, fused=False)
        initial = copy.deepcopy(model.state_dict())
        clock = measure(evaluator, model, args.rounds)
        lines = report(args, clock, evaluator, len(data.split(args.split)))
        if args.plain:
            model.load_state_dict(initial)
            lines.append(plain_row(args, data, model, decoding))
        if args.sdpa:
            lines.append(sdpa_row(evaluator, model, precision))
        if args.profile:
            profile(lambda: evaluator.search(model))
    print("\n".join(lines), flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("\n".join(lines) + "\n")


def sdpa_row(evaluator: Evaluator, model: Translator, precision: torch.dtype) -> str:
    """The search in recordings of its own, in which `auto` leaves the kernel of decoding steps alone."""
    module = sys.modules["qknorm.attention.attend"]  # the name `attend` in the package is the function
    chooses, before, seconds = module._takes_few, evaluator.recorded, []
    module._takes_few = lambda *_: False
    evaluator.recorded = None if before is None else RecordedSearch(model, precision)
    for _ in range(4):
        wait()
        began = time.perf_counter()
        evaluator.search(model)
        wait()
        seconds.append(1000 * (time.perf_counter() - began))
    module._takes_few, evaluator.recorded = chooses, before
    return f"| search, SDPA in its steps | {seconds[0]:.1f} | {statistics.median(seconds[1:]):.1f} |"


def plain_row(args: argparse.Namespace, data: PreparedData, model: Translator, decoding: Decoding) -> str:
    """The search step by step, as it is without recordings."""
    rows = data.split(args.split)
    sources, seconds = [rows.source[i].tolist() for i in range(len(rows))], []
    for _ in range(2):
        wait()
        began = time.perf_counter()
        translate_ids(model, sources, decoding, precision=getattr(torch, args.dtype))
        wait()
        seconds.append(1000 * (time.perf_counter() - began))
    return f"| search, plain | {seconds[0]:.1f} | {seconds[1]:.1f} |"


if __name__ == "__main__":
    main()
