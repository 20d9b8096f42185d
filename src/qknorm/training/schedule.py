"""Learning rates over the steps, and when a plateau lowers them or ends the training."""

import math
from dataclasses import dataclass, field

from qknorm.config import Schedule


@dataclass
class LearningRate:
    """The rate for each step; `evaluated` tells it dev scores, which matter to the plateau kind alone."""

    settings: Schedule
    width: int
    max_steps: int
    factor: float = 1.0
    scores: list[float] = field(default_factory=list)

    @property
    def peak(self) -> float:
        """The rate at the end of warm-up."""
        if self.settings.peak is not None:
            return self.settings.peak
        return 1 / math.sqrt(self.width * max(1, self.settings.warmup))

    def at(self, step: int) -> float:
        """The rate of a step, counted from 1."""
        warmup = self.settings.warmup
        if step < warmup:
            return self.peak * step / warmup
        if self.settings.kind == "plateau":
            return self.peak * self.factor
        if self.settings.kind == "inverse-sqrt":
            return self.peak * math.sqrt(max(1, warmup) / max(1, step, warmup))
        progress = min(1.0, (step - warmup) / max(1, self.max_steps - warmup))
        return self.settings.floor + (self.peak - self.settings.floor) * 0.5 * (1 + math.cos(math.pi * progress))

    def evaluated(self, step: int, score: float) -> None:
        """Takes note of a dev score; below each of the last `patience` ones it is a plateau, and the rate falls."""
        recent = self.scores[-self.settings.patience :]
        full = len(recent) == self.settings.patience
        if self.settings.kind == "plateau" and step >= self.settings.warmup and full and score < min(recent):
            self.factor *= self.settings.decay
        self.scores.append(score)

    def ended(self, step: int) -> bool:
        """Whether a plateau has taken the rate under its floor."""
        return self.settings.kind == "plateau" and step >= self.settings.warmup and self.at(step) < self.settings.floor
