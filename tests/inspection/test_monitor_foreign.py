"""The monitor on models of transformers and timm: nothing changes, and what it says is true of q and k."""

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from direct import direct
from small_models import assert_same
from test_measures import agree
from torch import Tensor, nn
from torch.nn import functional as F

from foreign_models import Case, case, ids, library, padding
from qknorm.attention.adopt import adopt
from qknorm.inspection.monitor import AttentionMonitor, capture
from qknorm.inspection.watching import tape, versions

TEXT = ["gpt2", "llama", "qwen3", "bert"]
PAIRS = ["t5", "marian", "whisper"]


def step(case: Case) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients of a training step, the same dropout every time."""
    torch.manual_seed(1)
    case.model.train()
    case.model.zero_grad()
    output = case()
    output.square().mean().backward()
    return output.detach(), [p.grad.clone() for p in case.model.parameters() if p.grad is not None]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", [*TEXT, "vit", *PAIRS])
def test_training_of_transformers_is_the_same_to_the_bit(name: str, attention: str) -> None:
    model = case(name, attn_implementation=attention)
    before = step(model)
    with AttentionMonitor(model.model, every=1) as monitor:
        assert_same(before, step(model))
    assert len(monitor.latest) == model.attentions and not monitor.unseen
    assert_same(before, step(model))
    assert not any("forward" in vars(module) for module in model.model.modules())


@pytest.mark.parametrize("name", [*TEXT, "gemma2", "vit", *PAIRS])
def test_weights_are_those_that_transformers_returns(name: str) -> None:
    model = case(name, attn_implementation="eager")
    with torch.no_grad(), capture(model.model) as calls:
        output = model.model(**model.inputs, output_attentions=True)
    names = ("encoder_attentions", "attentions", "decoder_attentions", "cross_attentions")
    theirs = [weights for each in names for weights in getattr(output, each, None) or ()]
    assert len(calls) == len(theirs) == model.attentions
    for call in calls:
        ours = call.weights()
        alike = [weights for weights in theirs if weights.shape == ours.shape]
        real = torch.ones(ours.shape[0], ours.shape[2], dtype=torch.bool) if call.queries is None else call.queries
        shown = real[:, None, :, None]  # rows of padding may see what they like
        assert min(float(((ours - weights) * shown).abs().max()) for weights in alike) < 1e-6


class Projections:
    """Outputs of the projections of a model in float64, gathered by hooks of torch's own, by head."""

    def __init__(self, model: nn.Module, head_dim: int) -> None:
        self.found: dict[str, Tensor] = {}
        for name, module in model.named_modules():
            if not list(module.children()):
                module.register_forward_hook(self._keep(name))
        self._head_dim = head_dim

    def _keep(self, name: str) -> Any:
        def hook(_: nn.Module, inputs: Any, output: Any) -> None:
            self.found[name] = output

        return hook

    def heads(self, name: str, part: int = 0, parts: int = 1) -> Tensor:
        x = self.found[name].chunk(parts, dim=-1)[part]
        return x.view(*x.shape[:2], -1, self._head_dim).transpose(1, 2)


def measured(model: Case) -> tuple[AttentionMonitor, Projections]:
    """The model in float64 under a monitor and hooks, once."""
    model.model.double()
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in model.inputs.items()}
    seen = Projections(model.model, 8)
    monitor = AttentionMonitor(model.model)
    monitor.probe(lambda: model.model(**inputs))
    assert not monitor.unseen
    return monitor, seen


REAL = padding([7, 4], 7).bool()
SHOWN = REAL[:, None, None, :]
CAUSAL = SHOWN & torch.ones(7, 7, dtype=torch.bool).tril()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_gpt2_against_its_projections(attention: str) -> None:
    monitor, seen = measured(case("gpt2", attn_implementation=attention))
    for layer in range(2):
        q, k = (seen.heads(f"transformer.h.{layer}.attn.c_attn", part, 3) for part in (0, 1))
        agree(
            monitor.latest[f"transformer.h.{layer}.attn"],
            direct(q, k, scale=8**-0.5, mask=CAUSAL, queries=REAL),
            1e-9,
        )


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_llama_with_grouped_heads_and_rotary_positions(attention: str) -> None:
    monitor, seen = measured(case("llama", attn_implementation=attention))
    cos, sin = (x[:, None] for x in seen.found["model.rotary_emb"])

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    for layer in range(2):
        q, k = (turned(seen.heads(f"model.layers.{layer}.self_attn.{x}_proj")) for x in "qk")
        assert (q.shape[1], k.shape[1]) == (4, 2)
        agree(
            monitor.latest[f"model.layers.{layer}.self_attn"],
            direct(q, k, scale=8**-0.5, mask=CAUSAL, queries=REAL),
            1e-6,  # the library turns in float32
        )


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_bert_against_its_projections(attention: str) -> None:
    monitor, seen = measured(case("bert", attn_implementation=attention))
    for layer in range(2):
        name = f"bert.encoder.layer.{layer}.attention.self"
        q, k = seen.heads(f"{name}.query"), seen.heads(f"{name}.key")
        agree(monitor.latest[name], direct(q, k, scale=8**-0.5, mask=SHOWN, queries=REAL), 1e-9)


def test_vit_against_its_projections() -> None:
    monitor, seen = measured(case("vit"))
    for layer in range(2):
        name = f"layers.{layer}.attention"
        q, k = seen.heads(f"{name}.q_proj"), seen.heads(f"{name}.k_proj")
        agree(monitor.latest[name], direct(q, k, scale=8**-0.5), 1e-9)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["marian", "whisper"])
def test_translation_models_against_their_projections(name: str, attention: str) -> None:
    monitor, seen = measured(case(name, attn_implementation=attention))
    source = {"mask": SHOWN, "queries": REAL} if name == "marian" else {}
    expected = {
        "encoder.layers.1.self_attn": source,
        "decoder.layers.1.self_attn": {"is_causal": True},
        "decoder.layers.1.encoder_attn": {"mask": source.get("mask")},
    }
    for place, more in expected.items():
        q, k = (seen.heads(f"model.{place}.{x}_proj") for x in "qk")
        found = monitor.latest[f"model.{place}"]
        if name == "whisper":  # which scales the queries themselves
            agree(found, direct(q * 8**-0.5, k, scale=1.0, **more), 1e-9)
        else:
            agree(found, direct(q, k, scale=8**-0.5, **more), 1e-9)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_t5_with_its_position_bias(attention: str) -> None:
    model = case("t5", attn_implementation=attention)
    monitor, seen = measured(model)
    bias = {
        side: getattr(model.model, side).block[0].layer[0].SelfAttention.compute_bias(n, n).detach()
        for side, n in (("encoder", 7), ("decoder", 5))
    }
    future = torch.full((5, 5), -torch.inf, dtype=torch.float64).triu(1)
    places = {
        "encoder.block.1.layer.0.SelfAttention": {
            "mask": bias["encoder"].masked_fill(~SHOWN, -torch.inf),
            "queries": REAL,
        },
        "decoder.block.1.layer.0.SelfAttention": {"mask": bias["decoder"] + future},
        "decoder.block.1.layer.1.EncDecAttention": {"mask": SHOWN},
    }
    for name, more in places.items():
        q, k = seen.heads(f"{name}.q"), seen.heads(f"{name}.k")
        agree(monitor.latest[name], direct(q, k, scale=1.0, **more), 1e-9)


def test_norms_of_qwen3_are_seen_from_both_sides() -> None:
    model = case("qwen3")
    monitor, seen = measured(model)
    name = "model.layers.0.self_attn"
    raw = seen.found[f"{name}.q_proj"].view(2, 7, 4, 8).norm(dim=-1)
    torch.testing.assert_close(monitor.latest[name].q_norm, raw[REAL].mean(dim=0), rtol=1e-9, atol=1e-9)
    with capture(model.model) as calls:
        model.model(**model.inputs)
    torch.testing.assert_close(calls[0].q.norm(dim=-1), torch.full((2, 4, 7), 8**0.5).double(), rtol=1e-3, atol=1e-3)


def test_generation_with_a_cache_is_watched_too() -> None:
    model = case("llama").model
    prompt = ids(1, 5)
    expected = model.generate(prompt, max_new_tokens=3, do_sample=False)
    with capture(model) as calls:
        assert torch.equal(model.generate(prompt, max_new_tokens=3, do_sample=False), expected)
    sizes = [(call.q.shape[2], call.k.shape[2]) for call in calls if call.name == "model.layers.0.self_attn"]
    assert sizes == [(5, 5), (1, 6), (1, 7)]
    last = calls[-1]
    own = direct(last.q, last.k, scale=last.scale, offset=6)
    agree(last.measure(), own)


def test_padding_at_the_left_is_no_token() -> None:
    model = case("gpt2", attn_implementation="eager")
    model.inputs["attention_mask"] = padding([7, 4], 7, left=True)
    with capture(model.model) as calls:
        model()
    assert calls[0].queries is not None and calls[0].queries.tolist() == model.inputs["attention_mask"].bool().tolist()
    first = calls[0].measure().first_share
    weights = calls[0].weights()
    expected = torch.cat([weights[0, :, :, 0], weights[1, :, 3:, 3]], dim=1).mean(dim=1)
    torch.testing.assert_close(first, expected)


def test_what_passes_by_the_interface_is_named() -> None:
    transformers = library("transformers")
    config = transformers.GPTJConfig(
        vocab_size=61, n_embd=32, n_layer=1, n_head=4, n_positions=16, rotary_dim=4, bos_token_id=1, eos_token_id=None
    )
    model = transformers.GPTJForCausalLM(config).eval()
    with capture(model) as calls:
        model(ids(1, 5))
    assert not calls and list(calls.unseen) == ["transformer.h.0.attn"]
    assert "GPTJAttention" in calls.unseen["transformer.h.0.attn"]
    assert "attention interface" in calls.unseen["transformer.h.0.attn"]


@pytest.mark.parametrize(("name", "attention"), [("llama", "eager"), ("gpt2", "sdpa"), ("t5", "sdpa")])
def test_adopted_models_show_normalised_queries_and_the_scale(name: str, attention: str) -> None:
    model = case(name, attn_implementation=attention)
    with capture(model.model) as calls:
        model()
    plain = calls[0]
    adopt(model.model, scale_init=5.0)
    before = model()
    with capture(model.model) as calls:
        assert torch.equal(model(), before)
    assert len(calls) == model.attentions and not calls.unseen
    first = calls[0]
    torch.testing.assert_close(first.q, F.normalize(plain.q, dim=-1))
    torch.testing.assert_close(first.k, F.normalize(plain.k, dim=-1))
    torch.testing.assert_close(first.raw_q, plain.q)
    assert torch.equal(torch.as_tensor(first.scale), torch.tensor([5.0]))
    assert float(first.measure().largest_logit.max()) <= 5.0 + 1e-4


@pytest.mark.parametrize("fused", [True, False])
def test_adopted_models_of_timm(fused: bool) -> None:
    model = case("timm_vit")
    adopt(model.model, scale_init=5.0)
    for block in model.model.blocks:
        block.attn.fused_attn = fused
    with capture(model.model) as calls:
        model()
    torch.testing.assert_close(calls[0].q.norm(dim=-1), torch.ones(2, 4, 17))
    assert torch.equal(torch.as_tensor(calls[0].scale), torch.tensor([5.0]))


def test_an_implementation_that_cannot_be_read_is_named() -> None:
    model = case("llama")
    interface = importlib.import_module("transformers").AttentionInterface
    eager = importlib.import_module("transformers.models.llama.modeling_llama").eager_attention_forward
    interface.register("somebodys", eager)
    try:
        model.model.set_attn_implementation("somebodys")
        with capture(model.model) as calls:
            model()
    finally:
        del interface._global_mapping["somebodys"]
    assert not calls and list(calls.unseen) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert "somebodys" in calls.unseen["model.layers.0.self_attn"]


def test_sinks_in_a_softmax_are_named() -> None:
    model = case("llama")
    interface = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    attention = model.model.model.layers[0].self_attn

    class WithSinks(type(attention)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, **rest: Any) -> Any:
            function = interface.get_interface("sdpa", None)
            x = self.q_proj(hidden_states).view(2, 7, 4, 8).transpose(1, 2)
            out, _ = function(self, x, x, x, None, scaling=1.0, s_aux=torch.zeros(4))
            return self.o_proj(out.reshape(2, 7, 32)), None

    attention.__class__ = WithSinks
    attention.num_key_value_groups = 1
    with capture(model.model) as calls:
        model()
    assert [call.name for call in calls] == ["model.layers.1.self_attn"]
    assert "sinks" in calls.unseen["model.layers.0.self_attn"]


# ------------------------------------------------------------------ timm


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("normed", [True, False])
def test_timm(fused: bool, normed: bool) -> None:
    model = case("timm_vit", qkv_bias=True, qk_norm=normed)
    for block in model.model.blocks:
        block.attn.fused_attn = fused
    before = step(model)
    with AttentionMonitor(model.model, every=1) as monitor:
        assert_same(before, step(model))
    assert list(monitor.latest) == ["blocks.0.attn", "blocks.1.attn"] and not monitor.unseen
    monitor, seen = measured(model)
    for layer in range(2):
        name = f"blocks.{layer}.attn"
        raw = [seen.heads(f"{name}.qkv", part, 3) for part in (0, 1)]
        q, k = (seen.found[f"{name}.{x}_norm"] for x in "qk") if normed else raw
        agree(monitor.latest[name], direct(q, k, scale=8**-0.5, raw_q=raw[0], raw_k=raw[1]), 1e-9)


def test_timm_masks() -> None:
    library("timm")
    attention = importlib.import_module("timm.layers.attention").Attention(32, num_heads=4)
    attention.fused_attn = False
    x, mask = torch.randn(2, 5, 32), torch.rand(5, 5) < 0.7
    mask |= torch.eye(5, dtype=torch.bool)
    for given, expected in (({"attn_mask": mask}, mask), ({"is_causal": True}, torch.ones(5, 5).tril().bool())):
        with capture(attention) as calls:
            attention(x, **given)
        assert [call.name for call in calls] == ["Attention"]
        assert torch.equal(calls[0].weights()[0, 0] > 0, expected)
    real = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    for attention.fused_attn in (True, False):
        with capture(attention) as calls:
            attention(x, attn_mask=real[:, None, None])
        assert calls[0].queries is not None and torch.equal(calls[0].queries, real)


def test_other_attentions_of_timm_are_seen_fused_and_named_otherwise() -> None:
    library("timm")
    swin = importlib.import_module("timm.models.swin_transformer").SwinTransformer(
        img_size=16, patch_size=2, window_size=4, embed_dim=16, depths=(1,), num_heads=(2,), num_classes=3
    )
    attention = swin.layers[0].blocks[0].attn
    for fused in (True, False):
        attention.fused_attn = fused
        with capture(swin.eval()) as calls:
            swin(torch.randn(1, 3, 16, 16))
        assert [call.name for call in calls] == (["layers.0.blocks.0.attn"] if fused else [])
        assert list(calls.unseen) == ([] if fused else ["layers.0.blocks.0.attn"])
    assert "set_fused_attn(True, experimental=True)" in calls.unseen["layers.0.blocks.0.attn"]


@pytest.mark.parametrize(("home", "kind", "helps"), [("cait", "TalkingHeadAttn", False), ("xcit", "XCA", True)])
def test_advice_for_timm_is_given_where_it_helps(
    home: str, kind: str, helps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    library("timm")
    for fused in (1, 2):  # as by default, and as by set_fused_attn(True, experimental=True)
        monkeypatch.setattr("timm.layers.config._USE_FUSED_ATTN", fused)
        attention = getattr(importlib.import_module(f"timm.models.{home}"), kind)(16, num_heads=2)
        with capture(attention) as calls:
            attention(torch.randn(1, 5, 16))
        assert len(calls) == (1 if helps and fused == 2 else 0)
        assert ["set_fused_attn" in reason for reason in calls.unseen.values()] == ([] if calls else [helps])


# ------------------------------------------------------------------ versions


def test_installed_versions_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {name: versions.out_of_range(name) for name in versions.SUPPORTED} == dict.fromkeys(versions.SUPPORTED)
    monkeypatch.setattr(versions.metadata, "version", lambda _: "4.57.6")
    assert versions.out_of_range("transformers") == (
        "transformers 4.57.6 is not one of the versions that are understood (5.1 and later, before 6)"
    )
    foreign = type("GPT2Attention", (nn.Module,), {"__module__": "transformers.models.gpt2"})
    assert "4.57.6" in tape.why_unseen(foreign())


def test_the_project_is_developed_with_no_other_versions() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    asked = dict(
        found.groups()
        for wanted in project["dependencies"] + project["optional-dependencies"]["dev"]
        if (found := re.match(r"([\w-]+)>=([\d.]+)", wanted))
    )
    assert "torch" in asked
    for name in asked.keys() & versions.SUPPORTED.keys():
        assert versions.SUPPORTED[name].holds(asked[name]), name
