"""What a terminal, a log or a disk cannot take ends no command in a traceback; help is there at once."""

import errno
import io
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from qknorm.cli import corpora, translate
from qknorm.cli.main import VERBS, main
from qknorm.cli.study import STUDIES
from qknorm.files import atomic_path

COMMANDS = (*VERBS, *(f"study {name}" for name in STUDIES), "corpora list", "corpora download")
HEAVY = {
    "ctranslate2", "fastapi", "lxml", "matplotlib", "onnx", "onnxruntime", "polib", "ray", "sacrebleu", "sacremoses",
    "safetensors", "scipy", "starlette", "tensorboard", "torch", "transformers", "triton", "uvicorn",
}  # fmt: skip
NEEDED = {"score": {"lxml", "sacrebleu", "sacremoses"}}
"""Where the module that has a command's settings imports them."""
HELP_THEN_WRONG_WORD = """
import sys
from qknorm.cli import main
statuses = []
for word in ("--help", "--bananas"):
    try:
        main([*sys.argv[1:], word])
    except SystemExit as ended:
        statuses.append(ended.code)
print(*statuses)
print(*{name.partition(".")[0] for name in sys.modules})
"""


def fail(run: Callable[[Sequence[str]], None], monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    """The status that the command ends with where a verb does this."""
    monkeypatch.setattr(corpora, "run", run)
    with pytest.raises(SystemExit) as ended:
        main(["corpora"])
    return ended.value.code


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_letters_that_a_log_does_not_have_are_replaced(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(log, encoding=encoding, write_through=True))
    monkeypatch.setattr(corpora, "run", lambda _: print("gl → en"))
    main(["corpora"])
    assert log.getvalue().splitlines() == [b"gl ? en"]
    with translate._destination(None) as out:  # translations are data, and stay whole
        out.write("→")
        out.flush()
    assert log.getvalue().splitlines()[1:] == ["→".encode()]


@pytest.mark.parametrize("full", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_names_the_file_and_the_way_out(
    full: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: Sequence[str]) -> None:
        with atomic_path(tmp_path / "out.txt"):
            raise OSError(full, os.strerror(full))  # as `write` does, which knows no name

    assert fail(run, monkeypatch) == 1
    told = capsys.readouterr().err
    assert told == f"qknorm: {tmp_path / 'out.txt'}: {os.strerror(full)}; make room or name another place\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_under_standard_output_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as always_full:
        monkeypatch.setattr(sys, "stdout", always_full)
        assert fail(lambda _: print("a line that is not flushed"), monkeypatch) == 1
    told = capsys.readouterr().err
    assert told == "qknorm: standard output: No space left on device; make room or name another place\n"
    with Path("/dev/full").open("w", encoding="utf-8") as always_full:
        monkeypatch.setattr(sys, "stdout", always_full)
        with pytest.raises(SystemExit, match="1"):
            main(["--help"])
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("command", COMMANDS)
def test_neither_help_nor_a_wrong_word_waits_for_heavy_packages(command: str) -> None:
    told = subprocess.run(
        [sys.executable, "-c", HELP_THEN_WRONG_WORD, *command.split()], capture_output=True, text=True, check=True
    )
    *helped, statuses, imported = told.stdout.splitlines()
    assert f"usage: qknorm {command}" in "\n".join(helped)
    assert statuses == "0 2", told.stderr
    assert HEAVY & {*imported.split()} <= NEEDED.get(command, set())
