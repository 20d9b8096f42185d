"""Translation by ONNX Runtime, numpy and tokenizers alone: whoever only translates needs no PyTorch."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qknorm.decoding.results import Hypothesis
from qknorm.errors import InputError
from qknorm.export.card import Card
from qknorm.export.onnx_tree import Tree
from qknorm.export.search import Array, beam_search
from qknorm.export.texts import EngineTranslator
from qknorm.specials import PAD
from qknorm.text.batching import collate

ENCODER, DECODER = "encoder.onnx", "decoder.onnx"


def import_onnxruntime() -> Any:
    """The package onnxruntime, or a sentence on how to get it."""
    try:
        import onnxruntime
    except ImportError:
        raise InputError(
            "the engine onnx needs the package onnxruntime; get it with pip install 'qknorm[onnx]'"
        ) from None
    return onnxruntime


class OnnxModel:
    """The two graphs of an exported translator, loaded."""

    def __init__(self, folder: Path, *, threads: int | None = None) -> None:
        self.encoder, self.decoder = (_open_session(folder / name, threads) for name in (ENCODER, DECODER))
        self.cross = [output.name for output in self.encoder.get_outputs()]
        self.new = [output.name for output in self.decoder.get_outputs()][1:]
        _check_names(folder, self.encoder, {"source"})
        own = {name.replace("new", "own") for name in self.new}
        _check_names(folder, self.decoder, {"tokens", "position", "visible", "source_real", *self.cross, *own})
        self.key_heads, self.head_dim = (self.encoder.get_outputs()[0].shape[axis] for axis in (1, 3))

    def start(self, source: Array, beam: int) -> "OnnxStepper":
        """Reads source ids (b, s), padded with 0, and stands before the first token of k hypotheses each."""
        return OnnxStepper(self, source, beam)


def _open_session(path: Path, threads: int | None) -> Any:
    runtime = import_onnxruntime()
    if not path.is_file():
        raise InputError(f"{path} is missing; write it again with qknorm export RUN --to onnx")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # its warnings are about itself
    wished = os.environ.get("OMP_NUM_THREADS", "")
    options.intra_op_num_threads = threads or (int(wished) if wished.isdigit() else 0)
    try:
        return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its own types for each way to fail, which have no common parent
        reason = str(error).splitlines()[0]
        raise InputError(
            f"{path} cannot be loaded ({reason}); write it again with qknorm export RUN --to onnx"
        ) from None


def _check_names(folder: Path, session: Any, expected: set[str]) -> None:
    """Refuses graphs that are not the two halves of one export."""
    if {given.name for given in session.get_inputs()} != expected:
        raise InputError(
            f"{folder / ENCODER} and {DECODER} do not belong together; export with qknorm export RUN --to onnx"
        )


class OnnxStepper:
    """An exported translator in the midst of decoding: b sentences, k hypotheses each, their pasts kept as a tree."""

    def __init__(self, model: OnnxModel, source: Array, beam: int) -> None:
        self._model = model
        self._real = source != PAD
        self._cross = dict(zip(model.cross, model.encoder.run(None, {"source": source}), strict=True))
        self._tree = Tree(len(source), beam, [name.replace("new", "own") for name in model.new])
        self._tree.make_room(model.key_heads, model.head_dim)

    def step(self, tokens_bk: Array) -> Array:
        self._tree.prune_if_full()
        given = {
            "tokens": np.ascontiguousarray(tokens_bk),
            "position": np.array([self._tree.step]),
            "visible": self._tree.visible(),
            "source_real": self._real,
            **self._cross,
            **self._tree.stored,
        }
        log_probabilities, *new = self._model.decoder.run(None, given)
        self._tree.grow(new)
        found: Array = log_probabilities
        return found

    def reorder(self, origin_bk: Array) -> None:
        self._tree.reorder(origin_bk)

    def keep(self, sentences: Array) -> None:
        self._real = self._real[sentences]
        self._cross = {name: array[sentences] for name, array in self._cross.items()}
        self._tree.keep(sentences)


class OnnxTranslator(EngineTranslator):
    """A folder that `qknorm export --to onnx` wrote, ready for `translate`.

    `threads` is how many ONNX Runtime uses: those of OMP_NUM_THREADS, or as many as there are cores, if not given.
    """

    engine = "onnx"

    def __init__(self, folder: str | Path, *, threads: int | None = None) -> None:
        import_onnxruntime()
        super().__init__(Path(folder))
        self.model = OnnxModel(Path(folder), threads=threads)

    def search_batch(self, sources: list[Sequence[int]], card: Card, nbest: int) -> list[list[Hypothesis]]:
        return beam_search(
            self.model.start(collate(sources, []).source, card.beam),
            np.array([len(ids) + card.extra_length for ids in sources]),
            beam=card.beam,
            alpha=card.length_penalty,
            nbest=nbest,
            no_repeat_ngram=card.no_repeat_ngram,
        )
