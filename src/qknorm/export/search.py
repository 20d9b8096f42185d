"""Beam search in numpy: the search of `qknorm.decoding.search` for engines without PyTorch, with the same results.

Letters in names of arrays: b sentences, k slots of a sentence, t tokens in time, v types of the vocabulary.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from qknorm.decoding.results import Hypothesis
from qknorm.errors import InputError
from qknorm.specials import END, START

Array = NDArray[Any]


class Stepper(Protocol):
    """A model in the midst of decoding b sentences with k hypotheses each, all k alike before the first step."""

    def step(self, tokens_bk: Array) -> Array:
        """Log-probabilities (b, k, v) of what follows, given the last token of every hypothesis."""

    def reorder(self, origin_bk: Array) -> None:
        """Hypothesis j of sentence i becomes what hypothesis origin[i, j] of the same sentence was."""

    def keep(self, sentences: Array) -> None:
        """Only these sentences, given as indices into the current batch, stay."""


def beam_search(
    stepper: Stepper,
    max_lengths: Array,
    *,
    beam: int = 4,
    alpha: float = 0.6,
    nbest: int = 1,
    no_repeat_ngram: int = 0,
) -> list[list[Hypothesis]]:
    """For every sentence its `nbest` best hypotheses, best first (fewer where fewer are possible, one at least).

    None is empty; at max_lengths tokens, the end counted, a hypothesis is finished as it is.
    """
    check_settings(beam, alpha, nbest, no_repeat_ngram)
    if not len(max_lengths):
        return []
    longest = int(max_lengths.max())
    slots = _open_slots(max_lengths, beam, longest)
    outcome = _Slots(*(field.copy() for field in slots))
    penalty_t = (((5.0 + np.arange(longest + 1)) / 6.0) ** alpha).astype(np.float32)
    in_place = np.arange(beam)
    last_bk = np.full((len(max_lengths), beam), START)
    for length in range(1, longest + 1):
        candidates_bkv = stepper.step(last_bk) + slots.log_p_of_alive_bk[:, :, None]
        _forbid(candidates_bkv, slots.tokens_bkt[:, :, : length - 1], no_repeat_ngram)
        slots, origin_bk = _fill_open_slots(slots, candidates_bkv, length)
        slots, running_b = _stop_the_settled(slots, nbest, penalty_t)
        origin_bk = np.where(slots.alive_bk, origin_bk, in_place)
        running = int(running_b.sum())
        if not running:
            break
        if (origin_bk != in_place).any():
            stepper.reorder(origin_bk)
        if 4 * running <= 3 * len(running_b):
            _write(outcome, slots)
            kept = running_b.nonzero()[0]
            slots = _Slots(*(field[kept] for field in slots))
            stepper.keep(kept)
        last_bk = slots.tokens_bkt[:, :, length - 1]
    _write(outcome, slots)
    return _read(outcome, nbest, penalty_t)


class _Slots(NamedTuple):
    """A hypothesis in every slot: finished, alive (it may go on), or neither, with log-probability −inf."""

    tokens_bkt: Array
    log_p_bk: Array
    length_bk: Array
    finished_bk: Array
    limit_b: Array
    place_b: Array  # in the batch that the search began with

    @property
    def alive_bk(self) -> Array:
        return ~self.finished_bk & (self.log_p_bk > -np.inf)

    @property
    def log_p_of_alive_bk(self) -> Array:
        return np.where(self.finished_bk, -np.inf, self.log_p_bk)


def _open_slots(max_lengths: Array, beam: int, longest: int) -> _Slots:
    """Every sentence at its start: one empty hypothesis, and no other, so that the first step has no duplicates."""
    sentences = len(max_lengths)
    log_p_bk = np.full((sentences, beam), -np.inf, dtype=np.float32)
    log_p_bk[:, 0] = 0.0
    return _Slots(
        tokens_bkt=np.zeros((sentences, beam, longest), dtype=np.int64),
        log_p_bk=log_p_bk,
        length_bk=np.zeros((sentences, beam), dtype=np.int64),
        finished_bk=np.zeros((sentences, beam), dtype=np.bool_),
        limit_b=max_lengths.astype(np.int64),
        place_b=np.arange(sentences),
    )


def _fill_open_slots(slots: _Slots, candidates_bkv: Array, length: int) -> tuple[_Slots, Array]:
    """The best candidates in the slots not finished yet, and the slots they came from."""
    sentences, beam, types = candidates_bkv.shape
    best_bk, index_bk = best_of(candidates_bkv.reshape(sentences, -1), beam)
    # The first open slot takes the best candidate, the next one the second best: none is skipped for a finished slot.
    rank_bk = np.maximum((~slots.finished_bk).cumsum(1) - 1, 0)
    best_bk, index_bk = (np.take_along_axis(x, rank_bk, axis=1) for x in (best_bk, index_bk))
    grows_bk = ~slots.finished_bk & (best_bk > -np.inf)
    origin_bk = np.where(grows_bk, index_bk // types, np.arange(beam))
    token_bk = np.where(grows_bk, index_bk % types, END)
    tokens_bkt = np.take_along_axis(slots.tokens_bkt, origin_bk[:, :, None], axis=1)
    tokens_bkt[:, :, length - 1] = token_bk
    ends_bk = (token_bk == END) | (slots.limit_b == length)[:, None]
    filled = slots._replace(
        tokens_bkt=tokens_bkt,
        log_p_bk=np.where(slots.finished_bk, slots.log_p_bk, best_bk),
        length_bk=np.where(grows_bk, length, slots.length_bk),
        finished_bk=slots.finished_bk | (grows_bk & ends_bk),
    )
    return filled, origin_bk


def best_of(scores_bn: Array, count: int, width: int = 64) -> tuple[Array, Array]:
    """The highest of every row and their indices, in order; the lowest index first among equals.

    A sort of whole rows is slow. But the best n lie in those n blocks of a row that have the highest maxima, so only
    these are sorted.
    """
    rows, length = scores_bn.shape
    blocks = -(-length // width)
    maxima_bm = np.maximum.reduceat(scores_bn, np.arange(blocks) * width, axis=1)
    if np.isnan(maxima_bm).any():
        raise FloatingPointError("the model gave log-probabilities that are not numbers; its weights may have diverged")
    chosen_bc = np.sort(_descending(maxima_bm)[:, :count], axis=1)
    index_bn = (chosen_bc[:, :, None] * width + np.arange(width)).reshape(rows, -1)
    inside_bn = np.take_along_axis(scores_bn, np.minimum(index_bn, length - 1), axis=1)
    inside_bn[index_bn >= length] = -np.inf
    place_bk = _descending(inside_bn)[:, :count]
    return np.take_along_axis(inside_bn, place_bk, axis=1), np.take_along_axis(index_bn, place_bk, axis=1)


def _descending(scores_bn: Array) -> Array:
    """Places of every row from the highest to the lowest, equals in their order."""
    return np.argsort(-scores_bn, axis=1, kind="stable")


def _forbid(candidates_bkv: Array, tokens_bkt: Array, n: int) -> None:
    """−inf, in place, for an end at once, and for types that would repeat a sequence of n tokens."""
    tokens = tokens_bkt.shape[2]
    if tokens == 0:
        candidates_bkv[:, :, END] = -np.inf
    if not 0 < n <= tokens:
        return
    ngrams = np.lib.stride_tricks.sliding_window_view(tokens_bkt, n, axis=2)
    seen_bkt = (ngrams[..., :-1] == tokens_bkt[:, :, None, tokens - n + 1 :]).all(-1)
    b, k, t = seen_bkt.nonzero()
    candidates_bkv[b, k, ngrams[b, k, t, -1]] = -np.inf


def _stop_the_settled(slots: _Slots, nbest: int, penalty_t: Array) -> tuple[_Slots, Array]:
    """Gives up what is alive in sentences where it cannot change the result; also says which sentences go on.

    A log-probability only falls, so the penalty at the limit bounds what an alive hypothesis can reach.
    """
    scores_bk = np.where(slots.finished_bk, slots.log_p_bk / penalty_t[slots.length_bk], -np.inf)
    hope_b = slots.log_p_of_alive_bk.max(1) / penalty_t[slots.limit_b]
    running_b = np.sort(scores_bk, axis=1)[:, -nbest] < hope_b
    given_up_bk = slots.alive_bk & ~running_b[:, None]
    return slots._replace(log_p_bk=np.where(given_up_bk, -np.inf, slots.log_p_bk)), running_b


def _write(outcome: _Slots, slots: _Slots) -> None:
    for whole, part in zip(outcome, slots, strict=True):
        whole[slots.place_b] = part


def _read(outcome: _Slots, nbest: int, penalty_t: Array) -> list[list[Hypothesis]]:
    """The finished hypotheses of every sentence, best first, the shorter first among equals."""
    scores_bk = outcome.log_p_bk / penalty_t[outcome.length_bk]

    def hypothesis(i: int, j: int) -> Hypothesis:
        tokens = outcome.tokens_bkt[i, j, : outcome.length_bk[i, j]].tolist()
        kept = tokens[:-1] if tokens[-1:] == [END] else tokens
        return Hypothesis(kept, float(scores_bk[i, j]), float(outcome.log_p_bk[i, j]))

    found = []
    for i, ended in enumerate(outcome.finished_bk):
        ranking = sorted((-float(scores_bk[i, j]), int(outcome.length_bk[i, j]), int(j)) for j in ended.nonzero()[0])
        found.append([hypothesis(i, j) for _, _, j in ranking[:nbest]] or [hypothesis(i, 0)])
    return found


def check_settings(beam: int, alpha: float, nbest: int, no_repeat_ngram: int) -> None:
    """Refuses what no search could follow, in the words of the search of PyTorch."""
    if beam < 1:
        raise InputError(f"beam must be at least 1, got {beam}")
    if not 1 <= nbest <= beam:
        raise InputError(f"nbest must be between 1 and the beam of {beam}, got {nbest}; a wider beam gives more")
    if not 0 <= alpha <= 10:
        raise InputError(f"alpha must be between 0 (no length penalty) and 10, got {alpha}")
    if no_repeat_ngram < 0:
        raise InputError(f"no_repeat_ngram cannot be negative, got {no_repeat_ngram}")
