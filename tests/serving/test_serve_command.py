"""`qknorm serve` as people start and stop it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from qknorm.cli import main
from qknorm.cli.serve import read_key
from qknorm.config import Decoding, Model, Prepare, Subwords, Train, Training
from qknorm.errors import InputError
from qknorm.serving.limits import Limits
from qknorm.serving.server import is_local, make_server
from qknorm.text.prepare import prepare
from qknorm.training.fit import train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, which has learned nothing."""
    folder = tmp_path_factory.mktemp("serve")
    words = ("o libro", "a casa", "o gato", "a mesa", "o can", "a porta")
    lines = [f"{one} e {other} {number}" for one in words for other in words for number in range(3)]
    sides = folder / "train.gl", folder / "train.en"
    for side, change in zip(sides, (str.lower, str.upper), strict=True):
        side.write_text("".join(f"{change(line)}\n" for line in lines), encoding="utf-8")
    corpus = Prepare(source="gl", target="en", train=sides, subwords=Subwords(merges=20))
    prepare(corpus, folder / "data")
    settings = Train(
        model=Model(width=16, feed_forward=32, encoder_layers=1, decoder_layers=1, heads=2),
        training=Training(max_steps=2, evaluate_every=2, dev_sentences=2, batch_tokens=256),
        decoding=Decoding(beam=2, extra_length=3),
    )
    train(folder / "data", folder / "run", settings, device="cpu")
    return folder / "run"


@pytest.mark.slow
def test_it_serves_until_it_is_told_to_stop(run: Path) -> None:
    for package in ("fastapi", "uvicorn"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    words = ["serve", str(run), str(run), "--port", "0", "--device", "cpu", "--limits.characters", "50"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "QKNORM_API_KEY": "correct-horse", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "qknorm", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    try:
        line = process.stdout.readline()
        found = re.match(r"Serving gl-en, gl-en-2 at (http://127\.0\.0\.1:\d+) ", line)
        assert found, line or process.communicate()
        request = urllib.request.Request(
            f"{found[1]}/translate",
            json.dumps({"text": "o libro", "pair": "gl-en-2"}).encode(),
            {"Content-Type": "application/json", "Authorization": "Bearer correct-horse"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["translations"][0]["sentences"][0]["source"] == "o libro"
        process.send_signal(signal.SIGTERM)
        said, complained = process.communicate(timeout=60)
    finally:
        process.kill()
    assert complained == "" and said == ""
    assert process.returncode in (0, -signal.SIGTERM)


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *map(str, words)])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_bad_input_is_told_in_a_sentence(run, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("QKNORM_API_KEY", raising=False)
    assert "name a run folder" in refusal(capsys)
    assert "no run folder" in refusal(capsys, tmp_path)
    assert "from 0 to 65535" in refusal(capsys, run, "--port", "70000")
    assert "key.txt cannot be read" in refusal(capsys, run, "--api-key-file", tmp_path / "key.txt")
    pytest.importorskip("fastapi", reason="fastapi is not installed")
    pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = refusal(capsys, run, "--port", taken.getsockname()[1], "--device", "cpu")
        assert "cannot listen on 127.0.0.1" in said and "--port" in said
    assert "cannot listen on nowhere.invalid" in refusal(capsys, run, "--host", "nowhere.invalid", "--device", "cpu")


@pytest.mark.parametrize("content", ["", "  \n", "two words", "ключ", "a\x00b"])
def test_a_key_that_no_header_could_carry_is_refused(tmp_path, content):
    (tmp_path / "key").write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match="holds no key"):
        read_key(tmp_path / "key")


def test_a_key_comes_from_a_file_or_from_the_environment(tmp_path, monkeypatch):
    (tmp_path / "key").write_text("from-file\n", encoding="utf-8")
    assert read_key(tmp_path / "key") == "from-file"
    monkeypatch.setenv("QKNORM_API_KEY", "from-environment")
    assert read_key(None) == "from-environment"
    assert read_key(tmp_path / "key") == "from-file"
    monkeypatch.delenv("QKNORM_API_KEY")
    assert read_key(None) is None


def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(InputError, match=r"uvicorn.*pip install 'qknorm\[serve\]'"):
        make_server({}, Limits())


def test_which_addresses_are_this_machine_alone():
    assert all(map(is_local, ("127.0.0.1", "127.1.2.3", "::1", "localhost", "LOCALHOST")))
    assert not any(map(is_local, ("0.0.0.0", "::", "192.168.1.2", "example.org")))
