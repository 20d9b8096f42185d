"""A translator whose linear layers compute in 8-bit integers, for translating on a CPU.

Weights are rounded once, each output channel by a scale of its own; inputs at run time, each row by its own, so that
a row does not depend on what stands beside it. Products are summed in 32-bit integers; norms, attention
and all that is added stay in float32.
"""

import functools
from typing import NoReturn

import torch
from torch import Tensor, nn

from qknorm.attention import KeyValueCache, MultiheadAttention
from qknorm.errors import InputError
from qknorm.models.layers import FeedForward
from qknorm.models.translator import DecoderCache, Translator

KINDS = ("int8",)
INPUT_LEVELS = 127
WEIGHT_LEVELS = (127, 63)
"""Largest integers for weights, best first: processors without VNNI add pairs of products in 16 bits, and 63 fits."""
SMALLEST = 1e-30
"""Rows are taken to be at least so large, so that one of zeros is not divided by zero."""


def quantize(model: Translator) -> "QuantizedTranslator":
    """A copy of a model on the CPU for translating only, its linear layers and output projection in int8.

    One that is so already is given back as it is.
    """
    if isinstance(model, QuantizedTranslator):
        return model
    device = next(model.parameters()).device
    if device.type != "cpu":
        raise InputError(f"int8 is for the CPU, and this model is on {device}; use --device cpu, or leave int8 out")
    return QuantizedTranslator(model)


@functools.cache
def weight_levels() -> int:
    """The largest integer for weights at which this processor's products of int8 matrices are exact."""
    if not hasattr(torch, "_int_mm"):
        raise InputError(f"PyTorch {torch.__version__} cannot multiply int8 matrices; update it, or leave int8 out")
    inputs = torch.full((3, 64), INPUT_LEVELS, dtype=torch.int8)
    inputs[1], inputs[2, ::2] = -INPUT_LEVELS, -INPUT_LEVELS
    for levels in WEIGHT_LEVELS:
        weights = torch.full((64, 3), levels, dtype=torch.int8)
        weights[:, 1], weights[::2, 2] = -levels, -levels
        try:
            product = torch._int_mm(inputs, weights)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"this build of PyTorch multiplies no int8 matrices ({reason}); leave int8 out") from None
        if torch.equal(product.long(), inputs.long() @ weights.long()):
            return levels
    raise InputError("products of int8 matrices are not exact on this processor; leave int8 out")


class QuantizedLinear(nn.Module):
    """x ↦ x Wᵀ + bias, W as int8."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        weight = weight.detach().float()
        step = (weight.abs().amax(1) / weight_levels()).clamp(min=SMALLEST)
        integers = (weight / step.unsqueeze(1)).round_().to(torch.int8)
        # (in, out), as the product reads it; a copy even where it would be none, for strides of one column mislead it
        self.register_buffer("weight", integers.t().clone(memory_format=torch.contiguous_format))
        self.register_buffer("scale", step / INPUT_LEVELS)
        self.register_buffer("bias", None if bias is None else bias.detach().float().clone())

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        largest = rows.abs().amax(1, keepdim=True).clamp_(min=SMALLEST)
        integers = (rows * (INPUT_LEVELS / largest)).round_().to(torch.int8)
        product = torch._int_mm(integers, self.weight).float().mul_(self.scale)
        out = product.mul_(largest) if self.bias is None else torch.addcmul(self.bias, product, largest)
        return out.view(*x.shape[:-1], self.weight.shape[1])

    def extra_repr(self) -> str:
        return f"in_features={self.weight.shape[0]}, out_features={self.weight.shape[1]}"


class QuantizedAttention(MultiheadAttention):
    """Attention with int8 projections; what it normalises and attends to is as in the module it is made of."""

    def __init__(self, attention: MultiheadAttention) -> None:
        super().__init__(
            attention.embed_dim,
            attention.num_heads,
            batch_first=True,
            device="meta",
            num_kv_heads=attention.num_kv_heads,
            rotary=attention.rotary,
            rotary_base=attention.rotary_base,
            backend=attention.backend,
        )
        self.norm = attention.norm
        self.in_proj_weight = self.in_proj_bias = None
        assert attention.in_proj_weight is not None  # our models have one width everywhere
        self.together = QuantizedLinear(attention.in_proj_weight, attention.in_proj_bias)
        self.apart = nn.ModuleList(QuantizedLinear(*attention._projection(i)) for i in range(3))
        self.out_proj = QuantizedLinear(attention.out_proj.weight, attention.out_proj.bias)  # type: ignore[assignment]

    def _project(
        self, query: Tensor, key: Tensor, value: Tensor, cache: KeyValueCache | None, lag: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        past = 0 if cache is None or cache.fixed else cache.length
        if cache is not None and cache.filled:
            q = self._place(self._heads(self.apart[0](query), self.num_heads), past + lag, keys=False)
            return q, *cache.read()
        if query is key and key is value:
            q, k, v = torch.split(self.together(query), self._split, dim=-1)
        else:
            q, k, v = (project(x) for project, x in zip(self.apart, (query, key, value), strict=True))
        q = self._place(self._heads(q, self.num_heads), past + lag, keys=False)
        k = self._place(self._heads(k, self.num_kv_heads), past, keys=True)
        v = self.norm.value(self._heads(v, self.num_kv_heads))
        return q, *((k, v) if cache is None else cache.append(k, v))


class QuantizedTranslator(Translator):
    """`Translator` for translating only: it is neither trained nor saved."""

    def __init__(self, model: Translator) -> None:
        with torch.device("meta"):
            super().__init__(model.vocabulary, model.settings)
        self.load_state_dict({name: value.detach().clone() for name, value in model.state_dict().items()}, assign=True)
        self.positions = model.positions.clone()
        for layer in [*self.encoder, *self.decoder]:
            for name, part in list(layer.named_children()):
                if isinstance(part, MultiheadAttention):
                    setattr(layer, name, QuantizedAttention(part))
                elif isinstance(part, FeedForward):
                    part.widen = QuantizedLinear(part.widen.weight, part.widen.bias)  # type: ignore[assignment]
                    part.narrow = QuantizedLinear(part.narrow.weight, part.narrow.bias)  # type: ignore[assignment]
        bias = self.output_bias.masked_fill(~self.allowed, -torch.inf)
        with torch.no_grad():
            self.output = QuantizedLinear(self._table("output", None), bias)
        self.requires_grad_(False).eval()

    def score(self, states: Tensor, cache: DecoderCache | None = None) -> Tensor:
        scores: Tensor = self.output(states)
        return scores

    def train(self, mode: bool = True) -> "QuantizedTranslator":
        """Only `eval` has a meaning here."""
        if mode:
            raise RuntimeError("a quantised model cannot be trained; train the one it was made of")
        super().train(mode)
        return self

    def state_dict(self, *args: object, **kwargs: object) -> NoReturn:
        """There is none: what a run keeps are the weights this model was made of."""
        raise RuntimeError("a quantised model is not saved; save the one it was made of and quantise when loading")
