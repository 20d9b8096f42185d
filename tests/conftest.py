"""Settings for all tests: one thread a worker, fixed seeds, the corpora where QKNORM_DATA has them."""

import gc
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from interpreted import patch_once_a_launch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as for all that a shell starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # xdist already runs a worker on every core
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start, which would wait for each other
settings.register_profile("default", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("default")
if os.environ.get("TRITON_INTERPRET") == "1":
    patch_once_a_launch()
    gc.set_threshold(200_000, 50, 50)  # the interpreter makes small objects without end, hardly any of them in cycles


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def corpora() -> Path:
    """The folder of corpora that QKNORM_DATA names; tests that need it skip where it is absent."""
    folder = os.environ.get("QKNORM_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("QKNORM_DATA names no folder of corpora")
    return Path(folder)


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    """A headless Chromium; tests that need one skip where it is absent."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip("there is no Chromium on this machine")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()
