"""Joint BPE: words cut into subwords that both languages share, in the paper's manner or without loss for raw text."""

import json
import math
import random
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from qknorm import files
from qknorm.errors import InputError
from qknorm.specials import END, PAD, START, UNKNOWN
from qknorm.text.cutting import find_spelled

SPECIALS = ("<pad>", "<unk>", "<s>", "</s>")
SPACE = "▁"
END_OF_WORD = "</w>"

_LETTERS = r"\p{L}\p{M}\x{200C}\x{200D}"
_PIECES = rf"{SPACE}?[{_LETTERS}]+|{SPACE}?\p{{N}}|{SPACE}?[^{_LETTERS}\p{{N}}{SPACE}]+|{SPACE}"
"""A run of letters, a single digit, or a run of anything else, each with the space before it."""

_LEAST_COUNT = 2  # a merge seen once is no regularity
_PRIVATE_USE = range(0xF0000, 0x10FFFE)
_LONGEST_WORD_WITH_DROPOUT = 500  # longer "words" are noise, and dropout's cost grows with the square of the length
_MOST_KNOWN_CHUNKS = 200_000

Ids = tuple[int, ...]


def choose_merges(pairs: int) -> int:
    """Merges for a corpus: 2,000 at 5,000 pairs, doubled whenever the corpus grows fourfold, 1,000 to 16,000.

    A type must be seen often to be learned, and the number of types seen n times grows with the root of the text.
    """
    merges = 2_000 * math.sqrt(max(pairs, 1) / 5_000)
    return int(min(16_000, max(1_000, 500 * round(merges / 500))))


class Tokenizer:
    """Text to token ids and back. Ids 0 to 3 are padding, unknown, start and end; text never yields the others."""

    pad_id, unknown_id, start_id, end_id = PAD, UNKNOWN, START, END

    def __init__(self, vocabulary: dict[str, int], merges: Sequence[tuple[str, str]], pretokenized: bool) -> None:
        self.pretokenized = pretokenized
        self.merges = len(merges)
        self.size = len(vocabulary)
        self._vocabulary = vocabulary
        self._types = sorted(vocabulary, key=vocabulary.__getitem__)
        self.ranks = {
            (vocabulary[left], vocabulary[right]): (rank, vocabulary[left + right])
            for rank, (left, right) in enumerate(merges)
        }
        """Of each pair of symbols that is merged its rank, and what it makes."""
        self._backend = _build_backend(vocabulary, merges, pretokenized)
        self._forget()

    @classmethod
    def train(cls, lines: Iterable[str], merges: int, pretokenized: bool) -> "Tokenizer":
        """Learns at most `merges` merges; the same lines give the same tokenizer."""
        if pretokenized:
            alphabet, learned = _learn_pretokenized(list(lines), merges)
        else:
            alphabet, learned = _learn(_build_backend({}, [], pretokenized), list(lines), merges)
        vocabulary = {token: number for number, token in enumerate((*SPECIALS, *alphabet))}
        for left, right in learned:
            vocabulary.setdefault(left + right, len(vocabulary))
        return cls(vocabulary, learned, pretokenized)

    def encode(self, text: str) -> list[int]:
        """Token ids of a cleaned line, without start or end."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for many lines; quicker, for each stretch between spaces is worked out once and remembered."""
        rows = [text.split(" ") if text else [] for text in texts]  # no subword reaches over a space
        known = self._ids
        fresh = list({chunk for row in rows for chunk in row if chunk not in known})
        encodings = self._backend.encode_batch_fast(fresh, add_special_tokens=False)
        known.update(zip(fresh, (encoding.ids for encoding in encodings), strict=True))
        encoded = [[number for chunk in row for number in known[chunk]] for row in rows]
        if len(known) > _MOST_KNOWN_CHUNKS:
            self._forget()
        return encoded

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; special ones are skipped."""
        tokens = self.tokens(number for number in ids if number >= len(SPECIALS))
        if not self.pretokenized:
            return "".join(tokens).replace(SPACE, " ").removeprefix(" ")
        spaced = (f"{token.removesuffix(END_OF_WORD)} " if token.endswith(END_OF_WORD) else token for token in tokens)
        return "".join(spaced).removesuffix(" ")

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Each token as it is written in the vocabulary."""
        return [self._types[number] for number in ids]

    def encode_with_dropout(self, text: str, dropout: float, rng: random.Random) -> list[int]:
        """Token ids by BPE-dropout (Provilkov et al. 2020): a merge that is due is skipped with this probability.

        Repeatable by the state of `rng`; without dropout it equals `encode`. For whole texts `cutting` does it faster.
        """
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout must be between 0 and 1, got {dropout}")
        words = (word for chunk in text.split(" ") for word in self.spell(chunk)) if text else ()
        return [number for word in words for number in self._merge(word, dropout, rng)]

    def types_within(self, lines: Iterable[str]) -> list[int]:
        """Every type that dropout may cut these lines into: all that are spelled somewhere inside a word."""
        chunks = {chunk for line in lines if line for chunk in line.split(" ")}
        words = {word for chunk in chunks for word in self.spell(chunk)}
        spellings: dict[int, Ids] = {number: (number,) for word in words for number in word}
        present = set(spellings)  # of words too long for dropout that is what they are merged to
        for (left, right), (_, made) in self.ranks.items():  # parts are learned before what is made of them
            if left in spellings and right in spellings:
                spellings[made] = spellings[left] + spellings[right]
        return sorted(present.union(find_spelled(words, spellings, self.size)))

    def save(self, path: Path) -> None:
        """Writes tokenizer.json, which the tokenizers library also reads."""
        files.write_text(path, self._backend.to_str(pretty=True) + "\n")

    @classmethod
    def load(cls, path: Path, way_out: str = "run qknorm prepare again") -> "Tokenizer":
        """Reads what `save` wrote; refuses anything else, and says the way out."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{path} cannot be read ({error.strerror}); {way_out}") from None
        except (ValueError, RecursionError):
            raise InputError(f"{path} is damaged: it is no JSON; {way_out}") from None
        try:
            return cls(*_check(content))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"{path} is damaged or no tokenizer of qknorm ({error}); {way_out}") from None

    def _forget(self) -> None:
        # between two spaces there is nothing but a space, of which the backend by itself would make no token
        self._ids: dict[str, Sequence[int]] = {"": [symbol for word in self.spell("") for symbol in word]}

    def spell(self, chunk: str) -> list[Ids]:
        """The words of a stretch without spaces, each as its symbols before any merge; too long ones are merged."""
        marked = chunk if self.pretokenized else SPACE + chunk.replace(SPACE, "_")
        words = []
        for word, _ in self._backend.pre_tokenizer.pre_tokenize_str(marked):
            spelled = [*word[:-1], word[-1] + END_OF_WORD] if self.pretokenized else word
            symbols = tuple(self._vocabulary.get(symbol, self.unknown_id) for symbol in spelled)
            if len(symbols) > _LONGEST_WORD_WITH_DROPOUT:
                symbols = tuple(token.id for token in self._backend.model.tokenize(word))
            words.append(symbols)
        return words

    def _merge(self, symbols: Ids, dropout: float, rng: random.Random) -> list[int]:
        """Merges until none is left or all that are left are dropped; the first merge learned goes first."""
        merged = list(symbols)
        while True:
            pairs = ((place, self.ranks.get(pair)) for place, pair in enumerate(pairwise(merged)))
            due = [(merge, place) for place, merge in pairs if merge is not None and rng.random() >= dropout]
            if not due:
                return merged
            (_, made), place = min(due)
            merged[place : place + 2] = [made]


def _build_backend(vocabulary: dict[str, int], merges: Sequence[tuple[str, str]], pretokenized: bool) -> Backend:
    """The pipeline of one manner. Specials are no added tokens, so that text which spells one out is just text."""
    if not vocabulary:
        model = models.BPE()
    elif pretokenized:
        model = models.BPE(vocabulary, list(merges), unk_token=SPECIALS[1], end_of_word_suffix=END_OF_WORD)
    else:
        model = models.BPE(vocabulary, list(merges), unk_token=SPECIALS[1])
    backend = Backend(model)
    if pretokenized:
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        backend.decoder = decoders.BPEDecoder(END_OF_WORD)
    else:
        steps = [normalizers.Replace(SPACE, "_"), normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        backend.normalizer = normalizers.Sequence(steps)
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECES), "isolated")
        backend.decoder = decoders.Metaspace(SPACE, "always")
    return backend


def _learn(backend: Backend, lines: list[str], merges: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Alphabet and merges, in the order of their ids."""
    room = len(set().union(*lines)) + 1 + merges  # the alphabet, the mark for a space, and what merges make
    trainer = trainers.BpeTrainer(vocab_size=room, min_frequency=_LEAST_COUNT, show_progress=False)
    backend.train_from_iterator(lines, trainer, len(lines))
    model = json.loads(backend.to_str())["model"]
    alphabet = sorted((token for token in model["vocab"] if len(token) == 1), key=model["vocab"].__getitem__)
    return alphabet, [(left, right) for left, right in model["merges"][:merges]]


def _learn_pretokenized(lines: list[str], merges: int) -> tuple[list[str], list[tuple[str, str]]]:
    """The last letter of a word is a symbol of its own, written as a private character while learning.

    The library's own end-of-word suffix numbers such symbols in a random order, and ties would fall differently.
    """
    known = set().union(*lines)
    free = (chr(code) for code in _PRIVATE_USE if chr(code) not in known)
    finals = dict(zip(sorted({word[-1] for line in lines for word in line.split()}), free, strict=False))
    marked = [" ".join([word[:-1] + finals[word[-1]] for word in line.split()]) for line in lines]
    backend = _build_backend({}, [], pretokenized=True)
    alphabet, learned = _learn(backend, marked, merges)
    spelled = str.maketrans({mark: letter + END_OF_WORD for letter, mark in finals.items()})
    safe = [
        (left.translate(spelled), right.translate(spelled))
        for left, right in learned
        if END_OF_WORD not in left + right and left + right not in SPECIALS  # it would be taken for the mark itself
    ]
    return [symbol.translate(spelled) for symbol in alphabet], safe


def _check(content: Any) -> tuple[dict[str, int], list[tuple[str, str]], bool]:
    """Vocabulary, merges and manner of a tokenizer.json that is whole and ours; else a ValueError or KeyError."""
    model = content["model"]
    if model["type"] != "BPE" or content.get("added_tokens"):
        raise ValueError("another kind of model")
    vocabulary, merges = model["vocab"], [(left, right) for left, right in model["merges"]]
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise ValueError("ids have gaps")
    if any(vocabulary.get(token) != number for number, token in enumerate(SPECIALS)):
        raise ValueError("special tokens are not the first")
    for left, right in merges:
        if not {left, right, left + right} <= vocabulary.keys():
            raise ValueError("a merge makes an unknown token")
    pretokenized = model.get("end_of_word_suffix") == END_OF_WORD
    splitter = content["pre_tokenizer"]
    if pretokenized and splitter["type"] == "WhitespaceSplit":
        return vocabulary, merges, True
    if not pretokenized and splitter["type"] == "Split" and splitter["pattern"] == {"Regex": _PIECES}:
        return vocabulary, merges, False
    raise ValueError("words are split in another way")
