"""What is compared: the settings of the study, its arms, and what each run of an arm trains."""

import hashlib
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from pydantic import Field, model_validator

from qknorm.config import Attention, LanguageModel, LanguageModelDropout, Settings
from qknorm.errors import InputError
from qknorm.studies.published import LP_FOLDS

if TYPE_CHECKING:  # help does without PyTorch, and so do those who read these settings alone
    import torch

Beta = Annotated[float, Field(ge=0, lt=1)]
Arm = Literal["same-scale", "matched", "dot-product", "learned-p", "infinity"]
ARMS: tuple[Arm, ...] = get_args(Arm)
MAIN_ARMS: tuple[Arm, ...] = ("same-scale", "matched", "dot-product")
"""What the study runs if nothing else is asked for."""
ARM_MEANINGS: dict[Arm, str] = {
    "same-scale": "the paper's: the scale starts at one number for every p",
    "matched": "the scale starts where the logits spread as they do for p = 2",
    "dot-product": "no normalisation, logits divided by √d: the control",
    "learned-p": "p learned by every head, from 2 on",
    "infinity": "p = ∞, from the matched scale on",
}
STREAMS = 3
"""Models that a GPU trains at a time, side by side."""


class LpStudy(Settings):
    """Settings of every run of `qknorm study lp`.

    The paper gives the model, but neither the learning rate, the iterations nor the scale's start: nanoGPT's defaults
    for characters, and log2(L² − L) of the context for the scale, are our assumption.
    """

    model: LanguageModel = LanguageModel()
    fold_count: int = Field(default=LP_FOLDS, ge=2)
    """Blocks that the text is cut into, each held out once."""
    characters: int | None = Field(default=None, ge=1)
    """Use only so many characters from the beginning of the text."""
    scale_init: float | None = Field(default=None, gt=0)
    """Where the scale starts for p = 2; log2(L² − L) with L the context if not given."""
    seed: int = Field(default=0, ge=0)
    iterations: int = Field(default=5_000, ge=1)
    batch: int = Field(default=64, ge=1)
    """Windows of the context's length in a batch."""
    evaluate_every: int = Field(default=250, ge=1)
    """Iterations between evaluations on the whole held-out block."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """The highest."""
    final_learning_rate: float = Field(default=1e-4, ge=0)
    """Where the cosine ends."""
    warmup: int = Field(default=100, ge=0)
    """Iterations of linear warm-up."""
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    weight_decay: float = Field(default=0.1, ge=0)
    """Of matrices."""
    clip: float = Field(default=1.0, gt=0)
    """Largest gradient norm."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on GPUs that have it, float32 elsewhere."""

    @model_validator(mode="after")
    def _attention_is_the_arms(self) -> "LpStudy":
        if self.model.attention != Attention():
            raise ValueError("the arms of the study set model.attention; choose with --arms and --p instead")
        return self

    @property
    def first_scale(self) -> float:
        """The scale's start for p = 2."""
        from qknorm.attention import initial_scale

        return initial_scale(self.model.context) if self.scale_init is None else self.scale_init


def quick_study() -> LpStudy:
    """A study so small that two CPU cores end it within five minutes; what it finds says little about real models."""
    return LpStudy(
        model=LanguageModel(
            width=64, feed_forward=256, layers=3, heads=4, context=64, dropout=LanguageModelDropout.everywhere(0.0)
        ),
        fold_count=3,
        characters=60_000,
        iterations=400,
        batch=16,
        evaluate_every=50,
        learning_rate=3e-3,
        final_learning_rate=3e-4,
        warmup=40,
    )


QUICK_EXPONENTS = (1.5, 2.0, 3.0)


@dataclass(frozen=True)
class Run:
    """One training: an arm, its p (None for dot products), and the fold held out."""

    arm: Arm
    p: float | None
    fold: int

    @property
    def name(self) -> str:
        """How files and tables call it."""
        return f"{self.variant}-fold{self.fold}"

    @property
    def variant(self) -> str:
        """The arm and p alone."""
        return self.arm if self.p is None or self.arm in ("learned-p", "infinity") else f"{self.arm}-p{self.p:g}"

    def model_settings(self, study: LpStudy) -> LanguageModel:
        """The model that it trains."""
        if self.p is None:
            attention = Attention(qk_norm="none")
        else:
            attention = Attention(p=self.p, p_learned=self.arm == "learned-p")
        return study.model.model_copy(update={"attention": attention})

    def scale_start(self, study: LpStudy) -> float | None:
        """Where its scale starts; None leaves dot products their 1/√d."""
        from qknorm.attention import matched_scale

        if self.p is None:
            return None
        if self.arm in ("matched", "infinity"):
            return matched_scale(study.first_scale, self.p, study.model.width // study.model.heads)
        return study.first_scale


def make_run(arm: Arm, p: float | None, fold: int) -> Run:
    """The run that trains this; at p = 2 the matched scale is the same scale, so that one run serves both arms."""
    if arm == "dot-product":
        return Run(arm, None, fold)
    if arm == "learned-p":
        return Run(arm, 2.0, fold)
    if arm == "infinity":
        return Run(arm, math.inf, fold)
    if p is None:
        raise ValueError(f"arm {arm} needs a p")
    return Run("same-scale" if p == 2 else arm, p, fold)


def plan_runs(arms: tuple[Arm, ...], exponents: tuple[float, ...], folds: tuple[int, ...]) -> list[Run]:
    """Every run asked for, once: folds of one p next to each other, and arms of one p too, since they train alike."""
    wanted = [
        make_run(arm, p, fold)
        for p in (None, *sorted(exponents))
        for arm in arms
        if (p is None) == (arm not in ("same-scale", "matched"))
        for fold in folds
    ]
    return list(dict.fromkeys(wanted))


def run_seed(study: LpStudy, fold: int) -> int:
    """Start and data order of every run on a fold: the same for all p and arms, so that they differ in these alone."""
    digest = hashlib.sha256(f"{study.seed}/{fold}".encode()).digest()
    return int.from_bytes(digest[:6], "big")


def resolve_precision(study: LpStudy, device: "torch.device") -> LpStudy:
    """The settings with `auto` replaced by what it means on this device."""
    if study.precision != "auto":
        return study
    import torch

    half = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return study.model_copy(update={"precision": "bfloat16" if half else "float32"})


def fingerprint(study: LpStudy, text_digest: str) -> str:
    """What runs must share to be compared: their settings and their text."""
    content = json.dumps([study.model_dump(mode="json"), text_digest], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


# ------------------------------------------------------------------ parts, as they are asked for in words


def parse_arms(words: str) -> tuple[Arm, ...]:
    """Arms from "same-scale,matched"."""
    arms = [_parse_arm(word) for word in _split(words, "--arms")]
    return tuple(dict.fromkeys(arms))


def _parse_arm(word: str) -> Arm:
    for arm in ARMS:
        if arm == word:
            return arm
    raise InputError(f"--arms: there is no arm {word!r}; known are {', '.join(ARMS)}")


def parse_exponents(words: str) -> tuple[float, ...]:
    """Values of p from "2,2.5,3"."""
    values = []
    for word in _split(words, "--p"):
        try:
            value = float(word)
        except ValueError:
            raise InputError(f"--p: {word!r} is no number; give some such as 2,2.5,3") from None
        if not 1 <= value < math.inf:
            raise InputError(f"--p: {word} is not at least 1 and finite; p = ∞ is --arms infinity")
        if float(f"{value:g}") != value:  # files and tables would take it for its neighbour
            raise InputError(f"--p: {word} has more than six digits; give {value:g}, or another")
        values.append(value)
    return tuple(dict.fromkeys(values))


def parse_folds(words: str | None, count: int) -> tuple[int, ...]:
    """Folds from "0-2,5"; all of them if nothing is said."""
    if words is None:
        return tuple(range(count))
    folds: list[int] = []
    for word in _split(words, "--folds"):
        first, _, last = word.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()) or (word.endswith("-")):
            raise InputError(f"--folds: {word!r} is no fold; give some such as 0-2,5")
        span = range(int(first), int(last or first) + 1)
        if not span or span[-1] >= count:
            raise InputError(f"--folds: {word!r} asks for what is not there; folds go from 0 to {count - 1}")
        folds.extend(span)
    return tuple(dict.fromkeys(folds))


def _split(words: str, option: str) -> list[str]:
    parts = [word.strip() for word in words.split(",") if word.strip()]
    if not parts:
        raise InputError(f"{option} names nothing; leave it out for all")
    return parts
