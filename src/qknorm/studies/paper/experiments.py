"""The experiments as data: which systems a table compares, by which settings they differ, and with what."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from qknorm.config import Train
from qknorm.errors import InputError
from qknorm.studies.published import SIGNIFICANCE, Scorer, published_bleu
from qknorm.studies.recipes import PAIRS, change, paper
from qknorm.text.catalogue import suggestion

PEAK = 1 / math.sqrt(512 * 8_000)
"""The learning rate at the end of the paper's warm-up."""
USUAL_SIGNIFICANCE = 0.05
"""For what the paper states without a test."""


@dataclass(frozen=True)
class System:
    """One of the paper's two recipes with some settings changed."""

    name: str
    what: str
    base: Literal["qknorm", "baseline"] = "qknorm"
    changes: Mapping[str, object] = field(default_factory=dict)
    against: str | None = None
    """What it is compared with; the experiment's reference if not given."""

    def settings(self, recipe: str, seed: int) -> Train:
        """What to train with, by the recipe of one of the paper's pairs."""
        return change(paper(recipe, self.base), {**self.changes, "training.seed": seed})


@dataclass(frozen=True)
class Experiment:
    """A table: its systems, the one that the others are compared with, and the paper's own pairs."""

    name: str
    title: str
    systems: tuple[System, ...]
    reference: str
    pairs: tuple[str, ...] = ()
    """Where the paper has numbers; what it does not have runs on the pair that is asked for."""
    where: str | None = None
    scorer: Scorer = "moses"
    significance: float = USUAL_SIGNIFICANCE

    def published(self, pair: str, system: str) -> float | None:
        """The paper's number."""
        return None if self.where is None else published_bleu(self.where, pair, system)

    def choose(self, names: Sequence[str]) -> "Experiment":
        """The experiment with these systems alone, and the one they are compared with; all of them for no names."""
        if not names:
            return self
        wanted = {each.name for each in self.systems} & set(names)
        wanted |= {each.against or self.reference for each in self.systems if each.name in wanted}
        return replace(self, systems=tuple(each for each in self.systems if each.name in wanted))


BASELINE = System("baseline", "Nguyen & Salazar 2019: ScaleNorm, dot products", base="baseline")
QKNORM = System("qknorm", "QKNorm and LayerNorm")


def _varied(name: str, what: str, setting: str, values: Sequence[float]) -> tuple[System, ...]:
    return tuple(System(f"{name}-{value:g}", what.format(f"{value:g}"), "qknorm", {setting: value}) for value in values)


def _both(name: str, what: str, changes: Mapping[str, object]) -> tuple[System, ...]:
    """A change made to both of the paper's systems, QKNorm compared with the baseline that bears the same change."""
    return (
        System(f"{name}-baseline", f"baseline, {what}", "baseline", changes),
        System(f"{name}-qknorm", f"QKNorm, {what}", "qknorm", changes, against=f"{name}-baseline"),
    )


_SCALENORM, _DOT_PRODUCTS = {"model.norm": "scale"}, {"model.attention.qk_norm": "none"}
_ABLATIONS = (
    QKNORM,
    System(
        "without-g",
        "g fixed at 1",
        changes={"model.attention.scale_init": 1.0, "model.attention.scale_learned": False},
    ),
    System("without-layernorm", "no norm around sublayers", changes={"model.norm": "none"}),
    System("without-fixnorm", "word vectors of any length", changes={"model.fixnorm": False}),
    System(
        "without-fixnorm-prenorm",
        "word vectors of any length, norms after sublayers",
        changes={"model.fixnorm": False, "model.norm_position": "post"},
    ),
    System("values-normalised", "V normalised too", changes={"model.attention.normalize_values": True}),
)
_CONTROL = System("layernorm-dot-products", "LayerNorm, dot products", changes=_DOT_PRODUCTS)

TABLES: dict[str, Experiment] = {
    each.name: each
    for each in (
        Experiment("2", "Test BLEU", (BASELINE, QKNORM), "baseline", PAIRS, "Table 2", "moses", SIGNIFICANCE),
        Experiment("3", "Test BLEU", (BASELINE, QKNORM), "baseline", PAIRS, "Table 3", "sacrebleu", SIGNIFICANCE),
        Experiment(
            "4",
            "Heads",
            _varied("heads", "{} heads", "model.heads", (2, 4, 8, 16, 32)),
            "heads-8",
            ("en-vi",),
            "Table 4",
        ),
        Experiment(
            "5",
            "The percentile of training lengths that g starts from",
            _varied(
                "percentile",
                "percentile {}",
                "model.attention.scale_percentile",
                (75.0, 90.0, 92.5, 95.0, 97.5, 99.0, 100.0),
            ),
            "percentile-97.5",
            ("en-vi",),
            "Table 5",
        ),
        Experiment("6", "Ablations", _ABLATIONS, "qknorm", ("en-vi",), "Table 6"),
    )
}
"""The paper's tables of scores."""

BEYOND: dict[str, Experiment] = {
    each.name: each
    for each in (
        Experiment(
            "control",
            "Which of the paper's two changes does it: the norm around sublayers, or the attention",
            (
                _CONTROL,
                BASELINE,
                System("scalenorm-qknorm", "ScaleNorm, QKNorm", changes=_SCALENORM),
                QKNORM,
            ),
            "layernorm-dot-products",
        ),
        Experiment(
            "norms",
            "Other ways to normalise queries and keys",
            (
                QKNORM,
                System("per-head-g", "a g for every head", changes={"model.attention.scale_per_head": True}),
                System("rms", "RMSNorm on queries and keys", changes={"model.attention.qk_norm": "rms"}),
            ),
            "qknorm",
        ),
        Experiment(
            "width-query",
            "The price of a cross-attention that CTranslate2 can run: its queries normalised over the model's width",
            (
                QKNORM,
                System(
                    "width-query",
                    "cross-attention's queries normalised over the width",
                    changes={"model.attention.cross_query_norm": "width"},
                ),
            ),
            "qknorm",
        ),
        Experiment(
            "lp",
            "The p of the Lp norm, the scale started at the temperature of p = 2",
            (
                QKNORM,
                *(
                    System(
                        f"p-{p:g}",
                        f"p = {p:g}, matched",
                        changes={"model.attention.p": p, "model.attention.scale_matched": True},
                    )
                    for p in (1.5, 3.0, 4.0)
                ),
            ),
            "qknorm",
        ),
        Experiment(
            "warmup",
            "Steps of warm-up, to the same learning rate",
            tuple(
                system
                for steps in (8_000, 4_000, 1_000, 0)
                for system in _both(
                    f"warmup-{steps}",
                    f"{steps:,} steps",
                    {"training.schedule.warmup": steps, "training.schedule.peak": PEAK} if steps != 8_000 else {},
                )
            ),
            "warmup-8000-baseline",
        ),
        Experiment(
            "bpe-dropout",
            "BPE-dropout",
            (
                *_both("bpe-dropout-0", "every merge", {}),
                *_both("bpe-dropout-0.1", "BPE-dropout 0.1", {"training.bpe_dropout": 0.1}),
            ),
            "bpe-dropout-0-baseline",
        ),
        Experiment(
            "learning-rate",
            "The learning rate, times the paper's",
            tuple(
                system
                for times in (1.0, 0.5, 2.0, 4.0)
                for system in _both(
                    f"rate-{times:g}",
                    f"learning rate × {times:g}",
                    {"training.schedule.peak": times * PEAK} if times != 1 else {},
                )
            ),
            "rate-1-baseline",
        ),
        Experiment(
            "depth",
            "Layers of the encoder and of the decoder",
            tuple(
                system
                for layers in (2, 4, 6, 8)
                for system in _both(
                    f"depth-{layers}",
                    f"{layers} + {layers} layers",
                    {"model.encoder_layers": layers, "model.decoder_layers": layers},
                )
            ),
            "depth-4-baseline",
        ),
    )
}
"""What the paper leaves open, and the control it lacks."""

EXPERIMENTS = {**TABLES, **BEYOND}


def find_experiment(name: str) -> Experiment:
    """The experiment of this name; an unknown one is an error that suggests the nearest."""
    if name not in EXPERIMENTS:
        raise InputError(f"there is no experiment {name}{suggestion(name, EXPERIMENTS)}")
    return EXPERIMENTS[name]


def check_systems(names: Sequence[str], experiments: Sequence[Experiment]) -> None:
    """Refuses a system that none of the experiments has."""
    known = {system.name for experiment in experiments for system in experiment.systems}
    for name in names:
        if name not in known:
            raise InputError(f"--systems: there is no {name} in what is asked for{suggestion(name, known)}")


def make_quick(settings: Train) -> Train:
    """The same experiment in small, for two CPU cores: every setting that a table varies still varies."""
    model, training = settings.model, settings.training
    rate = (training.schedule.peak or PEAK) / PEAK
    return change(
        settings,
        {
            "model.width": 64,
            "model.feed_forward": 128,
            "model.encoder_layers": max(1, model.encoder_layers // 2),
            "model.decoder_layers": max(1, model.decoder_layers // 2),
            "model.dropout": {"residual": 0.1, "embedding": 0.1, "attention": 0.0, "feed_forward": 0.0, "word": 0.0},
            "training.batch_tokens": 1_024,
            "training.max_steps": 100,
            "training.evaluate_every": 50,
            "training.log_every": 10,
            "training.dev_sentences": 50,
            "training.keep": 1,
            "training.schedule.warmup": training.schedule.warmup // 200,
            "training.schedule.peak": 4e-3 * rate,
            "training.schedule.floor": 1e-6,
        },
    )
