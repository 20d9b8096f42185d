"""Temperature, top-k and top-p as properties, and draws that follow their seed and their chances."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qknorm.decoding.sampling import choose, divide_by_temperature, keep_top_k, keep_top_p

LOGITS = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=12).map(torch.tensor)


def kept(logits: torch.Tensor) -> set[int]:
    return set((logits > -torch.inf).nonzero().flatten().tolist())


@given(LOGITS, st.floats(0.05, 20))
def test_temperature_divides(logits, temperature):
    expected = torch.softmax(logits.double() / temperature, dim=-1)
    found = torch.softmax(divide_by_temperature(logits.double(), temperature), dim=-1)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)


def test_a_tiny_temperature_is_the_largest_and_no_nan():
    for temperature in (1e-38, 1e-46, 5e-324):  # the last two are 0 in float32
        divided = divide_by_temperature(torch.tensor([1.0, 3.0, -torch.inf, 2.0]), temperature)
        assert torch.softmax(divided, dim=-1).tolist() == [0, 1, 0, 0]
    with pytest.raises(ValueError, match="above 0"):
        divide_by_temperature(torch.zeros(2), 0.0)


@given(LOGITS, st.integers(1, 15))
def test_top_k_keeps_the_k_largest_as_they_are(logits, k):
    found = keep_top_k(logits, k)
    chosen = kept(found)
    assert len(chosen) == min(k, len(logits))
    assert all(found[i] == logits[i] for i in chosen)
    left = [float(logits[i]) for i in range(len(logits)) if i not in chosen]
    assert not left or max(left) <= min(float(logits[i]) for i in chosen)


@given(LOGITS, st.floats(0.01, 1.0))
def test_top_p_keeps_the_fewest_that_suffice(logits, p):
    found = keep_top_p(logits, p)
    chosen, chances = kept(found), torch.softmax(logits.double(), dim=-1)
    assert chosen and all(found[i] == logits[i] for i in chosen)
    mass = sum(float(chances[i]) for i in chosen)
    assert mass >= p - 1e-9
    if p < 1:
        assert mass - min(float(chances[i]) for i in chosen) < p + 1e-9
    left = [float(logits[i]) for i in range(len(logits)) if i not in chosen]
    assert not left or max(left) <= min(float(logits[i]) for i in chosen)


@given(LOGITS, st.integers(1, 12), st.floats(0.05, 1.0), st.floats(0.05, 5), st.integers(0, 2**40))
def test_a_draw_is_among_what_is_kept_and_repeats_with_its_seed(logits, k, p, temperature, seed):
    options = {"temperature": temperature, "top_k": k, "top_p": p}
    draws = [int(choose(logits, **options, generator=torch.Generator().manual_seed(seed))) for _ in range(2)]
    assert draws[0] == draws[1]
    assert draws[0] in kept(keep_top_p(keep_top_k(divide_by_temperature(logits, temperature), k), p))


@given(LOGITS)
def test_greedy_is_the_largest(logits):
    largest = float(logits.max())
    assert float(logits[choose(logits, temperature=0)]) == largest
    assert float(logits[choose(logits, top_k=1)]) == largest


def test_draws_follow_their_chances():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.2])).expand(20_000, 3)
    drawn = choose(logits, generator=torch.Generator().manual_seed(0))
    assert drawn.shape == (20_000,)
    shares = torch.bincount(drawn, minlength=3) / 20_000
    assert shares.tolist() == pytest.approx([0.5, 0.3, 0.2], abs=4 * math.sqrt(0.25 / 20_000))


@pytest.mark.parametrize("logits", [[math.nan, 1.0], [-math.inf, -math.inf], [math.inf, 0.0]])
def test_what_is_no_number_is_refused(logits):
    for temperature in (0, 1):
        with pytest.raises(FloatingPointError, match="no numbers"):
            choose(torch.tensor(logits), temperature=temperature)


def test_bad_bounds_are_refused():
    with pytest.raises(ValueError, match="k must be at least 1"):
        keep_top_k(torch.zeros(2), 0)
    for p in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match="p must be above 0"):
            keep_top_p(torch.zeros(2), p)
