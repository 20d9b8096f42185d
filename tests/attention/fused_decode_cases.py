"""The kernel of decoding steps against the reference in float64: on a GPU, or in Triton's interpreter."""

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from qknorm import MultiheadAttention, attend, attend_with_weights
from qknorm.attention import KeyValueCache, Visibility, lp_normalize
from qknorm.attention.attend import attend_normalised_keys, few_refusal
from qknorm.attention.fused_decode import Launch, attend_few, launch_for, why_not
from qknorm.inspection.watching.capture import capture

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
ATTEND = sys.modules["qknorm.attention.attend"]  # the name `attend` in the package is the function


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def draw_all(t: int, s: int, d: int, *, h: int = 2, kv: int = 2, b: int = 2, dtype: Any = torch.bfloat16) -> Any:
    return [draw(b, n, x, d, dtype=dtype) for n, x in ((h, t), (kv, s), (kv, s))]


def draw_mask(shape: tuple[int, ...], kind: str) -> Tensor:
    """Some keys hidden, and all of them from the last query of the last head of the last sentence."""
    seen = torch.rand(shape, device=DEVICE) < 0.6
    seen[..., 0] = True
    seen[-1, -1, -1] = False
    if kind == "bool":
        return seen
    dtype = getattr(torch, kind)
    return torch.randn(shape, device=DEVICE).to(dtype).masked_fill(~seen, -math.inf)


def exact(q: Tensor, k: Tensor, v: Tensor, scale: float | Tensor, mask: Any = None, normalise: bool = False) -> Tensor:
    q, k, v = q.double(), k.double(), v.double()
    if isinstance(mask, Tensor) and mask.dtype != torch.bool:
        mask = mask.double()
    scale = scale.double() if isinstance(scale, Tensor) else scale
    return attend_with_weights(lp_normalize(q) if normalise else q, k, v, scale=scale, mask=mask).output


def check(found: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    assert found.shape == expected.shape and not found.isnan().any()
    error = (found.double() - expected).norm() / expected.norm().clamp(min=1e-3)
    assert error <= (tolerance or TOLERANCE[found.dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("t", "s", "d", "h", "kv"),
    [
        (4, 64, 64, 2, 2),
        (1, 1, 16, 2, 2),
        (1, 300, 20, 2, 1),
        (3, 65, 48, 4, 2),
        (5, 31, 80, 4, 1),
        (16, 129, 8, 2, 2),
        (7, 192, 64, 6, 2),
        (2, 33, 256, 2, 1),
    ],
)
def test_values(dtype: torch.dtype, t: int, s: int, d: int, h: int, kv: int) -> None:
    q, k, v = draw_all(t, s, d, h=h, kv=kv, dtype=dtype)
    assert why_not(q, k, v, 0.3, None) is None
    check(attend_few(q, k, v, 0.3), exact(q, k, v, 0.3))


@pytest.mark.parametrize("kind", ["bool", "bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize(
    "shape", [(2, 1, 1, 70), (2, 1, 5, 70), (2, 4, 5, 70), (1, 4, 1, 70), (1, 1, 5, 70), (2, 4, 1, 70)]
)
def test_masks_of_every_kind_and_shape(kind: str, shape: tuple[int, ...]) -> None:
    q, k, v = draw_all(5, 70, 16, h=4)
    mask = draw_mask(shape, kind)
    found = attend_few(q, k, v, 0.5, mask=mask)
    check(found, exact(q, k, v, 0.5, mask))
    assert (found[-1, -1, -1] == 0).all() and (found[0, 0, 0] != 0).any()
    ready = Visibility.of(mask)
    assert torch.equal(attend_few(q, k, v, 0.5, mask=ready.mask, nothing=ready.nothing), found)


@pytest.mark.parametrize("shape", [(5, 70), (70,), (4, 5, 70), (1,), (2, 1, 5, 1)])
def test_masks_of_fewer_dimensions_and_over_keys_too(shape: tuple[int, ...]) -> None:
    q, k, v = draw_all(5, 70, 16, h=4)
    mask = torch.randn(shape, device=DEVICE)
    assert why_not(q, k, v, 0.5, mask) is None
    check(attend_few(q, k, v, 0.5, mask=mask), exact(q, k, v, 0.5, mask))


def test_one_query_of_one_head_and_its_mask() -> None:
    q, k, v = draw_all(1, 40, 16, h=1, kv=1, b=3)
    mask = draw_mask((3, 1, 1, 40), "bool")
    check(attend_few(q, k, v, 0.5, mask=mask), exact(q, k, v, 0.5, mask))


@pytest.mark.parametrize("keys", [16, 32, 64, 128])
@pytest.mark.parametrize("s", [63, 64, 65, 128, 200])
def test_blocks_of_any_size(keys: int, s: int) -> None:
    q, k, v = draw_all(4, s, 32)
    mask = draw_mask((2, 1, 4, s), "bfloat16")
    mask[0, :, 1, : s - 1] = -math.inf  # only the last key, so that whole blocks before it are hidden
    mask[0, :, 1, -1] = 0.5
    mask[0, :, 2, 1:] = -math.inf  # only the first one
    found = attend_few(q, k, v, 0.5, mask=mask, launch=Launch(keys, 4, 2))
    check(found, exact(q, k, v, 0.5, mask))
    torch.testing.assert_close(found[0, :, 1], v[0, :, -1])
    torch.testing.assert_close(found[0, :, 2], v[0, :, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [-1e4, 1e4, 0.0])
def test_logits_of_any_size(dtype: torch.dtype, size: float) -> None:
    q, k, v = draw_all(4, 70, 16, dtype=dtype)
    unit = lp_normalize(q.float()).to(dtype), lp_normalize(k.float()).to(dtype)
    check(attend_few(*unit, v, size), exact(*unit, v, size), 1e-2)
    alike = k[:, :, :1].expand(-1, -1, 70, -1)  # all logits near ±1e4, and equal
    check(attend_few(unit[0], alike, v, size), v.double().mean(2, keepdim=True).expand(-1, -1, 4, -1))


def test_a_finite_mask_hides_nothing_from_a_query_that_has_nothing_else() -> None:
    q, k, v = draw_all(3, 70, 16)
    mask = torch.full((2, 1, 3, 70), -1e9, device=DEVICE)
    check(attend_few(q, k, v, 0.5, mask=mask), v.double().mean(2, keepdim=True).expand(-1, -1, 3, -1))


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numbers", [(), (1,), (4,)])
def test_a_scale_in_memory_and_queries_normalised_inside(numbers: tuple[int, ...], scale_dtype: torch.dtype) -> None:
    q, k, v = draw_all(4, 70, 20, h=4)
    scale = (torch.rand(numbers, device=DEVICE) * 8 + 4).to(scale_dtype)
    k = lp_normalize(k)
    q[0, 0, 1] = 0.0
    q[0, 0, 2] *= 1e30
    for normalise in (False, True):
        how = scale if normalise else scale / 16
        q_in = q if normalise else q.clamp(-4, 4)
        check(attend_few(q_in, k, v, how, normalise=normalise), exact(q_in, k, v, how, normalise=normalise))


def test_what_is_not_a_number() -> None:
    q, k, v = draw_all(3, 70, 16, b=1, h=1, kv=1)
    mask = torch.ones(1, 1, 1, 70, dtype=torch.bool, device=DEVICE)
    mask[..., 40] = False
    k[0, 0, 40] = math.nan
    assert attend_few(q, k, v, 0.5).isnan().all()
    check(attend_few(q, k, v, 0.5, mask=mask), exact(q, k, v, 0.5, mask))  # a boolean mask hides it
    added = torch.zeros(1, 1, 1, 70, device=DEVICE).masked_fill(~mask, -math.inf)
    assert attend_few(q, k, v, 0.5, mask=added).isnan().all() and exact(q, k, v, 0.5, added).isnan().all()
    k[0, 0, 40], v[0, 0, 40] = 0.0, math.nan  # no mask hides a value, as in the reference
    assert attend_few(q, k, v, 0.5, mask=mask).isnan().all() and exact(q, k, v, 0.5, mask).isnan().all()
    v[0, 0, 40], q[0, 0, 1, 3] = 0.0, math.nan
    assert attend_few(q, k, v, 0.5, mask=mask).isnan().any(-1).flatten().tolist() == [False, True, False]
    nothing = torch.tensor([False, True, True], device=DEVICE).view(1, 1, 3, 1)
    found = attend_few(q, k, v, 0.5, mask=mask, nothing=nothing)
    assert (found[0, 0, 1:] == 0).all() and (found[0, 0, 0] != 0).any()


def test_beyond_the_last_key_nothing_is_read() -> None:
    q, k, v = draw_all(3, 128, 16)
    mask = torch.zeros(2, 1, 3, 128, device=DEVICE)
    k[:, :, 70:], v[:, :, 70:], mask[..., 70:] = math.nan, math.nan, math.nan
    found = attend_few(q, k[:, :, :70], v[:, :, :70], 0.5, mask=mask[..., :70])
    check(found, exact(q, k[:, :, :70], v[:, :, :70], 0.5))


def test_any_strides() -> None:
    packed = draw(3, 4, 6, 16)
    q = packed[1:, :, 1:3].transpose(1, 2)  # the queries of a packed projection
    room = draw(5, 2, 3, 100, 32)
    k, v = room[1, :, :2, :70, :16], room[3, :, 1:, 7:77, 16:]
    mask = draw_mask((2, 2, 9, 90), "bfloat16")[:, :1, 2:6, 10:80]
    found = attend_few(q, k, v, 0.5, mask=mask)
    dense = [x.contiguous() for x in (q, k, v)]
    assert torch.equal(found, attend_few(*dense, 0.5, mask=mask.contiguous()))
    check(found, exact(q, k, v, 0.5, mask))
    assert found.transpose(1, 2).is_contiguous()  # so that joining the heads moves nothing
    across = draw(2, 2, 16, 70).transpose(2, 3)  # the last dimension is not the dense one
    assert torch.equal(attend_few(q, across, across, 0.5), attend_few(q, across.contiguous(), across.contiguous(), 0.5))
    one = k[:1].expand(2, -1, -1, -1)
    assert torch.equal(attend_few(q, one, one, 0.5), attend_few(q, one.contiguous(), one.contiguous(), 0.5))
    every_other = draw_mask((2, 1, 4, 140), "bool")[..., ::2]
    check(attend_few(q, k, v, 0.5, mask=every_other), exact(q, k, v, 0.5, every_other))


def test_blocks_fit_the_rooms_of_a_search() -> None:
    for room in (64, 128, 192, 256, 384, 512, 768):
        assert room % launch_for(16, 64, room).keys == 0
    assert launch_for(16, 64, 20).keys == launch_for(16, 256, 200).keys == 32


def test_what_it_cannot_take_is_named() -> None:
    q, k, v = draw_all(3, 5, 16)
    wide, long = draw_all(3, 5, 272), draw_all(1, 1_025, 16)
    grad = q.clone().requires_grad_()
    for expected, inputs, how in [
        ("later ones see more keys", [q, k, v], {"is_causal": True}),
        ("over 16", draw_all(17, 5, 16), {}),
        ("drops no weights", [q, k, v], {"dropout": 0.1}),
        ("a gradient is wanted", [grad, k, v], {}),
        ("a gradient is wanted", [q, k, v], {"mask": torch.zeros(3, 5, device=DEVICE).requires_grad_()}),
        ("a gradient is wanted", [q, k, v], {"scale": torch.ones((), device=DEVICE, requires_grad=True)}),
        ("not of one half precision", [q.float(), k.float(), v.float()], {}),
        ("not of one half precision", [q, k, v.half()], {}),
        ("differ in batch or head dimension", [q, k, v[..., :8]], {}),
        ("differ in batch or head dimension", [q[:1], k, v], {}),
        ("empty", [q[:, :, :0], k, v], {}),
        ("empty", [q, k[:, :, :0], v[:, :, :0]], {}),
        ("than a program can hold", wide, {}),
        ("than a program can hold", draw_all(16, 5, 256, h=4, kv=1), {}),
        ("programs would walk", long, {}),
        ("neither one number nor one for each", [q, k, v], {"scale": torch.ones(3, device=DEVICE)}),
        ("neither boolean nor to be added", [q, k, v], {"mask": torch.ones(3, 5, device=DEVICE, dtype=torch.long)}),
        ("does not broadcast", [q, k, v], {"mask": torch.zeros(3, 4, device=DEVICE)}),
        ("does not broadcast", [q, k, v], {"mask": torch.zeros(1, 2, 1, 3, 5, device=DEVICE)}),
    ]:
        found = few_refusal(*inputs, **{"scale": 1.0, **how})  # type: ignore[arg-type]
        assert found is not None and expected in found
    assert few_refusal(q, k, v, scale=1.0) is None
    assert few_refusal(q[:, :, :1], k, v, scale=1.0, is_causal=True) is None
    with torch.no_grad():
        assert few_refusal(grad, k, v, scale=1.0) is None
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        assert "tangent" in str(few_refusal(dual, k, v, scale=1.0))
    told: list[str | None] = []
    torch.vmap(lambda x: (told.append(few_refusal(x, k, v, scale=1.0)), x)[1])(q.expand(3, -1, -1, -1, -1))
    assert told == ["the tensors stand for others"]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Lets `auto` take the kernel in the interpreter too; how often it did, and whether it normalised."""
    calls: list[bool] = []
    original: Callable[..., Tensor] = ATTEND._attend_few

    def counted(*inputs: Any, normalise: bool) -> Tensor:
        calls.append(normalise)
        return original(*inputs, normalise=normalise)

    monkeypatch.setattr(ATTEND, "_attend_few", counted)
    if DEVICE == "cpu":
        monkeypatch.setattr(ATTEND, "may_fuse", lambda backend, x: True)
    return calls


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("kind", ["bool", "bfloat16", "float32"])
def test_auto_takes_it_and_gives_the_same(taken: list[bool], kind: str, ready: bool) -> None:
    q, k, v = draw_all(4, 70, 16, h=4)
    mask = draw_mask((2, 1, 4, 70), kind)
    given = Visibility.of(mask) if ready else mask
    found = attend(q, k, v, scale=0.5, mask=given)
    assert taken == [False] and found.dtype == torch.bfloat16
    check(found, attend(q, k, v, scale=0.5, mask=given, backend="sdpa").double(), 2e-2)
    check(found, exact(q, k, v, 0.5, mask))
    for how in ({"backend": "sdpa"}, {"backend": "reference"}, {"is_causal": True}):
        attend(q, k, v, scale=0.5, mask=given, **how)  # type: ignore[arg-type]
    attend(q.clone().requires_grad_(), k, v, scale=0.5, mask=given)
    attend(q.repeat(1, 1, 5, 1), k, v, scale=0.5)
    assert len(taken) == 1


def test_one_query_at_the_end_sees_every_key(taken: list[bool]) -> None:
    q, k, v = draw_all(1, 70, 16)
    check(attend(q, k, v, scale=0.5, is_causal=True), exact(q, k, v, 0.5))
    assert taken == [False]


def test_autocast_gives_what_it_gives_elsewhere(taken: list[bool]) -> None:
    q, k, v = (x.float() for x in draw_all(3, 20, 16))
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        found = attend(q, k, v, scale=0.5)
        assert found.dtype == attend(q, k, v, scale=0.5, backend="sdpa").dtype == torch.bfloat16
    assert taken == [False]
    check(found, exact(q, k, v, 0.5), 2e-2)


@pytest.mark.parametrize("p", [2.0, 3.0])
@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference"])
def test_queries_alone_are_normalised(taken: list[bool], p: float, backend: Any) -> None:
    q, k, v = draw_all(4, 70, 16)
    k, g = lp_normalize(k, p), torch.tensor([5.0, 9.0], device=DEVICE)
    how = {"mask": None, "is_causal": False, "dropout": 0.0, "backend": backend}
    found = attend_normalised_keys(q, k, v, scale=g, p=p, **how)
    check(found, exact(lp_normalize(q.double(), p), k, v, g), 2e-2)
    assert taken == ([] if backend != "auto" else [p == 2.0])


@pytest.mark.parametrize(
    ("settings", "inside"),
    [
        ({}, True),
        ({"num_kv_heads": 1, "scale_per_head": True}, True),
        ({"rotary": "before_norm"}, True),
        ({"rotary": "after_norm"}, False),
        ({"p": 3.0}, False),
        ({"query_over": "width"}, False),
        ({"qk_norm": "rms"}, False),
        ({"qk_norm": "none"}, False),
    ],
)
def test_the_module_decodes_the_same(taken: list[bool], settings: dict[str, Any], inside: bool) -> None:
    module = MultiheadAttention(32, 2, batch_first=True, **settings).to(DEVICE, torch.bfloat16).eval()
    x, memory = draw(2, 6, 32), draw(2, 9, 32)
    hidden = torch.zeros(2, 9, dtype=torch.bool, device=DEVICE)
    hidden[1, 4:] = True
    results: list[list[Tensor]] = []
    for backend in ("auto", "reference"):
        module.backend = backend  # type: ignore[assignment]
        own, across = KeyValueCache(), KeyValueCache(fixed=True)
        with torch.no_grad():
            results.append([])
            for i in range(6):
                now = x[:, i : i + 1]
                results[-1].append(module(now, now, now, need_weights=False, is_causal=True, cache=own)[0])
                if module.rotary == "none":
                    over = {"key_padding_mask": hidden, "need_weights": False, "cache": across}
                    results[-1].append(module(now, memory, memory, **over)[0])
    for found, expected in zip(*results, strict=True):
        check(found, expected.double(), 2e-2)
    assert taken == [inside] * len(results[0])


def test_who_watches_sees_normalised_queries(taken: list[bool]) -> None:
    module = MultiheadAttention(32, 2, batch_first=True).to(DEVICE, torch.bfloat16).eval()
    x, memory, cache = draw(2, 1, 32), draw(2, 9, 32), KeyValueCache(fixed=True)
    with torch.no_grad(), capture(module) as calls:
        module(x, memory, memory, need_weights=False, cache=cache)
    assert taken == [True] and not calls.unseen
    assert len(calls) == 1 and torch.allclose(calls[0].q.float().norm(dim=-1), torch.ones(2, 2, 1, device=DEVICE), 2e-2)


def test_it_starts_on_the_gpu_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Tensor] = []
    device_of = torch.cuda.device_of
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: entered.append(x) or device_of(x))
    q, k, v = draw_all(3, 4, 8)
    attend_few(q, k, v, 1.0)
    assert [x.device for x in entered] == [q.device]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [32, 48, 64, 80, 128, 256])
@pytest.mark.parametrize(("t", "s", "group"), [(4, 64, 1), (1, 1_000, 2), (16, 257, 2), (4, 48, 4)])
def test_sizes_of_real_models(dtype: torch.dtype, d: int, t: int, s: int, group: int) -> None:
    q, k, v = draw_all(t, s, d, h=8, kv=8 // group, b=40, dtype=dtype)
    k, g = lp_normalize(k), torch.tensor(9.0, device=DEVICE)
    for shape, kind in (((40, 1, t, s), str(dtype).removeprefix("torch.")), ((40, 1, 1, s), "bool")):
        mask = draw_mask(shape, kind)
        assert why_not(q, k, v, g, mask) is None
        found = attend_few(q, k, v, g, mask=mask, normalise=True)
        check(found, exact(q, k, v, g, mask, normalise=True))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_recorded_in_a_cuda_graph_it_reads_what_is_there_then() -> None:
    q, k, v = draw_all(4, 128, 64, h=8, kv=8)
    mask = draw_mask((2, 1, 4, 128), "bfloat16")
    attend_few(q, k, v, 0.5, mask=mask)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend_few(q, k, v, 0.5, mask=mask)
    for x in (q, k, v):
        x.copy_(torch.randn_like(x))
    mask.copy_(draw_mask((2, 1, 4, 128), "bfloat16"))
    graph.replay()
    assert torch.equal(found, attend_few(q, k, v, 0.5, mask=mask))
    check(found, exact(q, k, v, 0.5, mask))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_one_compiled_kernel_serves_all_rooms() -> None:
    from qknorm.attention.fused_decode import decode_kernel

    def compiled() -> int:
        return sum(len(caches[0]) for caches in decode_kernel.device_caches.values())

    room = draw(2, 40, 8, 512, 64)
    q, mask = draw(40, 8, 4, 64), draw_mask((40, 1, 4, 512), "bfloat16")
    counts = []
    for sentences, s in ((40, 64), (30, 128), (17, 192), (1, 512)):
        k, v = room[:, :sentences, :, :s]
        attend_few(q[:sentences], k, v, 0.5, mask=mask[:sentences, :, :, :s])
        counts.append(compiled())
    assert counts[0] == counts[-1]
