"""Training together is training alone, beside a loop written down plainly."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from lp_cases import tiny_study, tiny_text
from torch import Tensor
from torch.nn import functional as F

from interpreted import run_in_interpreter
from qknorm.attention import attend_with_weights
from qknorm.models.language_model import LanguageModel
from qknorm.studies.lp.design import LpStudy, Run, run_seed
from qknorm.studies.lp.evaluation import Evaluator, entropy_and_saturation
from qknorm.studies.lp.folds import cover, draw_starts, make_folds
from qknorm.studies.lp.records import Record
from qknorm.studies.lp.stack import Stack, learning_rates
from qknorm.studies.lp.training import Execution, evaluation_points, train_stack

PLAIN = Execution()
TEXT = tiny_text()


def losses(record: Record) -> list[float]:
    return [value for point in record.curve for value in (point.validation, point.training) if not math.isnan(value)]


def train_plainly(run: Run, study: LpStudy) -> tuple[list[float], LanguageModel]:
    """The training losses of every step, from PyTorch's parts alone."""
    context = study.model.context
    fold = make_folds(len(TEXT.ids), study.fold_count, context)[run.fold]
    starts = draw_starts(fold, context, study.iterations, study.batch, run_seed(study, run.fold))
    torch.manual_seed(run_seed(study, run.fold))
    model = LanguageModel(TEXT.vocabulary, run.model_settings(study), scale_init=run.scale_start(study))
    matrices = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": study.weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=study.betas,
        foreach=False,
    )
    seen = []
    for step in range(study.iterations):
        for group in optimizer.param_groups:
            group["lr"] = learning_rates(study)[step]
        windows = torch.stack([TEXT.ids[s : s + context + 1] for s in starts[step].tolist()]).long()
        logits = model(windows[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, TEXT.vocabulary), windows[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), study.clip)
        optimizer.step()
        seen.append(loss.item())
    return seen, model


@pytest.mark.parametrize(
    "runs",
    [
        [Run("same-scale", 3.0, 0), Run("matched", 3.0, 1), Run("same-scale", 3.0, 2)],
        [Run("dot-product", None, 2), Run("dot-product", None, 0)],
        [Run("learned-p", 2.0, 0), Run("learned-p", 2.0, 1)],
        [Run("infinity", math.inf, 1)],
    ],
    ids=["p = 3", "dot product", "learned p", "infinity"],
)
def test_together_is_alone(runs: list[Run]) -> None:
    study = tiny_study(learning_rate=1e-2, clip=0.5)
    together = train_stack(runs, study, TEXT, PLAIN)
    for record, run in zip(together, runs, strict=True):
        plain, model = train_plainly(run, study)
        expected = [sum(plain[:4]) / 4, sum(plain[4:]) / 2]
        assert [point.training for point in record.curve[1:]] == pytest.approx(expected, abs=1e-5)
        scales = [float(each.norm.scale.detach().mean()) for each in model.attentions().values()]
        assert record.curve[-1].scales == pytest.approx(scales, rel=1e-5)
        fold = make_folds(len(TEXT.ids), study.fold_count, study.model.context)[run.fold]
        evaluator = Evaluator(study, model, cover(TEXT.ids, fold.held_out, study.model.context), torch.device("cpu"))
        validation = evaluator.validation_loss(dict(model.named_parameters()) | dict(model.named_buffers()))
        assert record.final == pytest.approx(validation, abs=1e-5)


DOT_PRODUCT, LEARNED = Run("dot-product", None, 0), Run("learned-p", 2.0, 0)
THREE = [Run("same-scale", 3.0, 0), Run("matched", 3.0, 1), Run("same-scale", 3.0, 2)]


def check_against_plain(runs: list[Run], study: LpStudy, execution: Execution) -> None:
    for record, run in zip(train_stack(runs, study, TEXT, execution), runs, strict=True):
        plain, model = train_plainly(run, study)
        expected = [sum(plain[:4]) / 4, sum(plain[4:]) / 2]
        assert [point.training for point in record.curve[1:]] == pytest.approx(expected, abs=2e-3)
        assert record.curve[-1].scales == pytest.approx(
            [float(each.norm.scale.detach().mean()) for each in model.attentions().values()], rel=1e-3
        )


@pytest.mark.parametrize(
    "execution",
    [
        Execution("cuda", streams=1),
        Execution("cuda", streams=2),
        Execution("cuda", layers="fused"),
        Execution("cuda", layers="fused", streams=3),
    ],
    ids=str,
)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recorded_steps_on_a_gpu_are_plain_ones(execution: Execution) -> None:
    check_against_plain(THREE, tiny_study(learning_rate=1e-2, clip=0.5), execution)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("execution", "run", "context"),
    [
        (Execution("cuda"), THREE[0], 13),
        *((Execution("cuda", layers="fused"), run, 32) for run in (THREE[0], DOT_PRODUCT, LEARNED)),
    ],
    ids=str,
)
def test_every_way_agrees_in_bfloat16_on_a_gpu(execution: Execution, run: Run, context: int) -> None:
    study = tiny_study(context=context, learning_rate=1e-2, clip=0.5)
    expected = losses(train_stack([run], study, TEXT, PLAIN)[0])
    assert expected[0] - expected[-1] > 0.05  # what is learned shows
    half = study.model_copy(update={"precision": "bfloat16"})
    assert losses(train_stack([run], half, TEXT, execution)[0]) == pytest.approx(expected, abs=1.5e-2)


@pytest.mark.slow
def test_steps_by_our_own_kernels_in_tritons_interpreter() -> None:
    run_in_interpreter(Path(__file__).parent / "fused_lp_cases.py")


def test_with_dropout_each_model_drops_what_it_drops_alone() -> None:
    study = tiny_study(dropout=0.3)
    runs = [Run("same-scale", 2.0, 0), Run("matched", 4.0, 1), Run("dot-product", None, 0)]
    together = train_stack(runs, study, TEXT, PLAIN)
    for record, run in zip(together, runs, strict=True):
        assert losses(train_stack([run], study, TEXT, PLAIN)[0]) == losses(record)


def test_pytorchs_parts_leave_out_no_step() -> None:
    study = tiny_study(iterations=2)
    assert [record.skipped_steps for record in train_stack(THREE, study, TEXT, PLAIN)] == [0, 0, 0]


def test_records_tell_how_many_steps_each_model_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stack, "skipped_steps", lambda self: [2, 0, 1])
    records = train_stack(THREE, tiny_study(iterations=1), TEXT, PLAIN)
    assert [record.skipped_steps for record in records] == [2, 0, 1]


def test_a_fixed_seed_gives_fixed_losses_and_leaves_the_callers_alone() -> None:
    run, study = Run("same-scale", 2.5, 1), tiny_study(dropout=0.2)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = train_stack([run], study, TEXT, PLAIN)[0]
    assert torch.equal(torch.rand(3), expected)
    assert losses(train_stack([run], study, TEXT, PLAIN)[0]) == losses(first)
    other = tiny_study(dropout=0.2, seed=1)
    assert losses(train_stack([run], other, TEXT, PLAIN)[0]) != losses(first)


def test_runs_on_a_fold_start_alike_whatever_their_p() -> None:
    study = tiny_study(iterations=1)
    records = train_stack([Run("same-scale", p, 0) for p in (1.0, 4.0)], study, TEXT, PLAIN)
    assert records[0].curve[0].scales == records[1].curve[0].scales
    fold_0, fold_1 = (run_seed(study, fold) for fold in (0, 1))
    assert fold_0 != fold_1


def test_validation_loss_is_the_mean_over_the_whole_block() -> None:
    """Against windows predicted one by one: every character but the first, each from a full window before the last."""
    study = tiny_study()
    run = Run("same-scale", 2.0, 1)
    context = study.model.context
    model = LanguageModel(TEXT.vocabulary, run.model_settings(study), scale_init=3.0).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0)
    held_out = make_folds(len(TEXT.ids), study.fold_count, context)[1].held_out
    block = TEXT.ids[held_out[0] : held_out[1]].long()
    total = 0.0
    with torch.no_grad():
        for place in range(1, len(block)):
            # the last window reaches back to be full; all others stand side by side
            first = min((place - 1) // context * context, len(block) - 1 - context)
            logits = model(block[None, first:place])[0, -1].double()
            total -= float(logits.log_softmax(-1)[block[place]])
    evaluator = Evaluator(study, model, cover(TEXT.ids, held_out, context), torch.device("cpu"))
    assert evaluator.validation_loss(dict(model.named_parameters())) == pytest.approx(
        total / (len(block) - 1), abs=1e-5
    )


def test_entropy_and_saturation_of_known_weights() -> None:
    uniform = torch.ones(5, 5).tril() / torch.arange(1.0, 6.0).unsqueeze(1)
    assert entropy_and_saturation(uniform.expand(2, 3, 5, 5)) == pytest.approx((1.0, 0.0))
    assert entropy_and_saturation(torch.eye(5).expand(2, 3, 5, 5)) == pytest.approx((0.0, 1.0))
    half = torch.stack([uniform, torch.eye(5)]).unsqueeze(0)
    assert entropy_and_saturation(half) == pytest.approx((0.5, 0.5))


def test_what_is_measured_of_attention_is_the_models_own() -> None:
    """Entropy by hand from the first layer's queries and keys, with the weights that were given, not the form's."""
    study = tiny_study()
    run = Run("same-scale", 3.0, 0)
    form, model = (
        LanguageModel(TEXT.vocabulary, run.model_settings(study), scale_init=start).eval() for start in (3.0, 9.0)
    )
    fold = make_folds(len(TEXT.ids), study.fold_count, study.model.context)[0]
    held_out = cover(TEXT.ids, fold.held_out, study.model.context)
    state: dict[str, Tensor] = {name: each.detach() for name, each in model.named_parameters()}
    measured = Evaluator(study, form, held_out, torch.device("cpu")).attention(state)
    assert measured["scales"] == pytest.approx([9.0, 9.0])
    layer = model.decoder[0]
    ids = held_out.inputs[:4]
    with torch.no_grad():
        x = layer.around_attention.norm(model.words[ids] + model.positions[: ids.shape[1]])
        q, k, v = (x @ layer.attention.in_proj_weight.T).chunk(3, dim=-1)
        q, k, v = (each.view(*ids.shape, 2, 8).transpose(1, 2) for each in (q, k, v))
        weights = attend_with_weights(q, k, v, scale=9.0, p=3.0, is_causal=True).weights.double()
    entropies = [
        -(row * row.clamp(min=1e-300).log()).sum(-1) / math.log(keys)
        for keys in range(2, ids.shape[1] + 1)
        for row in [weights[:, :, keys - 1, :keys]]
    ]
    assert measured["entropy"][0] == pytest.approx(float(torch.stack(entropies).mean()), abs=1e-5)


def test_learning_rates_are_nanogpts_in_outline() -> None:
    rates = learning_rates(LpStudy())
    assert len(rates) == 5_000
    assert rates[0] == pytest.approx(1e-5) and rates[99] == pytest.approx(1e-3, rel=1e-3)
    assert rates[-1] == pytest.approx(1e-4) and max(rates) <= 1e-3
    assert rates[2_549] == pytest.approx(5.5e-4, rel=1e-3)  # half-way down the cosine


def test_points_of_evaluation_begin_at_the_start_and_end_at_the_end() -> None:
    assert evaluation_points(tiny_study(iterations=10)) == [0, 4, 8, 10]
    assert evaluation_points(tiny_study(iterations=3)) == [0, 3]


def test_a_stack_runs_on_the_gpu_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and Triton's kernels are those of the current GPU."""
    current: list[torch.device] = []

    @contextmanager
    def enter(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def stop(*_: object) -> None:
        assert current == [torch.device("cuda:1")]
        raise LookupError

    monkeypatch.setattr(torch.cuda, "device", enter)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: nullcontext())
    monkeypatch.setattr("qknorm.studies.lp.training.make_stack", stop)
    with pytest.raises(LookupError):
        train_stack(THREE, tiny_study(), TEXT, Execution("cuda:1"))
