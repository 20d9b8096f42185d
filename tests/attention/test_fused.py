from pathlib import Path

import pytest
import torch

from interpreted import run_in_interpreter
from qknorm import MultiheadAttention, attend

pytest.importorskip("triton", reason="triton is not installed")
CASES = ["fused_cases.py", "fused_attention_cases.py", "fused_pass_cases.py"]


@pytest.mark.slow
@pytest.mark.parametrize("cases", CASES)
def test_the_kernels_in_tritons_interpreter(cases: str) -> None:
    run_in_interpreter(Path(__file__).with_name(cases))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("cases", CASES)
def test_the_kernels_on_the_gpu(cases: str) -> None:
    assert pytest.main(["-q", str(Path(__file__).with_name(cases))]) == 0


def test_asked_for_by_name_they_say_why_they_cannot() -> None:
    q = k = v = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match="on cpu, not on a GPU"):
        attend(q, k, v, scale=1.0, p=2.0, backend="fused")
    with pytest.raises(ValueError, match="no p is given"):
        attend(q, k, v, scale=1.0, backend="fused")
    x = torch.randn(1, 3, 16)
    with pytest.raises(ValueError, match="on cpu, not on a GPU"):
        MultiheadAttention(16, 2, batch_first=True, backend="fused")(x, x, x, need_weights=False)
