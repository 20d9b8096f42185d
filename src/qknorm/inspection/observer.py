"""The attentions of a model that `qknorm train` trains: measured every so many steps, in a pass of their own."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from qknorm.inspection.judgement import Finding, Sample, find
from qknorm.inspection.measures import Measures
from qknorm.inspection.monitor import AttentionMonitor
from qknorm.models.translator import Translator
from qknorm.specials import PAD

KIND = "attention"
"""Of the lines in metrics.jsonl."""
SENTENCES = 8
"""Of a batch that are measured."""
MOST_STEPS = 256
"""Steps of a history that are kept to judge by."""


class Observation(NamedTuple):
    """What was measured at a step, to be written down, and what there is to say about it."""

    heads: dict[str, dict[str, list[float]]]
    """By attention and measure, a number a head, of five digits."""
    means: dict[str, dict[str, float]]
    """By attention and measure, one number."""
    warnings: list[str]
    """New since the last observation."""


class AttentionObserver:
    """Measures a few sentences of a batch, and warns once of each thing that goes wrong with an attention.

    The model runs in eval mode, uncompiled, and without drawing random numbers, so that training goes on as it would.
    """

    def __init__(self) -> None:
        self._history: list[Sample] = []
        self._told: set[tuple[str, str]] = set()

    def recall(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Takes up the observations in lines of metrics.jsonl, for a training that goes on."""
        self._history = [
            Sample(int(row["step"]), name, Measures.from_dict(numbers))
            for row in rows
            if row.get("kind") == KIND
            for name, numbers in row[KIND].items()
        ]
        self._history = _thinned(self._history)
        self._new(find(self._history))  # what was wrong at the end has been told

    def __call__(self, step: int, model: nn.Module, *inputs: Tensor) -> Observation:
        """Observes the model on the first sentences of the inputs it was trained on at this step."""
        real = {}
        few = [x[:SENTENCES] for x in inputs]
        if isinstance(model, Translator):
            sentences = (inputs[1] != PAD).any(dim=1)  # the other rows fill a batch up to its shape
            few = [x[sentences][:SENTENCES] for x in inputs]
            real = dict(zip(("encoder", "decoder"), (x != PAD for x in few), strict=True))
        monitor = AttentionMonitor(model, batch=SENTENCES)
        measured = monitor.probe(lambda: model(*few), step=step, real=real)
        self._history = _thinned(self._history + monitor.history)
        return Observation(
            {name: _rounded(measures.as_dict()) for name, measures in measured.items()},
            {name: measures.mean() for name, measures in measured.items()},
            [finding.text for finding in self._new(find(self._history, cure=_cure(model)))],
        )

    def _new(self, findings: Iterable[Finding]) -> list[Finding]:
        """Those not told of before; what has passed may be told of when it comes back."""
        found = {(finding.kind, finding.name): finding for finding in findings}
        new = [finding for key, finding in found.items() if key not in self._told]
        self._told = set(found)
        return new


def _rounded(numbers: dict[str, list[float]]) -> dict[str, list[float]]:
    """Five digits of each: a line for metrics.jsonl is long enough with them."""
    return {name: [float(f"{number:.5g}") for number in column] for name, column in numbers.items()}


def _thinned(history: list[Sample]) -> list[Sample]:
    """Without every other step of the older half once there are many, so that judging stays cheap."""
    steps = sorted({sample.step for sample in history})
    if len(steps) <= MOST_STEPS:
        return history
    older = steps[: len(steps) // 2]
    dropped = set(older[1::2])
    return [sample for sample in history if sample.step not in dropped]


def _cure(model: nn.Module) -> str:
    """What helps, in settings of `qknorm train`."""
    attention = getattr(getattr(model, "settings", None), "attention", None)
    if getattr(attention, "qk_norm", "lp") == "lp":
        return "lower training.schedule.peak, or lengthen training.schedule.warmup"
    return "lower training.schedule.peak, or bound the logits with model.attention.qk_norm = lp"
