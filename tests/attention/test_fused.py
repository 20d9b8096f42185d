import pytest
import torch

from qknorm import MultiheadAttention, attend

pytest.importorskip("triton", reason="triton is not installed")


def test_asked_for_by_name_they_say_why_they_cannot() -> None:
    q = k = v = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match="on cpu, not on a GPU"):
        attend(q, k, v, scale=1.0, p=2.0, backend="fused")
    with pytest.raises(ValueError, match="no p is given"):
        attend(q, k, v, scale=1.0, backend="fused")
    x = torch.randn(1, 3, 16)
    with pytest.raises(ValueError, match="on cpu, not on a GPU"):
        MultiheadAttention(16, 2, batch_first=True, backend="fused")(x, x, x, need_weights=False)
