"""The loss against one computed token by token in float64 with nothing but exp and log."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qknorm.training.objective import _TokenLosses, label_smoothed_loss, token_losses

ALLOWED = torch.tensor([False, False, False, True, True, True, False, True, True])
TARGETS = torch.tensor([[4, 8, 3, 0, 0], [7, 6, 5, 3, 0]])  # 0 is padding, 6 may not be produced


def make_logits(seed: int = 0, size: float = 2.0) -> torch.Tensor:
    logits = size * torch.randn(2, 5, 9, generator=torch.Generator().manual_seed(seed))
    return logits.masked_fill(~ALLOWED, -torch.inf)


def by_hand(logits: torch.Tensor, smoothing: float) -> tuple[float, float, int]:
    types = [i for i in range(9) if ALLOWED[i]]
    smoothed = plain = 0.0
    tokens = 0
    for row, targets in zip(logits.tolist(), TARGETS.tolist(), strict=True):
        for scores, target in zip(row, targets, strict=True):
            if target == 0 or target not in types:
                continue
            log_sum = math.log(math.fsum(math.exp(scores[i]) for i in types))
            losses = {i: log_sum - scores[i] for i in types}
            plain += losses[target]
            smoothed += (1 - smoothing) * losses[target] + smoothing * math.fsum(losses.values()) / len(types)
            tokens += 1
    return smoothed, plain, tokens


@given(st.integers(0, 10_000), st.floats(0, 0.9), st.floats(0.1, 20))
def test_loss_equals_one_computed_by_hand(seed, smoothing, size):
    logits = make_logits(seed, size)
    losses = label_smoothed_loss(logits, TARGETS, ALLOWED, smoothing)
    smoothed, plain, tokens = by_hand(logits, smoothing)
    assert losses.smoothed.item() == pytest.approx(smoothed, rel=1e-5, abs=1e-4)
    assert losses.plain.item() == pytest.approx(plain, rel=1e-5, abs=1e-4)
    assert losses.tokens.item() == tokens == 6


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradient_is_the_difference_to_the_smoothed_target(smoothing):
    """∂loss/∂logit = p − ((1 − ε)·[target] + ε/n) on allowed types of counted tokens, and 0 elsewhere."""
    logits = make_logits().requires_grad_()
    label_smoothed_loss(logits, TARGETS, ALLOWED, smoothing).smoothed.backward()
    p = logits.detach().double().softmax(-1)
    wanted = torch.zeros_like(p)
    for i in range(2):
        for j in range(5):
            target = TARGETS[i, j]
            if target != 0 and ALLOWED[target]:
                wanted[i, j] = p[i, j] - smoothing * ALLOWED / ALLOWED.sum()
                wanted[i, j, target] -= 1 - smoothing
    torch.testing.assert_close(logits.grad.double(), wanted * ALLOWED, atol=1e-6, rtol=1e-5)


def test_gradient_agrees_with_finite_differences():
    logits, h = make_logits().requires_grad_(), 1e-5
    label_smoothed_loss(logits, TARGETS, ALLOWED, 0.1).smoothed.backward()
    exact = logits.detach().double()
    for place in [(0, 0, 4), (0, 0, 5), (1, 2, 3), (1, 3, 8), (1, 1, 5), (0, 4, 4)]:
        up, down = exact.clone(), exact.clone()
        up[place] += h
        down[place] -= h
        slope = (by_hand(up, 0.1)[0] - by_hand(down, 0.1)[0]) / (2 * h)
        assert logits.grad[place].item() == pytest.approx(slope, abs=1e-5)


def test_what_stands_at_padding_and_at_forbidden_targets_does_not_matter():
    logits = make_logits()
    other = logits.clone()
    other[TARGETS == 0] = make_logits(7)[TARGETS == 0]
    other[TARGETS == 6] = make_logits(8)[TARGETS == 6]
    one, same = (label_smoothed_loss(each, TARGETS, ALLOWED, 0.1) for each in (logits, other))
    assert [x.item() for x in one] == [x.item() for x in same]


def test_half_precision_is_summed_in_float32():
    losses = label_smoothed_loss(make_logits().bfloat16(), TARGETS, ALLOWED, 0.1)
    assert losses.smoothed.dtype == losses.plain.dtype == torch.float32
    assert losses.smoothed.item() == pytest.approx(by_hand(make_logits().bfloat16(), 0.1)[0], rel=1e-5)


def test_nothing_to_learn_gives_zero_and_finite_gradients():
    logits = make_logits().requires_grad_()
    losses = label_smoothed_loss(logits, torch.zeros_like(TARGETS), ALLOWED, 0.1)
    losses.smoothed.backward()
    assert [x.item() for x in losses] == [0.0, 0.0, 0]
    assert not logits.grad.any()


@pytest.mark.parametrize("everything_allowed", [False, True])
@pytest.mark.parametrize("size", [0.1, 3.0, 100.0, 1e4])
def test_losses_in_few_passes_equal_the_reference(size, everything_allowed):
    """Values and gradients, of both losses at once, with likely and with hopeless targets."""
    random = torch.Generator().manual_seed(3)
    allowed = torch.ones(50, dtype=torch.bool) if everything_allowed else torch.rand(50, generator=random) < 0.7
    targets = allowed.nonzero().flatten()[torch.randint(0, int(allowed.sum()), (40,), generator=random)]
    logits = size * torch.randn(40, 50, generator=random)
    logits[0, targets[0]] = 2 * logits.max()  # certain
    logits = logits.masked_fill(~allowed, -torch.inf)
    weights = torch.randn(2, 40, generator=random)
    found = []
    for losses_of in (_TokenLosses.apply, token_losses):
        leaf = logits.clone().requires_grad_()
        losses = torch.stack(losses_of(leaf, targets, allowed))
        (losses * weights).sum().backward()
        found.append((losses.detach(), leaf.grad))
    for one, reference in zip(*found, strict=True):
        torch.testing.assert_close(one, reference, rtol=2e-6, atol=2e-6 * max(1.0, size))


def test_autocast_leaves_losses_in_float32():
    logits, allowed = torch.randn(4, 9), torch.ones(9, dtype=torch.bool)
    allowed[:3] = False
    logits = logits.masked_fill(~allowed, -torch.inf)
    targets = torch.tensor([4, 5, 0, 8])
    expected = label_smoothed_loss(logits, targets, allowed, 0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = label_smoothed_loss(logits, targets, allowed, 0.1)
    assert found == expected and found.smoothed.isfinite()


def test_a_logit_that_is_no_number_shows_in_the_loss():
    logits = make_logits()
    logits[0, 1, 4] = torch.nan
    losses = label_smoothed_loss(logits, TARGETS, ALLOWED, 0.1)
    assert losses.smoothed.isnan() and losses.plain.isnan()


def test_few_passes_may_be_derived_twice_from_one_forward_pass():
    logits = make_logits().requires_grad_()
    loss = label_smoothed_loss(logits, TARGETS, ALLOWED, 0.1).smoothed
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (second,) = torch.autograd.grad(loss, logits)
    assert torch.equal(first, second) and first.any()
