"""How many requests are let in."""

import asyncio
import math


class Full(Exception):
    """There is no room, and none to wait in; `seconds` is when to try again."""

    def __init__(self, seconds: int) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class Gate:
    """Lets so many in at once and so many more wait; `enter` and `leave` go together."""

    def __init__(self, most: int, waiting: int) -> None:
        self._most, self._room, self._places = most, waiting, asyncio.Semaphore(most)
        self.inside, self.waiting = 0, 0
        self._mean_seconds = 0.5

    async def enter(self) -> float:
        """Waits for a place, or raises `Full`; the time of entry is what `leave` wants."""
        if self.inside + self.waiting >= self._most + self._room:
            raise Full(self._patience())
        self.waiting += 1
        try:
            await self._places.acquire()
        finally:
            self.waiting -= 1
        self.inside += 1
        return asyncio.get_running_loop().time()

    def leave(self, entered: float) -> None:
        """Makes room."""
        self.inside -= 1
        self._mean_seconds += 0.1 * (asyncio.get_running_loop().time() - entered - self._mean_seconds)
        self._places.release()

    def _patience(self) -> int:
        """By when those who wait now should have had their turn, from 1 to 60 s."""
        return max(1, min(60, math.ceil(self._mean_seconds * (self.waiting + 1) / self._most)))
