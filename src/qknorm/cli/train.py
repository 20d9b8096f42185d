"""`qknorm train`."""

import itertools
import math
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from qknorm.cli.display import console, parse, suggest
from qknorm.config import AnyTrain, Train, TrainLanguageModel, read_settings
from qknorm.errors import InputError
from qknorm.export import Target
from qknorm.studies.recipes import WITHOUT_A_GPU, preset


@dataclass(frozen=True)
class Arguments:
    """Trains a translator on a folder that `qknorm prepare` wrote, or a language model on a text file.

    The settings below are those of a translator; `qknorm train TEXT --help` lists those of a language model.
    Their values are those of the preset for a GPU; with --preset NAME before --help, of another.

    Examples:

      qknorm train data/gl-en --run runs/gl-en

      qknorm train data/gl-en --run runs/gl-en --preset paper-qknorm-gl-en --training.seed 1

      qknorm train data/gl-en --run runs/gl-en --config my.toml --model.heads 4

      qknorm train data/gl-en --run runs/gl-en --resume

      qknorm train data/gl-en --run runs/gl-en --for ctranslate2 --model.attention.cross-query-norm width

      qknorm train shakespeare.txt --run runs/shakespeare

      torchrun --nproc-per-node 4 -m qknorm train data/gl-en --run-folder runs/gl-en
    """

    data: tyro.conf.Positional[Path]
    """Folder that `qknorm prepare` wrote, or a text file."""
    # an older argparse lets torchrun take --run for its own --run-path
    run: Annotated[Path, tyro.conf.arg(aliases=["--run-folder"])]
    """Run folder to write: settings, tokenizer, metrics, checkpoints. Under torchrun write --run-folder."""
    preset: str = "low-resource"
    """Settings to start from, such as paper-qknorm-gl-en; if not given, on a CPU low-resource-small."""
    config: Path | None = None
    """TOML file of settings that go over the preset's; options given here go over both."""
    resume: bool = False
    """Go on from the newest checkpoint of the run, with the run's own settings."""
    device: str | None = None
    """cpu or cuda; a GPU where there is one if not given."""
    quiet: bool = False
    """Print only the outcome."""
    export_to: Annotated[Target | None, tyro.conf.arg(name="for")] = None
    """Before the first step, export a random model of these settings to this target, and compare it."""
    settings: Annotated[Train, tyro.conf.arg(name="")] = field(default_factory=Train)


@dataclass(frozen=True)
class LanguageModelArguments:
    """Trains a language model on the characters of a text file, whose end is held out to evaluate on.

    The values of the settings below are those of the preset for a GPU; with --preset NAME before --help, of another.

    Examples:

      qknorm train shakespeare.txt --run runs/shakespeare

      qknorm train shakespeare.txt --run runs/p3 --model.attention.p 3 --model.attention.scale-matched

      qknorm train shakespeare.txt --run runs/small --preset character-lm-small --model.positions rotary

      qknorm train shakespeare.txt --run runs/shakespeare --resume
    """

    data: tyro.conf.Positional[Path]
    """Text file, UTF-8."""
    run: Annotated[Path, tyro.conf.arg(aliases=["--run-folder"])]
    """Run folder to write: settings, characters, metrics, checkpoints. Under torchrun write --run-folder."""
    preset: str = "character-lm"
    """Settings to start from; if not given, on a CPU character-lm-small."""
    config: Path | None = None
    """TOML file of settings that go over the preset's; options given here go over both."""
    resume: bool = False
    """Go on from the newest checkpoint of the run, with the run's own settings."""
    device: str | None = None
    """cpu or cuda; a GPU where there is one if not given."""
    quiet: bool = False
    """Print only the outcome."""
    settings: Annotated[TrainLanguageModel, tyro.conf.arg(name="")] = field(default_factory=TrainLanguageModel)


AnyArguments = Arguments | LanguageModelArguments


def run(words: Sequence[str]) -> None:
    """Parses and trains."""
    arguments, remark = _parse_for_device(list(words))
    from qknorm.inspection.observer import AttentionObserver  # these import PyTorch, which help does without
    from qknorm.training.fit import train

    if isinstance(arguments, Arguments) and arguments.export_to is not None:
        _check_export(arguments, arguments.export_to)
    outcome = train(
        arguments.data,
        arguments.run,
        arguments.settings,
        resume=arguments.resume,
        device=arguments.device,
        quiet=arguments.quiet,
        observer=AttentionObserver(),
        remark=remark,
    )
    if outcome is None:  # a process that does not lead its team
        _leave_team_at_once(0)
        return
    best = "not evaluated yet"
    if math.isfinite(outcome.best_score):
        told = outcome.criterion.in_words(outcome.best_score)
        best = f"best dev {outcome.criterion.name} {told} at step {outcome.best_step:,}"
    console.print(
        f"{outcome.reason} at step {outcome.step:,} after {outcome.seconds:,.0f} s; {best}",
        soft_wrap=True,
    )
    if outcome.interrupted:
        suggest("Go on", "qknorm", "train", arguments.data, "--run", arguments.run, "--resume")
        _leave_team_at_once(130)
        raise SystemExit(130)
    if isinstance(arguments, LanguageModelArguments):
        suggest("Next", "qknorm", "generate", arguments.run)
    else:
        suggest("Next", "qknorm", "score", arguments.run, "--split", "test")
    _leave_team_at_once(0)


def _check_export(arguments: Arguments, target: Target) -> None:
    from qknorm.export.check import check_export
    from qknorm.text.prepared import PreparedData
    from qknorm.training.run_folder import read_run

    settings = read_run(arguments.run)[0] if arguments.resume else arguments.settings
    apart = check_export(target, settings, PreparedData.load(arguments.data))
    if not arguments.quiet:
        console.print(
            f"Can be exported to {target}: a random model of these settings has log-probabilities within {apart:.1g} "
            f"of PyTorch's there",
            soft_wrap=True,
        )


def _leave_team_at_once(status: int) -> None:
    """Ends a process that torchrun started: threads of its process group can abort Python's own way out."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _parse_for_device(words: list[str]) -> tuple[AnyArguments, str]:
    """Where no GPU is to be used and no preset was asked for, options go over the small one, with a remark on it."""
    if _value_of(words, "--preset") is not None or {"--resume", "--help", "-h"} & set(words):
        return _parse(words), ""
    with suppress(InputError):  # what does not fit one preset may fit the other
        _parse(words)  # a wrong word is told here, and need not wait for PyTorch
    from qknorm.training.parallel import choose_device

    if choose_device(_value_of(words, "--device")).type != "cpu":
        return _parse(words), ""
    large = _kind(words).preset
    small = WITHOUT_A_GPU[large]
    remark = f"on a CPU the default is the preset {small}; the one for a GPU is --preset {large}"
    return _parse(["--preset", small, *words]), remark


def _parse(words: list[str]) -> AnyArguments:
    """Presets and files are the defaults that the options go over, so they are looked up first."""
    config, name = _value_of(words, "--config"), _value_of(words, "--preset")
    text = _text_file(words)
    kind = _kind(words)
    base = preset(name or kind.preset)
    if text is None and isinstance(base, TrainLanguageModel):
        kind = LanguageModelArguments  # the file may be missing: `train` says so
    if text is not None and isinstance(base, Train):
        raise InputError(f"{text} is a text file, and {name} a preset for prepared folders; use character-lm")
    base = _own_settings(words, kind) or base
    if config is not None:
        base = _read(Path(config), base)
    unset: dict[str, Any] = {"data": tyro.MISSING, "run": tyro.MISSING}
    defaults = kind(**unset, preset=name or kind.preset, settings=base)  # type: ignore[arg-type]
    parsed: AnyArguments = parse(kind, words, "train", default=defaults)
    return parsed


def _kind(words: list[str]) -> type[AnyArguments]:
    return Arguments if _text_file(words) is None else LanguageModelArguments


def _own_settings(words: list[str], kind: type[AnyArguments]) -> AnyTrain | None:
    """The settings of the run that is to go on, whatever it began with; None where there is none of this kind."""
    run = _value_of(words, "--run", "--run-folder")
    if "--resume" not in words or run is None:
        return None
    from qknorm.training.language_run import read_language_run
    from qknorm.training.run_folder import read_run

    try:
        return read_language_run(Path(run))[0] if kind is LanguageModelArguments else read_run(Path(run))[0]
    except InputError:
        return None


def _read(path: Path, base: AnyTrain) -> AnyTrain:
    if isinstance(base, TrainLanguageModel):
        return read_settings(path, TrainLanguageModel, base)
    return read_settings(path, Train, base)


def _text_file(words: list[str]) -> str | None:
    """The text file among the words, if there is one, which is no option nor the value of one of ours."""
    named = ("--run", "--run-folder", "--preset", "--config", "--device", "--for")
    free = [word for before, word in zip(["", *words], words, strict=False) if before not in named]
    return next((word for word in free if not word.startswith("-") and Path(word).is_file()), None)


def _value_of(words: list[str], *names: str) -> str | None:
    """The value that an option of these names, in which _ may stand for -, is given last."""
    found: str | None = None
    for word, after in itertools.zip_longest(words, words[1:]):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in names:
            found = value if equals else after
    return found
