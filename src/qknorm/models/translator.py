"""The encoder-decoder: source token ids in, scores of target token ids out."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qknorm.attention import KeyValueCache, MultiheadAttention, Visibility, initial_scale, matched_scale
from qknorm.attention.dropout import Dropout
from qknorm.config import Model
from qknorm.models import fused_translator
from qknorm.models.layers import (
    FeedForward,
    LayerSettings,
    Residual,
    WordVectors,
    init_weights,
    look_up,
    make_attention,
    make_norm,
    sinusoids,
)
from qknorm.specials import PAD, UNKNOWN


class Memory(NamedTuple):
    """What the decoder reads of the source: encoder states (b, s, width), and which of them are real (b, 1, 1, s)."""

    states: Tensor
    real: Tensor

    @property
    def visibility(self) -> Visibility:
        """Every source has its end at least, so that no query is left without a key."""
        return Visibility(self.real, None)


@dataclass
class DecoderCache:
    """What the decoder keeps from step to step: a growing and a fixed cache for every layer, and tables of words."""

    layers: int
    own: list[KeyValueCache] = field(init=False)
    across: list[KeyValueCache] = field(init=False)
    words: dict[str, Tensor] = field(default_factory=dict)
    position: Tensor | None = None
    """The vector (1, width) of the one position that all next tokens stand at, where someone has looked it up."""

    def __post_init__(self) -> None:
        self.own = [KeyValueCache() for _ in range(self.layers)]
        self.across = [KeyValueCache(fixed=True) for _ in range(self.layers)]

    @property
    def length(self) -> int:
        """Tokens decoded so far."""
        return self.own[0].length


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward."""

    def __init__(self, settings: Model, scale_init: float | None) -> None:
        super().__init__()
        self.attention = make_attention(settings, scale_init, positions=True)
        self.feed_forward = FeedForward(settings)
        self.around_attention, self.around_feed_forward = Residual(settings), Residual(settings)

    def forward(self, x: Tensor, visibility: Visibility) -> Tensor:
        x = self.around_attention(x, lambda y: self.attention(y, y, y, visibility=visibility, need_weights=False)[0])
        out: Tensor = self.around_feed_forward(x, self.feed_forward)
        return out


class DecoderLayer(nn.Module):
    """Self-attention over what was produced, cross-attention over the source, then feed-forward."""

    def __init__(self, settings: Model, scale_init: float | None) -> None:
        super().__init__()
        self.attention = make_attention(settings, scale_init, positions=True)
        self.cross_attention = make_attention(settings, scale_init, positions=False)
        self.feed_forward = FeedForward(settings)
        self.around_attention, self.around_feed_forward = Residual(settings), Residual(settings)
        self.around_cross_attention = Residual(settings)

    def forward(
        self, x: Tensor, memory: Memory, own: KeyValueCache | None = None, across: KeyValueCache | None = None
    ) -> Tensor:
        # targets are padded at their end, so that no real position ever sees padding through the causal mask
        x = self.around_attention(
            x, lambda y: self.attention(y, y, y, need_weights=False, is_causal=True, cache=own)[0]
        )
        x = self.around_cross_attention(x, lambda y: self._read(y, memory, across))
        out: Tensor = self.around_feed_forward(x, self.feed_forward)
        return out

    def _read(self, y: Tensor, memory: Memory, across: KeyValueCache | None) -> Tensor:
        # the hypotheses of a beam read one memory: they stand side by side as queries, and nothing is copied
        queries = y.reshape(len(memory.states), -1, y.shape[-1])
        read: Tensor = self.cross_attention(
            queries,
            memory.states,
            memory.states,
            visibility=memory.visibility,
            need_weights=False,
            cache=across,
        )[0]
        return read.reshape(y.shape)


class Translator(nn.Module):
    """Encoder and decoder with every part of the paper's recipe as a setting.

    `allowed` marks the types that may be produced (all of them where it is not given). `scale_init` is the start of
    every attention's scale; `start_of_scale` works it out from the settings and the training lengths.
    """

    allowed: Tensor
    positions: Tensor

    def __init__(
        self, vocabulary: int, settings: Model, *, scale_init: float | None = None, allowed: Tensor | None = None
    ) -> None:
        super().__init__()
        self.vocabulary, self.settings, self.scale_init = vocabulary, settings, scale_init
        self.words = WordVectors(vocabulary, settings)
        self.target_words = None if settings.tie == "all" else WordVectors(vocabulary, settings)
        self.output_words = WordVectors(vocabulary, settings) if settings.tie == "none" else None
        self.output_bias = nn.Parameter(torch.zeros(vocabulary))
        self.languages = nn.Parameter(torch.empty(2, settings.width)) if settings.language_vectors else None
        self.dropout = Dropout(settings.dropout.embedding)
        self.encoder = nn.ModuleList(EncoderLayer(settings, scale_init) for _ in range(settings.encoder_layers))
        self.decoder = nn.ModuleList(DecoderLayer(settings, scale_init) for _ in range(settings.decoder_layers))
        pre = settings.norm_position == "pre"
        self.encoder_norm: nn.Module = make_norm(settings) if pre else nn.Identity()
        self.decoder_norm: nn.Module = make_norm(settings) if pre else nn.Identity()
        self.register_buffer(
            "allowed", torch.ones(vocabulary, dtype=torch.bool) if allowed is None else allowed.clone()
        )
        self.register_buffer("positions", self._position_table(256), persistent=False)
        self._outgrown: list[Tensor] = []
        self._compiled: dict[type[nn.Module], Callable[..., Tensor]] = {}
        init_weights(self, settings)
        if self.languages is not None:
            nn.init.normal_(self.languages, std=settings.width**-0.5)

    def encode(self, source: Tensor) -> Memory:
        """Reads source ids (b, s), padded with 0 at the end."""
        real = (source != PAD)[:, None, None, :]
        if (run := fused_translator.run_for(self)) is not None:
            return Memory(fused_translator.encode(self, run, source, Visibility(real, None)), real)
        x = self._embed(source, self.words.table(), side=0)
        for layer in self.encoder:
            x = self._run(layer, x, Visibility(real, None))
        return Memory(self.encoder_norm(x), real)

    def decode(self, target: Tensor, memory: Memory, cache: DecoderCache | None = None) -> Tensor:
        """States (b, t, width) after reading target ids (b, t), which with a cache follow on what it has seen."""
        if (run := fused_translator.run_for(self)) is not None:
            return fused_translator.decode(self, run, target, memory, cache)
        x = self._embed(target, self._table("target", cache), side=1, cache=cache)
        for i, layer in enumerate(self.decoder):
            x = self._run(layer, x, memory) if cache is None else layer(x, memory, cache.own[i], cache.across[i])
        out: Tensor = self.decoder_norm(x)
        return out

    def score(self, states: Tensor, cache: DecoderCache | None = None) -> Tensor:
        """Logits over the vocabulary; −∞ for types that may not be produced."""
        words = self._table("output", cache).to(states.dtype)
        bias = self.output_bias.to(states.dtype).masked_fill(~self.allowed, -torch.inf)  # a pass less over the logits
        if states.is_cuda and self.vocabulary % 8:  # tensor cores want whole eights
            missing = -self.vocabulary % 8
            words, bias = F.pad(words, (0, 0, 0, missing)), F.pad(bias, (0, missing))
        return F.linear(states, words, bias)[..., : self.vocabulary]

    def _table(self, which: str, cache: DecoderCache | None) -> Tensor:
        """The word vectors of the target or the output; while decoding they are worked out once."""
        if cache is not None and which in cache.words:
            return cache.words[which]
        table = self.words_of(which).table()
        if cache is not None:
            cache.words[which] = table
        return table

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits (b, t, vocabulary) of the token after each target token."""
        return self.score(self.decode(self._drop_words(target), self.encode(self._drop_words(source))))

    def words_of(self, which: str) -> WordVectors:
        """The word vectors of the `target` or the `output`."""
        return (self.output_words if which == "output" else None) or self.target_words or self.words

    def states_and_table(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """What logits are made of, for a loss that makes them itself: states, and the word vectors of the output.

        Without `allowed` and the output's bias; the table may have rows of zeros at its end.
        """
        states = self.decode(self._drop_words(target), self.encode(self._drop_words(source)))
        run = fused_translator.run_for(self)
        return states, self.words_of("output").table() if run is None else fused_translator.output_table(self, run)

    def scales(self) -> dict[str, float]:
        """The scale g of every attention (the mean where it has one a head), by name; dot products have none."""
        named = {name: each.norm for name, each in self.attentions().items() if each.norm.kind != "none"}
        return {name: float(norm.scale.detach().float().mean()) for name, norm in named.items()}

    def attentions(self) -> dict[str, MultiheadAttention]:
        """Every attention module, by what it is: encoder.0.self, decoder.0.self, decoder.0.cross, …"""
        kinds = {"attention": "self", "cross_attention": "cross"}
        return {
            f"{stack}.{kinds[part]}": module
            for name, module in self.named_modules()
            if isinstance(module, MultiheadAttention)
            for stack, _, part in [name.rpartition(".")]
        }

    def compile_layers(self) -> None:
        """Compiles one encoder and one decoder layer, for all of their kind and all shapes, for use in training."""
        self._compiled = {
            EncoderLayer: torch.compile(EncoderLayer.forward, dynamic=True),
            DecoderLayer: torch.compile(DecoderLayer.forward, dynamic=True),
        }

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Within it, layers run as they are written, so that hooks see into them."""
        compiled, self._compiled = self._compiled, {}
        try:
            yield
        finally:
            self._compiled = compiled

    def _run(self, layer: nn.Module, *inputs: object) -> Tensor:
        compiled = self._compiled.get(type(layer)) if self.training else None
        out: Tensor = layer(*inputs) if compiled is None else compiled(layer, *inputs)
        return out

    def _drop_words(self, ids: Tensor) -> Tensor:
        if not self.training or not self.settings.dropout.word:
            return ids
        dropped = torch.rand(ids.shape, device=ids.device) < self.settings.dropout.word
        return ids.masked_fill(dropped & (ids != PAD), UNKNOWN)

    def _embed(self, ids: Tensor, table: Tensor, side: int, cache: DecoderCache | None = None) -> Tensor:
        x = look_up(table, ids) * math.sqrt(self.settings.width)
        if self.languages is not None:
            x = x + self.languages[side]
        if (positions := self._positions_of(ids, cache)) is not None:
            x = x + positions
        out: Tensor = self.dropout(x)
        return out

    def ensure_positions(self, length: int) -> None:
        """Makes the table of positions reach so far."""
        if length > len(self.positions):
            self._outgrown.append(self.positions)  # recorded steps go on reading it where it is
            self.positions = self._position_table(2 * length).to(self.positions)

    def _positions_of(self, ids: Tensor, cache: DecoderCache | None) -> Tensor | None:
        """What is added to ids (b, t) for where they stand; None where attention is told instead."""
        if self.settings.positions == "rotary":
            return None
        if cache is not None and cache.position is not None:
            return cache.position
        return self._positions_from(0 if cache is None else cache.length, ids.shape[1])

    def _positions_from(self, past: int, length: int) -> Tensor:
        self.ensure_positions(past + length)
        return self.positions[past : past + length]

    def _position_table(self, length: int) -> Tensor:
        return sinusoids(length, self.settings.width, slip=self.settings.positions == "sinusoid-slip")


def start_of_scale(settings: LayerSettings, length: float) -> float | None:
    """Where every scale starts: the setting, or by the paper from this length of training sentences; None for √d."""
    attention = settings.attention
    if attention.qk_norm != "lp":
        return attention.scale_init
    start = initial_scale(max(length, 2)) if attention.scale_init is None else attention.scale_init
    if attention.scale_matched:
        return matched_scale(start, attention.p, settings.width // settings.heads)
    return start
