"""Many models trained in one program: every one runs as it would alone, but all in one recorded step.

A batch of 64 × 256 characters already fills a large GPU; what a single small training loses is the time between its
kernels and in their tails. A recording has no time between, and a second stream fills the tails. Nothing else changes:
each model keeps its p, its kernels and its numbers.

On a GPU nothing but one replay of a CUDA graph happens in a step. So all that changes from step to step lies on the
device: the text, where every window of every batch starts, the learning rates, and the number of the step.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qknorm.config import Schedule
from qknorm.models.language_model import LanguageModel
from qknorm.studies.lp.design import LpStudy
from qknorm.training.fast import Fast, FastStep
from qknorm.training.objective import next_token_loss
from qknorm.training.schedule import LearningRate

Layers = Literal["plain", "fused"]
"""How layers run: by PyTorch's kernels, or by our own."""


class Stack:
    """Models that share a step and a recording, each with its own weights and data order; they may differ in p."""

    def __init__(
        self,
        study: LpStudy,
        models: Sequence[LanguageModel],
        ids: Tensor,
        starts: Sequence[Tensor],
        random_states: Sequence[Tensor],
        device: torch.device,
        streams: int,
    ) -> None:
        self.study, self.device, self.size = study, device, len(models)
        self._ids = ids.to(device)
        self._starts = torch.stack(list(starts), dim=1).to(device)  # iterations, models, batch
        self._reach = torch.arange(study.model.context + 1, device=device)
        self._step = torch.zeros(1, dtype=torch.long, device=device)
        self._rates = learning_rates(study)
        self._rates_there = torch.tensor(self._rates, device=device)
        self.loss_sums = torch.zeros(self.size, device=device)
        self._done = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self.models = [model.to(device).train() for model in models]
        # on the CPU every model draws from a generator of its own, so that it drops what it would drop alone
        self._random_states = list(random_states)
        self._streams = (
            [torch.cuda.Stream() for _ in range(min(streams, self.size))]  # type: ignore[no-untyped-call]
            if device.type == "cuda"
            else []
        )
        self._rate = torch.zeros((), device=device)
        self._make_optimizer()
        if device.type == "cuda":
            self._record()

    def state(self, number: int) -> dict[str, Tensor]:
        """The parameters and buffers of one model, by name."""
        model = self.models[number]
        return {name: each.detach() for name, each in (*model.named_parameters(), *model.named_buffers())}

    def run(self, steps: int) -> None:
        """Takes so many steps, without waiting for the device to end them."""
        for _ in range(steps):
            if self._graph is not None:
                self._graph.replay()
            else:
                self._whole_step(self._rates[self._done])
            self._done += 1

    def read_losses(self) -> list[float]:
        """The summed training losses since the last call; waits for the device."""
        sums = [float(each) for each in self.loss_sums.tolist()]
        self.loss_sums.zero_()
        return sums

    def skipped_steps(self) -> list[int]:
        """Of each model, the steps left out since their gradients were not finite; PyTorch's parts leave out none."""
        return [0] * self.size

    def _whole_step(self, rate: float | None) -> None:
        """A step of all models by this rate; without one, by that on the device."""
        self._make_gradients()
        if rate is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
        for model in self.models:
            nn.utils.clip_grad_norm_(model.parameters(), self.study.clip, foreach=True)
        self._optimizer.step()
        self._clear_gradients()
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

    def _make_gradients(self) -> None:
        """The gradients of one step of all models; adds the losses to `loss_sums`."""
        windows = self._windows()
        self._for_each(lambda number: self._one(number, windows))

    def _for_each(self, job: Callable[[int], None]) -> None:
        """Does a job for every model, on a GPU on one of its streams."""
        if not self._streams:
            for number in range(self.size):
                self._draw_as_alone(job, number)
            return
        main = torch.cuda.current_stream()
        for number in range(self.size):
            stream = self._streams[number % len(self._streams)]
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                job(number)
        for stream in self._streams:
            main.wait_stream(stream)

    def _draw_as_alone(self, job: Callable[[int], None], number: int) -> None:
        torch.set_rng_state(self._random_states[number])
        job(number)
        self._random_states[number] = torch.get_rng_state()

    def _one(self, number: int, windows: Tensor) -> None:
        model, window = self.models[number], windows[number]
        with self._autocast():
            logits = model(window[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, -2), window[:, 1:].flatten())
        torch.autograd.backward(loss)
        self.loss_sums[number].add_(loss.detach())

    def _make_optimizer(self) -> None:
        """All that an update needs, moments included: nothing may be made while a step is recorded."""
        self._optimizer = self._new_optimizer(each for model in self.models for each in model.parameters())

    def _clear_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def _new_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
        """For these, with its moments, yet without a step taken.

        As in nanoGPT, matrices decay; vectors and numbers (p, the scale) do not.
        """
        cuda, learning = self.device.type == "cuda", list(parameters)
        groups: list[dict[str, Any]] = [
            {"params": [each for each in learning if each.dim() >= 2], "weight_decay": self.study.weight_decay},
            {"params": [each for each in learning if each.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            groups, lr=self._rate if cuda else 1.0, betas=self.study.betas, fused=True, capturable=cuda
        )
        for each in learning:
            each.grad = torch.zeros_like(each)
        # a fused optimiser makes its moments in its first step, but leaves everything as it is where this is 1
        optimizer.found_inf = torch.ones((), device=self.device)  # type: ignore[attr-defined]
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer._warned_capturable_if_run_uncaptured = True
        optimizer.step()
        del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
        optimizer.zero_grad(set_to_none=True)
        return optimizer

    def _windows(self) -> Tensor:
        """This step's windows (models, batch, context + 1), gathered where the text lies."""
        starts = self._starts.index_select(0, self._step).squeeze(0)
        return self._ids[starts.unsqueeze(-1) + self._reach].long()

    def _autocast(self) -> AbstractContextManager[Any]:
        """The precision of forward passes; a recording must not outlive the cache of cast weights."""
        return autocast(self.study, self.device, cache=False)


class FusedStack(Stack):
    """The same through the kernels that `qknorm train` takes on a GPU; no model waits for another before its update."""

    def _make_optimizer(self) -> None:
        half = torch.bfloat16 if self.study.precision == "bfloat16" else torch.float32
        fast = replace(Fast.everything(), overlap=self.size == 1)  # among several, the others fill the gaps
        self._steps = []
        self._counts = []
        for model in self.models:
            optimizer = self._new_optimizer(model.parameters())
            counts = torch.zeros(5, dtype=torch.float64, device=self.device)
            self._steps.append(FastStep(model, fast, half, optimizer, self.study.clip, counts))
            self._counts.append(counts)
        windows = self.study.batch * self.study.model.context
        self._weight = torch.full((), 1 / windows, device=self.device)

    def skipped_steps(self) -> list[int]:
        """Of each model, the steps left out since their gradients were not finite; waits for the device."""
        return [int(counts[4]) for counts in self._counts]  # as `FlatUpdate` counts them

    def _one(self, number: int, windows: Tensor) -> None:
        step, window = self._steps[number], windows[number]
        batch = window[:, :-1].contiguous(), window[:, 1:].contiguous()
        with self._autocast():
            loss, _ = step.losses(batch, self._weight, (next_token_loss,))
        torch.autograd.backward(loss, step.one)
        step.join()
        self.loss_sums[number].add_(loss.detach())

    def _whole_step(self, rate: float | None) -> None:
        windows = self._windows()

        def gradients_and_update(number: int) -> None:
            self._one(number, windows)
            self._update(self._steps[number], rate)

        self._for_each(gradients_and_update)
        self._step += 1

    def _update(self, step: FastStep, rate: float | None) -> None:
        assert step.update is not None
        if rate is not None:
            step.begin(rate)
        step.update()

    def _clear_gradients(self) -> None:
        for step in self._steps:
            assert step.flat is not None
            step.flat.gradients.zero_()


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
