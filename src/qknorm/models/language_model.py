"""The language model: token ids in, scores of the token after each of them out."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qknorm.attention import KeyValueCache, MultiheadAttention
from qknorm.attention.dropout import Dropout
from qknorm.config import LanguageModel as Settings
from qknorm.models import fused_language_model
from qknorm.models.layers import FeedForward, Residual, look_up, make_attention, make_norm
from qknorm.models.translator import start_of_scale

INIT_STD = 0.02


class Layer(nn.Module):
    """Self-attention over what came before, then feed-forward."""

    def __init__(self, settings: Settings, scale_init: float | None) -> None:
        super().__init__()
        self.attention = make_attention(settings, scale_init, positions=True)
        self.feed_forward = FeedForward(settings)
        self.around_attention, self.around_feed_forward = Residual(settings), Residual(settings)

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        x = self.around_attention(
            x, lambda y: self.attention(y, y, y, need_weights=False, is_causal=True, cache=cache)[0]
        )
        out: Tensor = self.around_feed_forward(x, self.feed_forward)
        return out


class LanguageModel(nn.Module):
    """A stack of decoder layers over token ids of one text.

    Every attention's scale starts at `scale_init`; if not given, where the settings say: by the paper's formula from
    the context.
    """

    def __init__(self, vocabulary: int, settings: Settings, *, scale_init: float | None = None) -> None:
        super().__init__()
        if vocabulary < 1:
            raise ValueError(f"a vocabulary has at least one type, got {vocabulary}")
        self.vocabulary, self.settings = vocabulary, settings
        scale_init = start_of_scale(settings, settings.context) if scale_init is None else scale_init
        self.words = nn.Parameter(torch.empty(vocabulary, settings.width))
        self.positions: nn.Parameter | None = None
        if settings.positions == "learned":
            self.positions = nn.Parameter(torch.empty(settings.context, settings.width))
        self.dropout = Dropout(settings.dropout.embedding)
        self.decoder = nn.ModuleList(Layer(settings, scale_init) for _ in range(settings.layers))
        self.norm = make_norm(settings)
        self.output_words = None if settings.tie else nn.Parameter(torch.empty(vocabulary, settings.width))
        self._compiled: Callable[..., Tensor] | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all matrices from N(0, 0.02²); biases are 0.

        Those that write to the residual stream are smaller by √(2 · layers), the number of writers, so that the
        stream starts at one size whatever the depth.
        """
        for table in (self.words, self.positions, self.output_words):
            if table is not None:
                nn.init.normal_(table, std=INIT_STD)
        writer_std = INIT_STD / math.sqrt(2 * self.settings.layers)
        for layer in self.decoder:
            assert isinstance(layer, Layer)
            attention, feed_forward = layer.attention, layer.feed_forward
            assert attention.in_proj_weight is not None
            nn.init.normal_(attention.in_proj_weight, std=INIT_STD)
            nn.init.normal_(feed_forward.widen.weight, std=INIT_STD)
            for writer in (attention.out_proj, feed_forward.narrow):
                nn.init.normal_(writer.weight, std=writer_std)
            for bias in (
                attention.in_proj_bias,
                attention.out_proj.bias,
                feed_forward.widen.bias,
                feed_forward.narrow.bias,
            ):
                if bias is not None:
                    nn.init.zeros_(bias)

    def forward(self, ids_bt: Tensor, cache: Sequence[KeyValueCache] | None = None) -> Tensor:
        """Logits (b, t, vocabulary) of the token after each id; with a cache the ids follow on what it has seen."""
        return F.linear(self._states(ids_bt, cache), self._output_table)

    def states_and_table(self, ids_bt: Tensor) -> tuple[Tensor, Tensor]:
        """The states that the logits come from, and the vectors that they are multiplied by."""
        return self._states(ids_bt, None), self._output_table

    @property
    def _output_table(self) -> Tensor:
        return self.words if self.output_words is None else self.output_words

    def _states(self, ids_bt: Tensor, cache: Sequence[KeyValueCache] | None) -> Tensor:
        past = 0 if cache is None else cache[0].length
        reach = past + ids_bt.shape[1]
        if reach > self.settings.context:
            raise ValueError(f"{reach} tokens are more than the model's context of {self.settings.context}")
        run = fused_language_model.run_for(self) if cache is None else None
        if run is not None:
            return fused_language_model.states(self, run, ids_bt)
        x = look_up(self.words, ids_bt)
        if self.positions is not None:
            x = x + self.positions[past:reach]
        x = self.dropout(x)
        for number, layer in enumerate(self.decoder):
            x = self._run(layer, x) if cache is None else layer(x, cache[number])
        states: Tensor = self.norm(x)
        return states

    def new_cache(self) -> list[KeyValueCache]:
        """An empty cache for `forward`, one part for every layer."""
        return [KeyValueCache() for _ in self.decoder]

    def attentions(self) -> dict[str, MultiheadAttention]:
        """Every attention module, by what it is: decoder.0.self, decoder.1.self, …"""
        named: dict[str, MultiheadAttention] = {}
        for number, layer in enumerate(self.decoder):
            assert isinstance(layer, Layer)
            named[f"decoder.{number}.self"] = layer.attention
        return named

    def scales(self) -> dict[str, float]:
        """The scale g of every attention (the mean where it has one a head), by name; dot products have none."""
        named = {name: each.norm for name, each in self.attentions().items() if each.norm.kind != "none"}
        return {name: float(norm.scale.detach().float().mean()) for name, norm in named.items()}

    def compile_layers(self) -> None:
        """Compiles one layer, for all of them, for use in training."""
        self._compiled = torch.compile(Layer.forward, dynamic=True)

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Within it, layers run as they are written, so that hooks see into them."""
        compiled, self._compiled = self._compiled, None
        try:
            yield
        finally:
            self._compiled = compiled

    def _run(self, layer: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = layer(x) if self._compiled is None or not self.training else self._compiled(layer, x)
        return out
