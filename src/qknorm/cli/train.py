"""`qknorm train`."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from qknorm.cli.display import console, parse, suggest
from qknorm.config import Train, read_settings
from qknorm.studies.recipes import preset


@dataclass(frozen=True)
class Arguments:
    """Trains a translator on a folder that `qknorm prepare` wrote, or goes on training one.

    Examples:

      qknorm train data/gl-en --run runs/gl-en

      qknorm train data/gl-en --run runs/gl-en --preset paper-qknorm-gl-en --training.seed 1

      qknorm train data/gl-en --run runs/gl-en --config my.toml --model.heads 4

      qknorm train data/gl-en --run runs/gl-en --resume

      torchrun --nproc-per-node 4 -m qknorm train data/gl-en --run-folder runs/gl-en
    """

    data: tyro.conf.Positional[Path]
    """Folder that `qknorm prepare` wrote."""
    # an older argparse lets torchrun take --run for its own --run-path
    run: Annotated[Path, tyro.conf.arg(aliases=["--run-folder"])]
    """Run folder to write: settings, tokenizer, metrics, checkpoints. Under torchrun write --run-folder."""
    preset: str = "low-resource"
    """Settings to start from: low-resource, or paper-qknorm-PAIR and paper-baseline-PAIR for the paper's five pairs."""
    config: Path | None = None
    """TOML file of settings that go over the preset's; options given here go over both."""
    resume: bool = False
    """Go on from the newest checkpoint of the run, with the run's own settings."""
    device: str | None = None
    """cpu or cuda; a GPU where there is one if not given."""
    quiet: bool = False
    """Print only the outcome."""
    settings: Annotated[Train, tyro.conf.arg(name="")] = field(default_factory=Train)


def run(words: Sequence[str]) -> None:
    """Parses and trains."""
    from qknorm.training.fit import train

    arguments = _parse(list(words))
    as_it_was = arguments.resume and arguments.settings == preset(Arguments.preset)
    outcome = train(
        arguments.data,
        arguments.run,
        None if as_it_was else arguments.settings,
        resume=arguments.resume,
        device=arguments.device,
        quiet=arguments.quiet,
    )
    if outcome is None:  # a process that does not lead its team
        _leave_team_at_once(0)
        return
    console.print(
        f"{outcome.reason} at step {outcome.step:,} after {outcome.seconds:,.0f} s; best dev BLEU "
        f"{outcome.best_score:.2f} at step {outcome.best_step:,}",
        soft_wrap=True,
    )
    if outcome.interrupted:
        suggest("Go on", "qknorm", "train", arguments.data, "--run", arguments.run, "--resume")
        _leave_team_at_once(130)
        raise SystemExit(130)
    suggest("Next", "qknorm", "score", arguments.run, "--split", "test")
    _leave_team_at_once(0)


def _leave_team_at_once(status: int) -> None:
    """Ends a process that torchrun started: threads of its process group can abort Python's own way out."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _parse(words: list[str]) -> Arguments:
    """Presets and files are the defaults that the options go over, so they are looked up first."""
    name = _value_of(words, "--preset") or Arguments.preset
    base = preset(name)
    config = _value_of(words, "--config")
    if config is not None:
        base = read_settings(Path(config), Train, base)
    defaults = Arguments(data=tyro.MISSING, run=tyro.MISSING, preset=name, settings=base)
    parsed: Arguments = parse(Arguments, words, "train", default=defaults)
    return parsed


def _value_of(words: list[str], option: str) -> str | None:
    for place, word in enumerate(words):
        if word == option and place + 1 < len(words):
            return words[place + 1]
        if word.startswith(option + "="):
            return word.partition("=")[2]
    return None
