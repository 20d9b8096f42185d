import copy
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from qknorm import KeyValueCache, MultiheadAttention, attend, lp_normalize

KINDS = [{"qk_norm": "lp"}, {"qk_norm": "lp", "p": 3.0, "p_learned": True}, {"qk_norm": "rms"}, {"qk_norm": "none"}]


def masks_for(batch: int, heads: int, t: int, s: int) -> list[dict[str, Tensor]]:
    padding = torch.zeros(batch, s, dtype=torch.bool)
    padding[0, -2:] = True
    boolean = torch.rand(t, s) > 0.6
    boolean[:, 0] = False
    per_head = torch.randn(batch * heads, t, s)
    return [
        {},
        {"key_padding_mask": padding},
        {"attn_mask": boolean},
        {"attn_mask": torch.randn(t, s)},
        {"attn_mask": per_head},
        {"key_padding_mask": padding, "attn_mask": boolean},
        {"key_padding_mask": torch.zeros(batch, s).masked_fill(padding, -torch.inf), "attn_mask": per_head},
    ]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"kdim": 12, "vdim": 20},
        {"add_bias_kv": True},
        {"add_zero_attn": True, "add_bias_kv": True},
    ],
)
def test_without_qknorm_it_is_torchs_module(batch_first: bool, need_weights: bool, options: dict[str, int]) -> None:
    theirs = nn.MultiheadAttention(32, 4, batch_first=batch_first, **options)  # type: ignore[arg-type]
    ours = MultiheadAttention(32, 4, batch_first=batch_first, qk_norm="none", **options)  # type: ignore[arg-type]
    ours.load_state_dict(theirs.state_dict())
    if theirs.in_proj_bias is not None:
        nn.init.normal_(theirs.in_proj_bias)
        ours.load_state_dict(theirs.state_dict())
    shapes = [(2, 5, 32), (2, 7, theirs.kdim), (2, 7, theirs.vdim)]
    q, k, v = (torch.randn(b if batch_first else t, t if batch_first else b, d) for b, t, d in shapes)
    for masks in masks_for(2, 4, 5, 7):
        results = []
        for module in (theirs, ours):
            module.zero_grad()
            output, weights = module(q, k, v, need_weights=need_weights, average_attn_weights=False, **masks)
            output.pow(2).mean().backward()
            gradients = {name: p.grad for name, p in module.named_parameters() if "norm" not in name}
            results.append((output, weights, gradients))
        (output, weights, gradients), (our_output, our_weights, our_gradients) = results
        torch.testing.assert_close(our_output, output, atol=1e-6, rtol=1e-6)
        assert (weights is None) == (our_weights is None)
        if weights is not None:
            torch.testing.assert_close(our_weights, weights, atol=1e-6, rtol=1e-6)
        assert our_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(our_gradients[name], gradient, atol=1e-6, rtol=1e-6)


def test_unbatched_and_averaged_weights_match_torch() -> None:
    theirs = nn.MultiheadAttention(16, 2)
    ours = MultiheadAttention(16, 2, qk_norm="none")
    ours.load_state_dict(theirs.state_dict())
    x, mask = torch.randn(5, 16), torch.randn(2, 5, 5)
    for found, expected in zip(ours(x, x, x, attn_mask=mask), theirs(x, x, x, attn_mask=mask), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_is_causal_needs_no_mask_and_equals_one() -> None:
    module = MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 5, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    for need_weights in (True, False):
        with_mask = module(x, x, x, attn_mask=mask, need_weights=need_weights)[0]
        torch.testing.assert_close(module(x, x, x, is_causal=True, need_weights=need_weights)[0], with_mask)
        hinted = module(x, x, x, attn_mask=mask, is_causal=True, need_weights=need_weights)[0]
        torch.testing.assert_close(hinted, with_mask)


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True, "add_bias_kv": True}])
def test_is_causal_does_not_see_ahead_past_extra_keys(options: dict[str, bool]) -> None:
    module = MultiheadAttention(16, 2, batch_first=True, **options)  # type: ignore[arg-type]
    x = torch.randn(2, 5, 16)
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    causal = module(x, x, x, is_causal=True)[0]
    torch.testing.assert_close(causal, module(x, x, x, attn_mask=hidden)[0])
    changed = x.clone()
    changed[:, 3:] = 0.0
    torch.testing.assert_close(module(changed, changed, changed, is_causal=True)[0][:, :3], causal[:, :3])


def test_a_mask_that_does_not_fit_the_keys_is_refused() -> None:
    module, cache = MultiheadAttention(16, 2, batch_first=True), KeyValueCache()
    x = torch.randn(2, 5, 16)
    module(x, x, x, need_weights=False, cache=cache)
    with pytest.raises(ValueError, match=r"\(2, 5\), but should have \(2, 10\)"):
        module(x, x, x, need_weights=False, cache=cache, key_padding_mask=torch.zeros(2, 5, dtype=torch.bool))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(("name", "shape"), [("key_padding_mask", (2, 5)), ("attn_mask", (5, 5))])
def test_a_mask_of_whole_numbers_is_refused_as_torchs_module_does(
    name: str, shape: tuple[int, int], need_weights: bool
) -> None:
    x, mask = torch.randn(2, 5, 16), {name: torch.ones(shape, dtype=torch.long).tril()}
    with pytest.raises(ValueError, match=rf"{name} is torch.int64; give bool \(True = hidden\)"):
        MultiheadAttention(16, 2, batch_first=True)(x, x, x, need_weights=need_weights, **mask)
    with pytest.raises((AssertionError, RuntimeError)):
        torch.nn.MultiheadAttention(16, 2, batch_first=True)(x, x, x, need_weights=need_weights, **mask)


@pytest.mark.parametrize("kind", ["lp", "rms", "layer", "none"])
@pytest.mark.parametrize("kv", [4, 2, 1])
def test_it_is_projection_normalisation_attention_projection(kind: str, kv: int) -> None:
    module = MultiheadAttention(32, 4, batch_first=True, num_kv_heads=kv, qk_norm=kind, length=79)  # type: ignore[arg-type]
    x = torch.randn(2, 5, 32)
    assert module.in_proj_weight is not None and module.in_proj_bias is not None
    q, k, v = (x @ module.in_proj_weight.T + module.in_proj_bias).split([32, 8 * kv, 8 * kv], dim=-1)
    q, k, v = (y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in (q, k, v))
    out = attend(module.norm.query(q), module.norm.key(k), v, scale=module.norm.scale, backend="reference")
    expected = module.out_proj(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x, x, x, need_weights=False)[0], expected, atol=1e-6, rtol=1e-6)


def test_back_ends_agree_in_values_and_gradients() -> None:
    x = torch.randn(2, 6, 32)
    results = []
    for backend in ("reference", "sdpa"):
        torch.manual_seed(1)
        module = MultiheadAttention(
            32, 4, batch_first=True, p=3.0, p_learned=True, scale_per_head=True, backend=backend
        )  # type: ignore[arg-type]
        output = module(x, x, x, need_weights=False, is_causal=True)[0]
        output.pow(2).sum().backward()
        results.append([output, *(p.grad for p in module.parameters())])
    for reference, fast in zip(*results, strict=True):
        assert reference is not None
        torch.testing.assert_close(fast, reference, atol=1e-5, rtol=1e-5)


def test_torchs_weights_load_and_only_the_scale_is_new() -> None:
    theirs, ours = nn.MultiheadAttention(32, 4), MultiheadAttention(32, 4, scale_init=7.0)
    assert set(ours.state_dict()) - set(theirs.state_dict()) == {"norm.scale"}
    ours.load_state_dict(theirs.state_dict())
    assert float(ours.norm.scale) == 7.0
    model, copied = nn.Sequential(ours), nn.Sequential(MultiheadAttention(32, 4))
    copied.load_state_dict(model.state_dict())
    assert float(copied[0].norm.scale) == 7.0
    with pytest.raises(RuntimeError, match="in_proj_weight"):
        ours.load_state_dict({"in_proj_bias": theirs.in_proj_bias})


@pytest.mark.parametrize("swap_after", [False, True])
def test_torchs_fast_path_does_not_bypass_it(swap_after: bool) -> None:
    """In eval mode torch's encoder reads self_attn's weights and skips its forward, unless it is told not to."""
    attention = MultiheadAttention(32, 4, batch_first=True, scale_init=20.0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    if not swap_after:
        layer.self_attn = attention
    encoder = nn.TransformerEncoder(layer, 2)
    if swap_after:
        for each in encoder.layers:
            each.self_attn = copy.deepcopy(attention)
    x = torch.randn(3, 6, 32)
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[1, 4:] = True
    calls = []
    for each in encoder.layers:
        each.self_attn.register_forward_hook(lambda *_: calls.append(1))
    for mask in (None, padding):
        trained = encoder.train()(x, src_key_padding_mask=mask)
        calls.clear()
        with torch.no_grad():
            evaluated = encoder.eval()(x, src_key_padding_mask=mask)
        assert len(calls) >= 2
        seen = slice(None) if mask is None else ~mask
        torch.testing.assert_close(evaluated[seen], trained[seen])


def test_torchs_whole_transformer_runs_on_it() -> None:
    model = nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True)
    for name in ("self_attn", "multihead_attn"):
        setattr(model.decoder.layers[0], name, MultiheadAttention(32, 4, batch_first=True))
    model.encoder.layers[0].self_attn = MultiheadAttention(32, 4, batch_first=True)
    source, target = torch.randn(2, 7, 32), torch.randn(2, 5, 32)
    mask = model.generate_square_subsequent_mask(5)
    trained = model(source, target, tgt_mask=mask, tgt_is_causal=True)
    with torch.no_grad():
        evaluated = model.eval()(source, target, tgt_mask=mask, tgt_is_causal=True)
    torch.testing.assert_close(evaluated, trained)


@pytest.mark.parametrize("options", [*KINDS, {"num_kv_heads": 2}, {"rotary": "after_norm"}, {"rotary": "before_norm"}])
def test_token_by_token_equals_the_full_pass(options: dict[str, object]) -> None:
    module = MultiheadAttention(32, 4, batch_first=True, **options).eval()  # type: ignore[arg-type]
    x = torch.randn(3, 40, 32)
    with torch.no_grad():
        full = module(x, x, x, need_weights=False, is_causal=True)[0]
        cache = KeyValueCache()
        steps = [x[:, :7], *x[:, 7:].split(1, dim=1)]  # a prompt of seven, then one by one
        parts = [module(s, s, s, need_weights=False, is_causal=True, cache=cache)[0] for s in steps]
    torch.testing.assert_close(torch.cat(parts, dim=1), full, atol=1e-5, rtol=1e-5)


def test_cached_cross_attention_reads_its_keys_once() -> None:
    module = MultiheadAttention(32, 4, batch_first=True).eval()
    x, memory = torch.randn(3, 5, 32), torch.randn(3, 9, 32)
    padding = torch.zeros(3, 9, dtype=torch.bool)
    padding[0, 6:] = True
    with torch.no_grad():
        full = module(x, memory, memory, key_padding_mask=padding, need_weights=False)[0]
        cache, normalised = KeyValueCache(fixed=True), []
        module.norm.key = lambda k, key=module.norm.key, **how: normalised.append(1) or key(k, **how)  # type: ignore[method-assign, assignment, misc]
        parts = [
            module(s, memory, memory, key_padding_mask=padding, need_weights=False, cache=cache)[0]
            for s in x.split(1, dim=1)
        ]
    torch.testing.assert_close(torch.cat(parts, dim=1), full, atol=1e-5, rtol=1e-5)
    assert len(normalised) == 1
    with pytest.raises(RuntimeError, match="filled once"):
        cache.append(memory[None], memory[None])


def test_the_cache_stores_normalised_keys() -> None:
    module, cache = MultiheadAttention(32, 4, batch_first=True), KeyValueCache()
    with pytest.raises(RuntimeError, match="empty"):
        cache.read()
    x = torch.randn(2, 3, 32)
    module(x, x, x, need_weights=False, cache=cache)
    keys, _ = cache.read()
    torch.testing.assert_close(keys, lp_normalize(keys))


@pytest.mark.parametrize("index", [[1, 0, 2], [0, 0, 2], [2, 2, 2], [0, 1, 2], [2, 0], [0, 1, 1, 2]])
def test_reordering_the_cache_reorders_the_beams(index: list[int]) -> None:
    module = MultiheadAttention(32, 4, batch_first=True).eval()
    x, order = torch.randn(3, 6, 32), torch.tensor(index)
    with torch.no_grad():
        cache = KeyValueCache()
        module(x[:, :5], x[:, :5], x[:, :5], need_weights=False, is_causal=True, cache=cache)
        cache.reorder(order)
        last = x[order, 5:]
        found = module(last, last, last, need_weights=False, is_causal=True, cache=cache)[0]
        expected = module(x[order], x[order], x[order], need_weights=False, is_causal=True)[0][:, 5:]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_rotary_order_matters_unless_p_is_2() -> None:
    x = torch.randn(2, 6, 32)
    for p, same in ((2.0, True), (3.0, False)):
        outputs = []
        for rotary in ("before_norm", "after_norm"):
            torch.manual_seed(3)
            module = MultiheadAttention(32, 4, batch_first=True, p=p, rotary=rotary)  # type: ignore[arg-type]
            outputs.append(module(x, x, x, need_weights=False)[0])
        assert torch.allclose(outputs[0], outputs[1], atol=1e-6) == same


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "compiler"), zip(KINDS, ["aot_eager", "inductor", "aot_eager", "aot_eager"], strict=True)
)
def test_compiles_whole(options: dict[str, object], compiler: str) -> None:
    module = MultiheadAttention(32, 4, batch_first=True, **options)  # type: ignore[arg-type]
    compiled = torch.compile(copy.deepcopy(module), fullgraph=True, backend=compiler)
    module.backend = "sdpa"  # what a compiled one takes, whatever is faster in short sequences on a CPU
    x = torch.randn(2, 6, 32)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[0, 4:] = True
    results = []
    for m in (module, compiled):
        output = m(x, x, x, key_padding_mask=padding, need_weights=False, is_causal=True)[0]
        output.pow(2).sum().backward()
        results.append([output, *(p.grad for p in m.parameters())])
    for eager, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, eager, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("options", KINDS)
def test_exports_with_dynamic_shapes(options: dict[str, object]) -> None:
    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = MultiheadAttention(32, 4, batch_first=True, **options)  # type: ignore[arg-type]

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False, is_causal=True)[0]

    model = SelfAttention().eval()
    auto = torch.export.Dim.AUTO
    program = torch.export.export(model, (torch.randn(2, 6, 32),), dynamic_shapes=({0: auto, 1: auto},))
    exported = program.module()
    x = torch.randn(3, 11, 32)
    x[0, 3] = 0.0  # queries and keys of no length: zeros, and no slope
    results = []
    for each in (model, exported):
        output = each(x)
        output.pow(2).sum().backward()
        results.append({"output": output, **{name: weights.grad for name, weights in each.named_parameters()}})
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", KINDS)
def test_autocast_and_its_gradients(dtype: torch.dtype, options: dict[str, object]) -> None:
    module = MultiheadAttention(32, 4, batch_first=True, **options)  # type: ignore[arg-type]
    x = torch.randn(2, 6, 32)
    expected = module(x, x, x, need_weights=False)[0]
    for need_weights in (True, False):
        with torch.autocast("cpu", dtype=dtype):
            output = module(x, x, x, need_weights=need_weights)[0]
        assert output.dtype == dtype
        torch.testing.assert_close(output.float(), expected, atol=0.05, rtol=0.05)
        output.float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("options", [*KINDS, {"scale_learned": False}])
def test_meta_device_then_real(options: dict[str, object]) -> None:
    with torch.device("meta"):
        module = MultiheadAttention(32, 4, batch_first=True, **options)  # type: ignore[arg-type]
    assert all(p.is_meta for p in module.parameters())
    module.to_empty(device="cpu").reset_parameters()
    torch.manual_seed(5)
    module.reset_parameters()
    torch.manual_seed(5)
    fresh = MultiheadAttention(32, 4, batch_first=True, **options)  # type: ignore[arg-type]
    fresh.reset_parameters()
    torch.manual_seed(5)
    fresh.reset_parameters()
    x = torch.randn(2, 3, 32)
    torch.testing.assert_close(module(x, x, x)[0], fresh(x, x, x)[0])


def test_deepcopy_is_independent() -> None:
    module = MultiheadAttention(32, 4, batch_first=True)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.norm.scale.fill_(1.0)
    assert float(module.norm.scale) != 1.0


def test_bad_settings_are_named() -> None:
    for options, words in [
        ({"num_heads": 5}, "5 heads"),
        ({"num_heads": 4, "num_kv_heads": 3}, "share 3"),
        ({"num_heads": 4, "rotary": "after"}, "rotary"),
        ({"num_heads": 4, "qk_norm": "l2"}, "by lp, rms, layer or none, not by 'l2'"),
        ({"num_heads": 4, "backend": "fused", "qk_norm": "rms"}, "nothing to fuse"),
    ]:
        with pytest.raises(ValueError, match=words):
            MultiheadAttention(32, **options)  # type: ignore[arg-type]


def _ddp_worker(rank: int, folder: str, data: Tensor) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = nn.parallel.DistributedDataParallel(MultiheadAttention(32, 4, batch_first=True))
    x = data[rank::2]
    module(x, x, x, need_weights=False)[0].pow(2).mean().backward()
    if rank == 0:
        torch.save({name: p.grad for name, p in module.module.named_parameters()}, f"{folder}/gradients.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_distributed_data_parallel_averages_every_gradient(tmp_path: object) -> None:
    data = torch.randn(4, 6, 32)
    mp.spawn(_ddp_worker, args=(str(tmp_path), data), nprocs=2)
    gradients = torch.load(f"{tmp_path}/gradients.pt", weights_only=True)
    torch.manual_seed(0)
    module = MultiheadAttention(32, 4, batch_first=True)
    module(data, data, data, need_weights=False)[0].pow(2).mean().backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-6, rtol=1e-5)


def test_where_attend_gets_normalised_queries_functional_transforms_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qknorm.attention.multihead.may_fuse", lambda *_: True)  # as on a GPU
    module, x = MultiheadAttention(8, 2, batch_first=True, qk_norm="none").double(), torch.randn(2, 3, 8).double()

    def loss(y: Tensor) -> Tensor:
        out: Tensor = module(y, y, y, need_weights=False)[0].square().sum()
        return out

    found = torch.func.grad(loss)(x)
    torch.testing.assert_close(found, torch.autograd.grad(loss(x.requires_grad_()), x)[0])
