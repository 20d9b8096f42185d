"""Many models trained in one program: what the two ways share, the data, the optimiser and the recorded step.

On a GPU nothing but one replay of a CUDA graph happens in a step. So all that changes from step to step lies on the
device: the text, where every window of every batch starts, the learning rates, and the number of the step.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qknorm.config import Schedule
from qknorm.studies.lp.design import LpStudy
from qknorm.training.schedule import LearningRate

Compiled = Literal["no", "layers", "whole"]
"""What torch.compile is used on: nothing, layers around their attention, or a model and its loss as one program."""


class Stack(ABC):
    """Models of one shape, each with its own weights and data order, that take every step together."""

    def __init__(self, study: LpStudy, ids: Tensor, starts: Sequence[Tensor], device: torch.device) -> None:
        self.study, self.device, self.size = study, device, len(starts)
        self._ids = ids.to(device)
        self._starts = torch.stack(list(starts), dim=1).to(device)  # iterations, models, batch
        self._reach = torch.arange(study.model.context + 1, device=device)
        self._step = torch.zeros(1, dtype=torch.long, device=device)
        self._rates = learning_rates(study)
        self._rates_there = torch.tensor(self._rates, device=device)
        self.loss_sums = torch.zeros(self.size, device=device)
        self._done = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    @abstractmethod
    def parameters_to_learn(self) -> list[tuple[nn.Parameter | Tensor, bool]]:
        """Every tensor that learns, and whether weight decay is for it."""

    @abstractmethod
    def state(self, number: int) -> dict[str, Tensor]:
        """The parameters and buffers of one model, by name."""

    @abstractmethod
    def _make_gradients(self) -> None:
        """The gradients of one step of all models, clipped by model; adds the losses to `loss_sums`."""

    def run(self, steps: int) -> None:
        """Takes so many steps, without waiting for the device to end them."""
        for _ in range(steps):
            if self._graph is not None:
                self._graph.replay()
            else:
                for group in self.optimizer.param_groups:
                    group["lr"] = self._rates[self._done]
                self._whole_step()
            self._done += 1

    def prepare(self) -> None:
        """Makes the optimiser; on a GPU, records the step. To be called once, before `run`."""
        cuda = self.device.type == "cuda"
        self._rate = torch.zeros((), device=self.device)
        learning = self.parameters_to_learn()
        rate = self._rate if cuda else 1.0
        groups: list[dict[str, Any]] = [
            {
                "params": [each for each, decay in learning if decay],
                "lr": rate,
                "weight_decay": self.study.weight_decay,
            },
            {"params": [each for each, decay in learning if not decay], "lr": rate, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=self.study.betas, fused=True, capturable=cuda)
        if cuda:
            self._record()

    def _whole_step(self) -> None:
        self._make_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._step += 1

    def _record(self) -> None:
        """Records a whole step after a rehearsal, in which kernels are made ready and which leaves no trace."""
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(3):
                self._make_gradients()
            # a fused optimiser makes its moments in its first step, but leaves everything as it is where this is 1
            self.optimizer.found_inf = torch.ones((), device=self.device)  # type: ignore[attr-defined]
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
            self.optimizer._warned_capturable_if_run_uncaptured = True
            self.optimizer.step()
            del self.optimizer.found_inf, self.optimizer.grad_scale  # type: ignore[attr-defined]
            self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.current_stream().wait_stream(beside)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._rate.copy_(self._rates_there.index_select(0, self._step).squeeze(0))
            self._make_gradients()
            self.optimizer.step()
            self._step += 1
        self._graph = graph
        self.loss_sums.zero_()

    def windows(self) -> Tensor:
        """This step's windows (models, batch, context + 1), gathered where the text lies."""
        starts = self._starts.index_select(0, self._step).squeeze(0)
        return self._ids[starts.unsqueeze(-1) + self._reach].long()

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of forward passes; a recording must not outlive the cache of cast weights."""
        return autocast(self.study, self.device, cache=False)

    def read_losses(self) -> list[float]:
        """The summed training losses since the last call; waits for the device."""
        sums = [float(each) for each in self.loss_sums.tolist()]
        self.loss_sums.zero_()
        return sums


def learning_rates(study: LpStudy) -> list[float]:
    """The rate of every step: linear warm-up, then a cosine."""
    schedule = Schedule(kind="cosine", peak=study.learning_rate, warmup=study.warmup, floor=study.final_learning_rate)
    rate = LearningRate(schedule, study.model.width, study.iterations)
    return [rate.at(step) for step in range(1, study.iterations + 1)]


def autocast(study: LpStudy, device: torch.device, *, cache: bool = True) -> AbstractContextManager[Any]:
    """The precision in which forward passes compute."""
    if study.precision != "bfloat16":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=cache)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats, in float32."""
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


def decays(parameter: Tensor) -> bool:
    """Whether weight decay is for it, as in nanoGPT: matrices yes, vectors and numbers (p, the scale) no."""
    return parameter.dim() >= 2


def named_tensors(model: nn.Module) -> Mapping[str, Tensor]:
    """Parameters and buffers together, detached."""
    return {name: each.detach() for name, each in (*model.named_parameters(), *model.named_buffers())}
