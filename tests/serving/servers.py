"""Small models, an engine that waits to be let go, and real servers on ports of their own."""

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from qknorm.config import Decoding, Model
from qknorm.decoding.translate import Alternative, TextTranslator, Translation
from qknorm.models.translator import Translator
from qknorm.serving.limits import Limits
from qknorm.serving.server import make_server
from qknorm.specials import END
from qknorm.text.subwords import SPACE, Tokenizer

LINES = ["O libro vermello é grande.", "A casa branca, a casa grande?", "The red book is big!", "הספר האדום גדול."]
PATIENCE = 30.0
"""Seconds after which a test that waits for something has failed; nothing depends on how soon it comes."""


def make_translator(source: str = "gl", target: str = "en") -> TextTranslator:
    """A translator with random weights: what it says means nothing, but it always says the same."""
    tokenizer = Tokenizer.train(LINES * 3, merges=25, pretokenized=False)
    allowed = torch.ones(tokenizer.size, dtype=torch.bool)
    allowed[:END] = False
    torch.manual_seed(1)
    shape = Model(width=16, feed_forward=32, encoder_layers=1, decoder_layers=1, heads=2)
    model = Translator(tokenizer.size, shape, scale_init=8.0, allowed=allowed)
    with torch.no_grad():  # far enough from uniform that rounding decides nothing
        model.output_bias.normal_()
        model.output_bias[END] += 1.0
        for parameter in model.parameters():
            parameter.mul_(2.0 if parameter.dim() > 1 else 1.0)
        begins_a_word = torch.tensor([token.startswith(SPACE) for token in tokenizer.tokens(range(tokenizer.size))])
        model.output_bias[begins_a_word] += 4.0
    return TextTranslator(model, tokenizer, source, target, Decoding(beam=2, extra_length=4), 40)


class HeldEngine:
    """Says a sentence in capitals, but not before it is let go; `began` is set when the first one comes."""

    source, target = "aa", "bb"

    def __init__(self) -> None:
        self.began, self.go = threading.Event(), threading.Event()
        self.batches: list[list[str]] = []

    def explain(self, texts: Sequence[str], **options: object) -> list[Translation]:
        self.batches.append(list(texts))
        self.began.set()
        assert self.go.wait(PATIENCE)
        return [Translation(text.upper(), -1.0, [Alternative(text.upper(), -1.0)]) for text in texts]


class BrokenEngine:
    """Fails, with words that are nobody's business."""

    source, target = "xx", "yy"

    def explain(self, texts: Sequence[str], **options: object) -> list[Translation]:
        raise RuntimeError("/secret/path/weights.safetensors")


class Running:
    """A server that runs in a thread."""

    def __init__(self, server, port: int, thread: threading.Thread) -> None:
        self.server, self.port, self.thread = server, port, thread
        self.address = f"http://127.0.0.1:{port}"
        self.client = pytest.importorskip("httpx").Client(base_url=self.address, timeout=PATIENCE)

    def translate(self, **asked: object):
        return self.client.post("/translate", json=asked)

    def metric(self, start: str) -> float:
        """The value of the first sample whose line begins so; 0 if there is none."""
        lines = self.client.get("/metrics").text.splitlines()
        return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(start)), 0.0)

    def wait_for_metric(self, start: str, value: float) -> None:
        """Waits until a sample has this value."""
        pause = threading.Event()
        for _ in range(int(PATIENCE / 0.02)):
            if self.metric(start) == value:
                return
            pause.wait(0.02)
        raise AssertionError(f"{start} never was {value}:\n{self.client.get('/metrics').text}")

    def begin_stop(self) -> None:
        self.server.should_exit = True


@contextmanager
def serving(engines: dict, limits: Limits | None = None, **options: object) -> Iterator[Running]:
    """A server for these engines, stopped at the end; skips where it cannot be had."""
    for package in ("fastapi", "uvicorn", "httpx"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    listener = socket.create_server(("127.0.0.1", 0))
    server = make_server(engines, limits or Limits(batch_wait_ms=1), port=0, **options)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    running = Running(server, listener.getsockname()[1], thread)
    pause = threading.Event()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        pause.wait(0.01)
    try:
        yield running
    finally:
        running.client.close()
        running.begin_stop()
        thread.join(server.config.timeout_graceful_shutdown + PATIENCE)  # it waits for what is under way
        listener.close()
        assert not thread.is_alive(), "the server did not stop"
