import pytest

from qknorm.errors import InputError
from qknorm.studies.recipes import change, preset
from qknorm.studies.tune.candidates import (
    FACTORS,
    MERGES,
    QUICK,
    Candidate,
    apply,
    check_factors,
    find_winners,
    join,
    single_changes,
)

LOW = preset("low-resource")


def test_every_value_is_a_valid_setting_and_one_of_each_factor_is_our_preset_s_own():
    candidates = single_changes(LOW, 3_000)
    assert len({each.name for each in candidates}) == len(candidates)
    for factor, values in FACTORS.items():
        tried = [each for each in candidates if each.factor == factor]
        assert len(values) - len(tried) == (0 if factor == "merges" else 1), factor
    for each in candidates:
        assert (apply(LOW, each.changes) != LOW) is (MERGES not in each.changes)
    assert set(QUICK) <= set(FACTORS)


def test_the_first_values_come_first_and_what_the_start_has_is_left_out():
    factors = [each.factor for each in single_changes(LOW, 1_000)]
    assert factors[: len(FACTORS)] == list(FACTORS)
    names = [each.name for each in single_changes(change(LOW, {"model.heads": 2}), 1_000, ("heads", "merges"))]
    assert names == ["merges 2000", "heads 8", "merges 500", "heads 4", "merges 4000", "merges 8000"]
    assert [each.name for each in single_changes(LOW, 3_000, ("schedule", "layers"), values=1)] == [
        "schedule inverse-sqrt",
        "layers 5",
    ]
    # one value of each factor that the start does not have, though the likeliest is its own
    assert [each.name for each in single_changes(LOW, 1_000, ("merges", "norm"), values=1)] == [
        "merges 2000",
        "norm rms",
    ]


def test_winners_are_the_best_value_of_each_factor_over_the_margin():
    one, two = Candidate("heads 2", {"model.heads": 2}, "heads"), Candidate("heads 8", {"model.heads": 8}, "heads")
    merges, norm = Candidate("merges 500", {MERGES: 500}, "merges"), Candidate("norm rms", {}, "norm")
    gains = {one: 0.3, two: 0.5, merges: 0.9, norm: 0.2}
    assert find_winners(gains, 0.2) == [merges, two]
    assert find_winners(gains, 0.9) == []
    assert find_winners({one: -5.0, two: -6.0}, -9.0) == [one]


def test_joining_takes_all_and_the_foremost_and_the_particular_goes_over_the_general():
    schedule = next(each for each in single_changes(LOW, 3_000) if each.name == "schedule inverse-sqrt")
    steps = next(each for each in single_changes(LOW, 3_000) if each.name == "steps 50000")
    merges = Candidate("merges 500", {MERGES: 500}, "merges")
    everything, two = join(LOW, [steps, schedule, merges])
    assert (everything.name, two.name) == ("best 3 joined", "best 2 joined")
    assert everything.changes[MERGES] == 500 and MERGES not in two.changes
    for joined in (everything, two):
        found = apply(LOW, joined.changes).training
        assert (found.schedule.kind, found.max_steps, found.stop_after) == ("inverse-sqrt", 50_000, 20)
    assert join(LOW, [merges]) == join(LOW, []) == []


def test_what_the_start_cannot_have_is_left_out():
    start = change(LOW, {"model.width": 384, "model.heads": 6})
    assert [each.name for each in single_changes(start, 3_000, ("width", "heads"))] == ["heads 8", "heads 4", "heads 2"]
    wide = Candidate("width 250", {"model.width": 250}, "width")
    assert [each.name for each in join(LOW, [*single_changes(LOW, 3_000, ("norm", "batch"), 1), wide])] == [
        "best 2 joined"
    ]


def test_an_unknown_factor_is_an_error_that_suggests_one():
    check_factors(("merges", "none"))
    with pytest.raises(InputError, match=r"--only mergs: there is no such factor.*merges"):
        check_factors(("mergs",))
