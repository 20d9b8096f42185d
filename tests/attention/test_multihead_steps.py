"""Token by token with a cache, and the last queries alone: the same as the whole."""

from typing import Any

import pytest
import torch

from qknorm import KeyValueCache, MultiheadAttention

ROTARY: list[dict[str, Any]] = [{"rotary": "before_norm"}, {"rotary": "after_norm"}, {"rotary": "after_norm", "p": 3.0}]


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("rotary", ["none", "before_norm", "after_norm"])
@pytest.mark.parametrize(
    "options",
    [
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"add_bias_kv": True, "add_zero_attn": True, "qk_norm": "layer", "num_kv_heads": 2},
        {"add_bias_kv": True, "normalize_values": True, "kdim": 16, "vdim": 16},
    ],
)
def test_extra_keys_are_there_once(options: dict[str, Any], rotary: Any, need_weights: bool) -> None:
    module = MultiheadAttention(16, 4, batch_first=True, rotary=rotary, **options).eval()
    x = torch.randn(2, 7, 16)
    how: dict[str, Any] = {"is_causal": True, "need_weights": need_weights}
    with torch.no_grad():
        whole, weights = module(x, x, x, **how)
        for sizes in ([1] * 7, [3, 1, 1, 2]):
            cache = KeyValueCache()
            steps = [module(now, now, now, cache=cache, **how) for now in x.split(sizes, dim=1)]
            torch.testing.assert_close(torch.cat([out for out, _ in steps], dim=1), whole, atol=1e-6, rtol=1e-5)
            assert cache.length == 7
            if weights is not None:
                torch.testing.assert_close(steps[-1][1], weights[:, -sizes[-1] :], atol=1e-6, rtol=1e-5)


def test_a_fixed_cache_keeps_extra_keys() -> None:
    module = MultiheadAttention(16, 4, batch_first=True, add_bias_kv=True, add_zero_attn=True, kdim=12, vdim=12).eval()
    x, memory, hidden = torch.randn(2, 5, 16), torch.randn(2, 7, 12), torch.zeros(2, 7, dtype=torch.bool)
    hidden[0, 4:] = True
    how: dict[str, Any] = {"key_padding_mask": hidden, "need_weights": False}
    with torch.no_grad():
        whole, cache = module(x, memory, memory, **how)[0], KeyValueCache(fixed=True)
        parts = [module(now, memory, memory, cache=cache, **how)[0] for now in x.split(1, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("options", ROTARY)
@pytest.mark.parametrize("extra", [False, True])
def test_the_last_queries_alone_stand_at_the_end(options: dict[str, Any], need_weights: bool, extra: bool) -> None:
    module = MultiheadAttention(16, 4, batch_first=True, add_bias_kv=extra, **options).eval()
    x, how = torch.randn(2, 6, 16), {"is_causal": True, "need_weights": need_weights}
    with torch.no_grad():
        whole = module(x, x, x, **how)[0]
        torch.testing.assert_close(module(x[:, -2:], x, x, **how)[0], whole[:, -2:], atol=1e-6, rtol=1e-5)
        cache = KeyValueCache()
        module(x[:, :3], x[:, :3], x[:, :3], cache=cache, **how)
        rest = x[:, 3:]
        found = module(rest[:, 1:], rest, rest, cache=cache, **how)[0]
        torch.testing.assert_close(found, whole[:, 4:], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("need_weights", [True, False])
def test_without_is_causal_queries_count_from_0_as_keys_do(need_weights: bool) -> None:
    module = MultiheadAttention(16, 4, batch_first=True, rotary="after_norm").eval()
    x, memory = torch.randn(2, 4, 16), torch.randn(2, 7, 16)
    with torch.no_grad():
        whole = module(x, memory, memory, need_weights=need_weights)[0]
        first = module(x[:, :2], memory, memory, need_weights=need_weights)[0]
    torch.testing.assert_close(first, whole[:, :2], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("options", ROTARY)
def test_rotary_positions_with_a_fixed_cache_are_refused(options: dict[str, Any]) -> None:
    module = MultiheadAttention(16, 4, batch_first=True, **options)
    x, memory = torch.randn(2, 1, 16), torch.randn(2, 7, 16)
    with pytest.raises(ValueError, match=r"cannot be used with a fixed cache.*rotary='none', or give no cache"):
        module(x, memory, memory, cache=KeyValueCache(fixed=True))


@pytest.mark.parametrize("fixed", [False, True])
def test_a_cache_of_another_batch_is_refused(fixed: bool) -> None:
    module, cache = MultiheadAttention(16, 4, batch_first=True).eval(), KeyValueCache(fixed=fixed)
    x = torch.randn(2, 3, 16)
    module(x, x, x, need_weights=False, cache=cache)
    for other in (torch.randn(3, 1, 16), torch.randn(1, 1, 16)):
        with pytest.raises(ValueError, match=rf"holds a batch of 2 and .* one of {len(other)}: use a cache of its own"):
            module(other, other, other, need_weights=False, cache=cache)
    assert cache.length == 3


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("need_weights", [True, False])
def test_a_cache_filled_under_autocast_is_read_under_autocast(fixed: bool, need_weights: bool) -> None:
    module, cache = MultiheadAttention(16, 4, batch_first=True).eval(), KeyValueCache(fixed=fixed)
    x, how = torch.randn(2, 3, 16), {"need_weights": need_weights, "cache": cache}
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            module(x, x, x, **how)
        now = x[:, :1]
        with pytest.raises(
            ValueError, match=r"holds torch.bfloat16 and this call computes in torch.float32: .*autocast"
        ):
            module(now, now, now, **how)


@pytest.mark.parametrize("fixed", [False, True])
def test_a_cache_in_full_precision_is_read_under_autocast(fixed: bool) -> None:
    module, cache = MultiheadAttention(16, 4, batch_first=True).eval(), KeyValueCache(fixed=fixed)
    x = torch.randn(2, 3, 16)
    with torch.no_grad():
        module(x[:, :2], x[:, :2], x[:, :2], need_weights=False, cache=cache)
        keys = x[:, :2] if fixed else x
        expected = module(x[:, 2:], keys, keys, need_weights=False)[0]
        with torch.autocast("cpu", torch.bfloat16):
            found = module(x[:, 2:], x[:, 2:], x[:, 2:], need_weights=False, cache=cache)[0]
    torch.testing.assert_close(found.float(), expected, atol=0.05, rtol=0.05)
