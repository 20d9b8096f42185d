"""Queries normalised over all heads together."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qknorm import KeyValueCache, MultiheadAttention, QKNorm
from qknorm.attention.norm import normalize_over_heads
from qknorm.config import Attention, Model
from qknorm.models.translator import Translator

P = (1.0, 1.5, 2.0, 3.0, math.inf)


@given(p=st.sampled_from(P), heads=st.integers(1, 4), head_dim=st.integers(1, 5), seed=st.integers(0, 99))
def test_it_is_the_length_over_the_width_times_a_root_of_the_heads(
    p: float, heads: int, head_dim: int, seed: int
) -> None:
    x = np.random.default_rng(seed).normal(size=(2, heads, 3, head_dim))
    wide = x.transpose(0, 2, 1, 3).reshape(2, 3, -1)
    length = np.linalg.norm(wide, p, axis=-1)[:, None, :, None]
    expected = x / length * heads ** (1 / p)
    np.testing.assert_allclose(normalize_over_heads(torch.from_numpy(x), p).numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("p", P)
def test_heads_of_one_length_are_normalised_as_one_by_one(p: float) -> None:
    head = torch.randn(2, 1, 3, 8, dtype=torch.float64)
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64).view(1, -1, 1, 1)
    q = head * signs
    over = {span: QKNorm(8, 4, p=p, query_over=span).double() for span in ("head", "width")}
    torch.testing.assert_close(over["width"].query(q), over["head"].query(q))
    torch.testing.assert_close(over["width"].scaled_query(q), over["head"].scaled_query(q))


def test_heads_of_other_lengths_share_it_out() -> None:
    q = torch.ones(1, 2, 1, 4)
    q[:, 1] *= 3
    lengths = QKNorm(4, 2, query_over="width").query(q).norm(dim=-1).flatten()
    torch.testing.assert_close(lengths, torch.tensor([1.0, 3.0]) * math.sqrt(2 / 10))


def test_gradients_are_those_of_finite_differences() -> None:
    x = torch.randn(1, 2, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(normalize_over_heads, (x,))


def test_zeros_stay_zeros() -> None:
    assert not normalize_over_heads(torch.zeros(1, 2, 3, 4)).any()


def test_attention_is_the_formula_and_the_same_step_by_step() -> None:
    attention = MultiheadAttention(12, 3, batch_first=True, query_over="width", scale_per_head=True).double().eval()
    with torch.no_grad():
        attention.norm.scale.copy_(torch.tensor([2.0, 5.0, 9.0]))
    x, memory = torch.randn(2, 4, 12, dtype=torch.float64), torch.randn(2, 5, 12, dtype=torch.float64)
    together = attention(x, memory, memory, need_weights=False)[0]
    q, k, v = (
        y @ w.t() + b for y, (w, b) in ((m, attention._projection(i)) for i, m in enumerate((x, memory, memory)))
    )
    q = q / q.norm(dim=-1, keepdim=True) * math.sqrt(3)
    q, k, v = (each.view(2, -1, 3, 4).transpose(1, 2) for each in (q, k, v))
    logits = attention.norm.scale.view(3, 1, 1) * (q @ (k / k.norm(dim=-1, keepdim=True)).transpose(2, 3))
    expected = attention.out_proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(together, expected)
    cache = KeyValueCache(fixed=True)
    steps = [attention(x[:, [t]], memory, memory, need_weights=False, cache=cache)[0] for t in range(4)]
    torch.testing.assert_close(torch.cat(steps, dim=1), together)


def test_only_cross_attention_of_a_translator_has_it() -> None:
    shape = {"width": 8, "feed_forward": 8, "encoder_layers": 1, "decoder_layers": 1, "heads": 2}
    model = Translator(9, Model(**shape, attention=Attention(cross_query_norm="width")))
    spans = {name: attention.norm.query_over for name, attention in model.attentions().items()}
    assert spans == {"encoder.0.self": "head", "decoder.0.self": "head", "decoder.0.cross": "width"}


@pytest.mark.parametrize("changes", [{"kind": "rms"}, {"kind": "none"}, {"p_learned": True}, {"query_over": "all"}])
def test_what_has_no_meaning_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="query_over"):
        QKNorm(4, 2, **{"query_over": "width", **changes})


@pytest.mark.parametrize("changes", [{"qk_norm": "rms"}, {"qk_norm": "none"}, {"p_learned": True}])
def test_settings_that_do_not_go_together_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cross_query_norm width needs qk_norm lp"):
        Attention(cross_query_norm="width", **changes)


def test_it_says_so_of_itself() -> None:
    assert "queries over all heads together" in repr(QKNorm(4, 2, query_over="width"))
