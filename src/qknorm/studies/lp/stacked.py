"""Stacked weights: one forward and one backward pass for all models, each matrix product a batch of products.

Fewer and larger kernels, at the price of one p for the whole stack and of the plain way to normalise.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from qknorm.errors import InputError
from qknorm.models.language_model import LanguageModel
from qknorm.studies.lp.design import LpStudy
from qknorm.studies.lp.stack import Stack, decays, mean_loss, set_rate

KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
"""PyTorch's attention that can be stacked.

Within `vmap` no tensor says that it needs a gradient. The kernels that ask, the memory-efficient one and cuDNN's, then
leave out what their own backward pass reads, whatever the length. float32, which flash attention does not take, is left
to plain products.
"""


class Stacked(Stack):
    """Models whose weights lie in common tensors, with the model as the first dimension."""

    def __init__(
        self,
        study: LpStudy,
        models: Sequence[LanguageModel],
        ids: Tensor,
        starts: Sequence[Tensor],
        device: torch.device,
        *,
        compiled: bool = False,
    ) -> None:
        super().__init__(study, ids, starts, device)
        if len({model.settings.attention for model in models}) > 1:
            raise ValueError("stacked models run the same program, so that they need one p; stack each p by itself")
        shares = models[0].settings.dropout
        if device.type == "cpu" and any((shares.residual, shares.embedding, shares.attention, shares.feed_forward)):
            raise InputError("stacked weights cannot drop out on the CPU; take --together side-by-side")
        self._parameters, self._buffers = stack_module_state([model.to(device) for model in models])
        self._form = copy.deepcopy(models[0]).to("meta").train()
        for attention in self._form.attentions().values():
            # neither the kernels that normalise nor the CPU's for attention know stacks
            attention.backend = "sdpa" if device.type == "cuda" else "reference"
        self._losses = vmap(self._loss, randomness="different")
        if compiled:
            self._losses = torch.compile(self._losses, dynamic=False)
        self.prepare()

    def state(self, number: int) -> dict[str, Tensor]:
        """The parameters and buffers of one model, by name."""
        both = {**self._parameters, **self._buffers}
        return {name: each.detach()[number] for name, each in both.items()}

    def _loss(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], window: Tensor) -> Tensor:
        logits = functional_call(self._form, (parameters, buffers), (window[:, :-1],))
        return mean_loss(logits, window[:, 1:])

    def _make_gradients(self) -> None:
        with self.autocast(), sdpa_kernel(KERNELS):
            losses = self._losses(self._parameters, self._buffers, self.windows())
        torch.autograd.backward(losses.sum())
        self.loss_sums += losses.detach()

    def _make_optimizer(self) -> None:
        # what is a matrix in a model decays
        self._optimizer = self._new_optimizer([(each, decays(each[0])) for each in self._parameters.values()])

    def _update(self, rate: float | None) -> None:
        set_rate(self._optimizer, rate)
        self._clip()
        self._optimizer.step()
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def _clip(self) -> None:
        """Every model's gradients by its own norm, as `clip_grad_norm_` does for one."""
        gradients = [each.grad for each in self._parameters.values() if each.grad is not None]
        squares = torch.stack([each.reshape(self.size, -1).square().sum(dim=1) for each in gradients])
        factors = (self.study.clip / (squares.sum(dim=0).sqrt() + 1e-6)).clamp(max=1.0)
        for each in gradients:
            each.mul_(factors.view(-1, *[1] * (each.dim() - 1)))
