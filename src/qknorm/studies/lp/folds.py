"""Folds by contiguous blocks, with a gap as long as the context on both sides of the block that is held out.

Neighbouring characters of one text tell each other's secrets. Shuffled folds would leak across every edge; blocks have
two edges, and the gap keeps every training window at least a context away from them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qknorm.errors import InputError

Span = tuple[int, int]  # from, to: the last is not included


@dataclass(frozen=True)
class Fold:
    """The held-out block and the spans of training text around it and its gaps."""

    number: int
    held_out: Span
    training: tuple[Span, ...]


def make_folds(length: int, count: int, context: int) -> list[Fold]:
    """`count` blocks of a text of `length` characters, which partition it; sizes differ by one at most."""
    edges = [length * number // count for number in range(count + 1)]
    if length // count < 2:
        raise InputError(f"a text of {length:,} characters is too short for {count} folds; give more text")
    return [_make_fold(number, (edges[number], edges[number + 1]), length, context) for number in range(count)]


def _make_fold(number: int, held_out: Span, length: int, context: int) -> Fold:
    spans = ((0, held_out[0] - context), (held_out[1] + context, length))
    training = tuple((start, end) for start, end in spans if end - start > context)  # room for a window and its target
    if not training:
        raise InputError(
            f"beside fold {number} of {length:,} characters no window of {context} is left to train on; give more "
            f"text, or a smaller --model.context or --fold-count"
        )
    return Fold(number, held_out, training)


def draw_starts(fold: Fold, context: int, iterations: int, batch: int, seed: int) -> Tensor:
    """Where the windows of every batch start, int32 (iterations, batch): evenly over all that lie in training text.

    A window is `context` characters and the one after them, the last target.
    """
    generator = torch.Generator().manual_seed(seed)
    rooms = [end - start - context for start, end in fold.training]
    places = torch.randint(sum(rooms), (iterations, batch), generator=generator)
    starts = places + fold.training[0][0]
    if len(rooms) == 2:
        jump = fold.training[1][0] - fold.training[0][0] - rooms[0]
        starts = torch.where(places >= rooms[0], starts + jump, starts)
    return starts.to(torch.int32)


@dataclass(frozen=True)
class HeldOut:
    """The windows that cover a held-out block: input, target, and which targets count, so that each counts once."""

    inputs: Tensor
    targets: Tensor
    counted: Tensor

    @property
    def total(self) -> int:
        """Characters predicted: all of the block but its first."""
        return int(self.counted.sum())


def cover(ids: Tensor, held_out: Span, context: int) -> HeldOut:
    """Windows side by side over the block; the last reaches back for a full context and counts only what is new.

    In a block shorter than the context there is one short window.
    """
    block = ids[held_out[0] : held_out[1]].long()
    context = min(context, len(block) - 1)
    starts = list(range(0, len(block) - context, context))
    fresh = [0] * len(starts)
    covered = starts[-1] + context
    if covered < len(block) - 1:
        starts.append(len(block) - 1 - context)
        fresh.append(covered - starts[-1])
    places = torch.tensor(starts).unsqueeze(1) + torch.arange(context)
    counted = torch.arange(context) >= torch.tensor(fresh).unsqueeze(1)
    return HeldOut(block[places], block[places + 1], counted)
