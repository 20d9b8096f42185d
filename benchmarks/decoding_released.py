"""The search of the paper's released code, restated by us: how it keeps, copies and gathers what it has computed.

Keys and values grow by concatenation and are kept unnormalised, so that all of them are normalised anew at every step;
the memory's are repeated for every hypothesis; and every step gathers all of them, those of the memory too, in the
order of the hypotheses that go on. Attention is an explicit softmax in float32.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from training_peers import ReleasedAttention, ReleasedModel


class ReleasedStepper:
    """A `ReleasedModel` in the midst of decoding b sentences, k hypotheses each."""

    def __init__(self, model: ReleasedModel, source: Tensor, beam: int) -> None:
        self._model, self._beam = model, beam
        self._table = F.normalize(model.embedding, dim=-1)
        hidden = (source == 0)[:, None, None, :]
        states = self._encode(source, hidden)
        self._hidden = hidden.repeat_interleave(beam, 0)
        self._layers = model.layers[model.encoder_layers :]
        across = [layer["attention"][1] for layer in self._layers]
        self._across = [[f(states).repeat_interleave(beam, 0) for f in (each.k, each.v)] for each in across]
        self._own: list[list[Tensor]] = [[] for _ in self._layers]
        self._length = 0

    @torch.no_grad()
    def step(self, tokens_bk: Tensor) -> Tensor:
        model = self._model
        y = self._table[tokens_bk.reshape(-1, 1)] * math.sqrt(model.width) + model.positions[self._length]
        for number, layer in enumerate(self._layers):
            own, (attention, cross) = self._own[number], layer["attention"]
            z = layer["norms"][0](y)
            new = [attention.k(z), attention.v(z)]
            own[:] = [torch.cat(pair, 1) for pair in zip(own, new, strict=True)] if own else new
            y = y + _attend(attention, z, *own, None)
            y = y + _attend(cross, layer["norms"][1](y), *self._across[number], self._hidden)
            y = y + layer["ffn"](layer["norms"][2](y))
        self._length += 1
        logits = F.linear(model.final[1](y), self._table, model.bias)
        return torch.log_softmax(logits, dim=-1).view(*tokens_bk.shape, -1)

    def reorder(self, origin_bk: Tensor) -> None:
        first = torch.arange(len(origin_bk), device=origin_bk.device).unsqueeze(1) * self._beam
        self._gather((first + origin_bk).flatten())

    def keep(self, sentences: Tensor) -> None:
        slots = torch.arange(self._beam, device=sentences.device)
        self._gather((sentences.unsqueeze(1) * self._beam + slots).flatten())

    def _gather(self, rows: Tensor) -> None:
        for kept in (*self._own, *self._across):
            kept[:] = [each[rows] for each in kept]
        self._hidden = self._hidden[rows]

    def _encode(self, source: Tensor, hidden: Tensor) -> Tensor:
        model = self._model
        x = self._table[source] * math.sqrt(model.width) + model.positions[: source.shape[1]]
        for layer in model.layers[: model.encoder_layers]:
            z = layer["norms"][0](x)
            x = x + layer["attention"][0](z, z, hidden)
            x = x + layer["ffn"](layer["norms"][1](x))
        states: Tensor = model.final[0](x)
        return states


def _attend(attention: ReleasedAttention, x: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """`ReleasedAttention` over keys and values that are projected already."""
    q, k, v = (y.view(len(y), -1, attention.heads, y.shape[-1] // attention.heads).transpose(1, 2)
               for y in (attention.q(x), k, v))  # fmt: skip
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    logits = attention.g * q @ k.transpose(-2, -1)
    weights = (logits if mask is None else logits.masked_fill(mask, -1e9)).softmax(-1)
    out: Tensor = attention.out((weights @ v).transpose(1, 2).reshape(x.shape))
    return out
