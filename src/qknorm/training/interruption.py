"""Signals that end a training between two steps, never within one."""

import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

AT_ONCE = 1.0
"""Seconds after which a second signal is a second wish: torchrun passes on what a terminal has sent already."""


class CalledOff(Exception):
    """Ends an evaluation that a signal came into: it changes nothing, and can be repeated."""


class Interruption:
    """Turns SIGINT and SIGTERM into a name that the loop looks at, so that a step is never cut in two.

    `told` is called with the first from within a handler of signals, where no buffered output is safe.
    """

    def __init__(self, told: Callable[[str], None] | None = None) -> None:
        self.name: str | None = None
        self._told = told
        self._noted_at = 0.0
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interruption":
        for each in (signal.SIGINT, signal.SIGTERM):
            try:
                self._former[each] = signal.signal(each, self._note)
            except ValueError:  # not the main thread: whoever runs us there handles signals
                break
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each, former in self._former.items():
            signal.signal(each, former)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.name is None:
            self.name, self._noted_at = signal.Signals(number).name, time.monotonic()
            if self._told is not None:
                self._told(self.name)
        elif time.monotonic() - self._noted_at > AT_ONCE:  # a second time means at once
            raise KeyboardInterrupt
