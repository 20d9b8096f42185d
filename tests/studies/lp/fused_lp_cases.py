"""Models in one stack through our own kernels learn what plain ones learn; in Triton's interpreter."""

import pytest
import torch
from lp_cases import tiny_study
from test_lp_training import DOT_PRODUCT, LEARNED, TEXT, THREE, check_against_plain, losses

from qknorm.studies.lp.design import Run
from qknorm.studies.lp.stack import FusedStack
from qknorm.studies.lp.training import Execution, make_stack, train_stack

FUSED = Execution(layers="fused")


@pytest.mark.parametrize("runs", [THREE[:2], [DOT_PRODUCT], [LEARNED]], ids=["p = 3", "dot product", "learned p"])
def test_fused_layers_learn_what_plain_ones_learn(runs: list[Run]) -> None:
    check_against_plain(runs, tiny_study(learning_rate=1e-2, clip=0.5, batch=2, context=8), FUSED)


def test_a_step_without_finite_gradients_is_left_out_and_counted() -> None:
    stack = make_stack(THREE[:2], tiny_study(iterations=3, batch=2, context=8), TEXT, FUSED)
    assert isinstance(stack, FusedStack)
    stack.run(1)
    assert stack.skipped_steps() == [0, 0]
    before = {number: stack.state(number)["words"].clone() for number in range(2)}
    stack._make_gradients()
    flat = stack._steps[1].flat
    assert flat is not None
    flat.gradients[0] = torch.nan
    for step in stack._steps:
        stack._update(step, 1e-2)
    assert stack.skipped_steps() == [0, 1]
    assert not torch.equal(stack.state(0)["words"], before[0]) and torch.equal(stack.state(1)["words"], before[1])


def test_with_dropout_each_model_drops_what_it_drops_alone() -> None:
    study = tiny_study(dropout=0.3, iterations=2, batch=2, context=8)
    together = train_stack([Run("same-scale", 2.0, 0), Run("same-scale", 2.0, 1)], study, TEXT, FUSED)
    alone = train_stack([Run("same-scale", 2.0, 1)], study, TEXT, FUSED)[0]
    assert losses(together[1]) == pytest.approx(losses(alone), abs=1e-6)
    assert losses(together[0]) != losses(alone)
