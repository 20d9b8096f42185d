"""The task of translating: sentence pairs in batches, smoothed cross-entropy, BLEU of what is really translated."""

import os
from collections.abc import Sequence

import numpy as np
import torch

from qknorm.config import Train, Training
from qknorm.errors import InputError
from qknorm.models.translator import Translator
from qknorm.progress import Progress
from qknorm.text.batching import TrainingBatches
from qknorm.text.prepared import PreparedData
from qknorm.training.evaluation import Evaluator
from qknorm.training.metrics import BLEU
from qknorm.training.objective import label_smoothed_loss
from qknorm.training.run_folder import About, allowed_types, build_model
from qknorm.training.step import BatchTensors, Objective, choose_precision
from qknorm.training.task import Measured

STAGED_BYTES = 1 << 30
"""Batches are kept on the device for later epochs while they take less than this."""
MOST_WORKERS = 2
"""Processes that cut text ahead beside a GPU: one keeps up with an H200, and the second makes up for a pause."""
CORES = "QKNORM_CORES"
"""The variable of the environment by which who starts trainings side by side tells each how many cores are its own."""


def count_cores() -> int:
    """The cores for this process and those it starts: as many as it was told, else all that it may run on."""
    told = os.environ.get(CORES)
    if told is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not told.isdecimal() or int(told) < 1:
        raise InputError(f"{CORES} is {told!r} in the environment; give the number of cores, 1 or more, or unset it")
    return int(told)


def choose_workers(device: torch.device, cores: int | None = None) -> int:
    """How many processes cut text ahead, one core left for training; none on the CPU, where training needs every core.

    `cores` are those of `count_cores` if not given.
    """
    if device.type == "cpu":  # where training waits longer anyway
        return 0
    cores = count_cores() if cores is None else cores
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # trainings of a team on this machine, each with its own
    return max(0, min(MOST_WORKERS, cores // beside - 1))


class PairBatches:
    """Batches of sentence pairs, kept on the device where they stay the same."""

    def __init__(self, data: PreparedData, training: Training, device: torch.device) -> None:
        self._planned = TrainingBatches(
            data.split("train"),
            data.tokenizer,
            (data.source, data.target),
            training.batch_tokens,
            training.seed,
            training.bpe_dropout,
            workers=choose_workers(device),
        )
        self._keep, self._device = not training.bpe_dropout, device
        self._staged: dict[int, BatchTensors] = {}
        self._staged_bytes = 0

    @property
    def shapes(self) -> Sequence[tuple[int, int]]:
        return self._planned.shapes

    def __len__(self) -> int:
        return len(self._planned.order)

    def start_epoch(self, epoch: int) -> None:
        self._planned.start_epoch(epoch)

    def tokens(self, position: int) -> int:
        return self._planned.target_tokens(self._planned.batches[self._planned.order[position]])

    def tensors(self, position: int) -> BatchTensors:
        number = int(self._planned.order[position])
        if number in self._staged:
            return self._staged[number]
        arrays = self._planned.arrays(self._planned.batches[number])
        stacked = torch.from_numpy(np.stack(arrays))
        if self._device.type == "cuda":  # from memory that stays in its place, a copy is not waited for
            stacked = stacked.pin_memory()
        batch = stacked.to(self._device, non_blocking=True).unbind()
        if self._keep and self._staged_bytes + stacked.nbytes < STAGED_BYTES:
            self._staged[number] = batch
            self._staged_bytes += stacked.nbytes
        return batch

    def close(self) -> None:
        self._planned.close()


class TranslationTask:
    """Trains a translator on prepared data."""

    criterion = BLEU

    def __init__(self, settings: Train, about: About, data: PreparedData) -> None:
        self._settings, self._about, self._data = settings, about, data
        self._model: Translator
        self._evaluator: Evaluator

    def build_model(self, device: torch.device) -> Translator:
        allowed = allowed_types(self._settings, self._data)
        self._model = build_model(self._settings, self._about, allowed).to(device)
        precision = torch.float32
        if device.type == "cuda":  # where half precision halves the time, and a model has learned in it
            precision = choose_precision(self._settings.training, device, self._settings.model.width)
        self._evaluator = Evaluator(
            self._data,
            "dev",
            self._settings.decoding,
            sentences=self._settings.training.dev_sentences,
            precision=precision,
        )
        return self._model

    def objective(self) -> Objective:
        return Objective(label_smoothed_loss, (self._model.allowed, self._settings.training.label_smoothing))

    def batches(self, device: torch.device, group: int) -> PairBatches:
        batches = PairBatches(self._data, self._settings.training, device)
        if len(batches) < group:
            raise InputError(
                f"the training text gives {len(batches)} batches, fewer than the {group} of one step; lower "
                f"training.batch_tokens or training.accumulate"
            )
        return batches

    def evaluate(self, progress: Progress | None) -> Measured:
        found = self._evaluator(self._model, progress)
        return Measured(
            found.bleu, {"dev_loss": found.loss, "dev_perplexity": found.perplexity, "dev_bleu": found.bleu}
        )

    def describe(self) -> str:
        return f"{self._about.source} → {self._about.target}"
