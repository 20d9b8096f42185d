"""Beam search over a step function, all sentences of a batch at once; with one slot it is greedy search.

Letters in names of tensors: b sentences, k slots of a sentence, t tokens in time, v types of the vocabulary.
"""

import math
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from qknorm.decoding.results import Hypothesis
from qknorm.errors import InputError
from qknorm.specials import END, START

Length = TypeVar("Length", float, Tensor)


class Stepper(Protocol):
    """A model in the midst of decoding b sentences with k hypotheses each, all k alike before the first step."""

    def step(self, tokens_bk: Tensor) -> Tensor:
        """Log-probabilities (b, k, v) of what follows, given the last token of every hypothesis."""

    def reorder(self, origin_bk: Tensor) -> None:
        """Hypothesis j of sentence i becomes what hypothesis origin[i, j] of the same sentence was."""

    def keep(self, sentences: Tensor) -> None:
        """Only these sentences, given as indices into the current batch, stay."""


def length_penalty(length: Length, alpha: float) -> Length:
    """((5 + n) / 6)^alpha of Wu et al. (2016), where the n tokens include the end of sentence."""
    penalty: Length = ((5.0 + length) / 6.0) ** alpha
    return penalty


@torch.no_grad()
def beam_search(
    stepper: Stepper,
    sentences: int,
    max_lengths: Tensor,
    *,
    beam: int = 4,
    alpha: float = 0.6,
    nbest: int = 1,
    no_repeat_ngram: int = 0,
) -> list[list[Hypothesis]]:
    """For every sentence its `nbest` best hypotheses, best first (fewer where fewer are possible, one at least).

    A sentence has `beam` slots. A step fills the open ones with the likeliest continuations; one that ends keeps its
    slot for good. At max_lengths tokens, the end counted, a hypothesis is finished as it is. None is empty or has a
    sequence of `no_repeat_ngram` tokens twice. Where nothing is possible any more, the hypothesis breaks off with
    log-probability −inf. Runs on the device of max_lengths.
    """
    check_settings(sentences, max_lengths, beam, alpha, nbest, no_repeat_ngram)
    if not sentences:
        return []
    device, longest = max_lengths.device, int(max_lengths.max())
    slots = open_slots(max_lengths, beam, longest)
    outcome = Slots(*(field.clone() for field in slots))
    rules = Rules(nbest, no_repeat_ngram, penalties(longest, alpha).to(device))
    in_place = torch.arange(beam, device=device)
    last_bk = torch.full((sentences, beam), START, device=device)
    for length in range(1, longest + 1):
        slots, origin_bk, running_b = advance(slots, stepper.step(last_bk), length, rules)
        # Both answers in one transfer: a GPU waits for the host once a step.
        moved, running = torch.stack([(origin_bk != in_place).sum(), running_b.sum()]).tolist()
        if not running:
            break
        if moved:
            stepper.reorder(origin_bk)
        if 4 * running <= 3 * len(running_b):
            write_results(outcome, slots)
            kept = running_b.nonzero().flatten()
            slots = Slots(*(field[kept] for field in slots))
            stepper.keep(kept)
        last_bk = slots.tokens_bkt[:, :, length - 1]
    write_results(outcome, slots)
    return read_results(outcome, rules)


class Rules(NamedTuple):
    """What a search goes by from its first step to its last."""

    nbest: int
    no_repeat_ngram: int
    penalty_t: Tensor  # of every length from 0 on


def penalties(longest: int, alpha: float) -> Tensor:
    """The length penalty of 0, 1, … `longest` tokens."""
    return length_penalty(torch.arange(longest + 1, dtype=torch.float64), alpha).float()


class Slots(NamedTuple):
    """A hypothesis in every slot: finished, alive (it may go on), or neither, with log-probability −inf."""

    tokens_bkt: Tensor
    log_p_bk: Tensor
    length_bk: Tensor
    finished_bk: Tensor
    limit_b: Tensor
    place_b: Tensor  # in the batch that the search began with

    @property
    def alive_bk(self) -> Tensor:
        return ~self.finished_bk & (self.log_p_bk > -math.inf)

    @property
    def log_p_of_alive_bk(self) -> Tensor:
        return self.log_p_bk.masked_fill(self.finished_bk, -math.inf)


def open_slots(max_lengths: Tensor, beam: int, longest: int) -> Slots:
    """Every sentence at its start: one empty hypothesis, and no other, so that the first step has no duplicates."""
    log_p_bk = torch.full((len(max_lengths), beam), -math.inf, device=max_lengths.device)
    log_p_bk[:, 0] = 0.0
    length_bk = torch.zeros_like(log_p_bk, dtype=torch.long)
    return Slots(
        tokens_bkt=length_bk[:, :, None].repeat(1, 1, longest),
        log_p_bk=log_p_bk,
        length_bk=length_bk,
        finished_bk=torch.zeros_like(log_p_bk, dtype=torch.bool),
        limit_b=max_lengths.long(),
        place_b=torch.arange(len(max_lengths), device=max_lengths.device),
    )


class Advance(NamedTuple):
    """The slots after a step, which slot each hypothesis that goes on came from, and which sentences go on."""

    slots: Slots
    origin_bk: Tensor
    running_b: Tensor


def advance(slots: Slots, log_p_bkv: Tensor, length: int | Tensor, rules: Rules) -> Advance:
    """One step: the token that makes hypotheses `length` long is chosen by its log-probabilities.

    A step over sentences that do not go on changes nothing that is read in the end. The length may be a tensor of one
    number, so that a device that replays this step need not know it; then no n-gram may be forbidden.
    """
    candidates_bkv = log_p_bkv + slots.log_p_of_alive_bk[:, :, None]
    _forbid(candidates_bkv, slots.tokens_bkt, length, rules.no_repeat_ngram)
    slots, origin_bk = _fill_open_slots(slots, candidates_bkv, length)
    slots, running_b = _stop_the_settled(slots, rules.nbest, rules.penalty_t)
    in_place = torch.arange(origin_bk.shape[1], device=origin_bk.device)
    return Advance(slots, torch.where(slots.alive_bk, origin_bk, in_place), running_b)


def _fill_open_slots(slots: Slots, candidates_bkv: Tensor, length: int | Tensor) -> tuple[Slots, Tensor]:
    """The best candidates in the slots not finished yet, and the slots they came from."""
    types, beam = candidates_bkv.shape[2], candidates_bkv.shape[1]
    best_bk, index_bk = _best(candidates_bkv.flatten(1), beam)
    # The first open slot takes the best candidate, the next one the second best: none is skipped for a finished slot.
    rank_bk = ((~slots.finished_bk).cumsum(1) - 1).clamp(min=0)
    best_bk, index_bk = best_bk.gather(1, rank_bk), index_bk.gather(1, rank_bk)
    grows_bk = ~slots.finished_bk & (best_bk > -math.inf)
    origin_bk = torch.where(grows_bk, index_bk // types, torch.arange(beam, device=index_bk.device))
    token_bk = (index_bk % types).masked_fill(~grows_bk, END)  # where() would copy the number from the host
    tokens_bkt = slots.tokens_bkt.gather(1, origin_bk[:, :, None].expand_as(slots.tokens_bkt))
    if isinstance(length, Tensor):
        tokens_bkt.index_copy_(2, length - 1, token_bk[:, :, None])
    else:
        tokens_bkt[:, :, length - 1] = token_bk
    ends_bk = (token_bk == END) | (slots.limit_b == length)[:, None]
    filled = slots._replace(
        tokens_bkt=tokens_bkt,
        log_p_bk=torch.where(slots.finished_bk, slots.log_p_bk, best_bk),
        length_bk=torch.where(grows_bk, length, slots.length_bk),
        finished_bk=slots.finished_bk | (grows_bk & ends_bk),
    )
    return filled, origin_bk


def _best(scores_bn: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The highest of every row and their indices, in order; the lowest index first among equals.

    torch.topk leaves equals in any order, and a sort of whole rows is slow. But the best n lie in those n blocks of a
    row that have the highest maxima, so only these are sorted.
    """
    (rows, length), width = scores_bn.shape, 64
    whole = length - length % width
    maxima = [scores_bn[:, :whole].view(rows, -1, width).amax(2)] if whole else []
    if whole < length:  # the last block is shorter
        maxima.append(scores_bn[:, whole:].amax(1, keepdim=True))
    ranking_bm = torch.cat(maxima, dim=1).sort(dim=1, descending=True, stable=True).indices
    chosen_bc = ranking_bm[:, :count].sort(dim=1).values
    index_bn = (chosen_bc[:, :, None] * width + torch.arange(width, device=scores_bn.device)).flatten(1)
    inside_bn = scores_bn.gather(1, index_bn.clamp(max=length - 1)).masked_fill_(index_bn >= length, -math.inf)
    sorted_bn, place_bn = inside_bn.sort(dim=1, descending=True, stable=True)
    return sorted_bn[:, :count], index_bn.gather(1, place_bn[:, :count])


def _forbid(candidates_bkv: Tensor, tokens_bkt: Tensor, length: int | Tensor, n: int) -> None:
    """−inf, in place, for an end that comes first, and for types that would repeat a sequence of n tokens."""
    if isinstance(length, Tensor):
        if n:
            raise ValueError("where the length is a tensor no n-gram can be forbidden")
        candidates_bkv[:, :, END].masked_fill_(length == 1, -math.inf)
        return
    tokens = length - 1
    if not tokens:
        candidates_bkv[:, :, END] = -math.inf
    if not 0 < n <= tokens:
        return
    tokens_bkt = tokens_bkt[:, :, :tokens]
    ngrams = tokens_bkt.unfold(2, n, 1)
    seen_bkt = (ngrams[..., :-1] == tokens_bkt[:, :, None, tokens - n + 1 :]).all(-1)
    # Added, not assigned: a type may stand in several n-grams, and −inf must win whatever the order.
    candidates_bkv.scatter_add_(2, ngrams[..., -1], torch.where(seen_bkt, -math.inf, 0.0))


def _stop_the_settled(slots: Slots, nbest: int, penalty_t: Tensor) -> tuple[Slots, Tensor]:
    """Gives up what is alive in sentences where it cannot change the result; also says which sentences go on.

    A log-probability only falls, so the penalty at the limit bounds what an alive hypothesis can reach.
    """
    scores_bk = (slots.log_p_bk / penalty_t[slots.length_bk]).masked_fill(~slots.finished_bk, -math.inf)
    hope_b = slots.log_p_of_alive_bk.amax(1) / penalty_t[slots.limit_b]
    running_b = scores_bk.topk(nbest).values[:, -1] < hope_b
    given_up_bk = slots.alive_bk & ~running_b[:, None]
    return slots._replace(log_p_bk=slots.log_p_bk.masked_fill(given_up_bk, -math.inf)), running_b


def write_results(outcome: Slots, slots: Slots) -> None:
    """Puts what these slots hold where it belongs among all sentences."""
    for whole, part in zip(outcome, slots, strict=True):
        whole[slots.place_b] = part


def read_results(outcome: Slots, rules: Rules) -> list[list[Hypothesis]]:
    """The finished hypotheses of every sentence, best first, the shorter first among equals."""
    if outcome.log_p_bk.isnan().any():
        raise FloatingPointError("the model gave log-probabilities that are not numbers; its weights may have diverged")
    scores = (outcome.log_p_bk / rules.penalty_t[outcome.length_bk]).tolist()
    tokens_bkt, log_p = outcome.tokens_bkt.cpu().numpy(), outcome.log_p_bk.tolist()
    lengths, finished = outcome.length_bk.tolist(), outcome.finished_bk.tolist()

    def hypothesis(i: int, j: int) -> Hypothesis:
        tokens = tokens_bkt[i, j, : lengths[i][j]].tolist()
        return Hypothesis(tokens[:-1] if tokens[-1:] == [END] else tokens, scores[i][j], log_p[i][j])

    found = []
    for i, ended in enumerate(finished):
        ranking = sorted((-scores[i][j], lengths[i][j], j) for j, yes in enumerate(ended) if yes)
        found.append([hypothesis(i, j) for _, _, j in ranking[: rules.nbest]] or [hypothesis(i, 0)])
    return found


def check_settings(
    sentences: int, max_lengths: Tensor, beam: int, alpha: float, nbest: int, no_repeat_ngram: int
) -> None:
    """Raises InputError for what cannot be searched with."""
    if beam < 1:
        raise InputError(f"beam must be at least 1, got {beam}")
    if not 1 <= nbest <= beam:
        raise InputError(f"nbest must be between 1 and the beam of {beam}, got {nbest}; a wider beam gives more")
    if not 0 <= alpha <= 10:
        raise InputError(f"alpha must be between 0 (no length penalty) and 10, got {alpha}")
    if no_repeat_ngram < 0:
        raise InputError(f"no_repeat_ngram cannot be negative, got {no_repeat_ngram}")
    if max_lengths.shape != (sentences,):
        raise ValueError(f"max_lengths must have shape ({sentences},), one a sentence, got {tuple(max_lengths.shape)}")
    if sentences and int(max_lengths.min()) < 1:
        raise InputError(f"max_lengths must be at least 1, got {int(max_lengths.min())}")
