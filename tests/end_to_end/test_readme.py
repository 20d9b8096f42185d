"""What README.md and the guides tell people to type: commands parse, Python runs, settings are valid, links lead on."""

import functools
import importlib
import os
import re
import runpy
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import tyro

import qknorm
from qknorm.cli import main as cli_main
from qknorm.cli.corpora import Choice
from qknorm.cli.main import VERBS
from qknorm.cli.study import STUDIES
from qknorm.config import Train, read_settings
from qknorm.errors import InputError
from qknorm.studies.grid.jobs import code_version
from qknorm.studies.recipes import PRESETS
from qknorm.text.demo_corpus import generate

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def shell_lines() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for block in code_blocks(page, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                if line.strip():
                    yield page.name, line.strip()


def qknorm_words(line: str) -> list[str]:
    """The words after `qknorm`, or after `python -m qknorm`, up to a pipe or redirection."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|<>&;")
    lexer.whitespace_split = True
    words = list(lexer)
    words = words[words.index("qknorm") + 1 :]
    ends = [place for place, word in enumerate(words) if set(word) <= set("|<>&;")]
    return words[: ends[0]] if ends else words


def parse(words: list[str]) -> object:
    """Parses as the command does, without doing anything."""
    verb, rest = words[0], words[1:]
    assert verb in VERBS, f"there is no verb {verb}"
    module = importlib.import_module(f"qknorm.cli.{verb}")
    if verb == "train":
        return module._parse(rest)
    if verb == "study":
        module, rest = importlib.import_module(f"qknorm.cli.study_{rest[0]}"), rest[1:]
    return tyro.cli(Choice if verb == "corpora" else module.Arguments, args=rest)


COMMANDS = [(page, line) for page, line in shell_lines() if "qknorm" in line.split()]


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{page}-{line}" for page, line in COMMANDS])
def test_every_command_parses(page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for guide in PAGES:
        for settings in code_blocks(guide, "toml"):
            Path("my.toml").write_text(settings, encoding="utf-8")
    parse(qknorm_words(line))


def test_commands_of_every_verb_are_shown() -> None:
    shown = {qknorm_words(line)[0] for _, line in COMMANDS}
    assert shown == set(VERBS)
    assert any("make demo" in line for _, line in shell_lines())


def test_the_parser_refuses_what_is_wrong() -> None:
    """The test above means something: options and presets that do not exist fail in it."""
    with pytest.raises(SystemExit):
        parse(["translate", "runs/gl-en", "--inptu", "news.gl"])
    with pytest.raises(InputError, match="no preset"):
        parse(["train", "data", "--run", "runs/a", "--preset", "paper-qknorm-gl"])
    assert qknorm_words("cat a.gl | qknorm translate runs/gl-en > a.en") == ["translate", "runs/gl-en"]


def test_other_commands_name_things_that_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = [words for _, line in shell_lines() if "qknorm" not in (words := shlex.split(line, comments=True))]
    assert ["make", "demo"] in named
    for program, argument in named:
        assert program == "make" and argument in targets
    for page in PAGES:
        for script in re.findall(r"python (\S+\.py)", page.read_text(encoding="utf-8")):
            assert (ROOT / script).is_file(), script


def test_settings_in_toml_are_valid(tmp_path: Path) -> None:
    blocks = [block for page in PAGES for block in code_blocks(page, "toml")]
    assert blocks
    for block in blocks:
        path = tmp_path / "my.toml"
        path.write_text(block, encoding="utf-8")
        assert read_settings(path, Train) != Train()


def test_links_and_pictures_exist() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if not link.startswith(("http:", "https:")):
                assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_the_table_of_presets_is_complete() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first = re.findall(r"^\| `([a-z-]+)` \|", text, flags=re.MULTILINE)
    pairs = re.findall(r"`-([a-z]{2}-[a-z]{2})`", text)
    named = {*first, *(f"paper-{system}-{pair}" for system in ("qknorm", "baseline") for pair in pairs)}
    assert named == set(PRESETS)


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git on this machine")
def test_the_commit_that_made_a_run_is_found(tmp_path: Path) -> None:
    digests = runpy.run_path(str(ROOT / "docs" / "find_code.py"))["digests"]
    shutil.copytree(ROOT / "src" / "qknorm", tmp_path / "src" / "qknorm", ignore=shutil.ignore_patterns("__pycache__"))
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    own |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    git = functools.partial(subprocess.run, check=True, cwd=tmp_path, env=own)
    commit = ("git", "-c", "user.name=x", "-c", "user.email=x@x", "commit", "--quiet", "-am", "x")
    for words in (("git", "init", "--quiet"), ("git", "add", "."), commit):
        git(words)
    with (tmp_path / "src" / "qknorm" / "config" / "__init__.py").open("a", encoding="utf-8") as source:
        source.write("# changed\n")
    git(commit)
    newer, older = (digest for _, digest in digests(tmp_path))
    assert older == code_version().split("+")[1] != newer


def test_the_page_of_settings_is_what_the_source_says() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_settings.py"))
    assert made["PAGE"].read_text(encoding="utf-8") == made["make_page"](), "run python docs/make_settings.py"


def test_the_map_names_files_that_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("## Map")[1]
    inside = text.split("src/qknorm/\n")[1].split("\ntests/")[0]
    folder = current = ROOT / "src" / "qknorm"
    seen = 0
    for line in inside.splitlines():
        name = line.split()[0]
        place = folder if line.startswith("  ") and not line.startswith("    ") else current
        for each in re.findall(r"\b\w+\.py\b", line) or [name]:
            assert (place / each).exists(), f"{line.strip()}: {place / each}"
            seen += 1
        if name.endswith("/") and place == folder:
            current = folder / name
    assert seen > 20
    packages = {path.name for path in folder.iterdir() if (path / "__init__.py").is_file()}
    assert packages == {name.rstrip("/") for name in re.findall(r"^  (\w+/)", inside, flags=re.MULTILINE)}


@pytest.mark.slow
def test_python_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it stands, in order, but for settings of a model that trains in a moment."""
    monkeypatch.chdir(tmp_path)
    pairs = generate(120, seed=3)
    for side, language in enumerate(("gl", "en")):
        Path(f"train.{language}").write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8")
    monkeypatch.setattr(qknorm, "preset", lambda name: tiny(PRESETS[name]()))
    names: dict[str, object] = {}
    for block in code_blocks(ROOT / "README.md", "python"):
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert re.search(r"^\d+\.\d\d  nrefs:1\|", printed, flags=re.MULTILINE)
    comment = re.search(r"# (QKNorm\(.*\))", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert comment and comment[1] in printed


def tiny(settings: Train) -> Train:
    model = {"width": 16, "feed_forward": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    training = {"max_steps": 2, "evaluate_every": 2, "batch_tokens": 256}
    return settings.model_copy(
        update={
            "model": settings.model.model_copy(update=model),
            "training": settings.training.model_copy(update=training),
            "decoding": settings.decoding.model_copy(update={"beam": 1, "extra_length": 3}),
        }
    )


def test_options_in_running_text_exist(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    for words in [*([verb] for verb in VERBS), *(["study", name] for name in STUDIES)]:
        with pytest.raises(SystemExit) as ended:
            cli_main([*words, "--help"])
        assert ended.value.code == 0
    known = set(re.findall(r"--[a-z][a-z.-]+", capsys.readouterr().out))
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        named = {
            option for quoted in re.findall(r"`([^`]+)`", text) for option in re.findall(r"--[a-z][a-z.-]+", quoted)
        }
        assert named - {"--help"} <= known, f"{page.name} names {named - known}"
        if code_blocks(page, "sh"):
            assert named, f"{page.name} names no option any more; look at how this test finds them"
