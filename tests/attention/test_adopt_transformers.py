"""adopt on models of Hugging Face transformers: the formula by hand for each, generation, round trips."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from adopt_by_hand import Recorder, by_hand, causal, heads, linear
from torch import Tensor

from foreign_models import bert, gpt2, library, llama, marian, t5, vit, whisper
from qknorm.attention import QKNorm, initial_scale
from qknorm.attention.adopt import adopt

transformers = library("transformers")

HEAD, WORDS = 8, 61
IMPLEMENTATIONS = ["sdpa", "eager"]


def bart() -> Any:
    config = transformers.BartConfig(
        vocab_size=WORDS, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, init_std=0.3,
        pad_token_id=0, bos_token_id=1, eos_token_id=None, forced_eos_token_id=None, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config).eval()


def words(*shape: int) -> Tensor:
    return torch.randint(2, WORDS, shape, generator=torch.Generator().manual_seed(7))


def padded() -> tuple[Tensor, Tensor, Tensor]:
    """Two rows of ids, the second one shorter, with their mask, and the mask as it is added to logits."""
    ids, mask = words(2, 7), torch.ones(2, 7, dtype=torch.long)
    ids[1, 5:], mask[1, 5:] = 0, 0
    return ids, mask, torch.zeros(2, 1, 1, 7, dtype=torch.float64).masked_fill(mask[:, None, None] == 0, -torch.inf)


def set_up(model: Any, implementation: str, ending: str, **settings: Any) -> list[Recorder]:
    model.double().set_attn_implementation(implementation)
    adopt(model, **(settings or {"scale_init": 5.0}))
    seen = [Recorder(module) for name, module in model.named_modules() if name.endswith(ending)]
    assert seen
    return seen


def close(actual: Tensor, expected: Tensor, implementation: str) -> None:
    """Some of the library's eager functions take their softmax in float32, whatever the model is in."""
    tolerance = 1e-5 if implementation == "eager" else 1e-10
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions as Llama has them: the first half of a head turns with the second."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1) + torch.cat([-second, first], dim=-1) * sin.unsqueeze(1)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("p", [2.0, 3.0])
def test_llama(implementation: str, p: float) -> None:
    model = llama()
    seen = set_up(model, implementation, "self_attn", length=40, p=p, scale_per_head=True)
    for index, each in enumerate(seen):
        with torch.no_grad():
            each.module.qk_norm.scale.add_(torch.arange(4.0).double() + index)
    model(words(2, 6))
    for each in seen:
        x, (cos, sin) = each.argument("hidden_states"), each.kwargs["position_embeddings"]
        q, k, v = (heads(linear(f, x), HEAD) for f in (each.module.q_proj, each.module.k_proj, each.module.v_proj))
        q, k = turned(q, cos, sin), turned(k, cos, sin)  # p ≠ 2 notices that normalising comes after this
        close(
            each.output[0],
            linear(each.module.o_proj, by_hand(q, k, v, each.module.qk_norm.scale, causal(6), p)),
            implementation,
        )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bert(implementation: str) -> None:
    model = bert()
    seen = set_up(model, implementation, ".self")
    ids, mask, added = padded()
    model(ids, attention_mask=mask)
    for each in seen:
        x = each.argument("hidden_states")
        q, k, v = (heads(linear(f, x), HEAD) for f in (each.module.query, each.module.key, each.module.value))
        close(each.output[0], by_hand(q, k, v, 5.0, added), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gpt2(implementation: str) -> None:
    model = gpt2(scale_attn_by_inverse_layer_idx=True)
    seen = set_up(model, implementation, ".attn")
    model(words(2, 6))
    for each in seen:
        x = each.argument("hidden_states")
        q, k, v = (heads(part, HEAD) for part in linear(each.module.c_attn, x).chunk(3, dim=-1))
        close(each.output[0], linear(each.module.c_proj, by_hand(q, k, v, 5.0, causal(6))), implementation)


def test_gpt2_that_reorders_in_eager_mode() -> None:
    """It has a way around the attention interface, which an adopted one may not take."""
    model, plain = gpt2(reorder_and_upcast_attn=True), gpt2()
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        each.set_attn_implementation("eager")
        adopt(each, scale_init=5.0)
    torch.testing.assert_close(model(words(2, 6)).logits, plain(words(2, 6)).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vit(implementation: str) -> None:
    model = vit()
    seen = set_up(model, implementation, "attention")
    model(torch.randn(2, 3, 16, 16, dtype=torch.float64))
    for each in seen:
        x = each.argument("hidden_states")
        q, k, v = (heads(linear(f, x), HEAD) for f in (each.module.q_proj, each.module.k_proj, each.module.v_proj))
        close(each.output[0], linear(each.module.o_proj, by_hand(q, k, v, 5.0)), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_t5(implementation: str) -> None:
    """Its logits are not divided by √d and get a bias by distance: that stays, added to g times the cosine."""
    model = t5()
    seen = set_up(model, implementation, "Attention")
    ids, mask, added = padded()
    model(input_ids=ids, attention_mask=mask, decoder_input_ids=words(2, 4))
    stacks = (model.encoder, model.decoder)
    first = [stack.block[0].layer[0].SelfAttention for stack in stacks]
    bias = [attention.compute_bias(n, n) for attention, n in zip(first, (7, 4), strict=True)]
    kinds = {id(m): "decoder" for m in model.decoder.modules()} | {id(m): "encoder" for m in model.encoder.modules()}
    assert len(seen) == 6
    for each in seen:
        x, memory = each.argument("hidden_states"), each.kwargs.get("key_value_states")
        source = x if memory is None else memory
        q, k, v = (
            heads(f(y), HEAD)
            for f, y in zip((each.module.q, each.module.k, each.module.v), (x, source, source), strict=True)
        )
        if memory is not None:
            bias_or_mask = added
        else:
            bias_or_mask = bias[0] + added if kinds[id(each.module)] == "encoder" else bias[1] + causal(4)
        close(each.output[0], each.module.o(by_hand(q, k, v, 5.0, bias_or_mask)), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("build", [marian, bart])
def test_marian_and_bart(build: Any, implementation: str) -> None:
    model = build()
    seen = set_up(model, implementation, "_attn")
    ids, mask, added = padded()
    model(input_ids=ids, attention_mask=mask, decoder_input_ids=words(2, 4))
    assert len(seen) == 6
    for each in seen:
        x, memory = each.argument("hidden_states"), each.kwargs.get("key_value_states")
        source = x if memory is None else memory
        attention = each.module
        q, k, v = (
            heads(linear(f, y), HEAD)
            for f, y in ((attention.q_proj, x), (attention.k_proj, source), (attention.v_proj, source))
        )
        mask_here = causal(4) if memory is None and x.shape[1] == 4 else added
        close(each.output[0], linear(attention.out_proj, by_hand(q, k, v, 5.0, mask_here)), implementation)


@pytest.mark.parametrize("build", [llama, gpt2, t5, marian, bart])
def test_generation_with_a_cache_is_generation_without(build: Any) -> None:
    model = build()
    adopt(model, scale_init=8.0, p=3.0, scale_per_head=True)
    ids = words(2, 5)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    # without the ban on repeats, models at random say one word on and on, which shows nothing
    settings = {"attention_mask": mask, "do_sample": False, "no_repeat_ngram_size": 1}
    with_cache, without = (model.generate(ids, max_new_tokens=10, use_cache=use, **settings) for use in (True, False))
    assert with_cache.shape[1] > 10
    assert torch.equal(with_cache, without)
    beams = [model.generate(ids, max_new_tokens=6, num_beams=2, use_cache=use, **settings) for use in (True, False)]
    assert torch.equal(*beams)


def test_both_implementations_agree_and_can_be_switched() -> None:
    model = llama()
    adopt(model, length=40)
    by_sdpa = model(words(2, 6)).logits
    model.set_attn_implementation("eager")
    output = model(words(2, 6), output_attentions=True)
    torch.testing.assert_close(output.logits, by_sdpa, rtol=1e-4, atol=1e-4)
    assert output.attentions[0].shape == (2, 4, 6, 6)
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("sdpa")
    assert twin(words(2, 6), output_attentions=False).attentions is None
    assert model.config._attn_implementation == "eager"
    assert twin.model.layers[0].self_attn.config.wrapped is twin.config


def test_files_that_keep_older_names_are_read(tmp_path: Path) -> None:
    model, pixels = vit(), torch.randn(2, 3, 16, 16)
    adopt(model, scale_init=3.0)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, add_pooling_layer=False)
    loaded = adopt(again, state=tmp_path)
    assert [each.start for each in loaded.changed] == [3.0, 3.0]
    torch.save(model.state_dict(), tmp_path / "own.pt")
    for file in ("model.safetensors", "own.pt"):  # by the older names, and by its own
        another = type(model).from_pretrained(tmp_path, add_pooling_layer=False)
        assert [each.start for each in adopt(another, state=tmp_path / file).changed] == [3.0, 3.0]
    outputs = [each(pixels).last_hidden_state for each in (again, model)]
    torch.testing.assert_close(*outputs, rtol=0, atol=0)


@pytest.mark.parametrize("build", [llama, t5])
def test_what_save_pretrained_saved_comes_back(build: Any, tmp_path: Path) -> None:
    model = build()
    ids = words(2, 6)
    batch = {"input_ids": ids, "labels": ids}
    adoption = adopt(model, calibrate=batch, p=3.0, scale_per_head=True)
    with torch.no_grad():
        for each in adoption.parameters():
            each.mul_(1.25)
    model.save_pretrained(tmp_path)

    again = type(model).from_pretrained(tmp_path)
    loaded = adopt(again, state=tmp_path)
    assert [(each.name, each.start) for each in loaded.changed] == [
        (each.name, float(each.norm.scale.detach().mean())) for each in adoption.changed
    ]
    torch.testing.assert_close(again(**batch).logits, model(**batch).logits, rtol=0, atol=0)
    with pytest.raises(ValueError, match="saved with p = 3, not 4"):
        adopt(type(model).from_pretrained(tmp_path), state=tmp_path, p=4.0)
    with pytest.raises(ValueError, match="there are no weights in"):
        adopt(type(model).from_pretrained(tmp_path), state=tmp_path / "nowhere")


def test_pickles_as_processes_exchange_them() -> None:
    model = llama()
    adopt(model, length=40)
    twin = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(twin(words(2, 6)).logits, model(words(2, 6)).logits, rtol=0, atol=0)


def test_trains_compiled_and_with_gradient_checkpointing() -> None:
    ids = words(2, 6)
    gradients = []
    for way in ("plain", "checkpointed", "compiled"):
        torch.manual_seed(0)
        model = llama().train()
        del model.model.layers[1]
        adoption = adopt(model, length=40)
        if way == "checkpointed":
            model.gradient_checkpointing_enable()
        run = torch.compile(model, backend="eager", fullgraph=True) if way == "compiled" else model
        run(ids, labels=ids).loss.backward()
        gradients.append(torch.stack([each.grad for each in adoption.parameters()]))
    assert bool((gradients[0] != 0).all())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradients[2], gradients[0], rtol=1e-3, atol=1e-5)


def spread_of_rows(logits: Tensor, added: Tensor) -> float:
    squares = []
    shown = (added > -1).expand(logits.shape)
    for row, seen in zip(logits.flatten(0, -2), shown.flatten(0, -2), strict=True):
        squares.append((row[seen] - row[seen].mean()).square())
    return torch.cat(squares).mean().sqrt().item()


def test_calibration_keeps_spread_and_reports_loss() -> None:
    model = bert().double()
    ids, mask, added = padded()
    added = added + added.mT  # queries of padding do not count either
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    before = model(**batch).loss.item()
    seen = [Recorder(module) for name, module in model.named_modules() if name.endswith(".self")]
    model(**batch)
    expected = []
    for each in seen:
        q, k = (heads(linear(f, each.argument("hidden_states")), HEAD) for f in (each.module.query, each.module.key))
        dot = q @ k.mT / HEAD**0.5
        cosine = (q / q.norm(dim=-1, keepdim=True)) @ (k / k.norm(dim=-1, keepdim=True)).mT
        expected.append(spread_of_rows(dot, added) / spread_of_rows(cosine, added))
    adoption = adopt(model, calibrate=batch)
    assert [each.start for each in adoption.changed] == pytest.approx(expected, rel=1e-5)
    assert adoption.loss_before == pytest.approx(before, rel=1e-9)
    assert adoption.loss_after == pytest.approx(model(**batch).loss.item(), rel=1e-9)


@pytest.mark.parametrize("left", [False, True])
def test_padding_changes_no_scale(left: bool) -> None:
    model, ids, starts = llama(), words(2, 7), []
    for pad in (0, 20):
        side = (pad, 0) if left else (0, pad)
        given, mask = (torch.nn.functional.pad(x, side) for x in (ids, torch.ones_like(ids)))
        batch = {"input_ids": given, "attention_mask": mask, "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0)}
        starts.append([each.start for each in adopt(copy.deepcopy(model), calibrate=batch).changed])
    assert starts[1] == pytest.approx(starts[0], rel=1e-4)


def test_padding_of_the_source_says_nothing_of_the_target() -> None:
    ids, mask, _ = padded()
    model, starts = bart(), []
    for target in (ids, torch.cat([ids[:, :-1], words(2, 8)[:, 7:]], dim=1)):  # the same but for the last token
        batch = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": target}
        changed = adopt(copy.deepcopy(model), calibrate=batch).changed
        starts.append({each.name: each.start for each in changed if "decoder.layers.0.encoder_attn" in each.name})
    (first,), (second,) = (each.values() for each in starts)
    assert first != pytest.approx(second, rel=1e-4)


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
GROUPED = {**SIZES, "num_key_value_heads": 2}
OTHERS = {
    "MistralForCausalLM": GROUPED,
    "Qwen2ForCausalLM": GROUPED,
    "Gemma2ForCausalLM": {**GROUPED, "head_dim": 8},
    "GPTNeoXForCausalLM": SIZES,
    "OPTForCausalLM": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "RobertaForMaskedLM": SIZES,
    "ModernBertForMaskedLM": SIZES,
    "CLIPTextModel": SIZES,
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_that_go_through_the_interface(name: str) -> None:
    """What the guide names: adopted as they are found, with the scale of every head in force."""
    words_of_its_own = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    model_class = getattr(transformers, name)
    model = model_class(model_class.config_class(vocab_size=WORDS, **OTHERS[name], **words_of_its_own)).eval()
    ids = words(2, 6)
    adoption = adopt(model, calibrate={"input_ids": ids}, scale_per_head=True)
    assert len(adoption.changed) == 1 and not adoption.left
    assert adoption.changed[0].kv_heads == OTHERS[name].get("num_key_value_heads", 4)
    sharper = copy.deepcopy(model)
    with torch.no_grad():
        sharper.get_submodule(adoption.changed[0].name).qk_norm.scale[3] += 50.0
    first, second = (each(input_ids=ids)[0] for each in (model, sharper))
    assert bool(first.isfinite().all()) and not torch.allclose(first, second, rtol=1e-3)


@pytest.mark.parametrize("family", ["Qwen3", "Gemma3Text"])
def test_models_with_norms_of_their_own_are_left(family: str) -> None:
    config = getattr(transformers, f"{family}Config")(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    model = getattr(transformers, family.removesuffix("Text") + "ForCausalLM")(config)
    with pytest.raises(ValueError, match=r"normalises queries and keys already \(q_norm\)"):
        adopt(model, length=40)


def test_whisper() -> None:
    model = whisper()
    inputs = {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": words(2, 5)}
    before = model(**inputs).logits
    assert len(adopt(model, calibrate=inputs).changed) == 6
    assert not torch.allclose(model(**inputs).logits, before)


def test_models_outside_the_interface_are_named() -> None:
    config = transformers.GPTJConfig(vocab_size=WORDS, n_embd=32, n_layer=1, n_head=4, rotary_dim=4)
    with pytest.raises(ValueError, match="GPTJAttention does not go through the library's attention interface"):
        adopt(transformers.GPTJForCausalLM(config), length=40)


def test_the_rest_of_the_model_notices_nothing() -> None:
    model = llama()
    other = llama()
    expected = other(words(2, 6)).logits
    adoption = adopt(model, length=64)
    assert not adoption.left and adoption.changed[0].kv_heads == 2
    assert adoption.changed[0].start == pytest.approx(initial_scale(64))
    assert "4 over 2" in str(adoption)
    torch.testing.assert_close(other(words(2, 6)).logits, expected, rtol=0, atol=0)
    assert model.config._attn_implementation == "sdpa"
    attention = model.model.layers[0].self_attn
    assert isinstance(attention.qk_norm, QKNorm)
    assert attention.config.hidden_size == 32
    attention.config.rope_theta = 7.0
    assert model.config.rope_theta == 7.0
    with pytest.raises(ValueError, match="has QKNorm already"):
        adopt(model, length=64)


def test_a_number_of_heads_that_does_not_fit() -> None:
    model = llama()
    adopt(model, length=64, scale_per_head=True)
    attention = model.model.layers[0].self_attn
    attention.qk_norm.num_heads = 2
    with pytest.raises(ValueError, match="adopted for 2 heads over 2 key heads and now has 4 over 2"):
        model(words(2, 6))
