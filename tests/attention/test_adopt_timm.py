"""adopt on timm's vision transformers."""

import copy
import importlib

import pytest
import torch
from adopt_by_hand import Recorder, by_hand, heads
from torch import nn

from foreign_models import library, timm_vit
from qknorm.attention.adopt import adopt

library("timm")


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("p", [2.0, 3.0])
def test_vit(fused: bool, p: float) -> None:
    model = timm_vit(qkv_bias=True).double()
    adoption = adopt(model, scale_init=5.0, p=p)
    assert [each.name for each in adoption.changed] == ["blocks.0.attn", "blocks.1.attn"]
    seen = [Recorder(block.attn) for block in model.blocks]
    for each in seen:
        each.module.fused_attn = fused
    model(torch.randn(2, 3, 16, 16, dtype=torch.float64))
    for each in seen:
        x = each.argument("x")
        q, k, v = (heads(part, 8) for part in each.module.qkv(x).chunk(3, dim=-1))
        expected = each.module.proj(by_hand(q, k, v, 5.0, p=p))
        torch.testing.assert_close(each.output, expected, rtol=1e-10, atol=1e-10)


def test_calibration_round_trip_copy_and_compile() -> None:
    x = torch.randn(2, 3, 16, 16)
    model = timm_vit()
    adoption = adopt(model, calibrate=x, scale_per_head=True, loss=lambda logits: logits.square().mean())
    assert adoption.loss_before is not None and adoption.loss_after is not None
    assert not any(module._forward_pre_hooks for module in model.modules())
    state = model.state_dict()
    assert sorted(name for name in state if "norm.scale" in name) == [
        "blocks.0.attn.qk_norm.scale",
        "blocks.1.attn.qk_norm.scale",
    ]
    again = timm_vit()
    adopt(again, state=state)
    again.load_state_dict(state)
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.blocks[0].attn.qk_norm.scale.mul_(3.0)
    assert not torch.allclose(twin(x), model(x))
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)


def test_calibration_matches_the_spread() -> None:
    model = timm_vit().double()
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    seen = Recorder(model.blocks[0].attn)
    model(x)
    q, k, _ = (heads(part, 8) for part in seen.module.qkv(seen.argument("x")).chunk(3, dim=-1))
    dot = q @ k.mT / 8**0.5
    cosine = nn.functional.cosine_similarity(q[:, :, :, None], k[:, :, None], dim=-1)
    expected = dot.var(dim=-1).mean().sqrt() / cosine.var(dim=-1).mean().sqrt()
    assert adopt(model, calibrate=x).changed[0].start == pytest.approx(expected.item(), rel=1e-5)


def test_calibration_counts_what_the_mask_shows() -> None:
    x, starts = torch.randn(2, 5, 32), []
    for pad in (0, 12):
        torch.manual_seed(1)
        attention = timm_vit().blocks[0].attn
        shown = (torch.arange(5 + pad) < 5).expand(2, 1, 1, -1)
        batch = {"x": torch.cat([x, torch.full((2, pad, 32), 9.0)], dim=1), "attn_mask": shown}
        starts.append(adopt(attention, calibrate=batch).changed[0].start)
    assert starts[1] == pytest.approx(starts[0])


def test_norms_of_its_own_are_left() -> None:
    with pytest.raises(ValueError, match=r"normalises queries and keys already \(q_norm\)"):
        adopt(timm_vit(qk_norm=True), length=17)
    model = timm_vit()
    adopt(model, length=17)
    with pytest.raises(ValueError, match="has QKNorm already"):
        adopt(model, length=17)


def test_other_attentions_of_timm_are_named() -> None:
    with pytest.raises(ValueError, match="XCA is not a kind of attention that adopt knows"):
        adopt(importlib.import_module("timm.models.xcit").XCA(16, num_heads=2), length=16)
    model = timm_vit(class_token=False, global_pool="map")
    adoption = adopt(model, length=16)
    assert [each.reason for each in adoption.left] == [
        "timm's AttentionPoolLatent is not the plain attention of its vision transformers"
    ]
