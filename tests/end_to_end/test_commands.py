"""What the command says of itself, and of words it does not know."""

import pytest
from tasks import call, refuse, succeed

from qknorm.cli import main
from qknorm.cli.main import VERBS
from qknorm.version import __version__


def end_of(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = end_of(capsys, verb, "--help")
    assert status == 0
    assert "Example" in out
    assert out.count(f"qknorm {verb}") >= 2  # the usage, and an example
    assert "Traceback" not in out


def test_no_verb_shows_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = end_of(capsys)
    assert status == 2
    assert all(verb in out for verb in VERBS)
    assert end_of(capsys, "--help") == (0, out, "")


def test_version_through_the_module() -> None:
    assert call("--version").stdout == f"qknorm {__version__}\n"


def test_unknown_verb_suggests_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert refuse(capsys, "trian") == "qknorm: there is no verb trian; did you mean train?"


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ("corpora", "study")])
def test_unknown_option(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = end_of(capsys, verb, "somewhere", "--bananas", "3")
    assert status == 2
    assert "--bananas" in err
    assert "Traceback" not in err


def test_unknown_setting_suggests_one(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = end_of(capsys, "train", "data", "--run", "run", "--model.haeds", "4")
    assert status == 2
    assert "--model.heads" in err


def test_corpora_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    out = succeed(capsys, "corpora")
    assert "ted-gl-en" in out
    assert out == succeed(capsys, "corpora", "list")
