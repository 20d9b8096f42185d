"""Nested tensors, which torch's encoder makes of padded input in eval mode, and users by themselves."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qknorm import KeyValueCache, MultiheadAttention, adopt

LAYOUTS = [torch.strided, torch.jagged]


def rows() -> list[Tensor]:
    return [torch.randn(n, 16) for n in (3, 5, 1)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("how", [{}, {"is_causal": True}])
@pytest.mark.parametrize("options", [{}, {"rotary": "before_norm"}, {"add_bias_kv": True}])
def test_each_row_is_attended_to_by_itself(
    layout: torch.layout, batch_first: bool, how: dict[str, Any], options: dict[str, Any]
) -> None:
    module, given = MultiheadAttention(16, 4, batch_first=batch_first, **options), rows()
    nested = torch.nested.nested_tensor(given, layout=layout)
    found = module(nested, nested, nested, need_weights=False, **how)[0]
    assert found.is_nested and found.layout == layout
    for row, x in zip(found.unbind(), given, strict=True):
        expected = module(x, x, x, need_weights=False, **how)[0]
        torch.testing.assert_close(row, expected, atol=1e-6, rtol=1e-5)
    assert len((found + nested).unbind()) == 3  # a residual connection


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_those_of_padded_rows(layout: torch.layout) -> None:
    module, given = MultiheadAttention(16, 4, batch_first=True), rows()
    nested = torch.nested.nested_tensor(given, layout=layout)
    weights = module(nested, nested, nested, average_attn_weights=False)[1]
    assert weights.shape == (3, 4, 5, 5)
    expected = module(given[0], given[0], given[0], average_attn_weights=False)[1]
    torch.testing.assert_close(weights[0, :, :3, :3], expected)
    assert not weights[0, :, :, 3:].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_the_rows(layout: torch.layout) -> None:
    module, given = MultiheadAttention(16, 4, batch_first=True), rows()
    nested = torch.nested.nested_tensor(given, layout=layout, requires_grad=True)
    output = module(nested, nested, nested, need_weights=False)[0]
    torch.nested.to_padded_tensor(output, 0.0).square().sum().backward()
    found = [*nested.grad.unbind(), *(p.grad for p in module.parameters())]
    module.zero_grad()
    for x in given:
        module(x.requires_grad_(), x, x, need_weights=False)[0].square().sum().backward()
    for one, other in zip(found, [*(x.grad for x in given), *(p.grad for p in module.parameters())], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_not_plain_self_attention_is_refused(layout: torch.layout) -> None:
    module = MultiheadAttention(16, 4, batch_first=True)
    x, memory = (torch.nested.nested_tensor(rows(), layout=layout) for _ in range(2))
    dense = torch.randn(3, 5, 16)
    for inputs in ((x, memory, memory), (x, x, memory), (dense, x, x), (x, dense, dense)):
        with pytest.raises(ValueError, match="nested tensors are for self-attention"):
            module(*inputs)
    others: dict[str, Any] = {
        "attn_mask": torch.zeros(5, 5, dtype=torch.bool),
        "key_padding_mask": torch.zeros(3, 5, dtype=torch.bool),
        "cache": KeyValueCache(),
    }
    for name, given in others.items():
        with pytest.raises(ValueError, match=f"{name} cannot be used with a nested tensor"):
            module(x, x, x, **{name: given})


@pytest.mark.parametrize("is_causal", [True, False])
def test_an_adopted_encoder_is_causal_in_eval_mode_as_in_training(is_causal: bool) -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True), 2)
    adopt(encoder, length=8)
    x, hidden = torch.randn(2, 5, 16), torch.zeros(2, 5, dtype=torch.bool)
    hidden[1, 3:] = True
    trained = encoder(x, src_key_padding_mask=hidden, is_causal=is_causal)
    nested: list[bool] = []
    encoder.layers[0].self_attn.register_forward_pre_hook(lambda _, args: nested.append(args[0].is_nested))
    with torch.no_grad():
        evaluated = encoder.eval()(x, src_key_padding_mask=hidden, is_causal=is_causal)
    assert nested[0]
    torch.testing.assert_close(evaluated[~hidden], trained[~hidden], atol=1e-5, rtol=1e-5)
