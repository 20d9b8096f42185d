"""How fast each engine translates on the CPU: PyTorch, ONNX Runtime and CTranslate2, in float32 and in int8, one model.

    python benchmarks/engines.py --run runs/gl-en --split test     # a trained run, real sentences; BLEU beside speed
    python benchmarks/engines.py                                   # random weights: 100 sentences, 50 steps each
    python benchmarks/engines.py --smoke                           # tiny, to see that everything still runs

CTranslate2 takes a run trained with --model.attention.cross-query-norm width alone; others are measured without it.
Random weights never end a sentence, so each one is held to the same number of steps.
"""

import argparse
import functools
import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from decoding import measure
from qknorm.config import Decoding, Model
from qknorm.decoding.translate import TextTranslator, translate_ids
from qknorm.errors import InputError
from qknorm.export import ctranslate2, load_engine, onnx
from qknorm.export.texts import EngineTranslator
from qknorm.models.quantized import quantize
from qknorm.models.translator import Translator, start_of_scale
from qknorm.scoring import score
from qknorm.specials import END
from qknorm.studies.recipes import preset
from qknorm.text.prepared import PreparedData
from qknorm.text.subwords import SPECIALS, Tokenizer
from qknorm.training.run_folder import load_translator, read_run

ENGINES = {"onnx": ("ONNX Runtime", onnx.write_folder), "ctranslate2": ("CTranslate2", ctranslate2.write_folder)}
FIRST_TYPE = 0x4E00

Job = Callable[[], Sequence[Any]]


@dataclass(frozen=True)
class Work:
    """One translator, and what it is to translate: text with references, or ids."""

    translator: TextTranslator
    texts: list[str]
    references: list[str]
    ids: list[list[int]]

    def by_torch(self, int8: bool) -> Job:
        translator = self.translator
        model = quantize(translator.model) if int8 else translator.model
        if self.ids:
            return functools.partial(translate_ids, model, self.ids, translator.settings)
        words = (translator.tokenizer, translator.source, translator.target, translator.settings, translator.longest)
        return functools.partial(TextTranslator(model, *words).translate, self.texts)

    def by_engine(self, engine: EngineTranslator) -> Job:
        if self.ids:
            return functools.partial(engine.search, self.ids, engine.card, nbest=1, progress=None)
        return functools.partial(engine.translate, self.texts)


def trained(run: Path, split: str, sentences: int | None) -> Work:
    """A run and sentences of its data."""
    data = PreparedData.load(Path(read_run(run)[1].data))
    pairs = data.split(split)
    texts, references = (pairs.text(language)[:sentences] for language in (data.source, data.target))
    return Work(load_translator(run, device="cpu"), texts, references, [])


def drawn(settings: Model, types: int, sentences: int, length: int, steps: int) -> Work:
    """Random weights and random ids of one length, with a tokenizer whose types are single letters."""
    attention = settings.attention.model_copy(update={"cross_query_norm": "width"})
    settings = settings.model_copy(update={"attention": attention})
    torch.manual_seed(0)
    model = Translator(types, settings, scale_init=start_of_scale(settings, 79)).eval()
    with torch.no_grad():
        model.output_bias[END] = -1e4
    letters = (chr(FIRST_TYPE + i) for i in range(types - len(SPECIALS)))
    vocabulary = {token: number for number, token in enumerate((*SPECIALS, *letters))}
    tokenizer = Tokenizer(vocabulary, [], pretokenized=False)
    decoding = Decoding(beam=4, extra_length=steps - length)
    ids = torch.randint(len(SPECIALS), types, (sentences, length)).tolist()
    return Work(TextTranslator(model, tokenizer, "aa", "bb", decoding, length), [], [], ids)


def all_jobs(work: Work, threads: int, folder: Path) -> dict[str, Job]:
    """Every engine in both precisions, by name; one that cannot have this model is left out, with a word why."""
    jobs = {f"PyTorch, {'int8' if int8 else 'float32'}": work.by_torch(int8) for int8 in (False, True)}
    for engine, (name, write) in ENGINES.items():
        for precision in ("float32", "int8"):
            place = folder / f"{engine}-{precision}"
            place.mkdir()
            try:
                write(work.translator, place, quantize=None if precision == "float32" else precision)
                jobs[f"{name}, {precision}"] = work.by_engine(load_engine(engine, place, threads=threads))
            except InputError as error:
                print(f"{name}, {precision} is left out: {error}", flush=True)
    return jobs


def table(work: Work, jobs: dict[str, Job], seconds: dict[str, float]) -> list[str]:
    """Speed of every engine and, of a trained run, its BLEU and how many sentences are as by PyTorch in float32."""
    first = next(iter(jobs))
    count = len(work.texts or work.ids)
    lines = [f"| engine | seconds | sentences/s | speed, {first} = 1 |", "|---|---|---|---|"]
    if work.texts:
        lines = [f"{lines[0]} BLEU | the same sentences |", f"{lines[1]}---|---|"]
        expected = jobs[first]()
    for name, taken in seconds.items():
        line = f"| {name} | {taken:.2f} | {count / taken:.2f} | {seconds[first] / taken:.2f} |"
        if work.texts:
            found = jobs[name]()
            same = sum(ours == theirs for ours, theirs in zip(expected, found, strict=True))
            line += f" {score(list(found), [work.references])[0].value:.2f} | {same:,} of {count:,} |"
        lines.append(line)
    return lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a trained run; random weights if not given")
    parser.add_argument("--split", default="test")
    parser.add_argument("--sentences", type=int, help="only the first so many; 100 of random ones")
    parser.add_argument("--preset", default="paper-qknorm-gl-en", help="the size of a random model")
    parser.add_argument("--length", type=int, default=25, help="of random sentences")
    parser.add_argument("--steps", type=int, default=50, help="for random sentences")
    parser.add_argument("--vocabulary", type=int, default=3_164)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=["cpu"], default="cpu")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", type=Path, help="write the table here too, as Markdown")
    return parser.parse_args()


@torch.no_grad()
def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    settings = preset(args.preset).model
    if args.smoke:
        small = {"width": 32, "feed_forward": 64, "encoder_layers": 1, "decoder_layers": 1, "heads": 2}
        settings = settings.model_copy(update=small)
        args.sentences, args.length, args.steps, args.vocabulary, args.rounds = 4, 5, 8, 50, 1
    if args.run:
        work = trained(args.run, args.split, args.sentences)
    else:
        work = drawn(settings, args.vocabulary, args.sentences or 100, args.length, args.steps)
    with tempfile.TemporaryDirectory() as folder:
        jobs = all_jobs(work, args.threads, Path(folder))
        seconds = measure(dict(jobs), args.rounds)
        model = work.translator.model.settings
        what = (
            f"{args.split} set of {args.run}" if args.run else f"random sentences of {args.length}, {args.steps} steps"
        )
        lines = [
            f"{args.threads} CPU threads, {model.encoder_layers}+{model.decoder_layers} layers of {model.width}, "
            f"{len(work.texts or work.ids):,} sentences: {what}; beam {work.translator.settings.beam}, PyTorch "
            f"{torch.__version__}, Python {platform.python_version()}",
            "",
            *table(work, jobs, seconds),
        ]
    print("\n".join(lines), flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
