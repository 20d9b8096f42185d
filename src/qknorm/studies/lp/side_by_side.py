"""Models side by side: every one runs as it would alone, but all in one recorded step, on a few streams at a time.

A batch of 64 × 256 characters already fills a large GPU; what a single small training loses is the time between its
kernels and in their tails. A recording has no time between, and a second stream fills the tails. Nothing else changes:
each model keeps its p, its fused kernels and its numbers.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from qknorm.models.language_model import LanguageModel
from qknorm.studies.lp.around_attention import compile_around_attention
from qknorm.studies.lp.design import LpStudy
from qknorm.studies.lp.stack import Compiled, Stack, decays, mean_loss, named_tensors

STREAMS = 2


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
        compiled: Compiled = "no",
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
        if compiled == "whole":
            self._loss = torch.compile(loss_of, dynamic=False)
        elif compiled == "layers":
            forward = compile_around_attention()
            for model in self.models:
                model._compiled = forward
        self.prepare()

    def parameters_to_learn(self) -> list[tuple[nn.Parameter | Tensor, bool]]:
        """Every parameter of every model."""
        return [(each, decays(each)) for model in self.models for each in model.parameters()]

    def state(self, number: int) -> dict[str, Tensor]:
        """The parameters and buffers of one model, by name."""
        return dict(named_tensors(self.models[number]))

    def _make_gradients(self) -> None:
        windows = self.windows()
        if not self._streams:
            for number in range(self.size):
                self._draw_as_alone(number, windows)
            return
        main = torch.cuda.current_stream()
        for number in range(self.size):
            stream = self._streams[number % len(self._streams)]
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                self._one(number, windows)
        for stream in self._streams:
            main.wait_stream(stream)

    def _draw_as_alone(self, number: int, windows: Tensor) -> None:
        if self._random_states is None:
            self._one(number, windows)
            return
        torch.set_rng_state(self._random_states[number])
        self._one(number, windows)
        self._random_states[number] = torch.get_rng_state()

    def _one(self, number: int, windows: Tensor) -> None:
        model, window = self.models[number], windows[number]
        with self.autocast():
            loss = self._loss(model, window)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), self.study.clip, foreach=True)
        self.loss_sums[number].add_(loss.detach())


def loss_of(model: LanguageModel, window_bt: Tensor) -> Tensor:
    """The mean loss of every character of the windows but the first."""
    return mean_loss(model(window_bt[:, :-1]), window_bt[:, 1:])
