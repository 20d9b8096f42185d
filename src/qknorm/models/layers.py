"""The parts that encoder and decoder share: norms, feed-forward, residual wiring, word vectors, positions."""

import math
from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qknorm.attention import MultiheadAttention, lp_normalize
from qknorm.attention.dropout import Dropout
from qknorm.config import Attention, Model
from qknorm.models.fused_run import current_run


class DropoutShares(Protocol):
    """What a sublayer drops in training."""

    @property
    def residual(self) -> float: ...
    @property
    def attention(self) -> float: ...
    @property
    def feed_forward(self) -> float: ...


class LayerSettings(Protocol):
    """What a layer must know of the settings of its model, whichever model that is."""

    @property
    def width(self) -> int: ...
    @property
    def feed_forward(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int | None: ...
    @property
    def attention(self) -> Attention: ...
    @property
    def norm(self) -> Literal["layer", "scale", "rms", "none"]: ...
    @property
    def norm_position(self) -> Literal["pre", "post"]: ...
    @property
    def positions(self) -> str: ...
    @property
    def rotary_order(self) -> Literal["before_norm", "after_norm"]: ...
    @property
    def activation(self) -> Literal["relu", "gelu", "swiglu"]: ...
    @property
    def biases(self) -> bool: ...
    @property
    def dropout(self) -> DropoutShares: ...


class ScaleNorm(nn.Module):
    """x · s/‖x‖₂ with one learned s, from √width on (Nguyen & Salazar 2019)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(math.sqrt(width)))

    def forward(self, x: Tensor) -> Tensor:
        return lp_normalize(x) * self.scale.to(x.dtype)


def make_norm(settings: LayerSettings) -> nn.Module:
    """The norm that stands around sublayers."""
    if settings.norm == "scale":
        return ScaleNorm(settings.width)
    if settings.norm == "rms":
        return nn.RMSNorm(settings.width, eps=1e-6)
    if settings.norm == "none":
        return nn.Identity()
    return nn.LayerNorm(settings.width, bias=settings.biases)


def make_attention(settings: LayerSettings, scale_init: float | None, *, positions: bool) -> MultiheadAttention:
    """One attention module: over its own input, where rotary `positions` make sense, or else across languages."""
    attention = settings.attention
    return MultiheadAttention(
        settings.width,
        settings.heads,
        dropout=settings.dropout.attention,
        bias=settings.biases,
        batch_first=True,
        num_kv_heads=settings.kv_heads,
        qk_norm=attention.qk_norm,
        p=attention.p,
        p_learned=attention.p_learned,
        scale_init=scale_init,
        scale_learned=attention.scale_learned,
        scale_per_head=attention.scale_per_head,
        normalize_values=attention.normalize_values,
        query_over="head" if positions else attention.cross_query_norm,
        rotary=settings.rotary_order if positions and settings.positions == "rotary" else "none",
    )


class FeedForward(nn.Module):
    """Two linear maps with an activation between, or SwiGLU's three."""

    def __init__(self, settings: LayerSettings) -> None:
        super().__init__()
        self.activation = settings.activation
        widened = settings.feed_forward * (2 if self.activation == "swiglu" else 1)
        self.widen = nn.Linear(settings.width, widened, bias=settings.biases)
        self.narrow = nn.Linear(settings.feed_forward, settings.width, bias=settings.biases)
        self.dropout = Dropout(settings.dropout.feed_forward)

    def forward(self, x: Tensor) -> Tensor:
        run = current_run()
        if run is not None and run.layers and self.training and self.activation in ("relu", "gelu"):
            from qknorm.models.fused_layers import bias_activation_dropout

            z, share = F.linear(x, self.widen.weight), self.dropout.p
            return self._narrowed(bias_activation_dropout(run, self.activation, z, self.widen.bias, share))
        if run is not None and run.layers and not self.training and self.activation == "relu":
            from qknorm.models.fused_layers import linear_relu

            if (at_once := linear_relu(x, self.widen)) is not None:
                return self._narrowed(at_once)
        hidden = self.widen(x)
        if self.activation == "swiglu":
            gate, hidden = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * hidden
        else:
            hidden = F.relu(hidden) if self.activation == "relu" else F.gelu(hidden)
        return self._narrowed(self.dropout(hidden))

    def _narrowed(self, hidden: Tensor) -> Tensor:
        narrowed: Tensor = self.narrow(hidden)
        return narrowed


class Residual(nn.Module):
    """x + dropout(sublayer(norm(x))), or norm(x + dropout(sublayer(x)))."""

    def __init__(self, settings: LayerSettings) -> None:
        super().__init__()
        self.norm = make_norm(settings)
        self.before = settings.norm_position == "pre"
        self.dropout = Dropout(settings.dropout.residual)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        added: Tensor = self.dropout(sublayer(self.norm(x) if self.before else x))
        total: Tensor = x + added if self.before else self.norm(x + added)
        return total


class WordVectors(nn.Module):
    """A table of word vectors; with FixNorm every row counts as its unit vector."""

    def __init__(self, vocabulary: int, settings: Model) -> None:
        super().__init__()
        self.fixnorm = settings.fixnorm
        self.weight = nn.Parameter(torch.empty(vocabulary, settings.width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The paper's starts."""
        if self.fixnorm:
            nn.init.uniform_(self.weight, -0.01, 0.01)
        else:
            nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def table(self) -> Tensor:
        """The vectors in force, one row a type."""
        return lp_normalize(self.weight) if self.fixnorm else self.weight


def look_up(table: Tensor, ids: Tensor) -> Tensor:
    """Rows of a table. On a GPU their gradients are added up where they belong, without sorting the ids first."""
    if table.is_cuda:
        return table.index_select(0, ids.flatten()).view(*ids.shape, -1)
    return F.embedding(ids, table)


def sinusoids(length: int, width: int, *, slip: bool = False) -> Tensor:
    """Fixed positions (length, width): sines in the first half, cosines in the second.

    With `slip` sines stand in both halves, as in the paper's released code.
    """
    half = (width + 1) // 2
    frequencies = 10_000 ** -(torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(length, dtype=torch.float64).unsqueeze(1) * frequencies
    return torch.cat([angles.sin(), angles.sin() if slip else angles.cos()], dim=1)[:, :width].float()


def init_weights(module: nn.Module, settings: Model) -> None:
    """Draws the weights of all attention and feed-forward layers under `module` as the settings say; biases are 0."""
    attention_std = math.sqrt(2 / (5 * settings.width))
    feed_forward_std = math.sqrt(2 / (settings.width + settings.feed_forward))
    for part in module.modules():
        if isinstance(part, MultiheadAttention):
            _draw([part.in_proj_weight, part.out_proj.weight], settings.init, attention_std)
            _zero([part.in_proj_bias, part.out_proj.bias])
        elif isinstance(part, FeedForward):
            _draw([part.widen.weight, part.narrow.weight], settings.init, feed_forward_std)
            _zero([part.widen.bias, part.narrow.bias])


def _draw(weights: list[Tensor | None], init: str, std: float) -> None:
    for weight in weights:
        assert weight is not None
        if init == "paper":
            nn.init.normal_(weight, std=std)
        else:
            nn.init.xavier_uniform_(weight)


def _zero(biases: list[Tensor | None]) -> None:
    for bias in biases:
        assert bias is not None
        nn.init.zeros_(bias)
