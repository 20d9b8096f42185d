"""Loss, update and whole steps by fused kernels against their plain reference: on a GPU, or in Triton's interpreter."""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn

from qknorm.config import Dropout, Model, Training
from qknorm.models.beside import Beside
from qknorm.models.fused_run import FlatParameters, FusedRun
from qknorm.models.launches import LAUNCHES, Launch
from qknorm.models.translator import Translator
from qknorm.training import fast as fast_module
from qknorm.training.fast import Fast
from qknorm.training.flat_update import FlatUpdate
from qknorm.training.fused_loss import projected_loss
from qknorm.training.objective import label_smoothed_loss
from qknorm.training.step import Objective, Sums, TrainingStep

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABULARY = 21
PARTS = ["linear", "layers", "loss", "update"]
PLAIN = Training(precision="float32", compile=False)


def make_run(flat=None) -> FusedRun:
    return FusedRun(torch.tensor([5], device=DEVICE), flat=flat)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE)


@pytest.mark.parametrize(
    ("types", "smoothing", "more_rows"), [(16, 0.0, 0), (37, 0.1, 3), (37, 0.0, 0), (1_100, 0.1, 3)]
)
def test_the_loss_and_its_gradients_equal_the_reference(types, smoothing, more_rows):
    states, bias = (3 * draw(2, 4, 8)).requires_grad_(), draw(types).requires_grad_()
    table = torch.cat([draw(types, 8), torch.zeros(more_rows * (-types % 8 > 2), 8, device=DEVICE)]).requires_grad_()
    targets = torch.tensor([[4, 8, 3, 0], [7, 6, 5, 0]], device=DEVICE)  # 0 is padding, 6 may not be produced
    allowed = torch.ones(types, dtype=torch.bool, device=DEVICE)
    allowed[[0, 1, 2, 6, 9]] = False
    weight = torch.tensor(0.25, device=DEVICE)
    logits = (states @ table[:types].T + bias).masked_fill(~allowed, -torch.inf)
    expected = label_smoothed_loss(logits, targets, allowed, smoothing)
    found = projected_loss(make_run(), states, table, bias, targets, allowed, smoothing, weight)
    torch.testing.assert_close(found.weighted, expected.smoothed * weight, rtol=1e-5, atol=1e-5)
    for mine, reference in zip(found.sums, expected, strict=True):
        torch.testing.assert_close(mine, reference, check_dtype=False, rtol=1e-5, atol=1e-5)
    inputs = [states, table, bias]
    gradients = torch.autograd.grad(3 * found.weighted, inputs)
    for mine, reference in zip(gradients, torch.autograd.grad(3 * expected.smoothed * weight, inputs), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5)


def test_a_loss_over_nothing_is_zero_and_a_bad_one_shows():
    states, table, bias = draw(1, 3, 8).requires_grad_(), draw(16, 8).requires_grad_(), draw(16).requires_grad_()
    allowed, weight = torch.ones(16, dtype=torch.bool, device=DEVICE), torch.ones((), device=DEVICE)
    nothing = torch.zeros(1, 3, dtype=torch.long, device=DEVICE)
    found = projected_loss(make_run(), states, table, bias, nothing, allowed, 0.1, weight)
    assert [float(x) for x in found.sums] == [0, 0, 0]
    assert not any(gradient.any() for gradient in torch.autograd.grad(found.weighted, [states, table, bias]))
    broken = states.detach().clone()
    broken[0, 1, 2] = torch.nan
    broken.requires_grad_()
    found = projected_loss(make_run(), broken, table, bias, nothing + 5, allowed, 0.1, weight)
    assert found.weighted.isnan()
    assert torch.autograd.grad(found.weighted, table)[0].isnan().any()


def test_logits_far_from_zero_neither_overflow_nor_vanish():
    states, bias = torch.eye(8, device=DEVICE)[None] * 300, torch.zeros(16, device=DEVICE)
    table = draw(16, 8).requires_grad_()
    targets, allowed = torch.arange(4, 12, device=DEVICE)[None], torch.ones(16, dtype=torch.bool, device=DEVICE)
    found = projected_loss(make_run(), states, table, bias, targets, allowed, 0.1, torch.ones((), device=DEVICE))
    expected = label_smoothed_loss(states @ table.T, targets, allowed, 0.1)
    torch.testing.assert_close(found.sums.smoothed, expected.smoothed, rtol=1e-5, atol=1e-2)
    assert torch.autograd.grad(found.weighted, table)[0].isfinite().all()


def make_update(decay: float, clip: float, half: torch.dtype | None = None):
    parameters = [nn.Parameter(draw(*shape)) for shape in ((3, 5), (), (70,), (40, 40))]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1.0, betas=(0.9, 0.999), weight_decay=decay, fused=True)
    optimizer.found_inf, optimizer.grad_scale = torch.ones((), device=DEVICE), None
    optimizer.step()  # makes the moments
    del optimizer.found_inf, optimizer.grad_scale
    sums = torch.zeros(5, dtype=torch.float64, device=DEVICE)
    flat = FlatParameters(parameters, half)
    return parameters, optimizer, flat, FlatUpdate(flat, optimizer, clip, sums), sums


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("clip", [0.5, 1e6])
def test_updates_equal_clipping_and_adamw(decay, clip):
    parameters, _, flat, update, sums = make_update(decay, clip, torch.bfloat16)
    plain = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    reference = torch.optim.AdamW(plain, lr=1.0, betas=(0.9, 0.999), weight_decay=decay)
    assert not sums.any()
    for rate in (1e-2, 2e-2, 5e-3):
        gradients = [draw(*parameter.shape) for parameter in parameters]
        for mine, theirs, gradient in zip(parameters, plain, gradients, strict=True):
            mine.grad.copy_(gradient)
            theirs.grad = gradient.clone()
        nn.utils.clip_grad_norm_(plain, clip)
        reference.param_groups[0]["lr"] = rate
        reference.step()
        update.rate.fill_(rate)
        update()
        for mine, theirs in zip(parameters, plain, strict=True):
            torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(flat.half_of(mine).float(), mine.detach(), rtol=2**-7, atol=0)
            assert not mine.grad.any()
    assert sums.tolist() == [0, 0, 0, 3, 0]


@pytest.mark.parametrize(
    "launch", [Launch(64, 1, 3), Launch(256, 2), Launch(128, 1, 2, stages=2), Launch(4_096, 4, 5, evict="evict_first")]
)
def test_updates_are_the_same_however_they_are_spread(launch, monkeypatch):
    for kernel in ("adam", "squares"):
        monkeypatch.setitem(LAUNCHES, kernel, launch)
    test_updates_equal_clipping_and_adamw(0.1, 0.5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_step_changes_nothing_but_a_count(bad):
    parameters, optimizer, _, update, sums = make_update(0.1, 1.0)
    for parameter in parameters:
        parameter.grad.fill_(0.5)
    update.rate.fill_(0.1)
    update()
    values = [parameter.detach().clone() for parameter in parameters]
    moments = copy.deepcopy(optimizer.state_dict()["state"])
    parameters[2].grad[3] = bad
    update()
    assert sums.tolist() == [0, 0, 0, 2, 1]
    for parameter, value in zip(parameters, values, strict=True):
        assert torch.equal(parameter, value) and not parameter.grad.any()
    for number, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(state[name], moments[number][name]) for name in state)


def test_moments_that_are_put_back_are_used():
    parameters, optimizer, _, update, _ = make_update(0.0, 1.0)
    for parameter in parameters:
        parameter.grad.copy_(draw(*parameter.shape))
    update.rate.fill_(0.1)
    update()
    saved = copy.deepcopy(optimizer.state_dict())
    values = [parameter.detach().clone() for parameter in parameters]
    results = []
    for way in ("go on", "put back"):
        if way == "put back":
            optimizer.load_state_dict(saved)
            for parameter, value in zip(parameters, values, strict=True):
                parameter.data.copy_(value)
        for parameter in parameters:
            parameter.grad.fill_(0.01)
        update()
        results.append([parameter.detach().clone() for parameter in parameters])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def make_model(dropout: float = 0.0, **changes) -> Translator:
    torch.manual_seed(3)
    sizes = {"width": 16, "feed_forward": 24, "encoder_layers": 1, "decoder_layers": 1, "heads": 2}
    allowed = torch.ones(VOCABULARY, dtype=torch.bool)
    allowed[[0, 1, 2]] = False
    settings = Model(**{**sizes, **changes}, dropout=Dropout.everywhere(dropout, word=0.0))
    return Translator(VOCABULARY, settings, scale_init=3.0, allowed=allowed).to(DEVICE).train()


def make_step(model: Translator, settings: Training, fast: Fast) -> TrainingStep:
    objective = Objective(label_smoothed_loss, (model.allowed, settings.label_smoothing))
    return TrainingStep(model, model, settings, DEVICE, objective, fast)


def make_batch(seed: int) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(seed)
    source, target = (torch.randint(4, VOCABULARY, (2, 5), generator=random) for _ in range(2))
    source[0, 3:] = target[1, 4:] = 0
    start = torch.full((2, 1), 2)
    return tuple(x.to(DEVICE) for x in (source, torch.cat([start, target[:, :-1]], dim=1), target))


@functools.cache
def take_steps(fast: Fast, fixnorm: bool) -> tuple[Sums, dict[str, torch.Tensor]]:
    """Two steps, the first from two batches: what was summed up, and the weights after."""
    model = make_model(fixnorm=fixnorm)
    settings = Training(precision="float32", compile=False, clip=0.5, weight_decay=0.01)
    step = make_step(model, settings, fast)
    step([make_batch(0), make_batch(1)], 17, 1e-2)
    step([make_batch(2)], 9, 1e-2)
    return step.read_sums(), model.state_dict()


@pytest.mark.parametrize("part", [*PARTS, "all", "all, no fixnorm"])
def test_steps_equal_plain_steps_with_any_part(part):
    fast, fixnorm = Fast(**{part: True}) if part in PARTS else Fast.everything(), part != "all, no fixnorm"
    (one, plain), (other, fused) = take_steps(Fast(), fixnorm), take_steps(fast, fixnorm)
    assert list(plain) == list(fused)
    for name, value in plain.items():
        torch.testing.assert_close(fused[name], value, rtol=2e-3, atol=2e-4)
    assert one.steps == other.steps == 2 and one.tokens == other.tokens and other.bad_steps == 0
    assert other.smoothed == pytest.approx(one.smoothed, rel=1e-4)
    assert other.plain == pytest.approx(one.plain, rel=1e-4)


class LateStream:
    """A side stream as late as one can be: no job runs before the join."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], object]] = []
        self.started = self.joins = 0

    def start(self, job: Callable[[], object]) -> None:
        self.jobs.append(job)
        self.started += 1

    @torch.no_grad()  # as in a backward pass
    def join(self) -> None:
        self.joins += 1
        for job in self.jobs:
            job()
        self.jobs.clear()


@contextmanager
def unrecorded(step: TrainingStep) -> Iterator[None]:
    """Within it nothing is recorded on a GPU either."""
    recorded, step._recorded = step._recorded, None
    yield
    step._recorded = recorded


@pytest.mark.parametrize(
    ("backend", "changes"),
    [
        ("auto", {}),
        ("fused", {"fixnorm": False, "tie": "none", "decoder_layers": 2, "kv_heads": 1}),
    ],
)
def test_gradients_added_as_late_as_can_be_are_the_same(monkeypatch, changes, backend):
    """So nobody writes to what is still to be read, reads what is not there yet, or adds to it out of turn."""
    stream, results = LateStream(), []
    monkeypatch.setattr(fast_module, "side_stream", lambda _: stream)
    for overlap in (False, True):
        model = make_model(**changes)
        for attention in model.attentions().values():
            attention.backend = backend
        step = make_step(model, PLAIN, replace(Fast.everything(), overlap=overlap))
        with unrecorded(step):
            step._weight.fill_(0.1)
            step._forward_backward(*make_batch(0))
            assert not stream.jobs
            gradients = [parameter.grad.clone() for parameter in model.parameters()]
            step([make_batch(1), make_batch(2)], 17, 1e-2)
        results.append([*gradients, *(parameter.detach().clone() for parameter in model.parameters())])
        assert (stream.started, stream.joins) == (0, 0) or overlap
    linears = 11 + 6 * (len(model.decoder) - 1)  # the product that reads the memory counts once
    assert stream.started == 3 * linears and stream.joins == 3
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_table_that_is_a_linear_map_too_gets_both_gradients(monkeypatch):
    """Without fused layers and loss, autograd adds the table's gradient as an embedding, a linear map the other."""
    stream, results = LateStream(), []
    monkeypatch.setattr(fast_module, "side_stream", lambda _: stream)
    for fast in (Fast(), Fast(linear=True, overlap=True), Fast(linear=True, layers=True, overlap=True)):
        model = make_model(fixnorm=False, tie="all")
        step = make_step(model, PLAIN, fast)
        with unrecorded(step):
            step._weight.fill_(0.1)
            step._forward_backward(*make_batch(0))
        results.append(model.words.weight.grad.clone())
    assert stream.started > 0 and not stream.jobs
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-4, atol=1e-6)


def test_a_backward_pass_that_breaks_off_leaves_nothing_under_way(monkeypatch):
    stream, model = LateStream(), make_model()
    monkeypatch.setattr(fast_module, "side_stream", lambda _: stream)
    step = make_step(model, PLAIN, Fast.everything())

    def break_off(*_: object) -> None:
        raise KeyboardInterrupt

    model.encoder[0].attention.register_full_backward_pre_hook(break_off)
    with unrecorded(step), pytest.raises(KeyboardInterrupt):
        step._forward_backward(*make_batch(0))
    assert stream.started > 0 and not stream.jobs and stream.joins == 1


def test_a_parameter_that_is_not_learned_stays_as_it_is():
    model = make_model()
    frozen, learned = model.encoder[0].feed_forward.narrow.weight, model.encoder[0].feed_forward.widen.weight
    frozen.requires_grad_(False)
    before = frozen.clone(), learned.detach().clone()
    step = make_step(model, PLAIN, Fast.everything())
    step([make_batch(0)], 9, 1e-2)
    assert torch.equal(frozen, before[0]) and not torch.equal(learned, before[1])


def gradients_of_three_passes(overlap: bool, recorded: bool, precision: str, backend: str) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    batch = tuple(torch.randint(4, VOCABULARY, (32, 48), generator=random).to(DEVICE) for _ in range(3))
    model = make_model(width=256, feed_forward=1_024, encoder_layers=3, decoder_layers=3, heads=4)
    for attention in model.attentions().values():
        attention.backend = backend
    fast, settings = replace(Fast.everything(), overlap=overlap), Training(precision=precision, compile=False)
    step = make_step(model, settings, fast)
    assert (step._fast.flat.beside is not None) is overlap
    step._weight.fill_(1 / batch[0].numel())
    if recorded:
        step._record(batch)
    for _ in range(3):
        step._recorded.run("batch", batch) if recorded else step._forward_backward(*batch)
    return [parameter.grad.clone() for parameter in model.parameters()]


def assert_all_near(found: list[torch.Tensor], exact: list[torch.Tensor], precision: str) -> None:
    """Sums of floats may be in another order, by atomic additions and by other products."""
    least = 1e-3 * max(gradient.norm() for gradient in exact)
    assert least > 0
    for mine, reference in zip(found, exact, strict=True):
        error = (mine - reference).norm() / reference.norm().clamp(min=least)
        assert error < (1e-3 if precision == "float32" else 1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["auto", "fused"])
def test_on_a_gpu_two_streams_give_what_one_gives_recorded_or_not(monkeypatch, precision, backend):
    exact = gradients_of_three_passes(False, False, precision, backend)
    for overlap, recorded in ((False, True), (True, False), (True, True)):
        assert_all_near(gradients_of_three_passes(overlap, recorded, precision, backend), exact, precision)
    monkeypatch.setattr(fast_module, "Beside", functools.partial(Beside, most_held=1))  # waits for each job
    assert_all_near(gradients_of_three_passes(True, True, precision, backend), exact, precision)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("fast", [Fast(), Fast.everything()])
def test_a_shape_that_is_recorded_within_a_step_draws_what_one_recorded_before_draws(fast):
    losses = []
    for before in (True, False, None):
        model = make_model(dropout=0.5)
        step = make_step(model, PLAIN, fast)
        batch = make_batch(0)
        if before:
            step.prepare([tuple(batch[0].shape)])
        torch.manual_seed(7 if before is not None else 8)
        step([batch], 9, 1e-2)
        losses.append(step.read_sums().smoothed)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert abs(losses[2] - losses[0]) > 1e-3 * losses[0], "dropout has an effect"


def test_weights_that_are_put_back_reach_the_half_precision_copy():
    settings = Training(precision="bfloat16", compile=False)
    model = make_model()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    step = make_step(model, settings, Fast(linear=True))
    batch, losses = make_batch(0), []
    for way in ("fresh", "trained", "put back"):
        if way == "put back":
            with torch.no_grad():
                for name, value in model.state_dict().items():
                    value.copy_(saved[name])
        step([batch], 9, 0.3)
        losses.append(step.read_sums().smoothed)
    assert losses[0] == pytest.approx(losses[2], rel=1e-3)
    assert abs(losses[1] - losses[0]) > 1e-2 * losses[0]
