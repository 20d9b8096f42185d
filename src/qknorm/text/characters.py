"""A text as a sequence of characters: which there are, and which id each of them has."""

import json
import zlib
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qknorm import files
from qknorm.errors import InputError
from qknorm.text.readers import explain_no_utf8, open_bytes

KIND = "characters"


class Characters:
    """The vocabulary of a text: its characters in the order of their code points, numbered from 0."""

    def __init__(self, characters: str) -> None:
        if not characters or list(characters) != sorted(set(characters)):
            raise ValueError("a vocabulary is at least one character, each once, in the order of their code points")
        self.characters = characters
        self._codes = _codes(characters)

    @classmethod
    def of(cls, text: str) -> "Characters":
        """The vocabulary of a text."""
        return cls("".join(sorted(set(text))))

    @property
    def size(self) -> int:
        """How many characters there are."""
        return len(self.characters)

    def encode(self, text: str) -> NDArray[np.int64]:
        """The id of every character; refuses one that is not in the vocabulary."""
        codes = _codes(text)
        ids = np.searchsorted(self._codes, codes)
        known = self._codes[np.minimum(ids, self.size - 1)] == codes
        if not known.all():
            stranger = text[int(np.argmin(known))]
            raise InputError(
                f"the character {stranger!r} (U+{ord(stranger):04X}) does not occur in the text this model was "
                f"trained on; leave it out"
            )
        return ids.astype(np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids."""
        return "".join(self.characters[i] for i in ids)

    def save(self, path: Path) -> None:
        """Writes the vocabulary as JSON."""
        files.write_json(path, {"kind": KIND, "characters": self.characters})

    @classmethod
    def load(cls, path: Path) -> "Characters":
        """Reads what `save` wrote."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["kind"] != KIND:
                raise ValueError(content["kind"])
            if not isinstance(content["characters"], str):
                raise TypeError(type(content["characters"]))
            return cls(content["characters"])
        except FileNotFoundError:
            raise InputError(f"{path} is missing; restore it from a copy, or train again") from None
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            raise InputError(f"{path} is no vocabulary of characters; restore it from a copy, or train again") from None


class CharacterText:
    """A text file as ids of its characters; `load` is the way in."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.tokenizer = Characters.of(text)
        self.fingerprint = blake2b(text.encode("utf-8"), digest_size=16).hexdigest()
        narrow = np.min_scalar_type(self.tokenizer.size - 1)
        self.ids: NDArray[np.integer] = self.tokenizer.encode(text).astype(narrow)

    @classmethod
    def load(cls, path: str | Path) -> "CharacterText":
        """The text of a file, as `read_text` reads it."""
        return cls(Path(path), read_text(Path(path)))

    def __len__(self) -> int:
        return len(self.ids)

    def split(self, held_out: float) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
        """The ids to train on, and this share of them, at the end, to evaluate on."""
        edge = len(self.ids) - round(len(self.ids) * held_out)
        return self.ids[:edge], self.ids[edge:]


def read_text(path: Path) -> str:
    """Reads UTF-8, also packed by gzip; line ends of Windows count as one character, a byte-order mark as none."""
    with open_bytes(path) as file:
        try:
            raw = file.read()
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{path} cannot be read to its end ({error}); fetch or pack it again") from None
    if (at := raw.find(b"\0")) >= 0:
        raise explain_no_utf8(path, raw.count(b"\n", 0, at) + 1, raw, at)
    try:
        text = raw.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise explain_no_utf8(path, line, raw, error.start) from None
    if not text:
        raise InputError(f"{path} is empty; name a file with text")
    return text


def _codes(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
