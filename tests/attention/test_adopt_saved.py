"""States of adopted models: p comes back with the scales, older and wrapped states are read, others are refused."""

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from foreign_models import bert, library, llama, timm_vit
from qknorm.attention import MultiheadAttention, QKNorm
from qknorm.attention.adopt import adopt
from qknorm.attention.adopting.hugging_face import _reads

WIDTH, HEADS = 16, 4


def encoder(layers: int = 2) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()


class Own(nn.Module):
    """A model of transformers inside one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = bert()

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.bert(ids).logits
        return logits


def words() -> Tensor:
    return torch.randint(2, 61, (2, 7))


CASES: dict[str, tuple[Callable[[], Any], Callable[[], Tensor]]] = {
    "torch": (encoder, lambda: torch.randn(2, 5, WIDTH)),
    "timm": (lambda: library("timm") and timm_vit(), lambda: torch.randn(2, 3, 16, 16)),
    "transformers": (lambda: library("transformers") and Own(), words),
}


@pytest.mark.parametrize("p", [1.1, 3.0, math.inf])
@pytest.mark.parametrize("kind", CASES)
def test_p_comes_back_with_the_scales(kind: str, p: float) -> None:
    build, draw = CASES[kind]
    model, x = build(), draw()
    adopt(model, length=8, p=p)
    state = model.state_dict()

    again = build()
    loaded = adopt(again, state=state)
    again.load_state_dict(state)
    assert [each.norm.p for each in loaded.changed] == [p] * 2
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)

    other = build()
    adopt(other, length=8)
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=f"the state was saved with p = {p:g}, not 2"):
            other.load_state_dict(state, strict=strict)
    with pytest.raises(ValueError, match=f"was saved with p = {p:g}, not 4; leave p out"):
        adopt(build(), state=state, p=4.0)


@pytest.mark.parametrize("cast", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("p", [1.1, 2.7, 10.0, math.inf])
def test_p_is_the_same_after_a_cast(cast: torch.dtype, p: float) -> None:
    model = encoder(1)
    adopt(model, length=8, p=p)
    model.to(cast)
    assert adopt(encoder(1), state=model.state_dict()).changed[0].norm.p == p
    same = encoder(1)
    adopt(same, length=8, p=p)
    same.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    assert same.layers[0].self_attn.norm.p == p


def test_every_attention_keeps_its_own_p(tmp_path: Path) -> None:
    library("transformers")
    ids = words()
    for first, second in ((3.0, 2.0), (2.0, 3.0)):
        model = llama()
        adopt(model, length=8, p=first, only="*layers.0*")
        adopt(model, length=8, p=second, only="*layers.1*")
        model.save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path)
        assert [each.norm.p for each in adopt(again, state=tmp_path).changed] == [first, second]
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=0)
        part = type(model).from_pretrained(tmp_path)
        assert adopt(part, state=tmp_path, only="*layers.1*").changed[0].norm.p == second


def test_a_part_that_is_saved_by_itself(tmp_path: Path) -> None:
    library("transformers")
    own, ids = Own(), words()
    adopt(own, length=8, p=3.0)
    own.bert.save_pretrained(tmp_path)
    again = type(own.bert).from_pretrained(tmp_path)
    assert again.config.qknorm == {"p": 3.0}
    adopt(again, state=tmp_path)
    torch.testing.assert_close(again(ids).logits, own(ids), rtol=0, atol=0)


def test_what_was_learned_is_not_lost_without_a_word(tmp_path: Path) -> None:
    library("transformers")
    model = llama()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adopt(model, length=8, only="*layers.0*")
        adopt(model, length=8, only="*layers.1*")
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"was saved with QKNorm.*start anew now; adopt\(model, state=…\)"):
        adopt(again, length=8)
    again = type(model).from_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adopt(again, state=tmp_path)


def test_a_second_model_of_the_same_config_had_nothing_to_lose(tmp_path: Path) -> None:
    library("transformers")
    model = llama()
    adopt(model, length=8)
    model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert adopt(type(model)(model.config), length=8).changed


def test_scales_by_calibration_stay_under_torchs_weights() -> None:
    model, x = encoder(), torch.randn(2, 5, WIDTH)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    norms = [each.norm for each in adopt(model, calibrate=x, scale_per_head=True).changed]
    scales = [norm.scale.detach().clone() for norm in norms]
    model.load_state_dict(weights)
    assert all(len(scale.unique()) > 1 for scale in scales)
    assert all(torch.equal(norm.scale, scale) for norm, scale in zip(norms, scales, strict=True))


def test_states_from_before_p_was_in_them() -> None:
    """The scale had no dimension then, and p was nowhere."""
    model, x = encoder(), torch.randn(2, 5, WIDTH)
    adopt(model, length=8, p=3.0)
    older = {name: value for name, value in model.state_dict().items() if not name.endswith("p_fixed")}
    older = {name: value.view(()) if name.endswith("norm.scale") else value for name, value in older.items()}
    again = encoder()
    loaded = adopt(again, state=older, p=3.0)
    assert loaded.changed[0].norm.scale.shape == (1,)
    again.load_state_dict(older)
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(each.norm.p_fixed == 3.0 for each in loaded.changed)

    with torch.device("meta"):
        empty = MultiheadAttention(WIDTH, HEADS, p=3.0)
    prefix = "layers.0.self_attn."
    part = {name.removeprefix(prefix): value for name, value in older.items() if name.startswith(prefix)}
    empty.load_state_dict(part, assign=True)
    assert empty.norm.scale.shape == (1,) and empty.norm.p_fixed == 3.0


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_states_of_wrapped_models(prefix: str, tmp_path: Path) -> None:
    model = encoder()
    adopt(model, length=8, p=3.0)
    with torch.no_grad():
        model.layers[1].self_attn.norm.scale.fill_(7.0)
    state = {f"{prefix}{name}": value for name, value in model.state_dict().items()}
    torch.save(state, tmp_path / "model.pt")
    save_file(state, tmp_path / "model.safetensors")
    for given in (state, tmp_path / "model.pt", tmp_path / "model.safetensors"):
        loaded = adopt(encoder(), state=given).changed
        assert loaded[1].start == 7.0 and [each.norm.p for each in loaded] == [3.0, 3.0]


def test_what_the_state_does_not_have_is_refused() -> None:
    model = encoder()
    adopt(model, length=8)
    for asked in ("scale_per_head", "p_learned"):
        untouched = encoder()
        with pytest.raises(ValueError, match=f"{asked}=True was asked for, but layers.0.self_attn.norm was saved with"):
            adopt(untouched, state=model.state_dict(), **{asked: True})
        assert type(untouched.layers[0].self_attn) is nn.MultiheadAttention
    rich = encoder()
    adopt(rich, length=8, scale_per_head=True, p=3.0, p_learned=True)
    loaded = adopt(encoder(), state=rich.state_dict(), scale_per_head=True, p_learned=True)
    assert loaded.changed[0].norm.scale_per_head and loaded.changed[0].norm.p_raw is not None


def test_a_fixed_p_and_a_learned_one_do_not_mix() -> None:
    fixed, learned = QKNorm(8, 2, p=3.0), QKNorm(8, 2, p=3.0, p_learned=True)
    with pytest.raises(RuntimeError, match="p_raw"):
        learned.load_state_dict(fixed.state_dict())
    with pytest.raises(RuntimeError, match="p_raw"):
        fixed.load_state_dict(learned.state_dict())
    assert "p_fixed" not in QKNorm(8, 2).state_dict() | learned.state_dict()
    assert "p_fixed" not in QKNorm(8, 2, kind="rms", p=3.0).state_dict()


class Llama4Vision(nn.Module):
    """Llama 4's attention of images, which has an eager function of its own."""

    def __init__(self, implementation: str) -> None:
        super().__init__()
        modeling = library("transformers.models.llama4.modeling_llama4")
        sizes = {"hidden_size": 16, "num_attention_heads": 4, "image_size": 4, "patch_size": 2}
        config = library("transformers").Llama4VisionConfig(**sizes, attn_implementation=implementation)
        self.attention = modeling.Llama4VisionAttention(config)
        self.rotary = modeling.Llama4VisionRotaryEmbedding(config)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.attention(x, freqs_ci=self.rotary(x))[0]
        return output


def test_an_eager_function_that_takes_no_scale_is_not_used() -> None:
    model, x = Llama4Vision("sdpa").eval(), torch.randn(2, 5, 16)
    adoption = adopt(model, scale_init=5.0)
    assert [each.name for each in adoption.changed] == ["attention"]
    assert bool(model(x).isfinite().all())
    model.attention.config.wrapped._attn_implementation = "eager"
    with pytest.raises(ValueError, match=r"Llama4VisionAttention: its eager attention divides by √d.*'sdpa'"):
        model(x)
    with pytest.raises(ValueError, match=r"every one is left as it is \(its eager attention divides by √d"):
        adopt(Llama4Vision("eager"), scale_init=5.0)


def test_whether_a_function_uses_what_it_is_given() -> None:
    def by_name(query: Tensor, scaling: float) -> Tensor:
        return query * scaling

    def in_vain(query: Tensor, scaling: float) -> Tensor:
        return query

    def among_the_rest(query: Tensor, *args: Any, **rest: Any) -> Tensor:
        return by_name(query, **rest)

    def drops_the_rest(query: Tensor, *args: Any, **rest: Any) -> Tensor:  # as GPT-2's did in transformers 5.1
        return query

    uses = {by_name: True, in_vain: False, among_the_rest: True, drops_the_rest: False}
    assert {function: _reads(function, "scaling") for function in uses} == uses


def test_an_old_transformers_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = library("transformers")
    attention = type("OldAttention", (nn.Module,), {"__module__": "transformers.models.old"})()
    for version, told in (("4.57.1", "transformers 4.57.1 is too old"), ("5.22.2", "does not go through")):
        monkeypatch.setattr(transformers, "__version__", version)
        with pytest.raises(ValueError, match=told):
            adopt(nn.Sequential(attention), length=8)
