"""The observer of a training: measures few sentences, leaves the training as it is, warns once."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_measures import agree
from torch import Tensor

from qknorm.config import Model
from qknorm.inspection.judgement import Sample
from qknorm.inspection.measures import Measures
from qknorm.inspection.monitor import capture
from qknorm.inspection.observer import MOST_STEPS, SENTENCES, AttentionObserver, _thinned
from qknorm.models.translator import Translator


def translator(**attention: Any) -> Translator:
    settings = Model(width=16, feed_forward=24, heads=2, encoder_layers=1, decoder_layers=1, attention=attention)
    return Translator(30, settings, scale_init=4.0)


def batch(sentences: int = 3) -> tuple[Tensor, Tensor]:
    source, target = torch.randint(4, 30, (sentences, 6)), torch.randint(4, 30, (sentences, 4))
    source[1, 3:], target[0, 2:] = 0, 0
    return source, target


def test_an_observation() -> None:
    model = translator().train()
    inputs = batch(SENTENCES + 2)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    seen = AttentionObserver()(40, model, *inputs)
    assert torch.equal(torch.rand(3), expected) and model.training
    assert list(seen.heads) == list(seen.means) == ["encoder.0.self", "decoder.0.self", "decoder.0.cross"]
    assert set(seen.heads["encoder.0.self"]) == set(Measures.names())
    assert seen.means["decoder.0.self"]["entropy"] == pytest.approx(
        sum(seen.heads["decoder.0.self"]["entropy"]) / 2, rel=1e-4
    )
    assert seen.warnings == []
    with torch.no_grad(), capture(model.eval()) as calls:
        model(*(x[:SENTENCES] for x in inputs))
    real = inputs[1][:SENTENCES] != 0  # padding of the target is no query
    own = next(call for call in calls if call.name == "decoder.0.self")
    agree(replace(own, queries=real).measure(), seen.heads["decoder.0.self"], 1e-4)


def test_rows_that_fill_a_batch_up_are_no_sentences() -> None:
    model, (source, target) = translator().eval(), batch(2)
    filled_source, filled_target = torch.zeros(6, 6, dtype=torch.long), torch.zeros(6, 4, dtype=torch.long)
    filled_source[1:3], filled_target[1:3] = source, target
    filled_source[[0, 3, 4, 5], 0] = 3  # an end, as batching writes it
    assert AttentionObserver()(1, model, filled_source, filled_target) == AttentionObserver()(1, model, source, target)


def saturating(model: Translator) -> Translator:
    """Queries and keys that point the same way, very far."""
    with torch.no_grad():
        for attention in model.attentions().values():
            attention.in_proj_weight[:32] *= 200
    return model


def test_a_warning_is_given_once_and_again_when_it_comes_back() -> None:
    calm, wild = translator(qk_norm="none"), saturating(translator(qk_norm="none"))
    inputs, observer = batch(), AttentionObserver()
    assert observer(0, calm, *inputs).warnings == []
    first = observer(10, wild, *inputs).warnings
    assert any("softmax saturates" in each and "model.attention.qk_norm = lp" in each for each in first)
    assert observer(20, wild, *inputs).warnings == []
    assert observer(30, calm, *inputs).warnings == []
    assert any("softmax saturates" in each for each in observer(40, wild, *inputs).warnings)


def test_a_training_that_goes_on_recalls_what_was_said() -> None:
    wild, inputs = saturating(translator(qk_norm="none")), batch()
    observer = AttentionObserver()
    seen = observer(10, wild, *inputs)
    assert seen.warnings
    row = {"kind": "attention", "step": 10, "attention": seen.heads}
    rows = [{"kind": "step", "step": 5, "loss": 1.0}, json.loads(json.dumps(row).replace("NaN", "null"))]
    resumed = AttentionObserver()
    resumed.recall(rows)
    assert resumed(20, wild, *inputs) == observer(20, wild, *inputs)
    assert resumed(20, wild, *inputs).warnings == []


def test_what_helps_depends_on_the_model() -> None:
    wild = saturating(translator(qk_norm="lp"))
    with torch.no_grad():
        for attention in wild.attentions().values():
            attention.norm.scale.fill_(500.0)
    warnings = AttentionObserver()(0, wild, *batch()).warnings
    assert warnings and all("qk_norm" not in each and "training.schedule" in each for each in warnings)


def test_a_long_history_is_thinned() -> None:
    measures = Measures.from_stack(torch.zeros(len(Measures.names()), 1))
    history: list[Sample] = []
    for step in range(5 * MOST_STEPS):
        history = _thinned([*history, Sample(step, "a", measures)])
        assert len(history) <= MOST_STEPS
    steps = [sample.step for sample in history]
    assert steps[0] == 0 and steps[-20:] == list(range(steps[-1] - 19, steps[-1] + 1)) and steps == sorted(steps)
