"""Finds the verb, runs it, and turns what goes wrong into one sentence and an exit status."""

import difflib
import importlib
import io
import os
import sys
from collections.abc import Sequence

from qknorm import files
from qknorm.errors import InputError
from qknorm.version import __version__

VERBS = {
    "demo": "train and use a small translator on the embedded corpus, in about a minute",
    "prepare": "clean parallel text, learn subwords, write token ids",
    "train": "train a translator or a language model, or go on training one",
    "generate": "write text with a language model",
    "translate": "translate files, standard input, or what you type",
    "serve": "a page and a JSON API that translate, for people and programs",
    "score": "BLEU, chrF and TER with signatures; paired tests between systems",
    "export": "write a translator for other runtimes: ONNX, Hugging Face, CTranslate2",
    "inspect": "what attention does in a run: measures, a page to look at, pictures",
    "study": "the papers' experiments: runs, tests, tables and pictures",
    "average": "the mean of several checkpoints",
    "corpora": "list and download data sets by name",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one verb; exits with 0, with 2 for bad input, with 1 for other failures, with 130 when interrupted."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal or log without our arrows; standard error never refuses
        sys.stdout.reconfigure(errors="replace")
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _answer(words)
        print(end="", flush=True)  # a disk that is full shows here, not when Python ends
    except InputError as error:
        _fail(str(error), 2)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except BrokenPipeError:
        _discard_output()  # whoever read it has left
        raise SystemExit(1) from None
    except OSError as error:
        _fail(_explain(error), 1)
    except Exception as error:
        # a type of PyTorch's, which not every verb imports; its libraries also say it in other errors
        if type(error).__name__ != "OutOfMemoryError" and "out of memory" not in str(error).lower():
            raise
        smaller = (
            "--training.batch-tokens, --training.batch or --decoding.batch-tokens" if words[0] == "train" else "--beam"
        )
        _fail(f"the GPU has no memory left; lower {smaller}, end what else runs on it, or use --device cpu", 1)


def _answer(words: Sequence[str]) -> None:
    if not words or words[0] in ("-h", "--help"):
        print(_overview(), flush=True)
        raise SystemExit(0 if words else 2)
    if words[0] == "--version":
        print(f"qknorm {__version__}", flush=True)
        raise SystemExit(0)
    verb, rest = words[0], words[1:]
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1)
        known = f"did you mean {near[0]}?" if near else f"known: {', '.join(VERBS)}"
        raise InputError(f"there is no verb {verb}; {known}")
    importlib.import_module(f"qknorm.cli.{verb}").run(rest)


def _overview() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {verb:{width}}  {what}" for verb, what in VERBS.items()]
    return "\n".join(["usage: qknorm VERB …", "", *lines, "", "qknorm VERB --help says more, with an example."])


def _explain(error: OSError) -> str:
    """What failed, where, and the way out of a full disk."""
    where = error.filename
    try:
        print(end="", flush=True)
    except OSError:  # what could not be written waits there still
        _discard_output()
        where = where or "standard output"
    told = f"{where}: {error.strerror or error}" if where else f"{error.strerror or error}"
    return f"{told}; make room or name another place" if error.errno in files.NO_ROOM else told


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(sentence: str, status: int) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":  # torchrun's other processes on this machine have the same to say
        print(f"qknorm: {sentence}", file=sys.stderr)
    raise SystemExit(status)
