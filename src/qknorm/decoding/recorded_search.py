"""Beam search on a GPU at the speed of its kernels: a whole step is one CUDA graph, and the host looks in at times.

`search.beam_search` is the plain reference, whose step this one is; sentences that are settled go along unchanged until
the host drops them.
"""

from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qknorm.decoding.beam_decoder import BeamDecoder, Counters, Extent, Part
from qknorm.decoding.graphs import Graphs
from qknorm.decoding.results import Hypothesis
from qknorm.decoding.search import (
    Rules,
    Slots,
    advance,
    check_settings,
    open_slots,
    penalties,
    read_results,
    write_results,
)
from qknorm.decoding.translate import PlainSearch
from qknorm.models.fused_run import kernels_apply
from qknorm.models.translator import Translator
from qknorm.specials import PAD, START

LOOK_EVERY = 4
"""Steps between two looks at which sentences go on."""
SHARES = (48, 32, 24, 16, 8, 4, 2, 1)
"""64ths of the sentences begun with that a batch shrinks to: few, so that recordings are used again."""
ROOMS = (16, 32, 48, 64, 96, 128, 192)
"""Tokens that a step has room for, before multiples of 128; without a kernel it reads the whole of its room."""
ROOM_STEP, SOURCE_STEP = 32, 16
"""Tokens that buffers hold, and the length of sources, are multiples of these: kernels like them, and extents recur."""
READ_SHARES, FEWEST_IN_PARTS = (2, 8, 24, 64), 64
"""Up to which 64ths of the sentences sources are read together, and of how many: few are long, and they come first."""
MOST_READINGS = 4
"""Ways to cut sources into parts that are recorded for an extent; others are read whole."""
MOST_EXTENTS = 32
"""Extents kept at a time: each has recordings by the dozen, which take memory of the GPU's driver too."""
WIDEST_FUSED = 16
"""The widest beam that one kernel makes steps of: it finds the best one after another."""


class Decoder(Protocol):
    """A model that decodes in fixed buffers; `BeamDecoder` says what each of these does."""

    source: Tensor

    def read_source(self, *parts: Part) -> None: ...
    def step(self, last_bk: Tensor, room: int, counters: Counters) -> Tensor: ...
    def reorder(self, origin_bk: Tensor, room: int) -> None: ...
    def move(self, to: Tensor, origins: Tensor, length: int) -> None: ...


class Board:
    """The slots of a search in buffers that stay where they are, and the steps over them."""

    def __init__(self, decoder: Decoder, extent: Extent, graphs: Graphs) -> None:
        device = decoder.source.device
        self.decoder, self._graphs = decoder, graphs
        self._rooms = [room for room in (*ROOMS, *range(256, extent.room, 128)) if room < extent.room] + [extent.room]
        self._sizes = sorted({-(-extent.sentences * share // 64) for share in SHARES} | {extent.sentences})
        self._fresh = open_slots(torch.zeros(extent.sentences, device=device), extent.beam, extent.room)
        self.limit_b = torch.zeros_like(self._fresh.limit_b)
        self._slots, self._outcome = (Slots(*(field.clone() for field in self._fresh)) for _ in range(2))
        self._slots = self._slots._replace(limit_b=self.limit_b)
        self._last_bk = torch.zeros_like(self._fresh.length_bk)
        self._running_b = torch.zeros_like(self.limit_b, dtype=torch.bool)
        self.penalty_t = torch.ones(extent.room + 1, device=device)
        self._counters = Counters(extent.beam, device)
        self._readings: set[tuple[Part, ...]] = set()

    def search(self, longest: int, rules: Rules, parts: tuple[Part, ...] = ()) -> Slots:
        """Searches for what stands in the decoder's source, within `limit_b` tokens; what came out, in its order.

        The source may be read in `parts`.
        """
        if parts not in self._readings and len(self._readings) >= MOST_READINGS:
            parts = ()
        self._readings.add(parts)
        self._graphs.run(("open", parts), lambda: self._open(parts))
        size, length = len(self.limit_b), 0
        while True:
            until = min(length + LOOK_EVERY, longest)
            for done in range(length, until):
                self._step_recorded(size, next(room for room in self._rooms if room > done), rules)
            length = until
            running_b = self._running_b[:size].cpu().numpy()
            if not running_b.any() or length == longest:
                break
            size = self._shrink(running_b, length)
        write_results(self._outcome, self._view(size))
        return self._outcome

    def _open(self, parts: tuple[Part, ...]) -> None:
        self.decoder.read_source(*parts)
        for field, fresh in zip(self._slots, self._fresh, strict=True):
            if field is not self.limit_b:
                field.copy_(fresh)
        self._last_bk.fill_(START)
        self._counters.restart()

    def _step_recorded(self, size: int, room: int, rules: Rules) -> None:
        name = ("step", size, room, rules[:-1])  # penalties may differ from search to search
        self._graphs.run(name, lambda: self._step(size, room, rules))

    def _step(self, size: int, room: int, rules: Rules) -> None:
        now = self._view(size, room)
        log_p_bkv = self.decoder.step(self._last_bk[:size], room, self._counters)
        after, origin_bk, running_b = advance(now, log_p_bkv, self._counters.length, rules)
        for field, new in zip(now, after, strict=True):
            if field is not new:
                field.copy_(new)
        self._last_bk[:size].copy_(after.tokens_bkt.index_select(2, self._counters.position)[:, :, 0])
        self._running_b[:size].copy_(running_b)
        self.decoder.reorder(origin_bk, room)
        self._counters.count_on()

    def _shrink(self, running_b: NDArray[np.bool_], length: int) -> int:
        """Drops settled sentences where a smaller size will do: those that run take the places of some that do not."""
        before = len(running_b)
        size = min(each for each in self._sizes if each >= running_b.sum())
        if size == before:
            return size
        write_results(self._outcome, self._view(before))
        movers = np.flatnonzero(running_b[size:]) + size
        free = np.flatnonzero(~running_b[:size])[: len(movers)]
        if len(movers):
            to, origins = torch.from_numpy(np.stack([free, movers])).to(self.limit_b.device)
            for field in (*self._slots, self._last_bk):
                field[to] = field[origins]
            self.decoder.move(to, origins, length)
        return size

    def _view(self, size: int, room: int | None = None) -> Slots:
        """The slots of the first sentences."""
        fields = self._slots._asdict()
        tokens_bkt = fields.pop("tokens_bkt")[:size, :, :room]
        return Slots(tokens_bkt=tokens_bkt, **{name: field[:size] for name, field in fields.items()})


class FusedBoard(Board):
    """The same, with all of a step after the logits in one kernel."""

    decoder: BeamDecoder

    def _step(self, size: int, room: int, rules: Rules) -> None:
        from qknorm.decoding.fused_advance import advance_fused

        advance_fused(
            self._view(size),
            self.decoder.logits(self._last_bk[:size], room, self._counters),
            self._counters.length,
            rules,
            last_bk=self._last_bk[:size],
            running_b=self._running_b[:size],
            mask_bkp=self.decoder.mask_bkp[:size],
        )
        self._counters.count_on()


class _Made(NamedTuple):
    """What one extent needs."""

    board: Board
    decoder: BeamDecoder
    graphs: Graphs


class RecordedSearch:
    """Searches with one model and keeps its recordings, which hold while the weights stay where they are.

    They read the weights in force, so that a model may learn between two searches. On a CPU nothing is recorded. What a
    recording cannot do (n-grams that may not be repeated) is left to the plain search. `fused` says whether a kernel
    makes the search's part of a step, by the device if not given.
    """

    source_step = SOURCE_STEP

    def __init__(
        self,
        model: Translator,
        precision: torch.dtype,
        *,
        fused: bool | None = None,
        most_bytes: int | None = None,
    ) -> None:
        self.model, self.precision, self._fused = model, precision, fused
        self._most_bytes = most_bytes or _quarter_of_memory(model)
        self._addresses: tuple[int, ...] = ()
        self._forget()

    def _forget(self) -> None:
        """All recordings, and their buffers."""
        self._made: dict[Extent, _Made] = {}
        self._bytes = 0

    @property
    def recordings(self) -> int:
        """How many there are."""
        return sum(len(made.graphs) for made in self._made.values())

    @torch.inference_mode(False)  # buffers made within it could not be written to outside
    @torch.no_grad()
    def __call__(
        self,
        source: Tensor,
        max_lengths: Tensor,
        *,
        beam: int = 4,
        alpha: float = 0.6,
        nbest: int = 1,
        no_repeat_ngram: int = 0,
    ) -> list[list[Hypothesis]]:
        """What `beam_search` finds for these source ids (b, s), padded with 0. Both tensors may lie on the CPU."""
        check_settings(len(source), max_lengths, beam, alpha, nbest, no_repeat_ngram)
        if not len(source):
            return []
        if no_repeat_ngram:
            plain = PlainSearch(self.model)
            with torch.autocast(self._device.type, self.precision, enabled=self.precision.itemsize < 4):
                return plain(source, max_lengths, beam=beam, alpha=alpha, nbest=nbest, no_repeat_ngram=no_repeat_ngram)
        self._forget_what_moved()
        found: list[list[Hypothesis]] = []
        one = BeamDecoder.bytes_for(self.model, self._extent(source[:1], max_lengths.max(), beam), self.precision)
        at_once = max(1, min(len(source), self._most_bytes // one))
        while len(found) < len(source):
            part, others = slice(len(found), len(found) + at_once), len(self._made)
            try:
                found += self._search(source[part], max_lengths[part], beam, alpha, nbest)
            except torch.OutOfMemoryError:  # others use the GPU too
                if at_once == 1 and not others:
                    raise
                self._forget()
                at_once = max(1, at_once // 2)
                self._most_bytes = at_once * one
        return found

    def _search(self, source: Tensor, limits: Tensor, beam: int, alpha: float, nbest: int) -> list[list[Hypothesis]]:
        """For sentences that fit into memory together."""
        made = self._made_for(self._extent(source, limits, beam))
        made.board.penalty_t.copy_(penalties(len(made.board.penalty_t) - 1, alpha))
        rules = Rules(nbest, 0, made.board.penalty_t)
        made.decoder.source.zero_()
        made.decoder.source[:, : source.shape[1]].copy_(source)
        made.board.limit_b.copy_(limits)
        try:
            return read_results(made.board.search(int(limits.max()), rules, parts_of(source)), rules)
        except FloatingPointError:
            made.decoder.wipe()
            raise

    def _made_for(self, extent: Extent) -> _Made:
        """Buffers and recordings of an extent, made now if there are none; others go where memory is short."""
        if extent not in self._made:
            coming = BeamDecoder.bytes_for(self.model, extent, self.precision)
            if self._bytes + coming > self._most_bytes or len(self._made) >= MOST_EXTENTS:
                self._forget()
            decoder, graphs = BeamDecoder(self.model, extent, self.precision), Graphs(self._device)
            fused = kernels_apply(self._device) if self._fused is None else self._fused
            board = FusedBoard if fused and extent.beam <= WIDEST_FUSED else Board
            self._made[extent] = _Made(board(decoder, extent, graphs), decoder, graphs)
            self._bytes += coming
        return self._made[extent]

    def _extent(self, source: Tensor, limits: Tensor, beam: int) -> Extent:
        sentences, length = source.shape
        return Extent(sentences, beam, _up_to(SOURCE_STEP, length), _up_to(ROOM_STEP, int(limits.max())))

    def _forget_what_moved(self) -> None:
        """A recording reads weights where they were; whoever loads or moves a model may have put them elsewhere."""
        addresses = addresses_of(self.model)
        if addresses != self._addresses:
            self._forget()
            self._addresses = addresses

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device


def parts_of(source: Tensor) -> tuple[Part, ...]:
    """How to read these ids (b, s) with less padding: in parts cut to their longest; in none, that is whole, if few.

    Sources may come in any order; the less they are sorted, longest first, the less is gained.
    """
    sentences, width = source.shape
    if sentences < FEWEST_IN_PARTS:
        return ()
    ends_s = torch.arange(1, width + 1, device=source.device)
    lengths = torch.where(source != PAD, ends_s, 0).amax(1).tolist()
    parts: list[Part] = []
    for share in READ_SHARES:
        first, until = parts[-1].until if parts else 0, -(-sentences * share // 64)
        part = Part(until, _up_to(SOURCE_STEP, max(1, *lengths[first:until])))
        if parts and parts[-1].length == part.length:
            parts.pop()
        parts.append(part)
    whole = Part(sentences, _up_to(SOURCE_STEP, width))
    return () if parts == [whole] else tuple(parts)


def addresses_of(model: Translator) -> tuple[int, ...]:
    """Where all that a recording reads of a model lies, but for the table of positions, which outlives its growth."""
    tensors = [*model.parameters(), *(buffer for buffer in model.buffers() if buffer is not model.positions)]
    return tuple(tensor.data_ptr() for tensor in tensors)


def _up_to(step: int, number: int) -> int:
    """The next multiple of `step`."""
    return -(-number // step) * step


def _quarter_of_memory(model: Translator) -> int:
    device = next(model.parameters()).device
    return torch.cuda.get_device_properties(device).total_memory // 4 if device.type == "cuda" else 1 << 34
