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

Layers = Literal["plain", "fused", "compiled"]
"""How layers run: by PyTorch's kernels, by our own, or a model and its loss as one program of torch.compile."""


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
    def state(self, number: int) -> dict[str, Tensor]:
        """The parameters and buffers of one model, by name."""

    @abstractmethod
    def _make_gradients(self) -> None:
        """The gradients of one step of all models; adds the losses to `loss_sums`."""

    @abstractmethod
    def _make_optimizer(self) -> None:
        """All that `_update` needs, moments included: nothing may be made while a step is recorded."""

    @abstractmethod
    def _update(self, rate: float | None) -> None:
        """Clips by model, steps and clears the gradients; without a rate, by the one on the device."""

    @abstractmethod
    def _clear_gradients(self) -> None:
        """After a rehearsal."""

    def run(self, steps: int) -> None:
        """Takes so many steps, without waiting for the device to end them."""
        for _ in range(steps):
            if self._graph is not None:
                self._graph.replay()
            else:
                self._whole_step(self._rates[self._done])
            self._done += 1

    def prepare(self) -> None:
        """Makes the optimiser; on a GPU, records the step. To be called once, before `run`."""
        self._rate = torch.zeros((), device=self.device)
        self._make_optimizer()
        if self.device.type == "cuda":
            self._record()

    def _whole_step(self, rate: float | None) -> None:
        self._make_gradients()
        self._update(rate)
        self._step += 1

    def _record(self) -> None:
        """Records a whole step after a rehearsal, in which kernels are made ready and which leaves no trace."""
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(3):
                self._make_gradients()
            self._clear_gradients()
        torch.cuda.current_stream().wait_stream(beside)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._rate.copy_(self._rates_there.index_select(0, self._step).squeeze(0))
            self._whole_step(None)
        self._graph = graph
        self.loss_sums.zero_()

    def _new_optimizer(self, learning: Sequence[tuple[nn.Parameter | Tensor, bool]]) -> torch.optim.AdamW:
        """For these tensors, with weight decay for those marked; with its moments, yet without a step taken."""
        cuda = self.device.type == "cuda"
        groups: list[dict[str, Any]] = [
            {"params": [each for each, decays in learning if decays], "weight_decay": self.study.weight_decay},
            {"params": [each for each, decays in learning if not decays], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            groups, lr=self._rate if cuda else 1.0, betas=self.study.betas, fused=True, capturable=cuda
        )
        for each, _ in learning:
            each.grad = torch.zeros_like(each)
        # a fused optimiser makes its moments in its first step, but leaves everything as it is where this is 1
        optimizer.found_inf = torch.ones((), device=self.device)  # type: ignore[attr-defined]
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer._warned_capturable_if_run_uncaptured = True
        optimizer.step()
        del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
        optimizer.zero_grad(set_to_none=True)
        return optimizer

    def windows(self) -> Tensor:
        """This step's windows (models, batch, context + 1), gathered where the text lies."""
        starts = self._starts.index_select(0, self._step).squeeze(0)
        return self._ids[starts.unsqueeze(-1) + self._reach].long()

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of forward passes; a recording must not outlive the cache of cast weights."""
        return autocast(self.study, self.device, cache=False)

    def skipped_steps(self) -> list[int]:
        """Of each model, the steps left out since their gradients were not finite; PyTorch's parts leave out none."""
        return [0] * self.size

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


def set_rate(optimizer: torch.optim.Optimizer, rate: float | None) -> None:
    """The rate of the next step; None leaves the one on the device."""
    if rate is not None:
        for group in optimizer.param_groups:
            group["lr"] = rate


def decays(parameter: Tensor) -> bool:
    """Whether weight decay is for it, as in nanoGPT: matrices yes, vectors and numbers (p, the scale) no."""
    return parameter.dim() >= 2


def named_tensors(model: nn.Module) -> Mapping[str, Tensor]:
    """Parameters and buffers together, detached."""
    return {name: each.detach() for name, each in (*model.named_parameters(), *model.named_buffers())}
