"""One update: what is added up, what is clipped, and what a bad batch must not touch."""

import copy

import pytest
import torch

from qknorm.config import Dropout, Model, Training
from qknorm.models.translator import Translator
from qknorm.training.objective import label_smoothed_loss
from qknorm.training.step import Objective, TrainingStep, choose_precision

CPU = torch.device("cpu")
VOCABULARY = 24


def make_model(dropout: float = 0.0) -> Translator:
    torch.manual_seed(3)
    shape = {"width": 16, "feed_forward": 32, "encoder_layers": 1, "decoder_layers": 1, "heads": 2}
    return Translator(VOCABULARY, Model(**shape, dropout=Dropout.everywhere(dropout, word=dropout))).train()


def make_step(model: Translator, **settings) -> TrainingStep:
    training = Training(**settings)
    objective = Objective(label_smoothed_loss, (model.allowed, training.label_smoothing))
    return TrainingStep(model, model, training, CPU, objective)


def make_batch(seed: int, rows: int = 4, length: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    source, target = (torch.randint(4, VOCABULARY, (rows, length), generator=random) for _ in range(2))
    target[-1, length // 2 :] = 0
    return source, torch.cat([torch.full((rows, 1), 2), target[:, :-1]], dim=1), target


def tokens(*batches) -> int:
    return sum(int((batch[2] != 0).sum()) for batch in batches)


def weights(model: Translator) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], **tolerance: float) -> None:
    for name in one:
        torch.testing.assert_close(one[name], other[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def test_two_half_batches_equal_one_whole():
    whole = make_batch(0, rows=6)
    halves = [tuple(each[:2] for each in whole), tuple(each[2:] for each in whole)]
    models = make_model(), make_model()
    steps = [make_step(model) for model in models]
    for step in range(3):
        steps[0]([whole], tokens(whole), 1e-3 * (step + 1))
        steps[1](halves, tokens(*halves), 1e-3 * (step + 1))
    assert_alike(weights(models[0]), weights(models[1]), atol=1e-6, rtol=1e-5)
    one, other = (step.read_sums() for step in steps)
    assert one.smoothed == pytest.approx(other.smoothed, rel=1e-5)
    assert one.tokens == other.tokens == 3 * tokens(whole)
    assert one.steps == other.steps == 3


def test_the_update_is_adam_on_the_clipped_mean_loss():
    """Against plain torch: mean loss over tokens, clip_grad_norm_, unfused AdamW."""
    batch, model, plain = make_batch(1), make_model(), make_model()
    step = make_step(model, label_smoothing=0.0, clip=0.05, weight_decay=0.01)
    optimizer = torch.optim.AdamW(plain.parameters(), betas=Training().betas, weight_decay=0.01, fused=False)
    for rate in (1e-3, 2e-3):
        step([batch], tokens(batch), rate)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        logits = plain(batch[0], batch[1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[2].flatten(), ignore_index=0).backward()
        assert torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05) > 0.05
        optimizer.step()
    assert_alike(weights(model), weights(plain), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("clip", [0.01, 1e6])
def test_gradients_longer_than_the_clip_are_shortened_to_it(clip):
    model, batch = make_model(), make_batch(2)
    step, seen = make_step(model, clip=clip), []
    step.optimizer.register_step_pre_hook(
        lambda *_: seen.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())
    )
    step([batch], tokens(batch), 1e-3)
    assert seen[0] == pytest.approx(clip, rel=1e-3) if clip < 1 else 0.01 < seen[0] < 1e6


def test_a_step_that_is_not_finite_changes_nothing_but_a_count():
    model, undisturbed = make_model(), make_model()
    step, calm = make_step(model), make_step(undisturbed)
    first, bad, last = make_batch(0), make_batch(1), make_batch(2)
    for each in (step, calm):
        each([first], tokens(first), 1e-3)
    before = weights(model)
    with torch.no_grad():
        kept = model.encoder[0].feed_forward.widen.bias[0].clone()
        model.encoder[0].feed_forward.widen.bias[0] = torch.nan
    step([bad], tokens(bad), 1e-3)
    with torch.no_grad():
        model.encoder[0].feed_forward.widen.bias[0] = kept
    assert_alike(weights(model), before, atol=0, rtol=0)
    assert step.read_sums().bad_steps == 1
    for each in (step, calm):
        each([last], tokens(last), 1e-3)
    assert_alike(weights(model), weights(undisturbed), atol=0, rtol=0)
    assert step.read_sums().bad_steps == 0


def test_a_restored_optimiser_gives_the_identical_next_step():
    model = make_model()
    step = make_step(model, weight_decay=0.1)
    for seed in range(3):
        step([make_batch(seed)], 20, 1e-3)
    saved, moments = weights(model), copy.deepcopy(step.optimizer.state_dict())
    other = make_model()
    other.load_state_dict(saved)
    restored = make_step(other, weight_decay=0.1)
    restored.optimizer.load_state_dict(moments)
    for each in (step, restored):
        each([make_batch(9)], 20, 5e-4)
    assert_alike(weights(model), weights(other), atol=0, rtol=0)
    assert any(not torch.equal(saved[name], tensor) for name, tensor in weights(model).items())


def test_setting_up_changes_no_weight():
    model = make_model()
    before = weights(model)
    make_step(model, weight_decay=0.5)
    assert_alike(weights(model), before, atol=0, rtol=0)


def test_the_same_seed_gives_the_same_loss_bit_for_bit():
    def losses(seed: int) -> list[float]:
        step = make_step(make_model(dropout=0.3))
        torch.manual_seed(seed)
        found = []
        for number in range(4):
            step([make_batch(number)], 20, 1e-3)
            found.append(step.read_sums().smoothed)
        return found

    assert losses(5) == losses(5)
    assert losses(5) != losses(6)


def test_steps_learn():
    model = make_model()
    step, batch = make_step(model, label_smoothing=0.0), make_batch(0)
    step([batch], tokens(batch), 0.0)
    first = step.read_sums().plain
    for _ in range(60):
        step([batch], tokens(batch), 1e-2)
    step.read_sums()
    step([batch], tokens(batch), 0.0)
    assert step.read_sums().plain < first / 4


def test_precision_by_name_and_by_device(monkeypatch):
    assert choose_precision(Training(), CPU, width=64) == torch.float32
    for has, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr("qknorm.training.step._cpu_multiplies_bfloat16", lambda has=has: has)
        assert choose_precision(Training(), CPU, width=512) == dtype
    assert choose_precision(Training(precision="bfloat16"), CPU, width=64) == torch.bfloat16
    assert choose_precision(Training(precision="float32"), CPU, width=512) == torch.float32
    model, batch = make_model(), make_batch(0)
    step = make_step(model, precision="bfloat16")
    step([batch], tokens(batch), 1e-3)
    assert all(parameter.dtype == torch.float32 and parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("decay_matrices_only", [False, True])
def test_what_is_frozen_stays_as_it_is(decay_matrices_only):
    model = make_model()
    frozen = model.words.weight.requires_grad_(False)
    before = frozen.clone()
    step = make_step(model, weight_decay=0.5, decay_matrices_only=decay_matrices_only)
    others = model.encoder[0].feed_forward.widen.weight.detach().clone()
    batch = make_batch(0)
    step([batch], tokens(batch), 1e-2)
    assert torch.equal(frozen, before) and frozen.grad is None
    assert not torch.equal(model.encoder[0].feed_forward.widen.weight, others)
