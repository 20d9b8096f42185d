"""Fused steps: their cases in Triton's interpreter, and that on the CPU asking for them changes nothing."""

import os

import pytest
import torch

from qknorm.config import Dropout, Model, Training
from qknorm.models.translator import Translator
from qknorm.training.fast import Fast
from qknorm.training.objective import label_smoothed_loss
from qknorm.training.step import Objective, TrainingStep


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter runs kernels on the CPU")
def test_on_the_cpu_asking_for_everything_changes_not_one_bit() -> None:
    ids, results = torch.randint(4, 20, (2, 5)), []
    for fast in (None, Fast.everything()):
        torch.manual_seed(0)
        sizes = {"width": 16, "feed_forward": 24, "encoder_layers": 1, "decoder_layers": 1, "heads": 2}
        model = Translator(20, Model(**sizes, dropout=Dropout.everywhere(0.3))).train()
        objective = Objective(label_smoothed_loss, (model.allowed, 0.1))
        step = TrainingStep(model, model, Training(compile=False), torch.device("cpu"), objective, fast)
        for _ in range(2):
            step([(ids, ids, ids)], ids.numel(), 1e-2)
        results.append((step.read_sums(), model.state_dict()))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(value, results[1][1][name]) for name, value in results[0][1].items())
