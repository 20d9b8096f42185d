"""Every setting of the paper as a preset, one for each pair and system, and our own default."""

import difflib
import functools
from collections.abc import Callable

from qknorm.config import Attention, Decoding, Dropout, Model, Schedule, Train, Training
from qknorm.errors import InputError

PAIRS = ("en-vi", "ar-en", "en-he", "gl-en", "sk-en")
"""The paper's language pairs."""

MERGES = {"en-vi": 8_000, "ar-en": 8_000, "en-he": 8_000, "gl-en": 3_000, "sk-en": 8_000}
"""Joint BPE merges, which belong to `qknorm prepare`."""

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


def low_resource() -> Train:
    """Our own default for 5,000 to 200,000 pairs: a smaller model, textbook positions, inverse square root."""
    return Train(
        model=Model(
            width=512,
            feed_forward=1024,
            encoder_layers=5,
            decoder_layers=5,
            heads=4,
            dropout=Dropout.everywhere(0.3, word=0.1),
        ),
        training=Training(
            batch_tokens=4_096,
            schedule=Schedule(kind="inverse-sqrt", warmup=4_000, peak=7e-4),
            evaluate_every=500,
            max_steps=40_000,
            stop_after=10,
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
            keep=1,
        ),
        decoding=Decoding(beam=4),
    )


PRESETS: dict[str, Callable[[], Train]] = {
    "low-resource": low_resource,
    "demo": demo,
    **{
        f"paper-{system}-{pair}": functools.partial(paper, pair, system)
        for system in ("qknorm", "baseline")
        for pair in PAIRS
    },
}


def preset(name: str) -> Train:
    """The settings of this name."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(PRESETS)}"
        raise InputError(f"there is no preset {name}; {hint}")
    return PRESETS[name]()
