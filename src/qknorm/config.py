"""The tree of settings, validated: every default of ours stands here and nowhere else."""

import difflib
import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from qknorm.errors import InputError

SettingsKind = TypeVar("SettingsKind", bound="Settings")
Beta = Annotated[float, Field(ge=0, lt=1)]


class Settings(BaseModel):
    """A frozen group of settings; a name it does not know is an error.

    TOML has no null, so that "none" stands for it where a setting may be left open: a file can undo a preset's value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _read_none(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {name: None if value == "none" and _may_be_open(cls, name) else value for name, value in given.items()}


# ------------------------------------------------------------------ from text files to token ids


class Cleaning(Settings):
    """Which training pairs `prepare` drops. Given dev and test sets are normalised but never lose a pair."""

    min_characters: int = Field(default=1, ge=1)
    """Shorter sentences are dropped."""
    max_characters: int = Field(default=2_000, ge=1)
    """Longer sentences are dropped."""
    max_ratio: float = Field(default=4.0, ge=1)
    """Largest ratio of the two sides' lengths in characters; 15 are added to both, so that short pairs may differ."""
    drop_duplicates: bool = True
    """Drop a pair that stands earlier in the training text."""
    drop_identical: bool = True
    """Drop a pair whose two sides are the same."""
    drop_overlap: bool = True
    """Drop a training pair whose source or target sentence stands in the given dev or test set.

    Sets that are split off from the training text never overlap with it."""


class Subwords(Settings):
    """How words are cut into subwords."""

    merges: int | None = Field(default=None, ge=0)
    """BPE merges learned from both languages together; chosen from the size of the corpus if not given."""
    pretokenized: bool = False
    """The text is tokenised already (Moses or the like): words are what stands between spaces, and stay so."""


class Prepare(Settings):
    """Settings of `qknorm prepare`."""

    source: str
    """Code of the language to translate from, such as gl."""
    target: str
    """Code of the language to translate to, such as en."""
    train: tuple[Path, ...]
    """Training text: two plain text files (source, target), or files that hold both sides (TSV, JSONL, TMX, PO, MO)."""
    dev: tuple[Path, ...] = ()
    """Development set, in the same forms; if not given, split off from the training text."""
    test: tuple[Path, ...] = ()
    """Test set, in the same forms; if not given, split off from the training text."""
    dev_pairs: int = Field(default=1_000, ge=0)
    """How many pairs to split off as dev where none is given; never more than a tenth of the corpus."""
    test_pairs: int = Field(default=1_000, ge=0)
    """How many pairs to split off as test where none is given; never more than a tenth of the corpus."""
    cleaning: Cleaning = Cleaning()
    subwords: Subwords = Subwords()


# ------------------------------------------------------------------ the model


class Attention(Settings):
    """How queries and keys are normalised, in every attention of the model."""

    qk_norm: Literal["lp", "rms", "layer", "none"] = "lp"
    """lp: unit Lp length and a scale (QKNorm); rms or layer: with weights, as in recent LLMs; none: dot products."""
    p: float = Field(default=2.0, ge=1, allow_inf_nan=True)
    """The p of Lp; 2 is the paper's."""
    p_learned: bool = False
    """Learn p, one for every key head."""
    scale_init: float | None = None
    """Where the scale g starts; from the training lengths if not given."""
    scale_percentile: float = Field(default=97.5, ge=0, le=100)
    """g starts at log2(L² − L) with L this percentile of the training lengths in subwords."""
    scale_matched: bool = False
    """For p other than 2, start g so that the spread of logits is that of p = 2."""
    scale_learned: bool | None = None
    """Learn g; by default for lp alone."""
    scale_per_head: bool = False
    """One g for every head instead of one for every attention module."""
    normalize_values: bool = False
    """Normalise the values too (an ablation of the paper)."""

    @model_validator(mode="after")
    def _p_can_be_learned(self) -> "Attention":
        if self.p_learned and not (self.qk_norm == "lp" and 1 < self.p < math.inf):
            raise ValueError(
                f"model.attention.p_learned needs qk_norm lp and a p above 1 and below infinity to start from, not "
                f"qk_norm {self.qk_norm} and p {self.p:g}"
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

    width: int = Field(default=512, ge=2)
    """Size of the vectors between sublayers."""
    feed_forward: int = Field(default=2048, ge=1)
    """Size of the hidden layer of each feed-forward sublayer."""
    encoder_layers: int = Field(default=6, ge=1)
    decoder_layers: int = Field(default=6, ge=1)
    heads: int = Field(default=8, ge=1)
    """Attention heads; the width must be a multiple."""
    kv_heads: int | None = Field(default=None, ge=1)
    """Key and value heads, each shared by several query heads; as many as heads if not given."""
    attention: Attention = Attention()
    norm: Literal["layer", "scale", "rms"] = "layer"
    """LayerNorm, ScaleNorm (Nguyen & Salazar 2019) or RMSNorm around the sublayers."""
    norm_position: Literal["pre", "post"] = "pre"
    """Before each sublayer (with one norm after the stack) or after it."""
    fixnorm: bool = True
    """Word vectors of unit length, at the input times the square root of the width."""
    tie: Literal["all", "target", "none"] = "all"
    """Which word vectors are one: source, target and output; target and output; none."""
    language_vectors: bool = True
    """Add a learned vector to every input of a side."""
    logit_mask: bool = True
    """Never produce types that do not occur in the target side of the training text."""
    positions: Literal["sinusoid", "sinusoid-slip", "rotary"] = "sinusoid"
    """Sinusoids added to the input; as the paper's released code has them (sine in both halves); or rotary."""
    rotary_order: Literal["before_norm", "after_norm"] = "after_norm"
    """Whether rotary positions turn queries and keys before or after they are normalised."""
    activation: Literal["relu", "gelu", "swiglu"] = "relu"
    init: Literal["paper", "xavier"] = "paper"
    """The paper's normal distributions, or Xavier uniform."""
    dropout: Dropout = Dropout()

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> "Model":
        if self.width % self.heads:
            raise ValueError(f"model.width {self.width} is no multiple of model.heads {self.heads}")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"model.heads {self.heads} is no multiple of model.kv_heads {self.kv_heads}")
        if self.positions == "rotary" and (self.width // self.heads) % 2:
            raise ValueError("rotary positions need an even head size: model.width / model.heads")
        return self


# ------------------------------------------------------------------ training and decoding


class Schedule(Settings):
    """The learning rate over the steps."""

    kind: Literal["plateau", "inverse-sqrt", "cosine"] = "inverse-sqrt"
    """plateau: flat, times `decay` when dev BLEU falls below each of the last `patience` (the paper's)."""
    peak: float | None = Field(default=None, gt=0)
    """The highest learning rate; width^-0.5 · warmup^-0.5 if not given."""
    warmup: int = Field(default=4_000, ge=0)
    """Steps of linear warm-up."""
    decay: float = Field(default=0.8, gt=0, lt=1)
    """plateau: factor at a plateau."""
    patience: int = Field(default=3, ge=1)
    """plateau: how many past evaluations the newest must stay below to count as one."""
    floor: float = Field(default=1e-5, ge=0)
    """plateau: training ends under this; cosine: where it ends."""


class Decoding(Settings):
    """How translations are searched for."""

    beam: int = Field(default=4, ge=1)
    length_penalty: float = Field(default=0.6, ge=0)
    """Exponent of the GNMT length penalty ((5 + n)/6)^α."""
    extra_length: int = Field(default=50, ge=1)
    """A translation has at most so many tokens more than its source."""
    no_repeat_ngram: int = Field(default=0, ge=0)
    """Forbid a translation to repeat an n-gram of this size; 0 allows it."""
    batch_tokens: int | None = Field(default=None, ge=1)
    """Source tokens times beam translated at a time; by the device if not given."""


class Training(Settings):
    """The optimisation."""

    seed: int = Field(default=0, ge=0)
    batch_tokens: int = Field(default=4_096, ge=8)
    """Sentences times their longest side in a batch."""
    accumulate: int = Field(default=1, ge=1)
    """Batches to one step."""
    max_steps: int = Field(default=100_000, ge=1)
    max_minutes: float | None = Field(default=None, gt=0)
    """Stop after so much wall time."""
    evaluate_every: int = Field(default=500, ge=1)
    """Steps between evaluations on dev."""
    max_evaluations: int | None = Field(default=None, ge=1)
    stop_after: int | None = Field(default=None, ge=1)
    """Stop when dev BLEU has not risen for so many evaluations."""
    dev_sentences: int | None = Field(default=None, ge=1)
    """Translate only the first so many dev sentences for BLEU."""
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)
    bpe_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of BPE merges skipped at random, anew every epoch (Provilkov et al. 2020)."""
    clip: float = Field(default=1.0, gt=0)
    """Largest gradient norm."""
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    weight_decay: float = Field(default=0.0, ge=0)
    schedule: Schedule = Schedule()
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on GPUs and processors that multiply it (there from width 256 on), float32 elsewhere."""
    compile: bool | None = None
    """Use torch.compile; by default where it pays."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: every GPU holds the whole model, or a share of it."""
    log_every: int = Field(default=50, ge=1)
    """Steps between lines of metrics.jsonl."""
    keep: int = Field(default=3, ge=1)
    """Checkpoints kept besides the best."""
    tensorboard: bool = False


class Train(Settings):
    """Settings of `qknorm train`."""

    model: Model = Model()
    training: Training = Training()
    decoding: Decoding = Decoding()


# ------------------------------------------------------------------ TOML in, and errors in words


def read_settings(path: Path, kind: type[SettingsKind], base: SettingsKind | None = None) -> SettingsKind:
    """Settings from a TOML file, over those of `base` where the file is silent."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); name a TOML file of settings") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no TOML: {error}") from None
    merged = given if base is None else merge(base.model_dump(exclude_unset=False), given)
    try:
        return kind.model_validate(merged)
    except ValidationError as error:
        raise InputError(explain_validation(error, str(path), kind)) from None


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` over it, group by group."""
    merged = dict(base)
    for name, value in changes.items():
        inner = merged.get(name)
        both_groups = isinstance(inner, Mapping) and isinstance(value, Mapping)
        merged[name] = merge(inner, value) if both_groups else value  # type: ignore[arg-type]
    return merged


def explain_validation(error: ValidationError, where: str, kind: type[BaseModel] = Train) -> str:
    """The first mistake as a sentence: an unknown name with the nearest known one, or what is wrong with a value."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"]]
    name = ".".join(place)
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, list(setting_names(kind)), n=1, cutoff=0.5) or difflib.get_close_matches(
            place[-1], [known for known in setting_names(kind) if "." not in known], n=1
        )
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"{where}: there is no setting {name}{hint}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":  # raised by the checks above, which name the settings themselves
        return f"{where}: {message}"
    return f"{where}: {name}: {message}"


def _may_be_open(kind: type[BaseModel], name: str) -> bool:
    return name in kind.model_fields and type(None) in get_args(kind.model_fields[name].annotation)


def setting_names(kind: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted name of a tree of settings."""
    for name, entry in kind.model_fields.items():
        yield prefix + name
        if isinstance(entry.annotation, type) and issubclass(entry.annotation, BaseModel):
            yield from setting_names(entry.annotation, f"{prefix}{name}.")
