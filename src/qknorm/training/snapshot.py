"""What a checkpoint holds, as it was at one step: taken in no time, written beside the steps that follow."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qknorm.training.parallel import SpreadModel


@dataclass(frozen=True)
class Snapshot:
    """Weights, and what else a training goes on with; copies, so that training may go on."""

    model: dict[str, Tensor]
    training: dict[str, Tensor]
    ready: Any = None
    """The event on a GPU after which they can be read; None where they are on the CPU already."""

    def on_cpu(self) -> "Snapshot":
        """The same on the CPU; from a GPU by a stream of its own, so that no step waits for that."""
        if self.ready is None:
            return self
        with torch.cuda.stream(torch.cuda.Stream(self.sums.device)):  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().wait_event(self.ready)
            model, training = ({k: v.cpu() for k, v in each.items()} for each in (self.model, self.training))
        return Snapshot(model, training)

    @property
    def sums(self) -> Tensor:
        """What was gathered of the loss."""
        return self.training["sums"]


def take_snapshot(spread: SpreadModel, optimizer: torch.optim.Optimizer, sums: Tensor, alone: bool) -> Snapshot:
    """Of a model that one GPU trains `alone`, copies there, if there is room for two; else on the CPU."""
    stay = alone and sums.is_cuda and _has_room(spread, sums.device)
    model, moments = spread.weights(stay=stay), spread.moments(optimizer, stay=stay)
    training = {**moments, "sums": sums.clone() if stay else sums.cpu()}
    ready = None
    if stay:
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
    return Snapshot(model, training, ready)


def _has_room(spread: SpreadModel, device: torch.device) -> bool:
    one = 3 * sum(p.numel() * p.element_size() for p in spread.inner.parameters())
    return torch.cuda.mem_get_info(device)[0] > 3 * one
