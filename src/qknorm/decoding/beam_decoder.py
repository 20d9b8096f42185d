"""A translator that decodes in buffers that stay where they are, so that a step can be recorded and replayed.

The keys and values of all hypotheses of a sentence stand side by side, and a mask says which of them are whose. So when
hypotheses change places only the mask follows: no key is ever copied. `ModelStepper` is the plain reference.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from qknorm.attention import KeyValueCache, MultiheadAttention, QKNorm, Visibility
from qknorm.attention.dropout import Dropout
from qknorm.models.fused_run import is_as_made, kernels_apply, use_fused, whole
from qknorm.models.layers import FeedForward, Residual, ScaleNorm, WordVectors
from qknorm.models.translator import DecoderCache, DecoderLayer, Memory, Translator
from qknorm.specials import START

KNOWN = (
    DecoderLayer, MultiheadAttention, QKNorm, FeedForward, Residual, ScaleNorm, WordVectors, Dropout,
    nn.ModuleList, nn.Linear, nn.LayerNorm, nn.RMSNorm,
)  # fmt: skip
"""What a decoder is made of that fused steps know: they do the work of some of these without calling them."""


class Extent(NamedTuple):
    """How much buffers hold: sentences, hypotheses of each, source tokens, and tokens of a hypothesis."""

    sentences: int
    beam: int
    source_length: int
    room: int


class Part(NamedTuple):
    """Sentences that are read together, after those of the part before and until this one, cut to this length."""

    until: int
    length: int


class Counters:
    """Where the next step stands, kept on the device, so that steps count on by themselves."""

    def __init__(self, beam: int, device: torch.device) -> None:
        slots = torch.arange(beam)
        self._first = torch.cat([torch.tensor([0, 1]), -slots, slots]).to(device)
        self._increments = torch.cat([torch.ones(2 + beam, dtype=torch.long), torch.full((beam,), beam)]).to(device)
        self._now = self._first.clone()
        self.position, self.length = self._now[:1], self._now[1:2]
        self.past_k, self.places_k = self._now[2 : 2 + beam], self._now[2 + beam :]

    def restart(self) -> None:
        """Back to the first step."""
        self._now.copy_(self._first)

    def count_on(self) -> None:
        """The step is over."""
        self._now.add_(self._increments)


class BeamCache(KeyValueCache):
    """Keys and values of a sentence's hypotheses side by side: place = position · beam + slot."""

    def __init__(self, keys: Tensor, values: Tensor, counters: Counters, mask_bkp: Tensor) -> None:
        super().__init__()
        self._keys, self._values = keys, values
        self._places_k = counters.places_k
        # the hypotheses are queries side by side, each counted on from the one before; yet all stand at one position
        self.length = counters.past_k  # type: ignore[assignment]
        self._mask_b1kp = mask_bkp.unsqueeze(1)

    @property
    def visibility(self) -> Visibility | None:
        """To each hypothesis what led to it."""
        return Visibility(self._mask_b1kp, None)

    def append(self, k_bhsd: Tensor, v_bhsd: Tensor) -> tuple[Tensor, Tensor]:
        assert self._keys is not None and self._values is not None
        self._keys.index_copy_(2, self._places_k, k_bhsd.to(self._keys.dtype))
        self._values.index_copy_(2, self._places_k, v_bhsd.to(self._values.dtype))
        return self._keys, self._values


class _Step(nn.Module):
    """A step of the decoder as one call, so that other tensors can stand in for its weights."""

    def __init__(self, model: Translator) -> None:
        super().__init__()
        self.model = model

    def forward(self, last_bk: Tensor, memory: Memory, cache: DecoderCache) -> Tensor:
        states = self.model.decode(last_bk, memory, cache)
        if "bias" not in cache.words:
            return self.model.score(states, cache)
        return F.linear(states, cache.words["output"], cache.words["bias"])[..., : self.model.vocabulary]


class BeamDecoder:
    """A model in the midst of decoding, all of it in buffers of one extent."""

    def __init__(self, model: Translator, extent: Extent, precision: torch.dtype) -> None:
        device = next(model.parameters()).device
        heads, head_dim = _heads_of(model)
        layers, (sentences, beam, source_length, room) = len(model.decoder), extent
        self._model, self._extent, self._precision = model, extent, precision

        def buffer(*shape: int) -> Tensor:
            return torch.zeros(shape, device=device, dtype=precision)

        self.source = torch.zeros(sentences, source_length, dtype=torch.long, device=device)
        self._own = buffer(2 * layers, sentences, heads, room * beam, head_dim)
        self._across = buffer(2 * layers, sentences, heads, source_length, head_dim)
        # added to logits, not boolean: PyTorch would make that of a boolean one in each layer
        self.mask_bkp = buffer(sentences, beam, room * beam)
        self._real = buffer(sentences, 1, 1, source_length)
        self._diagonal = torch.full((beam, beam), -math.inf, device=device, dtype=precision).fill_diagonal_(0.0)
        self._words: dict[str, Tensor] = {}
        self._seed = torch.zeros(1, dtype=torch.long, device=device)  # of nothing: no random number may be drawn
        self._step = _Step(model)
        self._halves = self._make_halves()
        model.ensure_positions(max(room, source_length))

    @staticmethod
    def bytes_for(model: Translator, extent: Extent, precision: torch.dtype) -> int:
        """About how much memory this extent takes: its buffers, and what comes and goes in its largest recording."""
        sentences, beam, source_length, room = extent
        heads, head_dim = _heads_of(model)
        keys = 2 * len(model.decoder) * heads * head_dim * (beam * room + source_length)
        buffers = precision.itemsize * (keys + beam * beam * room)
        reading = precision.itemsize * source_length * (6 * model.settings.width + 2 * model.settings.feed_forward)
        stepping = (2 * precision.itemsize + 8) * beam * model.vocabulary  # logits, masked, in float32, and their logs
        return sentences * (buffers + max(reading, stepping))

    def read_source(self, *parts: Part) -> None:
        """Encodes the source, and makes everything ready for the first step.

        Parts, if any are given, cover all sentences; beyond a part's length there must be nothing but padding.
        """
        words: dict[str, Tensor] = {}
        self._real.fill_(-math.inf)
        first = 0
        for until, length in parts or [Part(*self.source.shape)]:
            self._read_part(slice(first, until), length, words)
            first = until
        self._keep_words(words)
        for name, weight in self._step.named_parameters():
            if name in self._halves:
                self._halves[name].copy_(weight)
        self.mask_bkp.fill_(-math.inf)

    def _read_part(self, which: slice, length: int, words: dict[str, Tensor]) -> None:
        """Keys and values of some sentences, and the tables of words where they are not there yet."""
        model, cache = self._model, DecoderCache(len(self._model.decoder), words=words)
        source = self.source[which, :length].contiguous()
        with self._autocast():
            memory = model.encode(source)
            start = torch.full((len(source), 1), START, device=source.device)
            states = model.decode(start, memory, cache)  # fills the caches across
            if "output" not in words:
                model.score(states, cache)
        for i, across in enumerate(cache.across):
            for j, stored in enumerate(across.read()):
                kept = self._across[2 * i + j, which]
                kept[:, :, :length].copy_(stored)
                kept[:, :, length:].zero_()  # what is there may not be a number, which would spoil all though hidden
        self._real[which, ..., :length].masked_fill_(memory.real, 0.0)

    def step(self, last_bk: Tensor, room: int, counters: Counters) -> Tensor:
        """Log-probabilities (b, k, v) of what follows for the first b sentences, within a part of the room."""
        return torch.log_softmax(self.logits(last_bk, room, counters).float(), dim=-1)

    def logits(self, last_bk: Tensor, room: int, counters: Counters) -> Tensor:
        """The same as logits, in the precision that they are computed in."""
        sentences, places = len(last_bk), room * self._extent.beam
        mask_bkp = self.mask_bkp[:sentences, :, :places]
        mask_bkp.index_copy_(2, counters.places_k, self._diagonal.expand(sentences, -1, -1))
        cache = DecoderCache(len(self._model.decoder), words=self._words)
        if self._model.settings.positions != "rotary":
            cache.position = self._model.positions.index_select(0, counters.position)
        own, across = self._own[:, :sentences, :, :places], self._across[:, :sentences]
        cache.own = [BeamCache(own[i], own[i + 1], counters, mask_bkp) for i in range(0, len(own), 2)]
        for i, fixed in enumerate(cache.across):
            fixed.adopt(across[2 * i], across[2 * i + 1])
        memory = Memory(torch.empty(sentences, 0, device=last_bk.device), self._real[:sentences])
        with self._autocast(), self._fused():
            logits: Tensor = functional_call(self._step, self._halves, (last_bk, memory, cache))
        return logits

    def reorder(self, origin_bk: Tensor, room: int) -> None:
        """Hypothesis j of sentence i becomes what hypothesis origin[i, j] of the same sentence was."""
        mask_bkp = self.mask_bkp[: len(origin_bk), :, : room * self._extent.beam]
        mask_bkp.copy_(mask_bkp.gather(1, origin_bk[:, :, None].expand_as(mask_bkp)))

    def move(self, to: Tensor, origins: Tensor, length: int) -> None:
        """Sentences take the places of others; `length` tokens have been decoded."""
        places = length * self._extent.beam
        self._own[:, to, :, :places] = self._own[:, origins, :, :places]
        self._across[:, to] = self._across[:, origins]
        self.mask_bkp[to], self._real[to] = self.mask_bkp[origins], self._real[origins]

    def wipe(self) -> None:
        """Forgets all keys and values: one that is not a number would spoil even those that do not see it."""
        self._own.zero_()

    @property
    def _is_half(self) -> bool:
        return self._precision.itemsize < 4

    def _make_halves(self) -> dict[str, Tensor]:
        """Room for the weights that autocast would cast in every step; they are cast once for each source instead."""
        return {
            name: torch.empty_like(weight, dtype=self._precision, requires_grad=False)
            for name, weight in self._step.named_parameters()
            if self._is_half and name.startswith("model.decoder.") and "norm" not in name
        }

    def _keep_words(self, tables: dict[str, Tensor]) -> None:
        """The word vectors in force; those of the output, and its bias, as the product of a step wants them.

        In its precision, with rows added up to a whole group; `Translator.score` is the reference, and what a model
        with another one has is left to that.
        """
        model, tables = self._model, dict(tables)
        plain = getattr(model.score, "__func__", None) is Translator.score
        if plain:
            tables["bias"] = model.output_bias.masked_fill(~model.allowed, -math.inf)
        for name, table in tables.items():
            if name not in self._words:
                rows = whole(len(table)) if plain and name != "target" else len(table)
                dtype = self._precision if self._is_half and name != "target" else table.dtype
                self._words[name] = table.new_zeros(rows, *table.shape[1:], dtype=dtype)
            self._words[name][: len(table)].copy_(table)

    def _fused(self) -> AbstractContextManager[object]:
        """Within it, layers are fused where that is possible; another kind of model knows best what its layers do.

        So does one in which somebody has replaced a part, or hooked on to it.
        """
        model, device = self._model, self.source.device
        if not kernels_apply(device) or type(model) is not Translator or model.training:
            return nullcontext()
        parts = [model.dropout, model.words_of("target"), model.decoder_norm, *model.decoder.modules()]
        if model.output_bias.dtype != torch.float32 or not all(is_as_made(part, *KNOWN) for part in parts):
            return nullcontext()
        return use_fused(device, layers=True, seed=self._seed)

    def _autocast(self) -> torch.autocast:
        # the cache of cast weights must not outlive a recording
        return torch.autocast(self.source.device.type, self._precision, enabled=self._is_half, cache_enabled=False)


def _heads_of(model: Translator) -> tuple[int, int]:
    """How many heads keys have, and their dimension."""
    attention = next(iter(model.attentions().values()))
    return attention.num_kv_heads, attention.head_dim
