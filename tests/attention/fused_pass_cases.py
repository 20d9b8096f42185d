"""What attentions of one training pass share, and gradients that need no copy: on a GPU, or in Triton's interpreter."""

import pytest
import torch
from fused_attention_cases import DEVICE, draw, draw_all, dropped_weights, path  # noqa: F401
from test_cut import Joining
from torch import Tensor

from qknorm import MultiheadAttention, attend, attend_with_weights
from qknorm.attention.sharing import share


@pytest.mark.usefixtures("path")
def test_gradients_of_a_joint_projection_are_not_copied() -> None:
    module = MultiheadAttention(32, 4, batch_first=True, num_kv_heads=2, backend="fused").to(DEVICE)
    x = draw(2, 18, 32)
    output = module(x, x, x, need_weights=False, is_causal=True)[0]
    with Joining() as joining:
        found = torch.autograd.grad(output.square().sum(), list(module.parameters()))
    assert joining.count == 0
    module.backend = "reference"
    output = module(x, x, x, need_weights=False, is_causal=True)[0]
    expected = torch.autograd.grad(output.square().sum(), list(module.parameters()))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


class Pass:
    """A training pass that attentions share."""

    def __init__(self, seed: int, place: Tensor | None = None) -> None:
        self.seed, self.place, self.sites = torch.tensor([seed], device=DEVICE), place, 0

    def next_site(self) -> int:
        self.sites += 1
        return self.sites

    def gradient_place(self, weight: Tensor) -> Tensor | None:
        return None if self.place is None else self.place.view(weight.shape)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("per_head", [True, False])
def test_within_a_pass_the_scales_gradient_is_added_where_it_belongs(per_head: bool) -> None:
    inputs = draw_all(18, 20, 16, h=4, kv=2, b=2)
    scale = torch.full((4,) if per_head else (), 5.0, device=DEVICE, requires_grad=True)
    weight = draw(2, 4, 18, 16)
    (expected,) = torch.autograd.grad((attend(*inputs, scale=scale, p=2.0, backend="fused") * weight).sum(), scale)
    place = torch.full_like(scale, 100.0, requires_grad=False)
    with share(Pass(1, place)):
        output = attend(*inputs, scale=scale, p=2.0, backend="fused")
    (output * weight).sum().backward()
    assert scale.grad is None, "autograd would count it twice"
    torch.testing.assert_close(place, 100 + expected, rtol=1e-4, atol=1e-4)
    fixed = scale.detach()
    with share(Pass(1, place)):
        attend(*(x.requires_grad_() for x in inputs), scale=fixed, p=2.0, backend="fused").sum().backward()
    torch.testing.assert_close(place, 100 + expected, rtol=1e-4, atol=1e-4)


def test_within_a_pass_dropout_comes_from_its_seed_and_differs_from_place_to_place() -> None:
    q, k, _ = draw_all(64, 64, 64, h=4, kv=4)
    results = []
    for seed in (2**40 + 7, 2**40 + 7, 8):
        with share(shared := Pass(seed)):
            results += [dropped_weights(q, k, 0.5, seed=len(results)) > 0 for _ in range(2)]
        assert shared.sites == 2
    first, second, again, _, other, _ = results
    assert torch.equal(first, again)
    rows = torch.stack([x.flatten().float() for x in (first, second, other, first.transpose(2, 3), first.roll(1, 1))])
    assert (rows.corrcoef() - torch.eye(5, device=DEVICE)).abs().max() < 0.05  # 16,384 draws: over six deviations
    assert abs(rows.mean() - 0.5) < 0.02


def test_within_a_pass_forward_and_backward_drop_the_same() -> None:
    q, k, v = (x.requires_grad_() for x in draw_all(20, 30, 32, kv=1))
    with share(Pass(3)):
        staying = (dropped_weights(q, k, 0.4, seed=0) > 0).double()
    with share(Pass(3)):
        output = attend(q, k, v, scale=3.0, p=2.0, dropout=0.4, backend="fused")
    expected = [x.detach().double().requires_grad_() for x in (q, k, v)]
    weights = attend_with_weights(*expected, scale=3.0, p=2.0).weights * staying / 0.6
    reference = weights @ expected[2].repeat_interleave(2, dim=1)
    weight = torch.randn_like(reference)
    torch.testing.assert_close(output.double(), reference, rtol=1e-4, atol=1e-5)
    gradients = torch.autograd.grad((output.double() * weight).sum(), [q, k, v])
    for mine, theirs in zip(gradients, torch.autograd.grad((reference * weight).sum(), expected), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-3, atol=1e-4)
