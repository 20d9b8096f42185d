"""How fast beam search decodes: 100 random sentences of 25 tokens, beam 4, 50 forced steps, the paper's size of model.

    python benchmarks/decoding.py                                        # the gl→en model on this machine
    python benchmarks/decoding.py --run runs/gl-en --split test          # a trained run on a split of its data
    python benchmarks/decoding.py --smoke                                # tiny, to see that everything still runs

Random weights never end a sentence on their own, so each one is held to the same number of steps.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from qknorm.decoding.recorded import RecordedDecoder
from qknorm.decoding.search import Stepper, beam_search
from qknorm.decoding.translate import ModelStepper
from qknorm.models.translator import Translator, start_of_scale
from qknorm.studies.recipes import preset
from qknorm.training.fit import quick_kernels


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


def forced(make: Callable[[Tensor, int], Stepper], source: Tensor, beam: int, steps: int) -> None:
    limits = torch.full((len(source),), steps, device=source.device)
    found = beam_search(make(source, beam), len(source), limits, beam=beam, min_length=steps)
    assert all(len(best.tokens) == steps for best, *_ in found)


def measure(job: Callable[[], object], rounds: int) -> float:
    """Median seconds of a job, after one to warm up."""
    times = []
    for _ in range(rounds + 1):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        job()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def measure_run(args: argparse.Namespace) -> None:
    """Sentences a second of a trained run on a split of its data, all of `translate` included."""
    from qknorm.text.prepared import PreparedData
    from qknorm.training.run_folder import load, read_run

    data = PreparedData.load(Path(read_run(args.run)[1].data))
    texts = data.split(args.split).text(data.source)
    translator = load(args.run, device=args.device)
    with quick_kernels(torch.device(args.device)):
        seconds = measure(lambda: translator.translate(texts), args.rounds)
    print(f"{len(texts):,} sentences in {seconds:.2f} s: {len(texts) / seconds:.1f} sentences/s on {args.device}")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="paper-qknorm-gl-en")
    parser.add_argument("--sentences", type=int, default=100)
    parser.add_argument("--length", type=int, default=25)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=3_164)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--run", type=Path)
    parser.add_argument("--split", default="test")
    parser.add_argument("--uncached", action="store_true", help="measure decoding without a cache too, which is slow")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", type=Path, help="write the table here too, as Markdown")
    args = parser.parse_args()
    if args.run:
        measure_run(args)
        return
    settings = preset(args.preset).model
    if args.smoke:
        small = {"width": 32, "feed_forward": 64, "encoder_layers": 1, "decoder_layers": 1, "heads": 2}
        settings = settings.model_copy(update=small)
        args.sentences, args.steps, args.vocabulary, args.rounds, args.uncached = 4, 5, 50, 1, True
    torch.manual_seed(0)
    device = torch.device(args.device)
    model = Translator(args.vocabulary, settings, scale_init=start_of_scale(settings, 79)).to(device).eval()
    source = torch.randint(4, args.vocabulary, (args.sentences, args.length), device=device)
    ways: dict[str, Callable[[Tensor, int], Stepper]] = {
        "cached keys": lambda source, beam: ModelStepper(model, source, beam),
        "cached keys, recorded steps": RecordedDecoder(model, getattr(torch, args.dtype)),
        "no cache": lambda source, beam: Uncached(model, source, beam),
    }
    if device.type != "cuda":
        del ways["cached keys, recorded steps"]
    if not args.uncached:
        del ways["no cache"]
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    lines = [
        f"{where}, {args.dtype}, {settings.encoder_layers}+{settings.decoder_layers} layers of {settings.width}, "
        f"{args.sentences} sentences of {args.length} tokens, beam {args.beam}, {args.steps} forced steps, "
        f"PyTorch {torch.__version__}, Python {platform.python_version()}",
        "",
        "| ours | seconds | sentences/s |",
        "|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    half = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    with quick_kernels(device), half:
        for name, make in ways.items():
            seconds = measure(lambda make=make: forced(make, source, args.beam, args.steps), args.rounds)  # type: ignore[misc]
            lines.append(f"| {name} | {seconds:.2f} | {args.sentences / seconds:.2f} |")
            print(lines[-1], flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
