"""Who looks on as attention is computed; with nobody there it costs nothing, and nobody has it computed otherwise."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

ONLOOKERS: list[Callable[..., Any]] = []
"""Each is called with a function to go on with, `unit_keys`, and what an attention was given; it returns the result."""


def shown(*, unit_keys: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Shows every call of the decorated function to all onlookers; `unit_keys` tells that its keys are normalised."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            # asked first: torch.compile would compile again whenever the list changes, had it to look at it
            if torch.compiler.is_compiling() or not ONLOOKERS:
                return function(*args, **kwargs)
            run: Callable[..., R] = function
            for onlooker in ONLOOKERS:
                run = functools.partial(onlooker, run, unit_keys)
            return run(*args, **kwargs)

        return call

    return decorate
