"""What is said of a history of measures: the right thing, of the right heads, since the right step, or nothing."""

import math

import pytest
import torch

from qknorm.inspection.judgement import Sample, find, judge
from qknorm.inspection.measures import Measures


def sample(step: int, name: str = "encoder.0.self", **measures: list[float]) -> Sample:
    heads = len(next(iter(measures.values())))
    calm = dict.fromkeys(Measures.names(), [0.0] * heads) | {"relative_entropy": [0.8] * heads}
    return Sample(step, name, Measures(**{key: torch.tensor(value) for key, value in (calm | measures).items()}))


def over(measure: str, *values: list[float], name: str = "encoder.0.self") -> list[Sample]:
    return [sample(100 * at, name, **{measure: each}) for at, each in enumerate(values)]


def test_a_calm_training_gives_no_warning() -> None:
    assert judge([]) == []
    assert judge(over("relative_entropy", [0.9, 0.8], [0.6, 0.7], [0.5, 0.2])) == []
    assert judge(over("largest_logit", [1.0], [2.0], [4.0], [8.0], [16.0])) == []
    assert judge(over("saturation", [0.1], [0.4])) == []


def test_collapse_of_entropy() -> None:
    history = over("relative_entropy", [0.8, 0.81, 0.7], [0.3, 0.8, 0.04], [0.04, 0.7, 0.03], [0.01, 0.7, 0.02])
    assert judge(history) == [
        "encoder.0.self, heads 1 and 3: entropy collapses, to 0.010 of its largest possible (from 0.80), under 0.05 "
        "since step 200; lower the learning rate, or bound the logits with qknorm.adopt(model)"
    ]


@pytest.mark.parametrize(
    "values",
    [
        ([0.03],),  # nobody knows where it came from
        ([0.03], [0.02]),  # low from the start: a head that looks at one place
        ([0.8], [0.02], [0.04]),  # it rises again
    ],
)
def test_low_entropy_alone_is_no_collapse(values: tuple[list[float], ...]) -> None:
    assert judge(over("relative_entropy", *values)) == []


def test_logits_that_grow_without_end() -> None:
    history = over("largest_logit", [10.0, 10.0], [20.0, 60.0], [45.0, 61.0], [90.0, 62.0], [200.0, 63.0])
    assert judge(history) == [
        "encoder.0.self, head 1: logits grow without end, to 200 (from 10 at step 0), over 50 since step 300; "
        "lower the learning rate, or bound the logits with qknorm.adopt(model)"
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
        "encoder.0.self, head 2: logits are no finite numbers any more, since step 100; lower the learning rate, or "
        "bound the logits with qknorm.adopt(model)"
    ]


def test_attentions_are_judged_apart_and_changes_of_heads_survived() -> None:
    history = over("saturation", [0.9], name="a") + over("saturation", [0.1], name="b")
    history += [sample(300, "b", saturation=[0.1, 0.8])]
    assert [(each.name, each.heads) for each in find(history)] == [("a", (0,)), ("b", (1,))]
