"""Search against plain references: enumeration of every sentence, and the same slots in simple loops."""

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qknorm.decoding.search import Hypothesis, _best, beam_search, length_penalty
from qknorm.errors import InputError
from qknorm.specials import END, START

STATES = 211
NEVER = -math.inf

seeds, alphas = st.integers(0, 10**6), st.floats(0, 1.5)


def next_state(state: int, token: int) -> int:
    return (7 * state + 3 * token + 1) % STATES


@dataclass
class TableModel:
    """A stepper whose answer depends on the sentence and on the whole history, and that records its calls."""

    table: Tensor  # (sentences, states, types)
    beam: int
    device: str = "cpu"
    batch_sizes: list[int] = field(default_factory=list)
    reorders: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.table = self.table.to(self.device)
        self.sentence_b = torch.arange(len(self.table), device=self.device)
        self.state_bk = torch.zeros(len(self.table), self.beam, dtype=torch.long, device=self.device)

    def step(self, tokens_bk: Tensor) -> Tensor:
        assert tokens_bk.shape == self.state_bk.shape
        self.batch_sizes.append(len(tokens_bk))
        self.state_bk = (7 * self.state_bk + 3 * tokens_bk + 1) % STATES
        return self.table[self.sentence_b[:, None], self.state_bk]

    def reorder(self, origin_bk: Tensor) -> None:
        self.reorders.append(origin_bk)
        self.state_bk = self.state_bk.gather(1, origin_bk)

    def keep(self, sentences: Tensor) -> None:
        self.sentence_b, self.state_bk = self.sentence_b[sentences], self.state_bk[sentences]


def random_table(seed: int, sentences: int, types: int) -> Tensor:
    logits = 2 * torch.randn(sentences, STATES, types, generator=torch.Generator().manual_seed(seed))
    return logits.log_softmax(-1)


def coarse_table(seed: int, sentences: int, types: int, impossible: float = 0.25) -> Tensor:
    """Eighths, so that sums are exact and ties abound, and a share of impossible types."""
    generator = torch.Generator().manual_seed(seed)
    table = -torch.randint(0, 9, (sentences, STATES, types), generator=generator) / 8
    return table.masked_fill(torch.rand(table.shape, generator=generator) < impossible, NEVER)


def chain(*steps: dict[int, float]) -> Tensor:
    """A table for one sentence in which a step's log-probabilities do not depend on the tokens before."""
    table = torch.full((1, STATES, 6), NEVER)
    reached = {next_state(0, START)}
    for step in steps:
        for state in reached:
            for token, value in step.items():
                table[0, state, token] = value
        reached = {next_state(state, token) for state in reached for token in step if token != END}
    return table


def search(
    table: Tensor, limits: list[int], *, beam: int = 4, model: TableModel | None = None, **rules: float
) -> list[list[Hypothesis]]:
    """beam_search over a table."""
    model = model or TableModel(table, beam)
    max_lengths = torch.tensor(limits, device=model.device)
    return beam_search(model, len(limits), max_lengths, beam=beam, **rules)


def score_of(log_p: float, length: int, alpha: float) -> float:
    return float(np.float32(log_p) / np.float32(length_penalty(float(length), alpha)))


def log_probability_of(table: Tensor, tokens: list[int]) -> float:
    """The sum over these tokens, the end among them where there is one."""
    state, total = next_state(0, START), np.float32(0)
    for token in tokens:
        total = total + np.float32(table[state, token].item())
        state = next_state(state, token)
    return float(total)


def every_sentence(types: int, limit: int) -> list[list[int]]:
    """All that ends within the limit, and all that reaches it without an end."""
    words = [t for t in range(types) if t != END]
    ended = [[*s, END] for n in range(1, limit) for s in itertools.product(words, repeat=n)]
    return ended + [list(s) for s in itertools.product(words, repeat=limit)]


def repeats(tokens: list[int], n: int) -> bool:
    ngrams = list(zip(*(tokens[i:] for i in range(n)), strict=False)) if n else []
    return len(set(ngrams)) < len(ngrams)


def plain_beam_search(
    table: Tensor, limit: int, beam: int, alpha: float, nbest: int, no_repeat_ngram: int
) -> list[tuple[list[int], float, float]]:
    """The slots of one sentence in simple loops: no early stop, nothing clever. Empty where nothing is possible."""
    alive: list[tuple[np.float32, list[int]]] = [(np.float32(0), [])]
    finished: list[tuple[float, int, list[int], float]] = []
    for length in range(1, limit + 1):
        grown = []
        for log_p, tokens in alive:
            state = next_state(0, START)
            for token in tokens:
                state = next_state(state, token)
            for token, value in enumerate(table[state].tolist()):
                allowed = not repeats([*tokens, token], no_repeat_ngram) and not (token == END and length == 1)
                if allowed and value > NEVER:
                    grown.append((log_p + np.float32(value), [*tokens, token]))
        grown = sorted(grown, key=lambda one: -one[0])[: beam - len(finished)]
        ended = [one for one in grown if one[1][-1] == END or length == limit]
        finished += [(score_of(p, length, alpha), length, tokens, float(p)) for p, tokens in ended]
        alive = [one for one in grown if one not in ended]
    ranking = sorted(finished, key=lambda one: (-one[0], one[1]))[:nbest]
    return [([t for t in tokens if t != END], score, log_p) for score, _, tokens, log_p in ranking]


def as_tuples(found: list[Hypothesis]) -> list[tuple[list[int], float, float]]:
    return [(one.tokens, one.score, one.log_probability) for one in found]


def test_length_penalty_is_the_published_one_for_numbers_and_tensors() -> None:
    assert length_penalty(1, 0.6) == 1.0
    assert length_penalty(7.0, 1.0) == 2.0
    assert length_penalty(19.0, 0.5) == 2.0
    assert length_penalty(torch.tensor([1, 7, 19]), 0.5).tolist() == pytest.approx([1.0, math.sqrt(2), 2.0])


@settings(max_examples=40)
@given(seeds, st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(4, 8))
def test_a_beam_of_one_takes_the_likeliest_token_at_every_step(seed: int, limits: list[int], types: int) -> None:
    table = random_table(seed, len(limits), types)
    model = TableModel(table, beam=1)
    found = [one for (one,) in search(table, limits, beam=1, model=model)]
    assert not model.reorders
    for row, limit, one in zip(table, limits, found, strict=True):
        tokens: list[int] = []
        state = next_state(0, START)
        while len(tokens) < limit and tokens[-1:] != [END]:
            choice = row[state].clone()
            choice[END] = NEVER if not tokens else choice[END]
            tokens.append(int(choice.argmax()))
            state = next_state(state, tokens[-1])
        assert one.tokens == [t for t in tokens if t != END]


@settings(max_examples=120)
@given(seeds, alphas, st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(4, 6), st.integers(1, 4))
def test_a_beam_of_full_width_is_exhaustive_search(
    seed: int, alpha: float, limits: list[int], types: int, nbest: int
) -> None:
    table = random_table(seed, len(limits), types)
    beam = max(types ** max(limits), nbest)
    batch = search(table, limits, beam=beam, alpha=alpha, nbest=nbest)
    for row, limit, found in zip(table, limits, batch, strict=True):
        everything = [(log_probability_of(row, s), s) for s in every_sentence(types, limit)]
        ranking = sorted(((score_of(p, len(s), alpha), s) for p, s in everything), key=lambda one: -one[0])[:nbest]
        assert [one.score for one in found] == pytest.approx([score for score, _ in ranking], rel=1e-6)
        best = [s for score, s in ranking if score >= ranking[0][0] * (1 + 1e-6)]
        assert found[0].tokens in [[t for t in s if t != END] for s in best]


@settings(max_examples=500)
@given(seeds, st.lists(st.integers(1, 8), min_size=3, max_size=7), st.integers(4, 8), st.integers(1, 6), st.data())
def test_beam_search_equals_the_plain_one_through_ties_and_impossible_types(
    seed: int, limits: list[int], types: int, beam: int, data: st.DataObject
) -> None:
    table = coarse_table(seed, len(limits), types, data.draw(st.sampled_from([0.25, 0.6])))
    rules = {
        "alpha": data.draw(st.sampled_from([0.0, 0.6, 1.0, 1.5])),
        "nbest": data.draw(st.integers(1, beam)),
        "no_repeat_ngram": data.draw(st.integers(0, 3)),
    }
    for row, limit, found in zip(table, limits, search(table, limits, beam=beam, **rules), strict=True):
        plain = plain_beam_search(row, limit, beam, **rules)
        if plain:
            assert as_tuples(found) == plain
        else:
            assert [(one.score, one.log_probability) for one in found] == [(NEVER, NEVER)]
            assert len(found[0].tokens) < limit


@settings(max_examples=40)
@given(seeds, st.lists(st.integers(1, 12), min_size=2, max_size=12), st.integers(1, 5))
def test_a_batch_equals_each_sentence_alone(seed: int, limits: list[int], beam: int) -> None:
    assert search(random_table(seed, 0, 5), [], beam=beam) == []
    table = random_table(seed, len(limits), 5)
    together = search(table, limits, beam=beam, nbest=beam)
    alone = [search(table[i : i + 1], [limit], beam=beam, nbest=beam)[0] for i, limit in enumerate(limits)]
    assert together == alone


@settings(max_examples=40)
@given(seeds, alphas, st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_n_best_are_sorted_distinct_within_limits_and_their_scores_can_be_recomputed(
    seed: int, alpha: float, limits: list[int]
) -> None:
    table = random_table(seed, len(limits), 5)
    for row, limit, found in zip(table, limits, search(table, limits, beam=6, alpha=alpha, nbest=6), strict=True):
        assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
        assert len({tuple(one.tokens) for one in found}) == len(found)
        for one in found:
            assert 1 <= len(one.tokens) <= limit and END not in one.tokens
            whole = one.tokens if len(one.tokens) == limit else [*one.tokens, END]
            assert one.log_probability == pytest.approx(log_probability_of(row, whole), rel=1e-6)
            assert one.score == pytest.approx(one.log_probability / length_penalty(len(whole), alpha), rel=1e-6)


def test_sentences_that_are_done_leave_once_a_quarter_of_the_batch_is_done() -> None:
    table = random_table(0, 8, 4)
    table[:, :, END] = NEVER
    model = TableModel(table, beam=2)
    limits = [5, 2, 8, 1, 4, 7, 3, 6]
    found = search(table, limits, beam=2, model=model)
    assert [len(best.tokens) for (best,) in found] == limits
    assert model.batch_sizes == [8, 8, 6, 6, 4, 3, 2, 1]
    assert sorted(model.sentence_b.tolist()) == [limits.index(8)]


@settings(max_examples=30)
@given(seeds, st.integers(2, 5))
def test_reorder_is_called_only_when_something_moved(seed: int, beam: int) -> None:
    model = TableModel(random_table(seed, 3, 4), beam)
    search(model.table, [9, 9, 9], beam=beam, model=model)
    assert all((origin != torch.arange(beam)).any() for origin in model.reorders)
    assert len(model.reorders) < len(model.batch_sizes)


def test_hypotheses_that_keep_their_slots_are_not_reordered() -> None:
    """Two first words, each with one sure way on: nothing moves after the first step filled the second slot."""
    table = torch.full((1, STATES, 6), NEVER)
    table[0, :, 4] = -0.1
    table[0, next_state(0, START), 4:] = torch.tensor([-0.5, -0.7])
    model = TableModel(table, beam=2)
    found = search(table, [6], beam=2, nbest=2, model=model)[0]
    assert [one.tokens for one in found] == [[4] * 6, [5, 4, 4, 4, 4, 4]]
    assert [origin.tolist() for origin in model.reorders] == [[[0, 0]]]


def test_a_hypothesis_that_moves_only_to_finish_is_not_reordered() -> None:
    table = chain({4: -0.1}, {5: -0.1, END: -1.0}, {5: -0.1}, {5: -0.1})
    model = TableModel(table, beam=2)
    found = search(table, [4], beam=2, nbest=2, model=model)[0]
    assert [one.tokens for one in found] == [[4, 5, 5, 5], [4]]
    assert not model.reorders


def test_a_longer_sentence_that_scores_better_wins_over_one_that_finished_first() -> None:
    table = chain({4: -0.1}, {END: -1.0, 5: -1.1}, {END: -0.0})
    for alpha, winner, log_p, length in ((0.0, [4], -1.1, 2), (1.5, [4, 5], -1.2, 3)):
        best = search(table, [10], beam=2, alpha=alpha)[0][0]
        assert best.tokens == winner
        assert best.log_probability == pytest.approx(log_p)
        assert best.score == pytest.approx(log_p / length_penalty(length, alpha))


def test_the_search_stops_once_nothing_alive_can_win() -> None:
    """One word that ends at once and surely, and one that goes on for ever: only a second best has to wait for it."""
    table = torch.full((1, STATES, 6), NEVER)
    table[:, :, 2] = -0.01
    first = next_state(0, START)
    table[0, first] = torch.tensor([NEVER, NEVER, NEVER, NEVER, -0.1, -5.0])
    table[0, next_state(first, 4)] = torch.tensor([NEVER, NEVER, NEVER, -0.1, NEVER, NEVER])
    for beam, nbest, steps in ((1, 1, 2), (2, 1, 2), (2, 2, 6)):
        model = TableModel(table, beam)
        found = search(table, [6], beam=beam, nbest=nbest, model=model)[0]
        assert [one.tokens for one in found] == [[4], [5, 2, 2, 2, 2, 2]][:nbest]
        assert len(model.batch_sizes) == steps


@settings(max_examples=60)
@given(seeds, st.integers(1, 700), st.integers(1, 9))
def test_the_best_of_a_row_are_those_of_a_stable_sort(seed: int, width: int, count: int) -> None:
    count = min(count, width)
    rows = -torch.randint(0, 40, (3, width), generator=torch.Generator().manual_seed(seed)).float().log2()
    values, indices = rows.sort(dim=1, descending=True, stable=True)
    best, index = _best(rows, count)
    assert torch.equal(best, values[:, :count]) and torch.equal(index, indices[:, :count])


def test_ties_go_to_the_lowest_index_whatever_the_size_of_the_vocabulary() -> None:
    for types in (6, 64, 65, 1000):
        table = torch.full((2, STATES, types), -1.0)
        found = search(table, [3, 3], beam=6, nbest=6)
        # The end is forbidden at the first step, then fourth in the order of types.
        assert [one.tokens for one in found[0]] == [[0], [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0], [0, 0, 4]]
        assert found[0] == found[1]


def test_no_sentence_is_empty_however_likely_its_end() -> None:
    table = torch.full((1, STATES, 6), -3.0)
    table[:, :, END] = -0.1
    assert all(len(one.tokens) >= 1 for one in search(table, [9], beam=4, nbest=4)[0])
    assert len(search(table, [9], beam=4, alpha=0.0)[0][0].tokens) == 1
    assert len(search(table, [1])[0][0].tokens) == 1


@pytest.mark.parametrize("n", [1, 2, 3])
def test_no_ngram_occurs_twice(n: int) -> None:
    table = random_table(n, 4, 6)
    table[:, :, END] = -20.0
    free, bound = (search(table, [30] * 4, nbest=4, no_repeat_ngram=rule) for rule in (0, n))
    assert any(repeats(one.tokens, n) for found in free for one in found)
    assert not any(repeats(one.tokens, n) for found in bound for one in found)


def test_a_beam_wider_than_the_vocabulary_fills_its_slots_later() -> None:
    table = random_table(3, 2, 4)
    assert [len(found) for found in search(table, [5, 1], beam=20, nbest=20)] == [20, 3]


def test_where_nothing_is_possible_the_sentence_breaks_off_and_others_go_on() -> None:
    table = random_table(1, 3, 4)
    table[0] = NEVER
    table[1] = chain({1: -0.5}, {2: -0.5})[0, :, :4]
    found = search(table, [6, 6, 6], beam=3, nbest=2)
    assert as_tuples(found[0]) == [([], NEVER, NEVER)]
    assert as_tuples(found[1]) == [([1, 2], NEVER, NEVER)]
    assert found[2] == search(table[2:], [6], beam=3, nbest=2)[0]
    alone = TableModel(table[1:2], beam=3)
    search(table[1:2], [6], beam=3, model=alone)
    assert len(alone.batch_sizes) == 3


def test_the_steppers_own_tensors_are_left_alone() -> None:
    class Constant(TableModel):
        def step(self, tokens_bk: Tensor) -> Tensor:
            return answer[: len(tokens_bk)]

    answer = random_table(0, 2, 6)[:, :3]
    before, limits = answer.clone(), torch.tensor([5, 2])
    beam_search(Constant(answer, 3), 2, limits, beam=3, no_repeat_ngram=1)
    assert torch.equal(answer, before)
    assert limits.tolist() == [5, 2]


def test_a_model_that_gives_no_numbers_is_reported() -> None:
    table = random_table(0, 2, 4)
    table[1, :, 2] = math.nan
    with pytest.raises(FloatingPointError, match="not numbers"):
        search(table, [4, 4])


@pytest.mark.parametrize(
    ("rules", "complaint"),
    [
        ({"beam": 0}, "beam must be at least 1"),
        ({"nbest": 0}, "nbest"),
        ({"nbest": 5}, "nbest must be between 1 and the beam of 4"),
        ({"alpha": -0.1}, "alpha must be between 0"),
        ({"alpha": math.nan}, "alpha must be between 0"),
        ({"no_repeat_ngram": -1}, "no_repeat_ngram"),
    ],
)
def test_bad_settings_are_named(rules: dict[str, float], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        search(random_table(0, 1, 4), [4], **rules)


def test_bad_limits_are_named() -> None:
    with pytest.raises(InputError, match="max_lengths must be at least 1, got 0"):
        search(random_table(0, 2, 4), [4, 0])
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        beam_search(TableModel(random_table(0, 2, 4), 4), 2, torch.tensor([4]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_finds_what_the_cpu_finds() -> None:
    limits = [1 + i % 17 for i in range(64)]
    table = coarse_table(5, len(limits), 300, impossible=0.5)
    on_gpu = TableModel(table, 4, device="cuda")
    found = search(table, limits, nbest=4, no_repeat_ngram=2)
    assert search(table, limits, nbest=4, no_repeat_ngram=2, model=on_gpu) == found
