"""Training, decoding, and the whole trees that `qknorm train` takes."""

from typing import Annotated, Literal

from pydantic import Field

from qknorm.config.group import Settings
from qknorm.config.models import LanguageModel, Model

Beta = Annotated[float, Field(ge=0, lt=1)]


class Schedule(Settings):
    """The learning rate over the steps."""

    kind: Literal["plateau", "inverse-sqrt", "cosine"] = "inverse-sqrt"
    """plateau: flat, times `decay` when dev BLEU falls below each of the last `patience` (the paper's); the others
    fall by their formula from the end of the warm-up on."""
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
    """Hypotheses kept at every step; 1 is greedy search."""
    length_penalty: float = Field(default=0.6, ge=0)
    """Exponent of the GNMT length penalty ((5 + n)/6)^α."""
    extra_length: int = Field(default=50, ge=1)
    """A translation has at most so many tokens more than its source."""
    no_repeat_ngram: int = Field(default=0, ge=0)
    """Forbid a translation to repeat an n-gram of this size; 0 allows it. It slows a GPU's search down."""
    batch_tokens: int | None = Field(default=None, ge=1)
    """Source tokens times beam translated at a time; by the device if not given."""


class Generation(Settings):
    """How a language model writes."""

    length: int = Field(default=500, ge=0)
    """How many characters to write."""
    temperature: float = Field(default=0.8, ge=0)
    """Divides the logits: below 1 the likely grows likelier; 0 always takes the likeliest."""
    top_k: int | None = Field(default=None, ge=1)
    """Choose among so many of the likeliest alone."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Choose among the likeliest that together have at least this probability."""


class Optimisation(Settings):
    """What every training has to say, whatever it trains."""

    seed: int = Field(default=0, ge=0)
    """Of the first weights, dropout, and the order of the text."""
    accumulate: int = Field(default=1, ge=1)
    """Batches to one step."""
    max_steps: int = Field(default=100_000, ge=1)
    """Stop after so many steps; a cosine is as long."""
    max_minutes: float | None = Field(default=None, gt=0)
    """Stop after so much wall time."""
    evaluate_every: int = Field(default=500, ge=1)
    """Steps between evaluations on dev."""
    max_evaluations: int | None = Field(default=None, ge=1)
    """Stop after so many evaluations."""
    stop_after: int | None = Field(default=None, ge=1)
    """Stop when dev BLEU, or a language model's dev loss, has not improved for so many evaluations."""
    clip: float = Field(default=1.0, gt=0)
    """Largest gradient norm."""
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    """How long AdamW remembers gradients and their squares."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's pull of the weights to zero, times the learning rate."""
    decay_matrices_only: bool = False
    """Leave biases, norms and scales out of weight decay."""
    schedule: Schedule = Schedule()
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on GPUs and processors that multiply it (there from width 256 on), float32 elsewhere."""
    compile: bool | None = None
    """On a GPU: True compiles layers by torch.compile, False computes by PyTorch alone, and by default our own kernels
    run where they apply, or else torch.compile where it pays. On the CPU only True compiles."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: every GPU holds the whole model, or a share of it."""
    log_every: int = Field(default=50, ge=1)
    """Steps between lines of metrics.jsonl."""
    inspect_every: int = Field(default=500, ge=0)
    """Steps between measurements of every attention, with a warning where one goes wrong; 0 for none."""
    keep: int = Field(default=3, ge=1)
    """Checkpoints kept besides the best. On a GPU one that is not the best is written every ten seconds at most."""
    tensorboard: bool = False
    """Write the metrics for TensorBoard as well."""


class Training(Optimisation):
    """The optimisation of a translator."""

    batch_tokens: int = Field(default=4_096, ge=8)
    """Sentences times their longest side in a batch."""
    dev_sentences: int | None = Field(default=None, ge=1)
    """Translate only the first so many dev sentences for BLEU."""
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)
    """Share of the wanted probability that is spread over all types that may be produced."""
    bpe_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of BPE merges skipped at random, anew every epoch (Provilkov et al. 2020)."""


class LanguageModelTraining(Optimisation):
    """The optimisation of a language model."""

    batch: int = Field(default=64, ge=1)
    """Windows of the text in a batch, each as long as the model's context."""
    held_out: float = Field(default=0.1, gt=0, lt=1)
    """Share of the text, at its end, that is kept as the dev set."""
    max_steps: int = Field(default=5_000, ge=1)
    """Stop after so many steps; a cosine is as long."""
    evaluate_every: int = Field(default=250, ge=1)
    """Steps between evaluations on dev."""
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    """How long AdamW remembers gradients and their squares."""
    weight_decay: float = Field(default=0.1, ge=0)
    """AdamW's pull of the weights to zero, times the learning rate."""
    decay_matrices_only: bool = True
    """Leave biases, norms and scales out of weight decay."""
    schedule: Schedule = Schedule(kind="cosine", peak=1e-3, warmup=100, floor=1e-4)


class Train(Settings):
    """Settings of `qknorm train` on a prepared folder."""

    model: Model = Model()
    training: Training = Training()
    decoding: Decoding = Decoding()


class TrainLanguageModel(Settings):
    """Settings of `qknorm train` on a text file."""

    model: LanguageModel = LanguageModel()
    training: LanguageModelTraining = LanguageModelTraining()
    generation: Generation = Generation()


AnyTrain = Train | TrainLanguageModel
