"""Decoding on a GPU without waiting for the host: each step is a CUDA graph, recorded once a shape and replayed.

The plain `ModelStepper` is the reference: it makes the first step, and the recordings run the same model code with
caches of fixed room in place of growing ones.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qknorm.attention import KeyValueCache, Visibility
from qknorm.attention.cache import moved_rows
from qknorm.decoding.graphs import ONE_RECORDING_AT_A_TIME
from qknorm.decoding.translate import ModelStepper
from qknorm.models.translator import DecoderCache, Memory, Translator

ROOM_STEP = 32
"""Rooms for tokens grow by so many: each step reads its whole room."""
SIZES = (1.0, 0.75, 0.5, 0.375, 0.25, 0.125, 0.0625, 0.03125, 0.0)
"""Shares of the sentences begun with that a batch shrinks to: few, so that recordings are used again."""


class Shape(NamedTuple):
    """What a recording is made for."""

    sentences: int
    beam: int
    source_length: int
    room: int


class RoomCache(KeyValueCache):
    """Keys and values in a room of fixed size, the newest put at a position that a tensor holds."""

    def __init__(self, keys: Tensor, values: Tensor, position: Tensor) -> None:
        super().__init__()
        self._keys, self._values = keys, values
        self.length = position  # type: ignore[assignment]
        places = torch.arange(keys.shape[2], device=keys.device)
        self._places = places.view(1, 1, 1, -1)

    @property
    def visibility(self) -> Visibility | None:
        """All places up to the position."""
        return Visibility(self._places <= self.length, None)

    def append(self, k_bhsd: Tensor, v_bhsd: Tensor) -> tuple[Tensor, Tensor]:
        assert self._keys is not None and self._values is not None
        position: Tensor = self.length  # type: ignore[assignment]
        self._keys.index_copy_(2, position, k_bhsd.to(self._keys.dtype))
        self._values.index_copy_(2, position, v_bhsd.to(self._values.dtype))
        return self._keys, self._values


class Recording:
    """The buffers that a recorded step reads and writes, and the graph over them."""

    def __init__(self, model: Translator, shape: Shape, precision: torch.dtype, words: dict[str, Tensor]) -> None:
        device = next(model.parameters()).device
        attention = model.decoder[0].attention
        heads, head_dim = attention.num_kv_heads, attention.head_dim  # type: ignore[union-attr]
        layers, rows = len(model.decoder), shape.sentences * shape.beam
        place = {"device": device, "dtype": precision}
        self.tokens = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.own = torch.zeros(2 * layers, rows, heads, shape.room, head_dim, **place)  # type: ignore[call-overload]
        self.across = torch.zeros(2 * layers, shape.sentences, heads, shape.source_length, head_dim, **place)  # type: ignore[call-overload]
        self.real = torch.ones(shape.sentences, 1, 1, shape.source_length, dtype=torch.bool, device=device)
        self._memory = Memory(torch.empty(shape.sentences, 0, device=device), self.real)
        self._cache = DecoderCache(layers, words=words)
        self._cache.own = [RoomCache(self.own[2 * i], self.own[2 * i + 1], self.position) for i in range(layers)]
        for i, cache in enumerate(self._cache.across):
            cache.append(self.across[2 * i], self.across[2 * i + 1])
            cache.adopt(self.across[2 * i], self.across[2 * i + 1])
        self.log_p = torch.empty(0)
        self._model, self._precision, self._shape = model, precision, shape
        self._graph: torch.cuda.CUDAGraph | None = None
        model.ensure_positions(shape.room)

    def record(self, pool: Any) -> None:
        """Records one step; without this, `replay` computes it anew.

        A step before makes kernels ready, since none may be compiled while one is recorded. It writes to the first
        place of the rooms alone, which is filled before it is ever read.
        """
        self._step()
        self._graph = torch.cuda.CUDAGraph()
        # other threads may go on meanwhile, as one that writes a checkpoint does
        with ONE_RECORDING_AT_A_TIME, torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._step()

    def replay(self) -> None:
        """One step over what the buffers hold; its result is in `log_p` until the next."""
        if self._graph is None:
            self._step()
        else:
            self._graph.replay()

    def _step(self) -> None:
        half = self._precision.itemsize < 4
        # the cache of cast weights must not outlive a recording
        with torch.autocast(self.tokens.device.type, self._precision, enabled=half, cache_enabled=False):
            states = self._model.decode(self.tokens, self._memory, self._cache)
            logits = self._model.score(states, self._cache).float()
        log_p = torch.log_softmax(logits, dim=-1)
        self.log_p = log_p.view(self._shape.sentences, self._shape.beam, -1)


class RecordedDecoder:
    """Makes steppers for one model and keeps their recordings, which hold while its weights stay where they are."""

    def __init__(self, model: Translator, precision: torch.dtype) -> None:
        self.model, self.precision = model, precision
        self._recordings: dict[Shape, Recording] = {}
        self._words: dict[str, Tensor] = {}
        self._pool: Any = None
        self._bytes = 0

    def __call__(self, source: Tensor, beam: int) -> "RecordedStepper":
        """A stepper for these sentences."""
        return RecordedStepper(self, source, beam)

    def recording(self, shape: Shape) -> Recording:
        """The recording of a shape, made now if there is none."""
        if shape not in self._recordings:
            self._make_room(shape)
            recording = Recording(self.model, shape, self.precision, self._words)
            if recording.tokens.is_cuda:
                self._pool = self._pool or torch.cuda.graph_pool_handle()
                recording.record(self._pool)
            self._recordings[shape] = recording
        return self._recordings[shape]

    def _make_room(self, shape: Shape) -> None:
        """Forgets all recordings when, with the one to come, they would hold more than a quarter of the GPU."""
        device = next(self.model.parameters()).device
        if device.type != "cuda":
            return
        settings = self.model.settings
        keys = shape.sentences * (shape.beam * shape.room + shape.source_length)
        coming = 2 * len(self.model.decoder) * keys * settings.width * self.precision.itemsize
        if self._bytes + coming > torch.cuda.get_device_properties(device).total_memory // 4:
            self._recordings.clear()
            self._pool, self._bytes = None, 0
        self._bytes += coming

    def keep_words(self, words: dict[str, Tensor]) -> None:
        """Puts the word vectors in force where the recordings read them."""
        for name, table in words.items():
            if name in self._words:
                self._words[name].copy_(table)
            else:
                self._words[name] = table.clone()


class RecordedStepper:
    """Decodes like `ModelStepper`, its steps after the first replayed."""

    def __init__(self, decoder: RecordedDecoder, source: Tensor, beam: int) -> None:
        self._decoder, self._beam = decoder, beam
        self._begun_with = self._sentences = len(source)
        self._source_length = source.shape[1]
        self._length = 0
        self._plain: ModelStepper | None = ModelStepper(decoder.model, source, beam)
        self._now: Recording | None = None

    def step(self, tokens_bk: Tensor) -> Tensor:
        if self._plain is not None:
            log_p = self._plain.step(tokens_bk)
            self._take_over(self._plain)
            return log_p
        if self._now is None or self._length >= self._now.own.shape[3]:
            self._move_to(torch.arange(self._sentences, device=tokens_bk.device), self._length + 1)
        now = self._now
        assert now is not None
        now.tokens[: tokens_bk.numel(), 0] = tokens_bk.flatten()
        now.position.fill_(self._length)
        now.replay()
        self._length += 1
        return now.log_p[: self._sentences]

    def reorder(self, origin_bk: Tensor) -> None:
        assert self._now is not None
        first = torch.arange(len(origin_bk), device=origin_bk.device).unsqueeze(1) * self._beam
        rows, origins = moved_rows((first + origin_bk).flatten())
        self._now.own[:, rows, :, : self._length] = self._now.own[:, origins, :, : self._length]

    def keep(self, sentences: Tensor) -> None:
        self._move_to(sentences, self._length + 1)
        self._sentences = len(sentences)

    def _take_over(self, plain: ModelStepper) -> None:
        """Puts what the first step left into the buffers of a recording."""
        memory, cache = plain.state()
        self._decoder.keep_words(cache.words)
        self._now = self._decoder.recording(self._shape(self._sentences, 1))
        self._length = 1
        self._now.real[: self._sentences] = memory.real
        for i, (own, across) in enumerate(zip(cache.own, cache.across, strict=True)):
            for j, stored in enumerate(own.read()):
                self._now.own[2 * i + j, : len(stored), :, :1] = stored
            for j, stored in enumerate(across.read()):
                self._now.across[2 * i + j, : len(stored)] = stored
        self._plain = None

    def _move_to(self, sentences: Tensor, length: int) -> None:
        """Goes on in a recording with room for `length` tokens and for these sentences."""
        before = self._now
        assert before is not None
        after = self._decoder.recording(self._shape(len(sentences), length))
        count = len(sentences)
        slots = torch.arange(self._beam, device=sentences.device)
        rows = (sentences.unsqueeze(1) * self._beam + slots).flatten()
        # by value, for the two may be one
        after.own[:, : count * self._beam, :, : self._length] = before.own[:, rows, :, : self._length]
        after.across[:, :count] = before.across[:, sentences]
        after.real[:count] = before.real[sentences]
        self._now = after

    def _shape(self, sentences: int, length: int) -> Shape:
        sizes = {max(1, -(-self._begun_with * int(share * 64) // 64)) for share in SIZES}
        size = min(each for each in sizes if each >= sentences)
        room = -(-length // ROOM_STEP) * ROOM_STEP
        return Shape(size, self._beam, self._source_length, room)
