"""The run folder of a language model: as whole as a translator's, and laid out and read by the same code."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qknorm.config import TrainLanguageModel
from qknorm.decoding.generate import TextGenerator
from qknorm.errors import InputError
from qknorm.models.language_model import LanguageModel
from qknorm.models.translator import start_of_scale
from qknorm.text.characters import Characters, CharacterText
from qknorm.training.checkpoint import Which
from qknorm.training.parallel import choose_device
from qknorm.training.run_folder import (
    LANGUAGE_MODEL,
    PRECISIONS,
    TOKENIZER,
    Facts,
    check_size,
    commit,
    known_facts,
    lay_out,
    put_weights,
    read_facts,
    read_own_settings,
    versions,
)


def split_text(text: CharacterText, settings: TrainLanguageModel) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """The ids to train on and those to evaluate on; refuses a text that is too short for either."""
    train, dev = text.split(settings.training.held_out)
    context = settings.model.context
    if len(train) <= context:
        raise InputError(
            f"{text.path} leaves {len(train):,} characters to train on, too few for a window of {context:,} and the "
            f"one after it; lower model.context, or give more text"
        )
    if len(dev) < 2:
        raise InputError(
            f"{text.path} leaves {len(dev)} characters to evaluate on; raise training.held_out, or give more text"
        )
    return train, dev


def create_language_run(run: Path, settings: TrainLanguageModel, text: CharacterText) -> Facts:
    """Lays out a new run folder for a language model."""
    split_text(text, settings)  # what is refused leaves no folder
    about = Facts(
        vocabulary=text.tokenizer.size,
        scale_init=start_of_scale(settings.model, settings.model.context),
        scale_length=settings.model.context,
        data=str(text.path.resolve()),
        fingerprint=text.fingerprint,
        versions=versions(),
        commit=commit(),
    )
    lay_out(run, settings, text.tokenizer, {"task": LANGUAGE_MODEL, **asdict(about)})
    return about


def read_language_run(run: Path) -> tuple[TrainLanguageModel, Facts]:
    """The settings and facts of a language model; refuses other runs and what is no run, as `read_run` does."""
    facts = read_facts(run)
    if facts.pop("task", None) != LANGUAGE_MODEL:
        raise InputError(f"{run} is a translator, not a language model; translate with qknorm translate {run}")
    return read_own_settings(run, TrainLanguageModel), known_facts(run, Facts, facts)


def build_language_model(settings: TrainLanguageModel, about: Facts) -> LanguageModel:
    """A fresh model of a run's settings."""
    return LanguageModel(about.vocabulary, settings.model, scale_init=about.scale_init)


def load_generator(
    run: str | Path, *, checkpoint: Which | Path = "best", device: str | None = None, precision: str = "float32"
) -> TextGenerator:
    """A trained language model, ready for `generate`; the options are those of a translator's `load`."""
    if precision not in PRECISIONS:
        raise InputError(f"precision {precision} is not known; use {' or '.join(PRECISIONS)}")
    run, place = Path(run), choose_device(device)
    settings, about = read_language_run(run)
    model = build_language_model(settings, about)
    put_weights(model, run, about, checkpoint)
    characters = Characters.load(run / TOKENIZER)
    check_size(run, characters.size, about)
    return TextGenerator(model.to(place), characters, settings.generation, precision=PRECISIONS[precision])
