"""What README.md lists as different from torch.nn.MultiheadAttention."""

import pytest
import torch
from torch import nn

from qknorm import MultiheadAttention


def test_what_differs_from_torchs_module_does() -> None:
    theirs, ours = nn.MultiheadAttention(16, 4, batch_first=True), MultiheadAttention(16, 4, batch_first=True)
    assert not isinstance(ours, nn.MultiheadAttention)
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"norm.scale\""):
        theirs.load_state_dict(ours.state_dict())
    result = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert not result.missing_keys and torch.equal(theirs.in_proj_weight, ours.in_proj_weight)
    with pytest.raises(Exception, match="keyword-only arguments"):
        torch.jit.script(ours)
    with pytest.raises(torch.fx.proxy.TraceError):
        torch.fx.symbolic_trace(ours)


def test_is_causal_aligns_to_the_end_and_torchs_mask_to_the_start() -> None:
    ours, q, k = MultiheadAttention(16, 4, batch_first=True), torch.randn(2, 3, 16), torch.randn(2, 5, 16)
    assert torch.equal(ours(q, k, k, is_causal=True)[1][0] > 0, torch.ones(3, 5).tril(2) > 0)
    mask = torch.ones(3, 5, dtype=torch.bool).triu(1)
    assert torch.equal(ours(q, k, k, attn_mask=mask, is_causal=True)[1][0] > 0, torch.ones(3, 5).tril() > 0)


def test_torch_may_drop_a_mask_beside_is_causal_and_we_do_not() -> None:
    theirs, ours = nn.MultiheadAttention(16, 4, batch_first=True), MultiheadAttention(16, 4, batch_first=True)
    x, bias = torch.randn(2, 5, 16), nn.Transformer.generate_square_subsequent_mask(5) + torch.randn(5, 5)
    kept = []
    for module in (theirs, ours):
        hinted, plain = (module(x, x, x, attn_mask=bias, need_weights=False, is_causal=h)[0] for h in (True, False))
        kept.append(torch.allclose(hinted, plain, atol=1e-5))
    assert kept == [False, True]
