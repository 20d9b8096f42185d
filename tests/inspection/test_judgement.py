"""What is said of a history of measures: the right thing, of the right heads, since the right step, or nothing."""

import math

import pytest
import torch

from qknorm.inspection.judgement import ANY_LENGTH, Sample, find, judge, judge_once
from qknorm.inspection.measures import Measures


def sample(step: int, name: str = "encoder.0.self", **measures: list[float]) -> Sample:
    heads = len(next(iter(measures.values())))
    calm = dict.fromkeys(Measures.names(), [0.0] * heads)
    calm |= {"relative_entropy": [0.8] * heads, "effective_keys": [3.0] * heads}
    return Sample(step, name, Measures(**{key: torch.tensor(value) for key, value in (calm | measures).items()}))


def over(measure: str, *values: list[float], name: str = "encoder.0.self") -> list[Sample]:
    return [sample(100 * at, name, **{measure: each}) for at, each in enumerate(values)]


def test_a_calm_training_gives_no_warning() -> None:
    assert judge([]) == []
    assert judge(over("relative_entropy", [0.9, 0.8], [0.6, 0.7], [0.5, 0.2])) == []
    assert judge(over("largest_logit", [1.0], [2.0], [4.0], [8.0], [16.0])) == []
    assert judge(over("saturation", [0.1], [0.4])) == []


def test_collapse_of_entropy() -> None:
    values = [0.8, 0.81, 0.7, 0.9], [0.3, 0.8, 0.04, 0.2], [0.04, 0.7, 0.03, 0.005], [0.01, 0.7, 0.02, 0.011]
    assert judge(over("relative_entropy", *values)) == [  # one wavers near nothing, which is no recovery
        "encoder.0.self, heads 1, 3 and 4: entropy collapses, to 0.010 of its largest possible (from 0.80), under 0.05 "
        "since step 200; " + ANY_LENGTH
    ]


@pytest.mark.parametrize(
    "values",
    [
        ([0.03],),  # nobody knows where it came from
        ([0.03], [0.02]),  # low from the start: a head that looks at one place
        ([0.8], [0.02], [0.06]),  # it rose again
    ],
)
def test_low_entropy_alone_is_no_collapse(values: tuple[list[float], ...]) -> None:
    assert judge(over("relative_entropy", *values)) == []


def test_logits_that_grow_without_end() -> None:
    history = over("largest_logit", [10.0, 10.0], [20.0, 60.0], [45.0, 61.0], [90.0, 62.0], [200.0, 63.0])
    assert judge(history) == [
        "encoder.0.self, head 1: logits grow without end, to 200 (from 10 at step 0), over 50 since step 300; "
        + ANY_LENGTH
    ]
    assert judge(over("largest_logit", [10.0], [900.0], [800.0], [700.0])) == []
    assert judge(over("largest_logit", [10.0], [900.0])) == []  # two points are no curve


def test_saturation() -> None:
    found = find(over("saturation", [0.1, 0.2], [0.6, 0.2], [0.7, 0.2]), cure="rest")
    assert [(each.kind, each.name, each.heads) for each in found] == [("saturation", "encoder.0.self", (0,))]
    assert found[0].text == (
        "encoder.0.self, head 1: softmax saturates, one key takes nearly everything for 70% of queries, for more than "
        "50% since step 100; rest"
    )


def test_numbers_that_are_none_are_all_there_is_to_say() -> None:
    history = over("largest_logit", [1.0, 2.0], [1.0, math.inf], [1.0, math.nan])
    assert judge(history) == [
        "encoder.0.self, head 2: logits are no finite numbers any more, since step 100; " + ANY_LENGTH
    ]
    assert ANY_LENGTH.startswith("lower the learning rate, or bound the logits with qknorm.adopt(model, length=…), … ")


def test_samples_in_which_nobody_saw_anything_are_passed_over() -> None:
    nothing = {"largest_logit": [math.nan] * 2, "relative_entropy": [math.nan] * 2, "effective_keys": [0.0, 0.0]}
    assert judge([sample(0, **nothing)]) == []
    history = [sample(0, saturation=[0.1, 0.9]), sample(100, **nothing)]
    assert [(each.kind, each.heads) for each in find(history)] == [("saturation", (1,))]
    history += [sample(200, largest_logit=[math.nan, 1.0]), sample(300, **nothing)]
    assert [(each.kind, each.heads) for each in find(history)] == [("broken", (0,))]
    assert "since step 200" in judge(history)[0]
    written = {name: [None if math.isnan(x) else x for x in column] for name, column in nothing.items()}
    assert judge_once("a", written) == []


def test_what_helps_may_depend_on_the_attention() -> None:
    history = over("saturation", [0.9], name="a") + over("saturation", [0.9], name="b")
    assert [text[-1] for text in judge(history, lambda name: f"look at {name}")] == ["a", "b"]


def test_attentions_are_judged_apart_and_changes_of_heads_survived() -> None:
    history = over("saturation", [0.9], name="a") + over("saturation", [0.1], name="b")
    history += [sample(300, "b", saturation=[0.1, 0.8])]
    assert [(each.name, each.heads) for each in find(history)] == [("a", (0,)), ("b", (1,))]


def test_measures_without_a_course() -> None:
    calm = {"largest_logit": [9.0, 1.0, 2.0], "relative_entropy": [0.3, None, 0.9], "saturation": [0.1, 0.2, 0.0]}
    assert judge_once("a", calm) == judge_once("a", {}) == []
    assert judge_once("a", calm | {"saturation": [0.1, 0.8, 0.6]}) == [
        "a, heads 2 and 3: softmax saturates, one key takes nearly everything for 80% of queries"
    ]
    assert judge_once("a", calm | {"largest_logit": [60.0, 1.0, 81.234], "relative_entropy": [0.04, 0.8, 0.01]}) == [
        "a, heads 1 and 3: entropy is 0.010 of its largest possible",
        "a, heads 1 and 3: logits reach 81.2; bound them with qknorm.adopt",
    ]
    assert judge_once("a", {"largest_logit": [None, 60.0], "saturation": [0.9, 0.9]}) == [
        "a, head 1: logits are no finite numbers; look at an earlier checkpoint"
    ]
