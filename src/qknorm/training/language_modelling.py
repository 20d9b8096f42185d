"""The task of language modelling: random windows of a text, cross-entropy of every next character."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from qknorm.config import TrainLanguageModel
from qknorm.models.language_model import LanguageModel
from qknorm.progress import Progress
from qknorm.text.characters import CharacterText
from qknorm.training.language_run import build_language_model, split_text
from qknorm.training.metrics import NATS
from qknorm.training.objective import next_token_loss
from qknorm.training.run_folder import Facts
from qknorm.training.step import BatchTensors, Objective
from qknorm.training.task import Measured

EVALUATED_AT_ONCE = 8_192
"""Characters in a batch of an evaluation."""


class Windows:
    """Batches of random windows of a text.

    Where they begin depends on the seed, the epoch and the position alone. An epoch is as many batches as hold the
    characters of the text, and at least `group`.
    """

    shapes: Sequence[tuple[int, int]] = ()  # there is one, and the first step makes ready for it

    def __init__(
        self, ids: NDArray[np.integer], context: int, batch: int, seed: int, device: torch.device, group: int = 1
    ) -> None:
        if len(ids) <= context:
            raise ValueError(f"{len(ids)} ids hold no window of {context} and one more")
        wide = ids if ids.dtype == np.uint8 else ids.astype(np.int32)  # torch indexes no uint16
        self._ids = torch.from_numpy(wide.copy()).to(device)
        self._steps = torch.arange(context, device=device)
        self._context, self._batch, self._seed = context, batch, seed
        self._length = max(group, len(ids) // (batch * context))
        self._epoch = 0

    def __len__(self) -> int:
        return self._length

    def start_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def tokens(self, position: int) -> int:
        return self._batch * self._context

    def tensors(self, position: int) -> BatchTensors:
        random = np.random.default_rng([self._seed, self._epoch, position])
        starts = random.integers(0, len(self._ids) - self._context, size=(self._batch, 1))
        places = torch.from_numpy(starts).to(self._ids.device) + self._steps
        return self._ids[places].long(), self._ids[places + 1].long()

    def close(self) -> None:
        """There is nothing to end."""


@torch.no_grad()
def held_out_loss(model: LanguageModel, ids: NDArray[np.integer], progress: Progress | None = None) -> float:
    """Mean cross-entropy in nats of every character but the first, without dropout.

    The text is read in windows of the model's context, one after the other, so that each character is predicted once,
    the first of a window from none but its predecessor.
    """
    device, training, context = next(model.parameters()).device, model.training, model.settings.context
    model.eval()
    text = torch.from_numpy(ids.astype(np.int64)).to(device)
    whole = (len(text) - 1) // context * context
    parts = [
        (seen.view(-1, width), wanted.view(-1, width))
        for seen, wanted, width in (
            (text[:whole], text[1 : whole + 1], context),
            (text[whole:-1], text[whole + 1 :], len(text) - 1 - whole),
        )
        if len(seen)
    ]
    total, done = torch.zeros((), dtype=torch.float64, device=device), 0
    rows = max(1, EVALUATED_AT_ONCE // context)
    for seen, wanted in parts:
        for start in range(0, len(seen), rows):
            total += next_token_loss(model(seen[start : start + rows]), wanted[start : start + rows]).plain
            done += wanted[start : start + rows].numel()
            if progress is not None:
                progress("evaluate", done, len(text) - 1)
    model.train(training)
    return float(total) / (len(text) - 1)


class LanguageModelTask:
    """Trains a language model on a text, whose end is held out as the dev set."""

    criterion = NATS

    def __init__(self, settings: TrainLanguageModel, about: Facts, text: CharacterText) -> None:
        self._settings, self._about, self._text = settings, about, text
        self._train, self._dev = split_text(text, settings)
        self._model: LanguageModel

    def build_model(self, device: torch.device) -> LanguageModel:
        self._model = build_language_model(self._settings, self._about).to(device)
        return self._model

    def objective(self) -> Objective:
        return Objective(next_token_loss)

    def batches(self, device: torch.device, group: int) -> Windows:
        training = self._settings.training
        return Windows(self._train, self._settings.model.context, training.batch, training.seed, device, group)

    def evaluate(self, progress: Progress | None) -> Measured:
        loss = held_out_loss(self._model, self._dev, progress)
        numbers = {"dev_loss": loss, "dev_perplexity": math.exp(min(loss, 700.0)), "dev_bits": loss / math.log(2)}
        return Measured(loss, numbers)

    def describe(self) -> str:
        return f"{self._text.path.name}, {len(self._train):,} characters and {len(self._dev):,} held out"
