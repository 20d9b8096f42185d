"""Models side by side: every one runs as it would alone, but all in one recorded step, on a few streams at a time.

A batch of 64 × 256 characters already fills a large GPU; what a single small training loses is the time between its
kernels and in their tails. A recording has no time between, and a second stream fills the tails. Nothing else changes:
each model keeps its p, its fused kernels and its numbers.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from qknorm.models.language_model import LanguageModel
from qknorm.studies.lp.design import LpStudy
from qknorm.studies.lp.stack import Stack, decays, mean_loss, named_tensors, set_rate
from qknorm.training.fast import Fast, FastStep
from qknorm.training.objective import next_token_loss

STREAMS = 3


class SideBySide(Stack):
    """Models that share a step and a recording, and nothing else; they may differ in p."""

    def __init__(
        self,
        study: LpStudy,
        models: Sequence[LanguageModel],
        ids: Tensor,
        starts: Sequence[Tensor],
        device: torch.device,
        *,
        random_states: Sequence[Tensor] | None = None,
        compiled: bool = False,
        streams: int = STREAMS,
    ) -> None:
        super().__init__(study, ids, starts, device)
        self.models = [model.to(device).train() for model in models]
        # on the CPU every model draws from a generator of its own, so that it drops what it would drop alone
        self._random_states = list(random_states) if random_states is not None and device.type == "cpu" else None
        self._streams = (
            [torch.cuda.Stream() for _ in range(min(streams, self.size))]  # type: ignore[no-untyped-call]
            if device.type == "cuda"
            else []
        )
        self._loss: Callable[[LanguageModel, Tensor], Tensor] = loss_of
        if compiled:
            self._loss = torch.compile(loss_of, dynamic=False)
        self.prepare()

    def state(self, number: int) -> dict[str, Tensor]:
        """The parameters and buffers of one model, by name."""
        return dict(named_tensors(self.models[number]))

    def _make_gradients(self) -> None:
        windows = self.windows()
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
        if self._random_states is None:
            job(number)
            return
        torch.set_rng_state(self._random_states[number])
        job(number)
        self._random_states[number] = torch.get_rng_state()

    def _one(self, number: int, windows: Tensor) -> None:
        model, window = self.models[number], windows[number]
        with self.autocast():
            loss = self._loss(model, window)
        torch.autograd.backward(loss)
        self.loss_sums[number].add_(loss.detach())

    def _make_optimizer(self) -> None:
        parameters = [each for model in self.models for each in model.parameters()]
        self._optimizer = self._new_optimizer([(each, decays(each)) for each in parameters])

    def _update(self, rate: float | None) -> None:
        set_rate(self._optimizer, rate)
        for model in self.models:
            nn.utils.clip_grad_norm_(model.parameters(), self.study.clip, foreach=True)
        self._optimizer.step()
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)


class FusedSideBySide(SideBySide):
    """The same through the kernels that `qknorm train` takes on a GPU; no model waits for another before its update."""

    def _make_optimizer(self) -> None:
        half = torch.bfloat16 if self.study.precision == "bfloat16" else torch.float32
        fast = replace(Fast.everything(), overlap=self.size == 1)  # among several, the others fill the gaps
        self._steps = []
        self._counts = []
        for model in self.models:
            optimizer = self._new_optimizer([(each, decays(each)) for each in model.parameters()])
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
        with self.autocast():
            loss, _ = step.losses(batch, self._weight, (next_token_loss,))
        torch.autograd.backward(loss, step.one)
        step.join()
        self.loss_sums[number].add_(loss.detach())

    def _whole_step(self, rate: float | None) -> None:
        windows = self.windows()

        def gradients_and_update(number: int) -> None:
            self._one(number, windows)
            self._update_one(self._steps[number], rate)

        self._for_each(gradients_and_update)
        self._step += 1

    def _update(self, rate: float | None) -> None:
        for step in self._steps:
            self._update_one(step, rate)

    def _update_one(self, step: FastStep, rate: float | None) -> None:
        assert step.update is not None
        if rate is not None:
            step.begin(rate)
        step.update()

    def _clear_gradients(self) -> None:
        for step in self._steps:
            assert step.flat is not None
            step.flat.gradients.zero_()


def loss_of(model: LanguageModel, window_bt: Tensor) -> Tensor:
    """The mean loss of every character of the windows but the first."""
    return mean_loss(model(window_bt[:, :-1]), window_bt[:, 1:])
