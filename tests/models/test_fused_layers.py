"""The fused layers: their cases in Triton's interpreter, and that nothing is different where they are off."""

import os

import pytest
import torch
from torch import nn

from interpreted import require_kernels
from qknorm.config import Model
from qknorm.models import fused_run
from qknorm.models.fused_run import FlatParameters, current_run, kernels_apply, use_fused
from qknorm.models.translator import Translator


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter runs kernels on the CPU")
def test_on_the_cpu_the_switch_changes_not_one_bit() -> None:
    sizes = {"width": 16, "feed_forward": 24, "encoder_layers": 1, "decoder_layers": 1, "heads": 2}
    model, ids = Translator(20, Model(**sizes)).train(), torch.randint(4, 20, (2, 5))
    assert not kernels_apply(torch.device("cpu"))
    torch.manual_seed(1)
    plain = model(ids, ids)
    torch.manual_seed(1)
    with use_fused(torch.device("cpu"), linear=True, layers=True) as run:
        assert run is None and current_run() is None
        assert torch.equal(model(ids, ids), plain)


def make_parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape)) for shape in ((3, 5), (), (130,))]


def test_flat_parameters_keep_values_shapes_and_gradients() -> None:
    parameters = make_parameters()
    parameters[0].grad = torch.ones(3, 5)
    values = [parameter.detach().clone() for parameter in parameters]
    flat = FlatParameters([*parameters, parameters[0]], torch.bfloat16)
    for parameter, value in zip(parameters, values, strict=True):
        assert (
            torch.equal(parameter, value)
            and parameter.is_leaf
            and parameter.data_ptr() % 256 == flat.values.data_ptr() % 256
        )
        assert torch.equal(flat.half_of(parameter), value.bfloat16())  # type: ignore[arg-type]
    assert float(flat.gradients.sum()) == 15
    (parameters[2] * 2).sum().backward()
    assert torch.equal(flat.gradient_of(parameters[2]), torch.full((130,), 2.0))  # type: ignore[arg-type]


def test_views_of_parameters_have_their_place_and_other_tensors_have_none() -> None:
    parameters = make_parameters()
    flat = FlatParameters(parameters, torch.bfloat16)
    rows = parameters[0][1:]
    flat.gradient_of(rows).fill_(1.0)  # type: ignore[union-attr]
    assert parameters[0].grad is not None and parameters[0].grad.sum(1).tolist() == [0, 5, 5]
    assert torch.equal(flat.half_of(parameters[0].t()), parameters[0].t().bfloat16())  # type: ignore[arg-type]
    assert flat.half_of(torch.zeros(3, 5)) is None and flat.gradient_of(parameters[0] * 2) is None
    assert FlatParameters(make_parameters()).half_of(parameters[0]) is None


def test_the_copy_is_renewed_where_others_have_written() -> None:
    parameters = make_parameters()
    flat = FlatParameters(parameters, torch.bfloat16)
    with torch.no_grad():
        parameters[2].copy_(torch.arange(130.0))
    assert not torch.equal(flat.half_of(parameters[2]), parameters[2].bfloat16())  # type: ignore[arg-type]
    flat.refresh_if_written()
    assert torch.equal(flat.half_of(parameters[2]), parameters[2].bfloat16())  # type: ignore[arg-type]


def test_what_cannot_be_laid_side_by_side_is_refused() -> None:
    assert FlatParameters.refusal(make_parameters()) is None
    assert FlatParameters.refusal([*make_parameters(), nn.Parameter(torch.zeros(3, dtype=torch.float64))])
    assert FlatParameters.refusal([nn.Parameter(torch.zeros(3, 4).t())])


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter runs kernels anywhere")
def test_on_gpus_before_ampere_everything_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    require_kernels()
    for capability, applies in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, found=capability: found)
        assert kernels_apply(torch.device("cuda", 0)) is applies
    monkeypatch.setattr(fused_run, "HAS_KERNELS", False)
    assert not kernels_apply(torch.device("cuda", 0)), "PyTorch is too old for them"


def test_parameters_that_are_not_all_learned_are_not_laid_side_by_side() -> None:
    parameters = make_parameters()
    assert FlatParameters.refusal(parameters) is None
    parameters[1].requires_grad_(False)
    assert "learned" in (FlatParameters.refusal(parameters) or "")
