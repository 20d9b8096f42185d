"""The text that is studied, as character ids: a file, Tiny Shakespeare where it is here, else sentences of our own."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qknorm.errors import InputError
from qknorm.text.characters import Characters, read_text
from qknorm.text.corpora import local_folder, text_file
from qknorm.text.demo_corpus import generate

CORPUS = "tinyshakespeare"
OWN_TEXT = "sentences of our own grammar"
OWN_SENTENCES = 5_000
OWN_SEED = 2026


@dataclass(frozen=True)
class Text:
    """Characters as ids, the smallest integers that hold them, and where they come from."""

    name: str
    ids: Tensor
    vocabulary: int
    digest: str


def find_text(file: Path | None = None, characters: int | None = None) -> Text:
    """The file; else the corpus, under QKNORM_DATA or downloaded before; else about 200 kB from our own grammar."""
    if file is not None:
        return make_text(file.name, read_text(file), characters)
    if local_folder(CORPUS) is not None:
        return make_text(CORPUS, read_text(text_file(CORPUS)), characters)
    english = [pair[1] for pair in generate(OWN_SENTENCES, OWN_SEED)]
    return make_text(OWN_TEXT, "\n".join(english) + "\n", characters)


def make_text(name: str, content: str, characters: int | None = None) -> Text:
    """`content`, or its first so many characters, as ids; every character that occurs is a type."""
    content = content[:characters]
    if not content:
        raise InputError(f"{name} is empty; give a text of at least some thousand characters")
    types = Characters.of(content)
    narrow = np.uint8 if types.size <= 256 else np.int32
    ids = torch.from_numpy(types.encode(content).astype(narrow))
    digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()
    return Text(name, ids, types.size, digest)
