"""The kernel of decoding steps, compiled for GPUs that need not be here."""

import sys
from typing import Any

import pytest
import torch

from interpreted import require_kernels
from qknorm import MultiheadAttention
from qknorm.attention import KeyValueCache
from qknorm.attention.availability import INTERPRETED

SM_86 = 101_376
"""Bytes of shared memory that a program can have on compute capability 8.6, 8.9 and 12.0; 8.0 and 9.0 have more."""


def compiled_for(capability: int, d: int, rows: int, *, mask: str = "*bf16", **flags: Any) -> Any:
    """The kernel for rows that share a key head, with strides that are multiples of 16, as caches have."""
    require_kernels()
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from qknorm.attention.fused_decode import decode_kernel, launch_for

    if INTERPRETED:
        pytest.skip("the interpreter compiles nothing")
    keys, warps, stages = launch_for(rows, d, 256)
    sizes = {"D": d, "BLOCK_D": d, "GROUP": rows // 4, "ROWS": rows, "KEYS": keys, "mask_s": 1}
    fixed = {"SCALES": 1, "MASK": 2, "BOOLEAN": False, "BLIND": False, "NORMALISE": True, **flags, **sizes}
    kinds = {"g_ptr": "*fp32", "nothing_ptr": "*i1", "scale": "fp32", "mask_ptr": mask}
    names = decode_kernel.arg_names
    source = ASTSource(
        decode_kernel,
        {
            name: "constexpr" if name in fixed else kinds.get(name) or ("*bf16" if name.endswith("_ptr") else "i32")
            for name in names
        },
        {(names.index(name),): value for name, value in fixed.items()},
        {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if name not in fixed and name not in ("key_heads", "t", "s", "scale")
        },
    )
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["*bf16", "*fp64"])
@pytest.mark.parametrize("d", [16, 32, 64, 128, 256])
def test_the_largest_program_fits_small_cards(d: int, mask: str) -> None:
    from qknorm.attention.fused_decode import MOST_ENTRIES, NARROWEST

    rows = MOST_ENTRIES // max(d, NARROWEST)
    for fits in (True, False):
        assert 0 < compiled_for(86, d, rows, mask=mask, FITS=fits).metadata.shared <= SM_86


@pytest.mark.slow
@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("fits", [True, False])
def test_keys_and_values_are_read_16_bytes_at_a_time(fits: bool, kind: int) -> None:
    """And on their way while others are computed with, whether or not a mask says where to stop."""
    program = compiled_for(90, 64, 16, FITS=fits, MASK=kind).asm["ptx"]
    assert program.count("cp.async.cg.shared.global") >= 2 * 64 * 64 * 2 // (64 * 16)  # by 64 threads


@pytest.mark.parametrize("settings", [{}, {"qk_norm": "rms"}, {"p": 3.0, "scale_per_head": True}])
def test_a_cache_read_by_a_compiled_module(settings: dict[str, Any]) -> None:
    module = MultiheadAttention(16, 2, batch_first=True, **settings).eval()
    x, memory = torch.randn(2, 3, 16), torch.randn(2, 5, 16)
    torch.compiler.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    results = []
    for way in (module, compiled):
        cache = KeyValueCache(fixed=True)
        with torch.no_grad():
            results.append([way(x, memory, memory, need_weights=False, cache=cache)[0] for _ in range(2)])
    for eager, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, eager)


def test_where_it_is_not_used_queries_carry_norm_and_scale_as_before() -> None:
    module = MultiheadAttention(16, 2, batch_first=True, backend="sdpa").eval()
    attend = sys.modules["qknorm.attention.attend"]
    x, memory = torch.randn(2, 3, 16), torch.randn(2, 5, 16)
    with torch.no_grad():
        cached = module(x, memory, memory, need_weights=False, cache=KeyValueCache(fixed=True))[0]
        q, k, v = module._project(x, memory, memory, None)
        expected = attend.attend(q, k, v, scale=1.0, backend="sdpa").transpose(1, 2).flatten(2)
        assert torch.equal(cached, module.out_proj(expected))
