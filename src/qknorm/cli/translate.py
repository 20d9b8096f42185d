"""`qknorm translate`."""

import gzip
import json
import os
import select
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TextIO, cast

import tyro

from qknorm.cli.display import console, parse, progress_bar, warn
from qknorm.decoding.results import Translation
from qknorm.decoding.texts import AnyTranslator, check_nbest
from qknorm.errors import InputError
from qknorm.export import ENGINES, load_engine
from qknorm.export.card import engine_of
from qknorm.files import atomic_path, is_device, takes_what_is_written
from qknorm.text.readers import decode_lines, read_lines

if TYPE_CHECKING:  # these import PyTorch, which other engines do without
    from qknorm.decoding.translate import TextTranslator
    from qknorm.training.checkpoint import Which

AT_ONCE = 2_000
"""Lines read before the first of them is translated; more make fuller batches, fewer answer sooner."""
PAUSE = 0.1
"""Seconds without a byte after which the lines of a pipe that have come are translated, however few."""


@dataclass(frozen=True)
class Arguments:
    """Translates files, standard input, or, at a terminal, what you type.

    Examples:

      qknorm translate runs/gl-en --input news.gl --output news.en

      cat news.gl | qknorm translate runs/gl-en > news.en

      qknorm translate runs/gl-en --input news.gl --nbest 4 --align --json

      qknorm translate gl-en-onnx --engine onnx --input news.gl --output news.en
    """

    run: tyro.conf.Positional[Path]
    """Run folder that `qknorm train` wrote, or, for another engine, folder that `qknorm export` wrote."""
    input: Path | None = None
    """File with one sentence a line; standard input if not given."""
    output: Path | None = None
    """File to write; standard output if not given."""
    beam: int | None = None
    """Width of the beam; that of the run's settings if not given."""
    length_penalty: float | None = None
    """Exponent of the length penalty; that of the run's settings if not given."""
    nbest: int = 1
    """How many alternatives of each sentence to write, as lines of: line number, score, translation; at most --beam,
    which grows to it where it is not given."""
    no_repeat_ngram: int | None = None
    """Forbid a translation to repeat an n-gram of this size."""
    align: bool = False
    """Write word alignments after a tab, as pairs source-target counted from 0; of --nbest only with --json."""
    json: bool = False
    """One JSON object a line, with text, score, alternatives and alignment."""
    checkpoint: str = "best"
    """best, last, a step, or a .safetensors file that `qknorm average` wrote."""
    device: str | None = None
    """cpu or cuda; a GPU where there is one if not given."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What to compute in; bfloat16 is faster where the processor has instructions for it."""
    quantize: Literal["int8"] | None = None
    """Compute linear layers in 8-bit integers, on the CPU: faster than float32, at a small loss."""
    engine: Literal["torch", "onnx", "ctranslate2"] = "torch"
    """What computes: PyTorch, or another runtime on a folder exported for it, which does not need PyTorch."""


def run(words: Sequence[str]) -> None:
    """Parses, loads, translates."""
    arguments: Arguments = parse(Arguments, words, "translate")
    _check(arguments)
    translator = _open(arguments)
    if arguments.input is None and sys.stdin.isatty():
        _converse(translator, arguments)
        return
    piped = None if arguments.input else _Arriving(sys.stdin.buffer)
    lines = decode_lines(piped, "standard input") if piped else read_lines(cast(Path, arguments.input))
    number = 0
    with _destination(arguments.output) as out:
        while chunk := _take(lines, piped):
            for translation in _explain(translator, chunk, arguments):
                number += 1
                _note_parts(f"line {number}", translation)
                for line in _lines_of(number, translation, arguments):
                    out.write(line + "\n")
            out.flush()


class _Arriving:
    """The lines of a pipe as they come."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._waiting: deque[bytes] = deque()

    def __iter__(self) -> Iterator[bytes]:
        begun: list[bytes] = []  # pieces of a line whose end has not come: joined once, however long it grows
        while data := self._file.read1(1 << 20):  # type: ignore[attr-defined]
            head, end, rest = data.rpartition(b"\n")
            if end:
                self._waiting.extend(line + end for line in b"".join((*begun, head)).split(end))
                begun = []
            begun.append(rest)
            while self._waiting:
                yield self._waiting.popleft()
        if rest := b"".join(begun):
            yield rest

    def pauses(self) -> bool:
        """Whether no line is here and none is on its way; always no where a system cannot tell."""
        try:
            return not self._waiting and not select.select([self._file], [], [], PAUSE)[0]
        except (OSError, ValueError):  # on Windows only sockets can be asked
            return False


def _take(lines: Iterator[str], piped: _Arriving | None) -> list[str]:
    """The next lines to translate together: what there is, but not too many."""
    taken: list[str] = []
    for line in lines:
        taken.append(line)
        if len(taken) == AT_ONCE or (piped is not None and piped.pauses()):
            break
    return taken


def load(run: Path, **options: Any) -> "TextTranslator":
    """A trained translator by PyTorch, which is imported only here."""
    from qknorm.training.run_folder import load_translator

    return load_translator(run, **options)


def _open(arguments: Arguments) -> AnyTranslator[Any]:
    """The translator of the engine asked for."""
    if arguments.engine != "torch":
        return load_engine(arguments.engine, arguments.run)
    exported = engine_of(arguments.run)
    if exported in ENGINES:
        raise InputError(f"{arguments.run} is a translator exported for {exported}; add --engine {exported}")
    refuse_exported(arguments.run)
    return load(
        arguments.run,
        checkpoint=which_checkpoint(arguments.checkpoint),
        device=arguments.device,
        precision=arguments.precision,
        quantize=arguments.quantize,
    )


def refuse_exported(folder: Path) -> None:
    """Says so where a folder that should be a run is what was exported from one."""
    exported = engine_of(folder)
    if exported is not None:
        raise InputError(f"{folder} is a translator exported for {exported}; name the run it was made from")


def _check(arguments: Arguments) -> None:
    least = {"beam": 1, "length_penalty": 0, "nbest": 1, "no_repeat_ngram": 0}
    for name, bound in least.items():
        given = getattr(arguments, name)
        if given is not None and not given >= bound:
            raise InputError(f"--{name.replace('_', '-')} is at least {bound}, not {given}")
    if arguments.engine != "torch":
        defaults = {"checkpoint": "best", "device": None, "precision": "float32", "quantize": None, "align": False}
        for name, default in defaults.items():
            if getattr(arguments, name) != default:
                raise InputError(f"--{name} is for --engine torch, on the run itself; leave it or --engine out")
    given, wanted = arguments.input, arguments.output
    if given is not None and wanted is not None and given.exists() and wanted.exists() and given.samefile(wanted):
        raise InputError(f"--output {wanted} is the file that is read, and would be lost; name another")
    check_nbest(arguments.nbest, arguments.beam)
    if wanted is not None:
        _check_writable(wanted)
    if arguments.align and arguments.nbest > 1 and not arguments.json:
        raise InputError("--align with --nbest has no place in plain lines; add --json, or leave one of them out")


def _check_writable(path: Path) -> None:
    """Refuses a name that cannot become a file, before there is anything to lose."""
    if path.is_dir():
        raise InputError(f"--output {path} is a folder; name a file, such as {path / 'translations.txt'}")
    if is_device(path):
        if not takes_what_is_written(path):
            raise InputError(f"--output {path} is not open for writing; name a file, or leave it out")
        return
    parents = Path(os.path.realpath(path)).parents
    folder = next(each for each in parents if each.exists())  # what is missing below it is made
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"--output {path} cannot be written, since {folder} takes no files from you; name another")


def which_checkpoint(name: str) -> "Which | Path":
    """best, last, a step or a file, as `load` takes it."""
    named: dict[str, Which] = {"best": "best", "last": "last"}
    return named.get(name) or (int(name) if name.isdigit() else Path(name))


def _explain(translator: AnyTranslator[Any], chunk: list[str], arguments: Arguments) -> list[Translation]:
    with progress_bar() as progress:
        return translator.explain(
            chunk,
            nbest=arguments.nbest,
            align=arguments.align,
            beam=arguments.beam,
            length_penalty=arguments.length_penalty,
            no_repeat_ngram=arguments.no_repeat_ngram,
            progress=progress,
        )


def _note_parts(what: str, translation: Translation) -> None:
    if translation.parts > 1:
        warn(f"{what} is longer than any in training; translated in {translation.parts} parts")


def _lines_of(number: int, translation: Translation, arguments: Arguments) -> Iterable[str]:
    if arguments.json:
        return [json.dumps(asdict(translation), ensure_ascii=False)]
    if arguments.nbest > 1:
        return [f"{number}\t{each.score:.4f}\t{each.text}" for each in translation.alternatives]
    links = " ".join(f"{s}-{t}" for s, t in translation.alignment or [])
    return [f"{translation.text}\t{links}" if arguments.align else translation.text]


def _converse(translator: AnyTranslator[Any], arguments: Arguments) -> None:
    console.print(f"Type {translator.source}, read {translator.target}; an empty line or Ctrl-D ends.", markup=False)
    while True:
        try:
            text = input(f"{translator.source}> ")
        except EOFError:
            return
        if not text.strip():
            return
        translation = _explain(translator, [text], arguments)[0]
        _note_parts("this", translation)
        for line in _lines_of(1, translation, arguments):
            print(f"{translator.target}> {line}")


@contextmanager
def _destination(path: Path | None) -> Iterator[TextIO]:
    if path is None:
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
        yield sys.stdout
        return
    packed = path.name.lower().endswith(".gz")  # as it would be read
    with (
        atomic_path(path) as partial,
        (gzip.open if packed else open)(partial, "wt", encoding="utf-8", newline="\n") as file,
    ):
        yield cast(TextIO, file)
