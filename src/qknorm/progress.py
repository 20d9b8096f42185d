"""How far a long job is, told while it runs."""

from collections.abc import Callable

Progress = Callable[[str, int, int | None], None]
"""Called with what is done, how much of it, and out of how much where that is known."""
