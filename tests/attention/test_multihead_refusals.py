"""What does not go together is named in one sentence; and torch's weights into a module without numbers of its own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qknorm import MultiheadAttention
from qknorm.attention import Visibility


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((2, 2, 5, 16),) * 3, r"query must be .* got \(2, 2, 5, 16\)"),
        (((16,),) * 3, r"query must be .* got \(16,\)"),
        (((2, 5, 16), (5, 16), (5, 16)), "query has 3 dimensions and key 2"),
        (((5, 16), (5, 16), (2, 5, 16)), "query has 2 dimensions and value 3"),
        (((2, 5, 16), (3, 5, 16), (3, 5, 16)), "query has a batch of 2 and key one of 3"),
        (((2, 5, 16), (1, 5, 16), (1, 5, 16)), "query has a batch of 2 and key one of 1"),
        (((2, 5, 16), (2, 5, 16), (1, 5, 16)), "query has a batch of 2 and value one of 1"),
        (((2, 5, 16), (2, 5, 16), (2, 4, 16)), r"of one length, got \(2, 5, 16\) and \(2, 4, 16\)"),
        (((2, 5, 8),) * 3, r"query must have a last dimension of 16, got \(2, 5, 8\)"),
        (((2, 5, 16), (2, 5, 8), (2, 5, 16)), r"key must have a last dimension of 16, got \(2, 5, 8\)"),
    ],
)
@pytest.mark.parametrize("need_weights", [True, False])
def test_inputs_that_torch_refuses_are_refused(shapes: Any, words: str, need_weights: bool) -> None:
    inputs = [torch.randn(shape) for shape in shapes]
    if inputs[0].shape == inputs[1].shape == inputs[2].shape:
        inputs = inputs[:1] * 3
    with pytest.raises(ValueError, match=words):
        MultiheadAttention(16, 4, batch_first=True)(*inputs, need_weights=need_weights)
    with pytest.raises((RuntimeError, AssertionError)):
        nn.MultiheadAttention(16, 4, batch_first=True)(*inputs, need_weights=need_weights)


def test_the_batch_is_where_batch_first_says() -> None:
    module = MultiheadAttention(16, 4)
    query, key = torch.randn(5, 2, 16), torch.randn(7, 2, 16)
    assert module(query, key, key)[0].shape == (5, 2, 16)
    with pytest.raises(ValueError, match=r"a batch of 2 and key one of 3 \(dimension 1"):
        module(query, torch.randn(7, 3, 16), torch.randn(7, 3, 16))
    with pytest.raises(ValueError, match="of one length"):
        module(query, key, torch.randn(6, 2, 16))


def test_one_tensor_for_all_three_must_fit_all_three() -> None:
    x = torch.randn(2, 5, 16)
    with pytest.raises(ValueError, match=r"key must have a last dimension of 12, got \(2, 5, 16\)"):
        MultiheadAttention(16, 4, kdim=12, vdim=12, batch_first=True)(x, x, x)


def test_a_visibility_beside_is_causal_and_extra_keys_is_refused() -> None:
    module, x = MultiheadAttention(16, 4, batch_first=True, add_zero_attn=True), torch.randn(2, 5, 16)
    shown = torch.ones(5, 6, dtype=torch.bool).tril()
    shown[:, 5] = True
    expected = module(x, x, x, is_causal=True)[0]
    torch.testing.assert_close(module(x, x, x, visibility=Visibility.of(shown))[0], expected)
    with pytest.raises(ValueError, match="make it part of visibility"):
        module(x, x, x, visibility=Visibility.of(shown), is_causal=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"num_heads": -4}, "num_heads must be at least 1, got -4"),
        ({"num_heads": 4, "num_kv_heads": -2}, "num_kv_heads must be at least 1, got -2"),
        ({"num_heads": 4, "embed_dim": 0}, "embed_dim must be at least 1, got 0"),
        ({"num_heads": 4, "backend": "cuda"}, "backend must be auto, reference, sdpa or fused, got 'cuda'"),
    ],
)
def test_settings_are_refused_before_anything_is_made(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MultiheadAttention(**{"embed_dim": 16, **options})


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_bias_kv": True, "rotary": "before_norm"}])
def test_extra_keys_export_with_any_batch(options: dict[str, Any]) -> None:
    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = MultiheadAttention(16, 4, batch_first=True, **options)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.attention(x, x, x, need_weights=False, is_causal=True)[0]
            return out

    model, b, t = SelfAttention().eval(), torch.export.Dim("b"), torch.export.Dim("t")
    program = torch.export.export(model, (torch.randn(2, 6, 16),), dynamic_shapes=({0: b, 1: t},))
    x = torch.randn(3, 9, 16)
    torch.testing.assert_close(program.module()(x), model(x), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale_init": 7.0, "scale_per_head": True},
        {"p": 3.0, "p_learned": True},
        {"p": 3.0, "scale_learned": False},
        {"qk_norm": "layer"},
    ],
)
def test_torchs_weights_in_a_module_made_without_numbers(options: dict[str, Any], assign: bool) -> None:
    theirs = nn.Sequential(nn.MultiheadAttention(16, 4, batch_first=True)).eval()
    expected = MultiheadAttention(16, 4, batch_first=True, **options).eval()
    expected.load_state_dict(theirs[0].state_dict())
    with torch.device("meta"):
        model = nn.Sequential(MultiheadAttention(16, 4, batch_first=True, **options)).eval()
    if not assign:
        model._apply(lambda each: torch.full_like(each, 9e18, device="cpu"))  # to_empty, with what may be in memory
    saved = theirs.state_dict()
    assert str(model.load_state_dict(saved, assign=assign)) == "<All keys matched successfully>"
    assert not any("norm" in name for name in saved)
    found = dict(model[0].named_parameters()) | dict(model[0].named_buffers())
    fresh = dict(expected.named_parameters()) | dict(expected.named_buffers())
    assert found.keys() == fresh.keys()
    for name, each in fresh.items():
        torch.testing.assert_close(found[name], each)
        assert found[name].requires_grad == each.requires_grad
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(model[0](x, x, x)[0], expected(x, x, x)[0])


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("names", [("out_proj.weight",), ("in_proj_weight", "out_proj.weight", "out_proj.bias")])
def test_torchs_weights_leave_what_was_learned(names: tuple[str, ...], assign: bool) -> None:
    module = MultiheadAttention(16, 4, scale_per_head=True, p=3.0)
    learned = torch.tensor([42.0, 1.0, 2.0, 3.0])
    with torch.no_grad():
        module.norm.scale.copy_(learned)
    theirs = nn.MultiheadAttention(16, 4).state_dict()
    module.load_state_dict({name: theirs[name] for name in names}, strict=False, assign=assign)
    assert torch.equal(module.norm.scale, learned) and module.norm.p_fixed == 3.0
    assert all(torch.equal(module.state_dict()[name], theirs[name]) for name in names)


def test_weights_of_others_leave_the_scale_alone() -> None:
    model = nn.ModuleDict({"attention": MultiheadAttention(16, 4), "out": nn.Linear(16, 2)})
    with torch.no_grad():
        model["attention"].norm.scale.fill_(3.0)
    missing = model.load_state_dict({f"out.{k}": v for k, v in nn.Linear(16, 2).state_dict().items()}, strict=False)
    assert "attention.norm.scale" in missing.missing_keys
    assert float(model["attention"].norm.scale) == 3.0
