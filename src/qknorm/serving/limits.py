"""How much of the machine anyone may take."""

from pydantic import Field

from qknorm.config.group import Settings


class Limits(Settings):
    """What a server takes on before it says no; the defaults are safe for a small machine."""

    body_bytes: int = Field(default=1 << 20, ge=1_024)
    """Largest body of a request, counted while it arrives."""
    characters: int = Field(default=20_000, ge=1)
    """Most characters in a request, all its texts together."""
    sentences: int = Field(default=500, ge=1)
    """Most sentences in a request, all its texts together."""
    beam: int = Field(default=8, ge=1)
    """Widest beam, and most alternatives, that a request may ask for."""
    seconds: float = Field(default=60, gt=0)
    """Longest that a request may take, waiting included."""
    requests: int = Field(default=64, ge=1)
    """Requests that are translated at the same time."""
    waiting: int = Field(default=64, ge=0)
    """Requests that wait beyond those; any more are told to come back later."""
    batch_sentences: int = Field(default=32, ge=1)
    """Most sentences that the model is given at once."""
    batch_wait_ms: float = Field(default=4, ge=0, le=1_000)
    """How long a sentence waits for others to share a batch with."""
    grace_seconds: int = Field(default=30, ge=0)
    """How long a server that was told to stop goes on with what it began."""
