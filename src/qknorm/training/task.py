"""What the loop must know of what it trains, and nothing more: so one loop trains translators and language models."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from qknorm.models.language_model import LanguageModel
from qknorm.models.translator import Translator
from qknorm.progress import Progress
from qknorm.training.metrics import Criterion
from qknorm.training.step import BatchTensors, Objective

AnyModel = Translator | LanguageModel


class Measured(NamedTuple):
    """An evaluation: the value that says which model is the best, and all numbers to write down, by name."""

    value: float
    numbers: Mapping[str, float]


STOPPED = Measured(math.nan, {})
"""An evaluation that a signal came into."""


class Batches(Protocol):
    """The batches of one epoch after another; what stands where depends on the seed and the epoch alone."""

    @property
    def shapes(self) -> Sequence[tuple[int, int]]:
        """Shapes of batches to make ready for before the first step."""

    def __len__(self) -> int:
        """How many batches the epoch has."""

    def start_epoch(self, epoch: int) -> None:
        """Makes it the batches of this epoch."""

    def tokens(self, position: int) -> int:
        """How many tokens the batch at this position of the epoch teaches."""

    def tensors(self, position: int) -> BatchTensors:
        """That batch on the device: what the model reads, then what it should say."""

    def close(self) -> None:
        """Ends whatever makes batches ready beside the training."""


class Task(Protocol):
    """A model to train, what it learns from, its loss, and how good it is."""

    @property
    def criterion(self) -> Criterion:
        """What tells a better model from a worse one."""

    def build_model(self, device: torch.device) -> AnyModel:
        """A fresh model, which the task will evaluate."""

    def objective(self) -> Objective:
        """The loss of that model."""

    def batches(self, device: torch.device, group: int) -> Batches:
        """What to train on; refuses data that do not give the `group` of batches that make one step."""

    def evaluate(self, progress: Progress | None) -> Measured:
        """How good the model is on the dev set; leaves it as it was."""

    def describe(self) -> str:
        """What is trained, in a few words."""


class Observer(Protocol):
    """Looks into a model now and then while it trains, and leaves it as it was."""

    def recall(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Takes up what was written down before, for a training that goes on."""

    def __call__(
        self, step: int, model: nn.Module, *inputs: Tensor
    ) -> tuple[Mapping[str, Any], Mapping[str, Any], Sequence[str]]:
        """What to write down for each head and for each attention, and sentences to warn with."""
