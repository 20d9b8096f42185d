"""Measures of attention: exact against their definitions in float64, whatever the blocks, masks and heads."""

import json
import math
import weakref
from typing import Any

import pytest
import torch
from direct import direct
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qknorm.attention import attend_with_weights
from qknorm.inspection import logits as blocks
from qknorm.inspection.measures import Measures, attention_weights, measure


def agree(found: Measures, expected: dict[str, list[float]], tolerance: float = 2e-5) -> None:
    for name in Measures.names():
        torch.testing.assert_close(
            getattr(found, name).double(),
            torch.tensor(expected[name], dtype=torch.float64),
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def draw_mask(kind: str, shape: tuple[int, int, int, int]) -> Tensor | None:
    b, h, t, s = shape
    lengths = torch.randint(1, s + 1, (b, 1, 1, 1))
    if kind == "right padding":
        return torch.arange(s) < lengths
    if kind == "left padding":
        return torch.arange(s) >= s - lengths
    if kind == "random":
        return torch.rand(b, h, t, s) < 0.6  # some queries see nothing
    if kind == "bias":
        return torch.randn(1, h, t, s).masked_fill(torch.rand(1, h, t, s) < 0.2, -torch.inf)
    if kind == "lowest":
        return torch.zeros(t, s).masked_fill(torch.rand(t, s) < 0.3, torch.finfo(torch.float32).min)
    return None


CASES = {
    "shape": st.tuples(st.integers(1, 3), st.sampled_from([(1, 1), (4, 2), (2, 2), (3, 1)]), st.integers(1, 6)),
    "keys": st.integers(1, 7),
    "mask": st.sampled_from(["none", "right padding", "left padding", "random", "bias", "lowest"]),
    "causal": st.booleans(),
    "padded": st.booleans(),
    "per_head": st.booleans(),
    "softcap": st.sampled_from([None, 2.0]),
    "at_once": st.sampled_from([1, 7, 100, 1 << 18]),
    "size": st.sampled_from([0.1, 1.0, 6.0]),
    "seed": st.integers(0, 10_000),
}


@settings(max_examples=80)
@given(**CASES)
def test_equal_to_the_definitions(
    shape: tuple[int, tuple[int, int], int], keys: int, mask: str, causal: bool, padded: bool, per_head: bool,
    softcap: float | None, at_once: int, size: float, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    b, (h, kv), t = shape
    q, k = size * torch.randn(b, h, t, 4), torch.randn(b, kv, keys, 4)
    given_: dict[str, Any] = {
        "scale": torch.rand(h) + 0.5 if per_head else 0.7,
        "mask": draw_mask(mask, (b, h, t, keys)),
        "is_causal": causal,
        "queries": torch.arange(t) < torch.randint(0, t + 1, (b, 1)) if padded else None,
        "softcap": softcap,
        "threshold": 0.8,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "LOGITS_AT_ONCE", {"cpu": at_once})
        found = measure(q, k, **given_)
    agree(found, direct(q, k, **given_))


def test_raw_vectors_offset_and_threshold() -> None:
    q, k, raw_q, raw_k = (
        torch.randn(2, 4, 3, 8),
        torch.randn(2, 2, 9, 8),
        torch.randn(2, 4, 3, 8),
        torch.randn(2, 2, 9, 8),
    )
    given_ = {"scale": 3.0, "raw_q": raw_q, "raw_k": raw_k, "offset": 4, "threshold": 0.5}
    found = measure(q, k, **given_)
    agree(found, direct(q, k, **given_))
    assert found.saturation.sum() > 0
    torch.testing.assert_close(found.q_norm, raw_q.norm(dim=-1).mean(dim=(0, 2)))
    assert found.k_norm[0] == found.k_norm[1]  # they share a key head


def test_uniform_and_certain_attention_have_known_measures() -> None:
    flat = measure(torch.zeros(1, 1, 4, 8), torch.randn(1, 1, 4, 8), scale=1.0)
    assert flat.numbers["entropy"] == pytest.approx([math.log(4)])
    assert flat.numbers["relative_entropy"] == pytest.approx([1.0])
    assert flat.numbers["effective_keys"] == pytest.approx([4.0])
    assert flat.numbers["distance"] == pytest.approx([(6 + 4 + 4 + 6) / 4 / 4])
    assert flat.numbers["saturation"] == flat.numbers["largest_logit"] == flat.numbers["logit_std"] == [0.0]
    sharp = measure(torch.eye(8)[None, None, :4], torch.eye(8)[None, None, :4], scale=1_000.0)
    assert sharp.numbers["entropy"] == pytest.approx([0.0], abs=1e-6)
    assert sharp.numbers["saturation"] == sharp.numbers["diagonal_share"] == [1.0]
    assert sharp.numbers["largest_logit"] == [1_000.0]
    assert sharp.numbers["qk_frobenius"] == pytest.approx([2.0])
    assert sharp.numbers["qk_frobenius_scaled"] == pytest.approx([2.0 / math.sqrt(8)])


def test_entropy_is_exact_where_logits_are_large_and_close() -> None:
    k = torch.tensor([[1.0, 0.0], [1.0, 1e-4], [1.0, -1e-4]], dtype=torch.float64)[None, None]
    q = torch.tensor([[2e4, 1e4]], dtype=torch.float64)[None, None]
    exact = direct(q, k, scale=1.0)
    assert 0.5 < exact["entropy"][0] < 1.0
    agree(measure(q, k, scale=1.0), exact, 1e-9)
    assert measure(q.float(), k.float(), scale=1.0).entropy.item() == pytest.approx(exact["entropy"][0], abs=5e-3)


def test_spread_is_exact_where_the_mean_is_large() -> None:
    q, k = torch.randn(2, 2, 40, 8, dtype=torch.float64), torch.randn(2, 2, 50, 8, dtype=torch.float64)
    q[..., 0], k[..., 0] = 30.0, 30.0
    expected = direct(q, k, scale=1.0)
    assert expected["logit_std"][0] < 5 < 800 < expected["largest_logit"][0]
    assert measure(q, k, scale=1.0).numbers["logit_std"] == pytest.approx(expected["logit_std"], rel=1e-10)
    assert measure(q.float(), k.float(), scale=1.0).numbers["logit_std"] == pytest.approx(
        expected["logit_std"], rel=1e-4
    )


def test_long_sequences_are_never_held_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    largest, alive, most_alive = 0, 0, 0

    def die() -> None:
        nonlocal alive
        alive -= 1

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest, alive, most_alive
            output = function(*args, **(kwargs or {}))
            if isinstance(output, Tensor):
                if not any(output is given for given in (*args, *(kwargs or {}).values())):  # else written in place
                    alive += 1
                    weakref.finalize(output, die)
                    most_alive = max(most_alive, alive)
                largest = max(largest, output.untyped_storage().nbytes() // output.element_size())
            return output

    monkeypatch.setattr(blocks, "LOGITS_AT_ONCE", {"cpu": 1 << 13})
    q, k = torch.randn(1, 2, 300, 4), torch.randn(1, 2, 400, 4)
    with Watch():
        found = measure(q, k, scale=0.5, is_causal=True)
    assert largest <= 1 << 14  # of 240,000 logits
    assert most_alive < 100, "what each of the 60 blocks leaves behind would keep its memory in use"
    monkeypatch.undo()
    expected = measure(q.double(), k.double(), scale=0.5, is_causal=True)
    torch.testing.assert_close(found.stack().double(), expected.stack(), rtol=1e-4, atol=1e-5)


def test_dtypes() -> None:
    q, k = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    assert measure(q.double(), k.double(), scale=0.3).entropy.dtype == torch.float64
    half = measure(q.bfloat16(), k.bfloat16(), scale=0.3)
    assert half.entropy.dtype == torch.float32
    agree(half, direct(q.bfloat16(), k.bfloat16(), scale=0.3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        agree(measure(q, k, scale=0.3), direct(q, k, scale=0.3))


def test_broken_numbers_show_and_hidden_ones_do_not() -> None:
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    k[0, 0, 3] = torch.nan
    seen = measure(q, k, scale=1.0)
    assert math.isnan(seen.largest_logit[0]) and math.isnan(seen.entropy[0])
    assert seen.stack()[:, 1].isfinite().all()
    hidden = measure(q, k, scale=1.0, mask=torch.tensor([True, True, True, False]))
    assert hidden.stack().isfinite().all()


def test_gradients_are_left_alone() -> None:
    q, k = torch.randn(1, 2, 4, 8, requires_grad=True), torch.randn(1, 2, 4, 8, requires_grad=True)
    assert not measure(q, k, scale=torch.tensor(2.0, requires_grad=True)).entropy.requires_grad


@pytest.mark.parametrize("kind", ["none", "random", "bias"])
@pytest.mark.parametrize("causal", [False, True])
def test_weights_are_those_of_the_reference(kind: str, causal: bool) -> None:
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)
    given_ = {"scale": torch.tensor([0.5, 1.0, 2.0, 3.0]), "mask": draw_mask(kind, (2, 4, 5, 7)), "is_causal": causal}
    expected = attend_with_weights(q, k, k, **given_).weights
    torch.testing.assert_close(attention_weights(q, k, **given_), expected)


def test_rows_means_and_json_and_back() -> None:
    measures = measure(torch.randn(2, 3, 5, 8), torch.randn(2, 3, 1, 8), scale=1.0)
    assert math.isnan(measures.relative_entropy[0])  # a single key leaves no choice
    rows = measures.as_rows("encoder.0.self")
    assert [(row["name"], row["head"]) for row in rows] == [("encoder.0.self", head) for head in range(3)]
    assert rows[1]["q_norm"] == pytest.approx(float(measures.q_norm[1]))
    assert set(rows[0]) == {"name", "head", *Measures.names()}
    assert measures.mean()["largest_logit"] == pytest.approx(float(measures.largest_logit.max()))
    assert measures.mean()["k_norm"] == pytest.approx(float(measures.k_norm.mean()))
    written = json.loads(json.dumps(measures.as_dict()).replace("NaN", "null"))
    torch.testing.assert_close(Measures.from_dict(written).stack(), measures.stack(), equal_nan=True)
    torch.testing.assert_close(Measures.from_stack(measures.stack()).cpu().stack(), measures.stack(), equal_nan=True)


@pytest.mark.parametrize(
    ("q", "k", "more", "message"),
    [
        ((2, 4, 5), (2, 4, 5), {}, "must be"),
        ((2, 4, 5, 8), (2, 4, 5, 6), {}, "one batch and head_dim"),
        ((2, 4, 5, 8), (2, 3, 5, 8), {}, "cannot share"),
        ((2, 4, 0, 8), (2, 4, 5, 8), {}, "nothing to measure"),
        ((2, 4, 5, 8), (2, 4, 5, 8), {"mask": torch.ones(5, 6)}, "does not broadcast"),
        ((2, 4, 5, 8), (2, 4, 5, 8), {"queries": torch.ones(2, 5)}, "boolean"),
        ((2, 4, 5, 8), (2, 4, 5, 8), {"queries": torch.ones(2, 4, dtype=torch.bool)}, "boolean"),
    ],
)
def test_bad_input(q: tuple[int, ...], k: tuple[int, ...], more: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure(torch.randn(q), torch.randn(k), scale=1.0, **more)
