"""Kernels that run unasked are compiled for a GPU with little shared memory, which needs no such GPU."""

from typing import Any

import pytest

from interpreted import require_kernels
from qknorm.attention.availability import INTERPRETED

SM_86 = 101_376
"""Bytes of shared memory that a program can have on compute capability 8.6, 8.9 and 12.0; 8.0 and 9.0 have more."""

HALVES = {"q_ptr", "k_ptr", "v_ptr", "to_out_ptr", "to_q_ptr", "to_k_ptr", "to_v_ptr"}
FLOATS = {"reach", "boost", "scale_up"}
KINDS = {"mask_ptr": "*i1", "seed_ptr": "*i64"}


def shared_memory(kernel: Any, half: str, warps: int, fixed: dict[str, Any]) -> int:
    """Bytes that a program takes, compiled for compute capability 8.6; tensors are aligned, as from PyTorch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if INTERPRETED:
        pytest.skip("the interpreter compiles nothing")

    def kind_of(name: str) -> str:
        if name in fixed:
            return "constexpr"
        if name in HALVES:
            return half
        return KINDS.get(name) or ("*fp32" if name.endswith("_ptr") else "fp32" if name in FLOATS else "i32")

    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: kind_of(name) for name in names},
        {(names.index(name),): value for name, value in fixed.items()},
        {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in fixed and "site" not in name},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 86, 32), options={"num_warps": warps})
    return int(compiled.metadata.shared)


@pytest.mark.slow
@pytest.mark.parametrize(("length", "d", "group"), [(128, 64, 1), (128, 64, 4), (64, 128, 4), (32, 256, 4)])
def test_the_backward_of_short_attention(length: int, d: int, group: int) -> None:
    require_kernels()
    from qknorm.attention.fused_small import small_backward_kernel
    from qknorm.attention.fused_tuning import is_short, small_warps

    assert is_short(length, length, d), "auto takes the kernels for it"
    flags = {"CAUSAL": True, "MASKED": True, "DROPOUT": True, "NORMALISE": True, "ADDS_TO_G": False}
    sizes = {"D": d, "BLOCK_D": d, "GROUP": group, "G_PER_HEAD": 0, "ROWS": length, "KEYS": length}
    warps = small_warps(length, length)
    assert 0 < shared_memory(small_backward_kernel, "*bf16", warps, {**sizes, **flags}) <= SM_86


@pytest.mark.slow
@pytest.mark.parametrize("width", [512, 2_048, 4_096])
def test_the_backward_of_sum_and_norm(width: int) -> None:
    require_kernels()
    from qknorm.models.fused_kernels import LAYER, add_norm_backward
    from qknorm.models.launches import LAUNCHES

    launch = LAUNCHES["add_norm_backward"]
    tile = launch.over_rows(4_096, width)[1]
    warps = tile.pop("num_warps")
    flags = dict.fromkeys(("HAS_Y", "HAS_Y_BIAS", "DROPS", "HAS_SUM", "HAS_BIAS"), True)
    fixed = {**tile, **flags, "KIND": LAYER, "STAGES": launch.stages_of_rows(width)}
    assert 0 < shared_memory(add_norm_backward, "*fp32", warps, fixed) <= SM_86
