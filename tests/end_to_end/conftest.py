"""Prepared data and trainings that many tests look at; nobody may change them."""

import pytest
from tasks import TINY, Learned, Tiny, call, prepare_task, upper


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("tiny")
    data = prepare_task(folder, upper, pairs=200, longest=5)
    config, run = folder / "tiny.toml", folder / "run"
    config.write_text(TINY, encoding="utf-8")
    call("train", data, "--run", run, "--config", config, "--device", "cpu")
    return Tiny(data, config, run)


@pytest.fixture(scope="session")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    folder = tmp_path_factory.mktemp("copy")
    data = prepare_task(folder, upper, pairs=3000, longest=6, merges=200)
    options = "--model.width 64 --model.feed-forward 128 --model.encoder-layers 1 --model.decoder-layers 1"
    options += " --training.batch-tokens 1024 --training.max-steps 160 --training.evaluate-every 80 --training.keep 2"
    call("train", data, "--run", folder / "run", "--preset", "demo", "--device", "cpu", *options.split())
    return Learned(data, folder / "text", folder / "run")
