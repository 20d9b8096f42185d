"""A run folder is whole: settings, tokenizer, versions, commit, metrics, weights; nothing else is needed to use it."""

import json
import platform
import subprocess
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy
import tokenizers
import tomli_w
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from qknorm import files
from qknorm.config import AnyTrain, Settings, Train, explain_validation
from qknorm.decoding.translate import TextTranslator
from qknorm.errors import InputError
from qknorm.models import quantized
from qknorm.models.translator import Translator, start_of_scale
from qknorm.specials import END
from qknorm.text.prepared import PreparedData
from qknorm.text.subwords import Tokenizer
from qknorm.training.checkpoint import Which, load_model_weights
from qknorm.training.metrics import METRICS_FILE
from qknorm.training.parallel import choose_device
from qknorm.version import __version__

FORMAT_VERSION = 1
SETTINGS, ABOUT, TOKENIZER = "settings.toml", "run.json", "tokenizer.json"
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TRANSLATOR, LANGUAGE_MODEL = "translator", "language model"
_WRITTEN_IN_TRAINING = (SETTINGS, ABOUT, TOKENIZER, METRICS_FILE, "curves.png")


class Vocabulary(Protocol):
    """What a run keeps of how text became ids."""

    def save(self, path: Path) -> None:
        """Writes it to a file."""


@dataclass(frozen=True)
class Facts:
    """What the settings of any run do not say but its model needs, and what made it."""

    vocabulary: int
    scale_init: float | None
    scale_length: float
    data: str
    fingerprint: str
    versions: dict[str, str]
    commit: str | None


FactsKind = TypeVar("FactsKind", bound=Facts)
SettingsKind = TypeVar("SettingsKind", bound=Settings)


@dataclass(frozen=True)
class About(Facts):
    """The facts of a translator."""

    source: str
    target: str
    longest: int


def create_run(run: Path, settings: Train, data: PreparedData) -> About:
    """Lays out a new run folder for a translator."""
    length = data.length_percentile(settings.model.attention.scale_percentile)
    about = About(
        source=data.source,
        target=data.target,
        vocabulary=data.tokenizer.size,
        scale_init=start_of_scale(settings.model, length),
        scale_length=length,
        longest=int(data.length_percentile(100)),
        data=str(data.folder.resolve()),
        fingerprint=data.fingerprint,
        versions=versions(),
        commit=commit(),
    )
    lay_out(run, settings, data.tokenizer, asdict(about))
    return about


def lay_out(run: Path, settings: AnyTrain, vocabulary: Vocabulary, facts: dict[str, Any]) -> None:
    """Writes what makes a folder a run, also over what a training left that died in doing so."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        clear_half_written(run)
        write_settings(run, settings)
        vocabulary.save(run / TOKENIZER)
        # last: it makes the folder a run
        files.write_json(run / ABOUT, {"format_version": FORMAT_VERSION, **facts})
    except OSError as error:
        raise InputError(f"{run} cannot be written ({error.strerror}); make room or name another --run") from error


def versions() -> dict[str, str]:
    """Of what the numbers of a run may depend on."""
    return {
        "qknorm": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "tokenizers": tokenizers.__version__,
    }


def write_settings(run: Path, settings: AnyTrain) -> None:
    """The settings as a TOML file that `qknorm train --config` also reads; what is left open is written as "none"."""
    files.write_text(run / SETTINGS, tomli_w.dumps(_with_none_spelled_out(settings.model_dump(mode="json"))))


def _with_none_spelled_out(group: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _with_none_spelled_out(value) if isinstance(value, dict) else "none" if value is None else value
        for name, value in group.items()
    }


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run."""
    return (folder / ABOUT).is_file()


def clear_half_written(run: Path) -> None:
    """Removes what a training that was killed while it wrote left behind."""
    for name in _WRITTEN_IN_TRAINING:
        for partial in run.glob(f".{name}.*.partial"):
            partial.unlink(missing_ok=True)


def is_unborn(folder: Path) -> bool:
    """Whether a folder is empty, or holds no more than what dies with a `create_run` that did not come to its end."""
    return all(entry.name in (SETTINGS, TOKENIZER) or entry.match(".*.partial") for entry in folder.iterdir())


def read_run(run: Path) -> tuple[Train, About]:
    """The settings and facts of a translator; refuses other runs, what is no run, damaged, or of another version."""
    facts = read_facts(run)
    if facts.pop("task", TRANSLATOR) != TRANSLATOR:
        raise InputError(f"{run} is a language model and does not translate; write text with qknorm generate {run}")
    return read_own_settings(run, Train), known_facts(run, About, facts)


def known_facts(run: Path, kind: type[FactsKind], facts: dict[str, Any]) -> FactsKind:
    """The facts as an object; refuses unknown and missing ones."""
    try:
        return kind(**facts)
    except TypeError as error:
        raise _damaged(run, error) from None


def task_of(run: Path) -> str:
    """What a run is: a translator or a language model."""
    return str(read_facts(run).get("task", TRANSLATOR))


def read_facts(run: Path) -> dict[str, Any]:
    """What run.json says, its version checked and left out; refuses what is no run."""
    if not is_run(run):
        raise InputError(f"{run} is no run folder (it has no {ABOUT}); make one with qknorm train")
    try:
        about: dict[str, Any] = json.loads((run / ABOUT).read_text(encoding="utf-8"))
        version = about.pop("format_version")
    except (ValueError, KeyError, AttributeError):
        raise InputError(f"{run / ABOUT} is damaged; train again, or restore it from a copy") from None
    if version != FORMAT_VERSION:
        raise InputError(
            f"{run} was written by another version of qknorm (run format {version}, this one reads {FORMAT_VERSION}); "
            f"use the version in its {ABOUT}"
        )
    return about


def read_own_settings(run: Path, kind: type[SettingsKind]) -> SettingsKind:
    """The settings that a run was trained by."""
    try:
        return kind.model_validate(tomllib.loads((run / SETTINGS).read_text(encoding="utf-8")))
    except ValidationError as error:
        raise InputError(explain_validation(error, str(run / SETTINGS), kind)) from None
    except (OSError, ValueError) as error:
        raise _damaged(run, error) from None


def _damaged(run: Path, error: Exception) -> InputError:
    return InputError(f"{run} is damaged ({error}); train again, or restore it from a copy")


def allowed_types(settings: Train, data: PreparedData) -> Tensor | None:
    """Marks the types that a model may produce: those in the training text, and the end; None where it may all.

    With BPE-dropout these are all that the text can be cut into: a target that may not be produced teaches nothing.
    """
    if not settings.model.logit_mask:
        return None
    allowed = torch.from_numpy(data.target_types.copy())
    if settings.training.bpe_dropout:
        allowed[data.tokenizer.types_within(data.split("train").text(data.target))] = True
    allowed[END] = True  # every sentence may
    return allowed


def build_model(settings: Train, about: About, allowed: Tensor | None = None) -> Translator:
    """A fresh model of a run's settings."""
    return Translator(about.vocabulary, settings.model, scale_init=about.scale_init, allowed=allowed)


def load_translator(
    run: str | Path,
    *,
    checkpoint: Which | Path = "best",
    device: str | None = None,
    precision: str = "float32",
    quantize: str | None = None,
) -> TextTranslator:
    """A trained translator, ready for `translate`: from a run folder, at its best checkpoint unless told otherwise.

    `checkpoint` is best, last, a step, or a file of weights that `qknorm average` wrote; `precision` is float32 or
    bfloat16, faster where the processor has instructions for it; `quantize="int8"` is faster still, on the CPU.
    """
    if precision not in PRECISIONS:
        raise InputError(f"precision {precision} is not known; use {' or '.join(PRECISIONS)}")
    check_quantize(quantize, precision)
    run, place = Path(run), choose_device("cpu" if quantize and device is None else device)
    settings, about = read_run(run)
    model = build_model(settings, about)
    put_weights(model, run, about, checkpoint)
    tokenizer = Tokenizer.load(run / TOKENIZER, f"copy it from the prepared folder {about.data}")
    check_size(run, tokenizer.size, about)
    model.to(place)
    return TextTranslator(
        quantized.quantize(model) if quantize else model,
        tokenizer,
        about.source,
        about.target,
        settings.decoding,
        about.longest,
        precision=PRECISIONS[precision],
    )


def check_quantize(quantize: str | None, precision: str = "float32") -> None:
    """Refuses a kind that is not known, or that does not go with the precision."""
    if quantize not in (None, *quantized.KINDS):
        raise InputError(f"quantize {quantize} is not known; use {' or '.join(quantized.KINDS)}, or leave it out")
    if quantize and precision != "float32":
        raise InputError(f"quantize {quantize} goes with precision float32, not {precision}; leave one of them out")


def put_weights(model: nn.Module, run: Path, about: Facts, checkpoint: Which | Path) -> None:
    """Gives a fresh model the weights of a checkpoint, or of a file."""
    weights = _read_weights(checkpoint) if isinstance(checkpoint, Path) else load_model_weights(run, checkpoint)
    try:
        model.load_state_dict(weights)
    except RuntimeError:
        raise InputError(
            f"the weights do not fit the settings of {run} (vocabulary of {about.vocabulary:,}): they belong to "
            f"another run, or {SETTINGS} was changed"
        ) from None


def check_size(run: Path, size: int, about: Facts) -> None:
    """Refuses a tokenizer that is not the one a run was trained with."""
    if size != about.vocabulary:
        raise InputError(
            f"{run / TOKENIZER} has {size:,} types but the weights have {about.vocabulary:,}: restore the "
            f"tokenizer this model was trained with"
        )


def _read_weights(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; qknorm average writes such a file") from None
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is damaged or no safetensors file ({error})") from None


def commit() -> str | None:
    """The commit of the code, where it runs from a checkout."""
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None
