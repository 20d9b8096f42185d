"""Which parts of a training step run in few passes over memory; `choose_fast` says when all of them do.

Every part has its plain reference, and where a part does not apply (on the CPU, without Triton, in a team, for sizes
its kernels do not take) the reference runs.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qknorm.config import Optimisation
from qknorm.models import fused_language_model, fused_translator
from qknorm.models.beside import Beside, CudaSideStream, SideStream
from qknorm.models.fused_run import FlatParameters, kernels_apply, use_fused
from qknorm.models.language_model import LanguageModel
from qknorm.models.translator import Translator
from qknorm.training.objective import Losses, label_smoothed_loss, next_token_loss

if TYPE_CHECKING:
    from qknorm.training.flat_update import FlatUpdate


FUSED_LOSSES = (label_smoothed_loss, next_token_loss)


@dataclass(frozen=True)
class Fast:
    """The parts, each of which can be used without the others."""

    linear: bool = False
    """Linear maps: weights cast once an update, bias gradients in one pass, keys and values of the memory together."""
    layers: bool = False
    """Residual, dropout and norm as one; bias, activation and dropout as one; word vectors as one."""
    loss: bool = False
    """The loss reads the logits once and leaves their gradient in their place."""
    update: bool = False
    """Clipping and AdamW in two passes over all parameters."""
    overlap: bool = False
    """Gradients of the weights of linear maps beside the rest of the backward pass; only with `linear`, on a GPU."""

    @classmethod
    def everything(cls) -> "Fast":
        """All parts."""
        return cls(linear=True, layers=True, loss=True, update=True, overlap=True)

    @property
    def model(self) -> bool:
        """Whether a forward pass is any different."""
        return self.linear or self.layers or self.loss


class FastStep:
    """The parts of one model's training step that are asked for."""

    def __init__(
        self,
        model: nn.Module,
        fast: Fast,
        half: torch.dtype,
        optimizer: torch.optim.Optimizer,
        clip: float,
        sums: Tensor,
    ) -> None:
        self._model, self.fast = model, fast
        self.flat: FlatParameters | None = None
        self.update: FlatUpdate | None = None
        self._sets_rate = True
        self.one = torch.ones((), device=sums.device)
        if fast.linear or fast.update:
            keeps_half = fast.linear and half != torch.float32
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            self.flat = FlatParameters(parameters, half if keeps_half else None)
        if fast.linear and fast.overlap and self.flat is not None and (stream := side_stream(self.flat)) is not None:
            self.flat.add_beside(Beside(stream))
        if fast.update and self.flat is not None:
            from qknorm.training import flat_update

            self.update = flat_update.FlatUpdate(self.flat, optimizer, clip, sums)
            rate = optimizer.param_groups[0]["lr"]
            if isinstance(rate, Tensor):  # that the step sets anyway
                self.update.rate, self._sets_rate = rate, False

    def join(self) -> None:
        """After a backward pass, before its gradients are read."""
        if self.flat is not None and self.flat.beside is not None:
            self.flat.beside.join()

    @staticmethod
    def applies(model: nn.Module, fast: Fast) -> bool:
        """Whether anything is asked for, and can be had for this model."""
        parameters = list(model.parameters())
        return fast != Fast() and kernels_apply(parameters[0].device) and FlatParameters.refusal(parameters) is None

    def begin(self, learning_rate: float) -> None:
        """Before a step, outside of what is recorded."""
        if self.flat is not None:
            self.flat.refresh_if_written()
        if self.update is not None and self._sets_rate:
            self.update.rate.fill_(learning_rate)

    def losses(self, batch: tuple[Tensor, ...], weight: Tensor, objective: tuple[Any, ...]) -> tuple[Tensor, Losses]:
        """What to derive, the smoothed loss times `weight`, and the sums; to be called within autocast."""
        fast, model, (*inputs, targets), (loss, *arguments) = self.fast, self._model, batch, objective
        with use_fused(targets.device, linear=fast.linear, layers=fast.layers, flat=self.flat) as run:
            if run is not None:
                run.one = self.one
            if (
                fast.loss
                and run is not None
                and isinstance(model, (Translator, LanguageModel))
                and loss in FUSED_LOSSES
            ):
                from qknorm.training.fused_loss import projected_loss

                states, table = model.states_and_table(*inputs)
                bias = model.output_bias if isinstance(model, Translator) else None
                allowed, smoothing = arguments or (None, 0.0)
                return projected_loss(run, states, table, bias, targets, allowed, smoothing, weight)
            losses: Losses = loss(model(*inputs), targets, *arguments)
            return losses.smoothed * weight, losses


def side_stream(flat: FlatParameters) -> SideStream | None:
    """A stream for work beside the main one: on a GPU, else none."""
    device = flat.values.device
    return CudaSideStream(device) if device.type == "cuda" else None


def choose_fast(model: nn.Module, settings: Optimisation) -> Fast:
    """The parts of a step that run by our own kernels: all, for the models they are made for, where nobody chose."""
    made_for = (isinstance(model, Translator) and fused_translator.takes_part(model.settings)) or (
        isinstance(model, LanguageModel) and fused_language_model.takes_part(model.settings)
    )
    return Fast.everything() if made_for and settings.compile is None else Fast()
