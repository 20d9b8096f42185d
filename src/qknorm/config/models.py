"""The models: translator and language model."""

import math
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from qknorm.config.group import Settings


class Attention(Settings):
    """How queries and keys are normalised, in every attention of the model."""

    qk_norm: Literal["lp", "rms", "layer", "none"] = "lp"
    """lp: unit Lp length and a scale (QKNorm); rms or layer: with weights, as in recent LLMs; none: dot products."""
    p: float = Field(default=2.0, ge=1, allow_inf_nan=True)
    """The p of Lp; 2 is the paper's."""
    p_learned: bool = False
    """Learn p, one for every key head."""
    scale_init: float | None = None
    """Where the scale g starts; from the training lengths, or a language model's context, if not given."""
    scale_percentile: float = Field(default=97.5, ge=0, le=100)
    """g starts at log2(L² − L) with L this percentile of the training lengths in subwords (a translator alone)."""
    scale_matched: bool = False
    """For p other than 2, start g so that the spread of logits is that of p = 2."""
    scale_learned: bool | None = None
    """Learn g; by default for lp alone."""
    scale_per_head: bool = False
    """One g for every head instead of one for every attention module."""
    normalize_values: bool = False
    """Normalise the values too (an ablation of the paper)."""
    cross_query_norm: Literal["head", "width"] = "head"
    """Where a translator reads its source, queries get their length head by head, or over the width (CTranslate2)."""

    @model_validator(mode="after")
    def _settings_go_together(self) -> "Attention":
        if self.p_learned and not (self.qk_norm == "lp" and 1 < self.p < math.inf):
            raise ValueError(
                f"model.attention.p_learned needs qk_norm lp and a p above 1 and below infinity to start from, not "
                f"qk_norm {self.qk_norm} and p {self.p:g}"
            )
        if self.cross_query_norm == "width" and (self.qk_norm != "lp" or self.p_learned):
            raise ValueError(
                f"model.attention.cross_query_norm width needs qk_norm lp and a p that is not learned, not qk_norm "
                f"{self.qk_norm}" + (" and p_learned" if self.p_learned else "")
            )
        return self


class Dropout(Settings):
    """What is dropped in training, and how much of it."""

    residual: float = Field(default=0.3, ge=0, lt=1)
    """Of what each sublayer adds."""
    embedding: float = Field(default=0.3, ge=0, lt=1)
    """Of the input vectors."""
    attention: float = Field(default=0.3, ge=0, lt=1)
    """Of attention weights."""
    feed_forward: float = Field(default=0.3, ge=0, lt=1)
    """Inside the feed-forward sublayer."""
    word: float = Field(default=0.1, ge=0, lt=1)
    """Of input tokens on both sides, replaced by the unknown token."""

    @classmethod
    def everywhere(cls, share: float, word: float = 0.1) -> "Dropout":
        """The same share in all places but words."""
        return cls(residual=share, embedding=share, attention=share, feed_forward=share, word=word)


class Model(Settings):
    """The encoder-decoder."""

    biases: ClassVar[bool] = True

    width: int = Field(default=512, ge=2)
    """Size of the vectors between sublayers."""
    feed_forward: int = Field(default=2048, ge=1)
    """Size of the hidden layer of each feed-forward sublayer."""
    encoder_layers: int = Field(default=6, ge=1)
    """Layers that read the source."""
    decoder_layers: int = Field(default=6, ge=1)
    """Layers that write the translation."""
    heads: int = Field(default=8, ge=1)
    """Attention heads; the width must be a multiple."""
    kv_heads: int | None = Field(default=None, ge=1)
    """Key and value heads, each shared by several query heads; as many as heads if not given."""
    attention: Attention = Attention()
    norm: Literal["layer", "scale", "rms", "none"] = "layer"
    """LayerNorm, ScaleNorm (Nguyen & Salazar 2019), RMSNorm, or nothing (an ablation) around the sublayers."""
    norm_position: Literal["pre", "post"] = "pre"
    """Before each sublayer (with one norm after the stack) or after it."""
    fixnorm: bool = True
    """Word vectors of unit length, at the input times the square root of the width."""
    tie: Literal["all", "target", "none"] = "all"
    """Which word vectors are one: source, target and output; target and output; none."""
    language_vectors: bool = True
    """Add a learned vector to every input of a side."""
    logit_mask: bool = True
    """Never produce types that the target side of the training text is not cut into, BPE-dropout included."""
    positions: Literal["sinusoid", "sinusoid-slip", "rotary"] = "sinusoid"
    """Sinusoids added to the input; as the paper's released code has them (sine in both halves); or rotary."""
    rotary_order: Literal["before_norm", "after_norm"] = "after_norm"
    """Whether rotary positions turn queries and keys before or after they are normalised."""
    activation: Literal["relu", "gelu", "swiglu"] = "relu"
    """In the feed-forward sublayers; swiglu has a gate, a third matrix."""
    init: Literal["paper", "xavier"] = "paper"
    """The paper's normal distributions, or Xavier uniform."""
    dropout: Dropout = Dropout()

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> "Model":
        _check_heads(self)
        return self


class LanguageModelDropout(Settings):
    """What is dropped in training, and how much of it."""

    residual: float = Field(default=0.2, ge=0, lt=1)
    """Of what each sublayer adds."""
    embedding: float = Field(default=0.2, ge=0, lt=1)
    """Of the input vectors."""
    attention: float = Field(default=0.2, ge=0, lt=1)
    """Of attention weights."""
    feed_forward: float = Field(default=0.0, ge=0, lt=1)
    """Inside the feed-forward sublayer."""

    @classmethod
    def everywhere(cls, share: float) -> "LanguageModelDropout":
        """The same share in all places but inside the feed-forward sublayer."""
        return cls(residual=share, embedding=share, attention=share)


class LanguageModel(Settings):
    """The decoder that reads and writes one text; its norms stand before each sublayer and after the stack."""

    norm_position: ClassVar[Literal["pre", "post"]] = "pre"

    width: int = Field(default=384, ge=2)
    """Size of the vectors between sublayers."""
    feed_forward: int = Field(default=1_536, ge=1)
    """Size of the hidden layer of each feed-forward sublayer."""
    layers: int = Field(default=6, ge=1)
    """Each an attention and a feed-forward sublayer."""
    heads: int = Field(default=6, ge=1)
    """Attention heads; the width must be a multiple."""
    kv_heads: int | None = Field(default=None, ge=1)
    """Key and value heads, each shared by several query heads; as many as heads if not given."""
    context: int = Field(default=256, ge=2)
    """How many tokens the model sees at most; g starts at log2(L² − L) with this L where no start is given."""
    attention: Attention = Attention()
    norm: Literal["layer", "scale", "rms"] = "layer"
    """LayerNorm, ScaleNorm (Nguyen & Salazar 2019) or RMSNorm before the sublayers."""
    positions: Literal["learned", "rotary"] = "learned"
    """A learned vector for each position, or rotary."""
    rotary_order: Literal["before_norm", "after_norm"] = "after_norm"
    """Whether rotary positions turn queries and keys before or after they are normalised."""
    activation: Literal["relu", "gelu", "swiglu"] = "gelu"
    """In the feed-forward sublayers; swiglu has a gate, a third matrix."""
    biases: bool = False
    """Whether linear maps and LayerNorms have biases."""
    tie: bool = True
    """Whether the vectors of input and output are one."""
    dropout: LanguageModelDropout = LanguageModelDropout()

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> "LanguageModel":
        _check_heads(self)
        return self


def _check_heads(model: Model | LanguageModel) -> None:
    if model.width % model.heads:
        raise ValueError(f"model.width {model.width} is no multiple of model.heads {model.heads}")
    if model.heads % (model.kv_heads or model.heads):
        raise ValueError(f"model.heads {model.heads} is no multiple of model.kv_heads {model.kv_heads}")
    if model.positions == "rotary" and (model.width // model.heads) % 2:
        raise ValueError("rotary positions need an even head size: model.width / model.heads")
