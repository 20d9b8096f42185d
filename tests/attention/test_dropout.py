import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qknorm import attend
from qknorm.attention.dropout import Dropout, dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("p", [0.1, 0.4, 0.9])
def test_the_share_and_the_mean_are_right(p: float, dtype: torch.dtype) -> None:
    x = torch.ones(400_001, dtype=dtype)
    found = dropout(x, p)
    assert found.dtype == dtype
    assert float((found == 0).float().mean()) == pytest.approx(p, abs=0.004)
    assert float(found.float().mean()) == pytest.approx(1.0, abs=0.03)
    assert found[found != 0].unique().numel() == 1


def test_the_gradient_goes_where_the_value_went() -> None:
    x = torch.randn(50, 7, requires_grad=True)
    found = dropout(x, 0.3)
    (gradient,) = torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close(gradient * x, found)


def test_entries_and_calls_are_independent_and_the_seed_repeats_them() -> None:
    kept = torch.stack([dropout(torch.ones(40_000), 0.5) > 0 for _ in range(2)]).float()
    assert float(kept.corrcoef()[0, 1].abs()) < 0.03
    for lag in (1, 2, 3, 4):
        pair = torch.stack([kept[0, :-lag], kept[0, lag:]])
        assert float(pair.corrcoef()[0, 1].abs()) < 0.03
    torch.manual_seed(7)
    first = dropout(torch.ones(1_000), 0.5)
    torch.manual_seed(7)
    assert torch.equal(dropout(torch.ones(1_000), 0.5), first)


@given(p=st.floats(0, 0.9999), size=st.integers(0, 9))
def test_any_share_and_size(p: float, size: int) -> None:
    found = dropout(torch.ones(size, 3), p)
    assert found.shape == (size, 3) and found.isfinite().all()


def test_all_or_an_impossible_share() -> None:
    assert (dropout(torch.ones(100_000), 1.0) == 0).all()
    for p in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="between 0 and 1"):
            dropout(torch.ones(3), p)


def test_nothing_is_dropped_outside_training() -> None:
    x = torch.randn(5)
    assert Dropout(0.5).eval()(x) is x
    assert dropout(x, 0.0) is x


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_vmap_draws_as_it_was_told_to(randomness: str) -> None:
    x = torch.ones(6, 5_000)
    found = torch.func.vmap(lambda row: dropout(row, 0.25), randomness=randomness)(x)
    assert float((found == 0).float().mean()) == pytest.approx(0.25, abs=0.03)
    assert found[found != 0].unique().tolist() == pytest.approx([4 / 3])
    assert torch.equal(found[0], found[1]) == (randomness == "same")


def test_attention_drops_weights_under_vmap() -> None:
    q = torch.randn(6, 1, 2, 4, 8)
    mapped = torch.func.vmap(lambda x: attend(x, x, x, scale=1.0, dropout=0.5), randomness="different")(q)
    assert mapped.shape == q.shape and not torch.allclose(mapped, attend(q[:, 0], q[:, 0], q[:, 0], scale=1.0)[:, None])
