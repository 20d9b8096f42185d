"""Small models of transformers and timm with weights at random, for tests of what works on others' models."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from qknorm.attention.adopting.torchvision import tolerate_any_torchvision


def library(name: str) -> Any:
    """transformers or timm; skips where it is not installed."""
    tolerate_any_torchvision()
    return pytest.importorskip(name, reason=f"{name} is not installed")


SIZES = {"vocab_size": 61, "initializer_range": 0.3, "pad_token_id": 0}


def gpt2(**changes: Any) -> Any:
    transformers = library("transformers")
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": None}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, **sizes, **changes)).eval()


def _llama_like(config: Any, model: Any, changes: dict[str, Any]) -> Any:
    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": None,
    }  # fmt: skip
    return model(config(**SIZES, **sizes, **changes)).eval()


def llama(**changes: Any) -> Any:
    """Grouped heads and rotary positions."""
    transformers = library("transformers")
    return _llama_like(transformers.LlamaConfig, transformers.LlamaForCausalLM, changes)


def qwen3(**changes: Any) -> Any:
    """As Llama, with an RMSNorm of its own over queries and keys."""
    transformers = library("transformers")
    return _llama_like(transformers.Qwen3Config, transformers.Qwen3ForCausalLM, changes)


def gemma2(**changes: Any) -> Any:
    """As Llama, with soft-capped logits and, in every other layer, a sliding window."""
    transformers = library("transformers")
    settings = {"attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 16, "sliding_window": 4, **changes}
    return _llama_like(transformers.Gemma2Config, transformers.Gemma2ForCausalLM, settings)


def bert(**changes: Any) -> Any:
    transformers = library("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **sizes, **changes)).eval()


def vit(**changes: Any) -> Any:
    transformers = library("transformers")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=4,
        initializer_range=0.3, **changes,
    )  # fmt: skip
    return transformers.ViTModel(config, add_pooling_layer=False).eval()


def t5(**changes: Any) -> Any:
    """Encoder-decoder with a position bias added to the logits."""
    transformers = library("transformers")
    config = transformers.T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, initializer_factor=2.0,
        pad_token_id=0, eos_token_id=None, decoder_start_token_id=0, **changes,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config).eval()


_BART_SIZES = {
    "vocab_size": 61, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "init_std": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 0,
}  # fmt: skip


def marian(**changes: Any) -> Any:
    transformers = library("transformers")
    settings = {**_BART_SIZES, "max_position_embeddings": 64, "forced_eos_token_id": None, **changes}
    return transformers.MarianMTModel(transformers.MarianConfig(**settings)).eval()


def whisper(**changes: Any) -> Any:
    transformers = library("transformers")
    settings = {**_BART_SIZES, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 32, **changes}
    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**settings)).eval()


def timm_vit(**changes: Any) -> Any:
    library("timm")
    vision = importlib.import_module("timm.models.vision_transformer")
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5}
    return vision.VisionTransformer(**{**sizes, **changes}).eval()


class Case(NamedTuple):
    """A model, what it is called with, and how many attentions run in one call."""

    model: nn.Module
    inputs: dict[str, Any]
    attentions: int

    def __call__(self) -> Tensor:
        """The model's main output, in float32 or float64 as the model is."""
        output = self.model(**self.inputs)
        for name in ("logits", "last_hidden_state"):
            if hasattr(output, name):
                return getattr(output, name)
        return output


def ids(*shape: int) -> Tensor:
    return torch.randint(2, 61, shape)


def padding(lengths: list[int], longest: int, *, left: bool = False) -> Tensor:
    """A mask as tokenizers give it: 1 at real tokens."""
    shown = (torch.arange(longest) < torch.tensor(lengths).unsqueeze(1)).long()
    return shown.flip(1) if left else shown


def text_case(make: Callable[..., Any], **changes: Any) -> Case:
    """A model of text over two sentences, the second of them padded at its end."""
    return Case(make(**changes), {"input_ids": ids(2, 7), "attention_mask": padding([7, 4], 7)}, 2)


def pair_case(make: Callable[..., Any], **changes: Any) -> Case:
    """A translation model: two layers of self-attention on either side, and two of cross-attention."""
    inputs = {"input_ids": ids(2, 7), "attention_mask": padding([7, 4], 7), "decoder_input_ids": ids(2, 5)}
    return Case(make(**changes), inputs, 6)


def case(name: str, **changes: Any) -> Case:
    """One of the models above by name, with settings of its config."""
    if name in ("t5", "marian"):
        return pair_case({"t5": t5, "marian": marian}[name], **changes)
    if name == "whisper":
        return Case(whisper(**changes), {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": ids(2, 5)}, 6)
    if name == "vit":
        return Case(vit(**changes), {"pixel_values": torch.randn(2, 3, 16, 16)}, 2)
    if name == "timm_vit":
        return Case(timm_vit(**changes), {"x": torch.randn(2, 3, 16, 16)}, 2)
    makers = {"gpt2": gpt2, "llama": llama, "qwen3": qwen3, "gemma2": gemma2, "bert": bert}
    return text_case(makers[name], **changes)
