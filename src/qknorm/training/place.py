"""How far a training has come."""

import math
from dataclasses import dataclass


@dataclass
class Place:
    """How far a training has come: all that decides what its next step does, besides the tensors."""

    step: int = 0
    epoch: int = 0
    position: int = 0
    evaluations: int = 0
    best_score: float = -math.inf
    best_step: int = 0
    since_best: int = 0
    loss: float | None = None
    """Of the steps logged last."""
    evaluation_due: bool = False
    """Whether this step is still to be evaluated: a signal stops an evaluation, and who goes on begins with it."""
