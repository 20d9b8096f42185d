"""Learning rates against worked-out values."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qknorm.config import Schedule
from qknorm.training.schedule import LearningRate


def rate(kind: str, *, width: int = 512, max_steps: int = 10_000, **settings) -> LearningRate:
    return LearningRate(Schedule(kind=kind, **settings), width, max_steps)


def test_the_papers_peak_and_warm_up():
    paper = rate("plateau", warmup=8_000)
    assert paper.peak == pytest.approx(4.94e-4, rel=1e-3)
    assert paper.at(1) == pytest.approx(4.94106e-4 / 8_000, rel=1e-4)
    assert paper.at(4_000) == pytest.approx(2.47053e-4, rel=1e-4)
    assert paper.at(8_000) == paper.at(1_000_000) == paper.peak


@given(st.sampled_from(["plateau", "inverse-sqrt", "cosine"]), st.integers(0, 500), st.integers(1, 2_000))
def test_a_rate_rises_in_warm_up_and_never_after_it(kind, warmup, step):
    schedule = rate(kind, warmup=warmup, peak=1e-3, max_steps=1_000, floor=1e-5)
    now, after = schedule.at(step), schedule.at(step + 1)
    assert 0 < now <= 1e-3
    assert now < after if step < warmup else now >= after


def test_inverse_square_root_golden():
    schedule = rate("inverse-sqrt", warmup=400, peak=1e-3)
    assert [schedule.at(step) for step in (100, 400, 1_600, 40_000)] == pytest.approx([2.5e-4, 1e-3, 5e-4, 1e-4])
    without = rate("inverse-sqrt", warmup=0, peak=1e-3)
    assert [without.at(step) for step in (1, 4, 100)] == pytest.approx([1e-3, 5e-4, 1e-4])


def test_cosine_golden():
    schedule = rate("cosine", warmup=100, peak=1e-3, floor=1e-4, max_steps=1_100)
    steps = (50, 100, 350, 600, 1_100, 5_000)
    quarter = 1e-4 + 9e-4 * 0.5 * (1 + math.sqrt(0.5))
    assert [schedule.at(step) for step in steps] == pytest.approx([5e-4, 1e-3, quarter, 5.5e-4, 1e-4, 1e-4])


def test_a_score_below_each_of_the_last_three_lowers_the_rate():
    schedule = rate("plateau", warmup=10, peak=1e-3, patience=3, decay=0.8)
    factors = []
    for score in (20.0, 21.0, 22.0, 19.0, 18.9, 19.5, 18.9, 18.0):
        schedule.evaluated(100, score)
        factors.append(schedule.factor)
    assert factors == pytest.approx([1, 1, 1, 0.8, 0.64, 0.64, 0.64, 0.512])
    assert schedule.at(100) == pytest.approx(0.512e-3)


def test_no_plateau_counts_before_the_end_of_warm_up_or_for_other_kinds():
    early = rate("plateau", warmup=1_000, peak=1e-3)
    other = rate("cosine", warmup=10, peak=1e-3)
    for score in (9.0, 8.0, 7.0, 6.0, 5.0):
        early.evaluated(999, score)
        other.evaluated(100, score)
    assert early.factor == other.factor == 1.0
    early.evaluated(1_000, 4.0)
    assert early.factor == pytest.approx(0.8)


def test_training_ends_when_plateaus_take_the_rate_under_its_floor():
    schedule = rate("plateau", warmup=10, peak=1e-3, decay=0.5, patience=1, floor=2e-4)
    ended = []
    for score in (5.0, 4.0, 3.0, 2.0):
        schedule.evaluated(50, score)
        ended.append(schedule.ended(50))
    assert ended == [False, False, False, True]
    assert not schedule.ended(9)  # a rate that is low because of warm-up ends nothing
    assert not rate("cosine", warmup=0, peak=1e-3, floor=1e-3).ended(50_000)


def test_a_schedule_goes_on_from_its_factor_and_scores():
    one = rate("plateau", warmup=0, peak=1e-3)
    for score in (5.0, 4.0, 3.0, 2.0):
        one.evaluated(10, score)
    other = LearningRate(one.settings, one.width, one.max_steps, factor=one.factor, scores=list(one.scores))
    for schedule in (one, other):
        schedule.evaluated(20, 1.0)
    assert one.at(21) == other.at(21) == pytest.approx(0.64e-3)
