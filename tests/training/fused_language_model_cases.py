"""Language models through fused kernels against their plain reference: on a GPU, or in Triton's interpreter."""

import functools
import gc
import weakref

import pytest
import torch
from torch import Tensor

from qknorm.config import LanguageModel as Settings
from qknorm.config import LanguageModelDropout, LanguageModelTraining
from qknorm.models.fused_run import FlatParameters, FusedRun, use_fused
from qknorm.models.language_model import LanguageModel
from qknorm.training.fast import Fast
from qknorm.training.fused_loss import projected_loss
from qknorm.training.objective import next_token_loss
from qknorm.training.step import Objective, Sums, TrainingStep

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABULARY = 19
PARTS = ["linear", "layers", "loss", "update"]


def make_model(dropout: float = 0.0, **changes: object) -> LanguageModel:
    torch.manual_seed(3)
    sizes = {"width": 16, "feed_forward": 24, "layers": 2, "heads": 2, "context": 6}
    settings = Settings(**{**sizes, **changes}, dropout=LanguageModelDropout.everywhere(dropout))
    model = LanguageModel(VOCABULARY, settings, scale_init=3.0).to(DEVICE).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def make_batch(seed: int, length: int = 6) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCABULARY, (3, length + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1].to(DEVICE), ids[:, 1:].to(DEVICE)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"biases": True, "tie": False},
        {"positions": "rotary", "norm": "rms"},
        {"norm": "scale", "activation": "relu", "biases": True},
        {"activation": "swiglu", "kv_heads": 1},
        {"attention": {"qk_norm": "none"}},
        {"attention": {"p": 3.0, "p_learned": True}},
    ],
    ids=str,
)
def test_a_fused_pass_is_the_plain_one(changes: dict[str, object]) -> None:
    model = make_model(**changes)
    ids, targets = make_batch(1, length=5)  # shorter than the context: positions are a view of their parameter
    plain = model(ids)
    next_token_loss(plain, targets).plain.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    flat = FlatParameters(model.parameters())
    with use_fused(DEVICE, linear=True, layers=True, flat=flat) as run:
        found = model(ids)
        assert run is not None and run.sites > 0  # it took part
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)
    next_token_loss(found, targets).plain.backward()
    for parameter, reference in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, reference, rtol=1e-3, atol=1e-3)


def test_a_window_over_the_context_is_refused_by_both() -> None:
    model = make_model()
    with pytest.raises(ValueError, match="context of 6"), use_fused(DEVICE, layers=True):
        model(torch.zeros(1, 7, dtype=torch.long, device=DEVICE))


def test_without_training_or_with_a_cache_the_plain_one_runs() -> None:
    model = make_model(dropout=0.5).eval()
    ids, _ = make_batch(2)
    with use_fused(DEVICE, layers=True, linear=True) as run:
        torch.testing.assert_close(model(ids, model.new_cache()), model(ids), rtol=1e-4, atol=1e-4)
        assert run is not None and run.sites == 0


@pytest.mark.parametrize("types", [VOCABULARY, 32, 1_100])
def test_the_loss_of_next_tokens_equals_the_reference(types: int) -> None:
    states = torch.randn(2, 4, 8, device=DEVICE).requires_grad_()
    table = torch.randn(types, 8, device=DEVICE).requires_grad_()
    targets = torch.randint(types, (2, 4), device=DEVICE)
    targets[0, 0] = 0  # counts as any other here
    weight, run = torch.tensor(0.25, device=DEVICE), FusedRun(torch.tensor([5], device=DEVICE))
    expected = next_token_loss(states @ table.T, targets)
    found = projected_loss(run, states, table, None, targets, None, 0.0, weight)
    torch.testing.assert_close(found.weighted, expected.plain * weight, rtol=1e-5, atol=1e-5)
    for mine, reference in zip(found.sums, expected, strict=True):
        torch.testing.assert_close(mine, reference, check_dtype=False, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(found.weighted, [states, table])
    for mine, reference in zip(gradients, torch.autograd.grad(expected.plain * weight, [states, table]), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5)


@functools.cache
def take_steps(fast: Fast, decay_matrices_only: bool) -> tuple[Sums, dict[str, Tensor]]:
    """Two steps, the first from two batches: what was summed up, and the weights after."""
    model = make_model(biases=True)
    settings = LanguageModelTraining(
        precision="float32", compile=False, clip=0.5, weight_decay=0.5, decay_matrices_only=decay_matrices_only
    )
    step = TrainingStep(model, model, settings, DEVICE, Objective(next_token_loss), fast)
    step([make_batch(0), make_batch(1)], 36, 1e-2)
    step([make_batch(2)], 18, 1e-2)
    return step.read_sums(), model.state_dict()


@pytest.mark.parametrize("part", [*PARTS, "all"])
@pytest.mark.parametrize("decay_matrices_only", [True, False])
def test_steps_equal_plain_steps_with_any_part(part: str, decay_matrices_only: bool) -> None:
    fast = Fast(**{part: True}) if part in PARTS else Fast.everything()
    (one, plain), (other, fused) = take_steps(Fast(), decay_matrices_only), take_steps(fast, decay_matrices_only)
    assert list(plain) == list(fused)
    for name, value in plain.items():
        torch.testing.assert_close(fused[name], value, rtol=2e-3, atol=2e-4)
    assert one.steps == other.steps == 2 and one.tokens == other.tokens == 54 and other.bad_steps == 0
    assert other.plain == pytest.approx(one.plain, rel=1e-4)


def test_decay_is_for_those_it_is_meant_for() -> None:
    all_decay, matrices = take_steps(Fast.everything(), False)[1], take_steps(Fast.everything(), True)[1]
    assert not torch.allclose(all_decay["norm.weight"], matrices["norm.weight"], rtol=1e-3)


def test_a_step_that_is_let_go_leaves_its_memory_at_once() -> None:
    take_steps(Fast(), True)  # what a first optimiser imports may hold its maker for a while
    model = make_model()
    settings = LanguageModelTraining(precision="float32", compile=False)
    step = TrainingStep(model, model, settings, DEVICE, Objective(next_token_loss), Fast.everything())
    assert step._fast.flat is not None and step._fast.update is not None
    held = [weakref.ref(each) for each in (step._fast.flat, step._fast.update)]
    gc.disable()
    try:
        del model, step
        assert [each() for each in held] == [None, None]
    finally:
        gc.enable()
