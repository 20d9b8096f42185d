"""Every setting of the papers as a preset, one for each pair and system, and our own defaults."""

import difflib
import functools
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from qknorm.config import (
    AnyTrain,
    Attention,
    Decoding,
    Dropout,
    LanguageModel,
    LanguageModelDropout,
    LanguageModelTraining,
    Model,
    Schedule,
    Train,
    Training,
    TrainLanguageModel,
    explain_validation,
    merge,
)
from qknorm.errors import InputError

PAIRS = ("en-vi", "ar-en", "en-he", "gl-en", "sk-en")
"""The paper's language pairs."""

MERGES = {"en-vi": 8_000, "ar-en": 8_000, "en-he": 8_000, "gl-en": 3_000, "sk-en": 8_000}
"""Joint BPE merges, which belong to `qknorm prepare`."""

CORPORA = {
    **{pair: f"ted-{pair}" for pair in PAIRS if pair != "en-vi"},
    "en-vi": "iwslt15-en-vi",
    "de-en": "iwslt14-de-en",
    "en-de": "multi30k-en-de",
}
"""The data set of a pair, by its name in `qknorm corpora list`."""

PRETOKENIZED = frozenset(PAIRS)
"""Pairs whose data set comes in tokens, which `qknorm prepare` is to be told."""

_EVALUATE_EVERY = {"en-vi": 1_500, "ar-en": 2_000, "en-he": 2_000, "gl-en": 100, "sk-en": 600}


def paper(pair: str, system: str) -> Train:
    """The recipe of Henry et al. 2020 for a pair: their own system, `qknorm`, or Nguyen & Salazar's, `baseline`."""
    small = pair == "gl-en"
    qknorm = system == "qknorm"
    return Train(
        model=Model(
            width=512,
            feed_forward=2048,
            encoder_layers=4 if small else 6,
            decoder_layers=4 if small else 6,
            heads=4 if small else 8,
            attention=Attention(qk_norm="lp" if qknorm else "none"),
            norm="layer" if qknorm else "scale",
            positions="sinusoid-slip",
            dropout=Dropout.everywhere(0.4 if small else 0.3, word=0.1),
        ),
        training=Training(
            batch_tokens=4_096,
            betas=(0.9, 0.999),
            label_smoothing=0.1,
            clip=1.0,
            schedule=Schedule(kind="plateau", warmup=8_000, decay=0.8, patience=3, floor=5e-5 if small else 1e-5),
            evaluate_every=_EVALUATE_EVERY[pair],
            max_evaluations=1_000 if small else 200,
            max_steps=10_000_000,
            stop_after=None,
        ),
        decoding=Decoding(beam=4, length_penalty=0.6, extra_length=50),
    )


def change(settings: Train, changes: Mapping[str, object]) -> Train:
    """The settings with some changed, by their dotted names such as model.heads; all are checked again."""
    tree: dict[str, Any] = {}
    for name, value in changes.items():
        *groups, last = name.split(".")
        place = tree
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = value
    try:
        return Train.model_validate(merge(settings.model_dump(), tree))
    except ValidationError as error:
        raise InputError(explain_validation(error, "settings of the experiment")) from None


def low_resource() -> Train:
    """Our own default for up to some 70,000 pairs: ScaleNorm with QKNorm, and words cut anew every epoch.

    Textbook positions, a cosine, no word dropout: chosen on the dev set of gl-en, size and batch on that of de-en too.
    """
    return Train(
        model=Model(
            width=512,
            feed_forward=2048,
            encoder_layers=6,
            decoder_layers=6,
            heads=4,
            norm="scale",
            dropout=Dropout(residual=0.3, embedding=0.3, attention=0.1, feed_forward=0.1, word=0.0),
        ),
        training=Training(
            batch_tokens=8_192,
            bpe_dropout=0.1,
            schedule=Schedule(kind="cosine", warmup=4_000, peak=1e-3),
            evaluate_every=500,
            max_steps=25_000,
            stop_after=None,
        ),
    )


def low_resource_small() -> Train:
    """The same for two CPU cores: a model that learns ten thousand pairs in under an hour, at a faster rate.

    Without BPE-dropout, which pays in longer trainings alone.
    """
    return Train(
        model=Model(
            width=256,
            feed_forward=1024,
            encoder_layers=3,
            decoder_layers=3,
            heads=4,
            norm="scale",
            dropout=Dropout.everywhere(0.1, word=0.0),
        ),
        training=Training(
            batch_tokens=2_048,
            schedule=Schedule(kind="cosine", warmup=600, peak=1.5e-3),
            evaluate_every=500,
            max_steps=4_500,
            stop_after=None,
        ),
    )


def demo() -> Train:
    """A model so small that two CPU cores train it in a minute, for the embedded corpus."""
    return Train(
        model=Model(
            width=128,
            feed_forward=384,
            encoder_layers=2,
            decoder_layers=2,
            heads=4,
            dropout=Dropout(residual=0.1, embedding=0.1, attention=0.0, feed_forward=0.0, word=0.0),
        ),
        training=Training(
            batch_tokens=1_024,
            schedule=Schedule(kind="cosine", warmup=80, peak=3e-3, floor=1e-4),
            evaluate_every=150,
            max_steps=600,
            stop_after=None,
            log_every=10,
        ),
        decoding=Decoding(beam=4),
    )


def character_lm() -> TrainLanguageModel:
    """The language model of López-Rubio et al. 2026 at p = 2.

    What they do not tell (learning rate, iterations, batch, start of the scale) is nanoGPT's for characters and the
    first paper's: our assumption.
    """
    return TrainLanguageModel()


def character_lm_small() -> TrainLanguageModel:
    """A language model so small that a CPU trains it in a few minutes."""
    return TrainLanguageModel(
        model=LanguageModel(
            width=128, feed_forward=512, layers=4, heads=4, context=64, dropout=LanguageModelDropout.everywhere(0.0)
        ),
        training=LanguageModelTraining(batch=16, max_steps=2_000),
    )


PRESETS: dict[str, Callable[[], AnyTrain]] = {
    "low-resource": low_resource,
    "low-resource-small": low_resource_small,
    "demo": demo,
    "character-lm": character_lm,
    "character-lm-small": character_lm_small,
    **{
        f"paper-{system}-{pair}": functools.partial(paper, pair, system)
        for system in ("qknorm", "baseline")
        for pair in PAIRS
    },
}

WITHOUT_A_GPU = {"low-resource": "low-resource-small", "character-lm": "character-lm-small"}
"""What takes the place of a default on a CPU, which would be at it for days."""


def preset(name: str) -> AnyTrain:
    """The settings of this name."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(PRESETS)}"
        raise InputError(f"there is no preset {name}; {hint}")
    return PRESETS[name]()
