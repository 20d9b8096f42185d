import pytest
import torch

from qknorm import MultiheadAttention, attend
from qknorm.attention import availability


def test_asked_for_by_name_they_say_why_they_cannot() -> None:
    q = k = v = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match="on cpu, not on a GPU"):
        attend(q, k, v, scale=1.0, p=2.0, backend="fused")
    with pytest.raises(ValueError, match="no p is given"):
        attend(q, k, v, scale=1.0, backend="fused")
    x = torch.randn(1, 3, 16)
    with pytest.raises(ValueError, match="on cpu, not on a GPU"):
        MultiheadAttention(16, 2, batch_first=True, backend="fused")(x, x, x, need_weights=False)


@pytest.mark.parametrize(("has_triton", "told"), [(True, "is older than 2.9"), (False, "triton is not installed")])
def test_without_kernels_another_way_is_taken_and_asked_for_by_name_they_say_why(
    has_triton: bool, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("HAS_TRITON", has_triton), ("HAS_KERNELS", False), ("INTERPRETED", True)):
        monkeypatch.setattr(availability, name, value)
    q = k = v = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match=told):
        attend(q, k, v, scale=1.0, p=2.0, backend="fused")
    expected = attend(q, k, v, scale=1.0, p=2.0, backend="reference")
    torch.testing.assert_close(attend(q, k, v, scale=1.0, p=2.0), expected)
