"""The folder that `prepare` writes: its file names, its manifest, and how it is opened again."""

import json
import math
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qknorm.errors import InputError
from qknorm.text.readers import read_lines
from qknorm.text.subwords import Tokenizer

FORMAT_VERSION = 1
MANIFEST = "prepared.json"
TOKENIZER = "tokenizer.json"
TARGET_TYPES = "target_types.npy"
_AGAIN = "run qknorm prepare again"

TokenIds = NDArray[np.uint16] | NDArray[np.uint32]


def text_name(split: str, language: str) -> str:
    """Cleaned text, one sentence a line."""
    return f"{split}.{language}"


def ids_name(split: str, language: str) -> str:
    """Token ids of all sentences one after another, without start or end."""
    return f"{split}.{language}.ids.npy"


def offsets_name(split: str, language: str) -> str:
    """Where each sentence begins in the ids, and where the last one ends."""
    return f"{split}.{language}.offsets.npy"


def read_manifest(folder: Path) -> dict[str, Any]:
    """What prepared.json says; refuses folders that are not ours, damaged, or of another version."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder; make it with qknorm prepare")
    if not path.is_file():
        raise InputError(f"{folder} has no {MANIFEST}, so it is not prepared data; make it with qknorm prepare")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise InputError(f"{path} is damaged; {_AGAIN}") from None
    if not isinstance(manifest, dict) or "format_version" not in manifest:
        raise InputError(f"{path} was not written by qknorm prepare; name another folder")
    if manifest["format_version"] != FORMAT_VERSION:
        raise InputError(
            f"{path} has format {manifest['format_version']}, this version reads {FORMAT_VERSION}; {_AGAIN}"
        )
    return manifest


def fingerprint(folder: Path, names: Iterable[str]) -> str:
    """A hash of the content of these files."""
    total = blake2b(digest_size=16)
    for name in sorted(names):
        total.update(f"{name}\n{(folder / name).stat().st_size}\n".encode())
        with (folder / name).open("rb") as file:
            while block := file.read(1 << 20):
                total.update(block)
    return total.hexdigest()


def percentile(histogram: Mapping[int, int], percent: float) -> float:
    """The value below which this share of a histogram lies, between two values on the straight line."""
    if not 0 <= percent <= 100:
        raise ValueError(f"a percentile is between 0 and 100, got {percent}")
    if not histogram:
        raise ValueError("an empty histogram has no percentiles")
    values = np.array(sorted(histogram))
    ends = np.cumsum([histogram[int(value)] for value in values])
    position = percent / 100 * (int(ends[-1]) - 1)
    below, above = (
        float(values[np.searchsorted(ends, rank, side="right")]) for rank in (math.floor(position), math.ceil(position))
    )
    return below + (position - math.floor(position)) * (above - below)


class Sentences:
    """One side of a split as token ids, mapped from disk: `sentences[i]` is an array, `len` the number of sentences."""

    def __init__(self, ids: TokenIds, offsets: NDArray[np.int64]) -> None:
        self.ids = ids
        self.offsets = offsets
        self.lengths: NDArray[np.int64] = np.diff(offsets)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> TokenIds:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sentence {index} of {len(self)}")
        index %= len(self)
        return self.ids[self.offsets[index] : self.offsets[index + 1]]


class Split:
    """The pairs of one split: token ids of both sides, and the cleaned text."""

    def __init__(self, folder: Path, name: str, source: str, target: str, pairs: int) -> None:
        self.name = name
        self._folder = folder
        self._languages = (source, target)
        self._pairs = pairs
        self.source = _load_sentences(folder, name, source, pairs)
        self.target = _load_sentences(folder, name, target, pairs)

    def __len__(self) -> int:
        return self._pairs

    def text(self, language: str) -> list[str]:
        """The cleaned sentences of one language."""
        if language not in self._languages:
            raise InputError(f"{self._folder} holds {' and '.join(self._languages)}, not {language}")
        path = self._folder / text_name(self.name, language)
        lines = list(read_lines(path))
        if len(lines) != self._pairs:
            raise InputError(f"{path} has {len(lines):,} lines where {self._pairs:,} are due; {_AGAIN}")
        return lines


class PreparedData:
    """What `prepare` wrote, checked and opened; `load` is the way in."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.source: str = manifest["source"]
        self.target: str = manifest["target"]
        self.fingerprint: str = manifest["fingerprint"]
        self.splits: tuple[str, ...] = tuple(manifest["splits"])
        self.tokenizer = Tokenizer.load(folder / TOKENIZER)
        self.target_types: NDArray[np.bool_] = _load_array(folder / TARGET_TYPES)
        if self.tokenizer.size != manifest["vocabulary"]:
            raise InputError(
                f"{folder / TOKENIZER} has {self.tokenizer.size:,} types, not the {manifest['vocabulary']:,} "
                f"that {MANIFEST} tells of; {_AGAIN}"
            )
        if self.target_types.shape != (self.tokenizer.size,) or self.target_types.dtype != np.bool_:
            raise InputError(f"{folder / TARGET_TYPES} does not fit the vocabulary; {_AGAIN}")
        self._lengths = {int(length): int(count) for length, count in manifest["train_lengths"]}

    @classmethod
    def load(cls, folder: str | Path) -> "PreparedData":
        """Opens a folder after checking its version and that every file is there in its full size."""
        folder = Path(folder)
        manifest = read_manifest(folder)
        try:
            for name, size in manifest["files"].items():
                path = folder / name
                if not path.is_file():
                    raise InputError(f"{path} is missing; {_AGAIN}")
                if path.stat().st_size != size:
                    raise InputError(f"{path} has {path.stat().st_size:,} bytes, not {size:,}: it is damaged; {_AGAIN}")
            return cls(folder, manifest)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{folder / MANIFEST} is damaged ({error!r}); {_AGAIN}") from None

    def split(self, name: str) -> Split:
        """The split of this name: train, dev or test."""
        if name not in self.splits:
            raise InputError(f"{self.folder} has no split {name}; it has {', '.join(self.splits)}")
        return Split(self.folder, name, self.source, self.target, self.manifest["splits"][name]["pairs"])

    def length_percentile(self, percent: float) -> float:
        """Of training sentences, both sides together, the length in subwords that this percentage stays within."""
        return percentile(self._lengths, percent)


def _load_sentences(folder: Path, split: str, language: str, pairs: int) -> Sentences:
    ids = _load_array(folder / ids_name(split, language))
    offsets = _load_array(folder / offsets_name(split, language))
    whole = (
        ids.ndim == offsets.ndim == 1
        and ids.dtype in (np.uint16, np.uint32)
        and len(offsets) == pairs + 1
        and offsets[0] == 0
        and offsets[-1] == len(ids)
        and bool(np.all(np.diff(offsets) >= 0))
    )
    if not whole:
        raise InputError(f"{folder / offsets_name(split, language)} does not fit the ids beside it; {_AGAIN}")
    return Sentences(ids, offsets)


def _load_array(path: Path) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise InputError(f"{path} is missing; {_AGAIN}") from None
    except (OSError, ValueError, EOFError):
        raise InputError(f"{path} is damaged; {_AGAIN}") from None
    return array
