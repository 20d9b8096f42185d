"""BPE-dropout of many lines at once: words that lose a merge are merged side by side, as arrays.

The law is that of `Tokenizer.encode_with_dropout`, the plain reference; only the random numbers are drawn otherwise.
Processes that cut beside a training run this module, so it imports numpy and nothing else.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.uint16] | NDArray[np.uint32]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]

_PLACE_BITS = 40
_PLACE = (1 << _PLACE_BITS) - 1
_WORDS_AT_ONCE = 20_000  # bounds the memory of looking for spellings


class Rules(NamedTuple):
    """The merges of a tokenizer: each pair of symbols as a number, in rising order, its rank, and what ranks make."""

    pairs: Longs
    ranks: Ints
    made: Ints
    symbols: Longs
    """How many symbols there are, alone in its array."""

    @classmethod
    def of(cls, ranks: Mapping[tuple[int, int], tuple[int, int]], symbols: int) -> "Rules":
        """From each pair's rank and what it makes."""
        pairs = np.array([left * symbols + right for left, right in ranks], dtype=np.int64)
        found = np.array(list(ranks.values()), dtype=np.int32).reshape(-1, 2)
        made = np.zeros(1 + int(found[:, 0].max(initial=-1)), dtype=np.int32)
        made[found[:, 0]] = found[:, 1]
        order = np.argsort(pairs)
        return cls(pairs[order], found[order, 0], made, np.array([symbols], dtype=np.int64))

    @property
    def none(self) -> int:
        """The rank of what is no merge."""
        return len(self.made)

    def narrow(self, ids: Ints) -> TokenIds:
        """Ids in the smallest type that holds all there are."""
        return ids.astype(np.uint16) if int(self.symbols[0]) <= 1 << 16 else ids.astype(np.uint32)

    def look_up(self, left: Ints, right: Ints) -> Longs:
        """The rank of each pair, `none` where it is no merge."""
        if not len(self.pairs):
            return np.full(len(left), self.none, dtype=np.int64)
        pairs = left * self.symbols + right
        places = np.minimum(np.searchsorted(self.pairs, pairs), len(self.pairs) - 1)
        return np.where(self.pairs[places] == pairs, self.ranks[places].astype(np.int64), self.none)


class Words(NamedTuple):
    """The different words of a text: the symbols of each before any merge, and its ids after all of them.

    Of each symbol also the rank of its merge with the next one.
    """

    symbols: Ints
    due: Longs
    symbol_starts: Longs
    ids: TokenIds
    id_starts: Longs

    @classmethod
    def of(cls, spelled: Collection[Sequence[int]], rules: Rules) -> "Words":
        """From the symbols of each word."""
        lengths = np.array([len(symbols) for symbols in spelled], dtype=np.int64)
        symbols = np.array([symbol for symbols in spelled for symbol in symbols], dtype=np.int32)
        due = _due(rules, symbols, lengths)
        ids, merged = merge(rules, symbols, due, lengths)
        return cls(symbols, due, starts_of(lengths), rules.narrow(ids), starts_of(merged))


class Lines(NamedTuple):
    """Lines as numbers of words, one line after another, and where each line begins and the last one ends."""

    words: Ints
    starts: Longs

    def pieces(self, size: int) -> list["Lines"]:
        """The same in pieces of `size` lines, the last one of fewer; of no lines one empty piece."""
        count = len(self.starts) - 1
        bounds = [self.starts[first : first + size + 1] for first in range(0, max(1, count), size)]
        return [Lines(self.words[each[0] : each[-1]], each - each[0]) for each in bounds]


class Spelling(Protocol):
    """What a tokenizer must tell."""

    size: int

    @property
    def ranks(self) -> Mapping[tuple[int, int], tuple[int, int]]:
        """Of each pair of symbols that is merged its rank, and what it makes."""

    def spell(self, chunk: str) -> Sequence[tuple[int, ...]]:
        """The words of a stretch without spaces, each as its symbols before any merge."""


def number_words(tokenizer: Spelling, texts: Iterable[Iterable[str]]) -> tuple[Rules, Words, list[Lines]]:
    """What a tokenizer knows of the words of some texts, and the texts by the numbers of these words."""
    chunks: dict[str, list[int]] = {}
    numbers: dict[tuple[int, ...], int] = {}
    numbered = []
    for text in texts:
        words, starts = [], [0]
        for line in text:
            for chunk in line.split(" ") if line else []:
                if chunk not in chunks:
                    chunks[chunk] = [numbers.setdefault(word, len(numbers)) for word in tokenizer.spell(chunk)]
                words.extend(chunks[chunk])
            starts.append(len(words))
        numbered.append(Lines(np.array(words, dtype=np.int32), np.array(starts, dtype=np.int64)))
    rules = Rules.of(tokenizer.ranks, tokenizer.size)
    return rules, Words.of(numbers, rules), numbered


class Cutter:
    """Cuts lines into subwords by BPE-dropout."""

    def __init__(self, rules: Rules, words: Words, dropout: float) -> None:
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout must be between 0 and 1, got {dropout}")
        self.rules, self.words, self.dropout = rules, words, dropout
        self._spelled, self._whole = np.diff(words.symbol_starts), np.diff(words.id_starts)
        merges = self._spelled - self._whole
        # that a drop is among the first 0, 1, 2, … merges that are due
        self._chances = np.array([1 - (1 - dropout) ** count for count in range(int(merges.max(initial=0)) + 1)])
        self._chance = self._chances[merges]

    def cut(self, lines: Lines, seed: Sequence[int]) -> tuple[TokenIds, Longs]:
        """The ids of all lines one after another, and how many each line has; the same for the same seed."""
        rng, words = np.random.default_rng(list(seed)), self.words
        drawn = rng.random(len(lines.words))
        broken = np.flatnonzero(drawn < self._chance[lines.words])
        ids, begins, lengths = words.ids, words.id_starts[lines.words], self._whole[lines.words]
        if len(broken):
            # the first drop comes after so many merges; from then on every merge that is due is drawn for
            spared = np.searchsorted(self._chances[1:], drawn[broken], side="right")
            kinds = lines.words[broken]
            sizes = self._spelled[kinds]
            places = _stretches(words.symbol_starts[kinds], sizes)
            cut = merge(self.rules, words.symbols[places], words.due[places], sizes, spared, self.dropout, rng)
            begins[broken], lengths[broken] = len(ids) + starts_of(cut[1])[:-1], cut[1]
            ids = np.concatenate([ids, self.rules.narrow(cut[0])])
        return ids[_stretches(begins, lengths)], np.diff(starts_of(lengths)[lines.starts])


def merge(
    rules: Rules,
    symbols: Ints,
    due: Longs,
    lengths: Longs,
    spared: Longs | None = None,
    dropout: float = 0.0,
    rng: np.random.Generator | None = None,
) -> tuple[Ints, Longs]:
    """Merges words that stand one after another, each until no merge is left or all that are left are dropped.

    Of each word the first `spared` merges are not dropped, the next one is, and from then on chance decides; without
    `spared` none is dropped. Returns the ids of all words and how many each has.
    """
    results = _Results(len(lengths))
    numbers, symbols, due = np.arange(len(lengths)), symbols.copy(), due.copy()
    while len(lengths):
        ends = np.cumsum(lengths)
        starts = ends - lengths
        keys = (due << _PLACE_BITS) + np.arange(
            len(due), dtype=np.int64
        )  # the smallest is the first place of the best merge
        best = np.minimum.reduceat(keys, starts)
        if spared is not None and rng is not None:
            dropped = (rng.random(len(keys)) < dropout) & np.repeat(spared <= 0, lengths)
            dropped[best[spared == 0] & _PLACE] = True
            keys[dropped] = rules.none << _PLACE_BITS
            best = np.minimum.reduceat(keys, starts)
            spared = spared - 1
        ranks, places = best >> _PLACE_BITS, best & _PLACE
        goes = ranks < rules.none
        keep = np.repeat(goes, lengths)
        results.add(numbers[~goes], lengths[~goes], symbols[~keep])
        ranks, places = ranks[goes], places[goes]
        symbols[places] = rules.made[ranks]
        _renew(due, rules, symbols, places, starts[goes], ends[goes])
        keep[places + 1] = False
        symbols, due = symbols[keep], due[keep]
        numbers, lengths = numbers[goes], lengths[goes] - 1
        spared = spared[goes] if spared is not None else None
    return results.in_order()


def _due(rules: Rules, symbols: Ints, lengths: Longs) -> Longs:
    """For each symbol the rank of its merge with the next one."""
    due = np.full(len(symbols), rules.none, dtype=np.int64)
    due[:-1] = rules.look_up(symbols[:-1], symbols[1:])
    due[np.cumsum(lengths) - 1] = rules.none
    return due


def _renew(due: Longs, rules: Rules, symbols: Ints, places: Longs, starts: Longs, ends: Longs) -> None:
    """Sets what is due on both sides of symbols that were just made; the one after each is about to go."""
    due[places] = rules.none
    before, here = places[places > starts] - 1, places[places + 2 < ends]
    left, right = np.concatenate([before, here]), np.concatenate([before + 1, here + 2])
    due[left] = rules.look_up(symbols[left], symbols[right])


class _Results:
    """Words as they are finished, brought back into their order."""

    def __init__(self, count: int) -> None:
        self._lengths = np.zeros(count, dtype=np.int64)
        self._begins = np.zeros(count, dtype=np.int64)
        self._found: list[Ints] = []
        self._size = 0

    def add(self, numbers: Longs, lengths: Longs, ids: Ints) -> None:
        self._lengths[numbers] = lengths
        self._begins[numbers] = self._size + np.cumsum(lengths) - lengths
        self._size += len(ids)
        self._found.append(ids)

    def in_order(self) -> tuple[Ints, Longs]:
        ids = np.concatenate([np.zeros(0, dtype=np.int32), *self._found])
        return ids[_stretches(self._begins, self._lengths)], self._lengths


def _stretches(begins: Longs, lengths: Longs) -> Longs:
    """The places of stretches that begin here and are so long, one after another."""
    before = np.cumsum(lengths) - lengths
    places: Longs = np.arange(int(lengths.sum())) + np.repeat(begins - before, lengths)
    return places


def starts_of(lengths: Longs) -> Longs:
    """Where each begins, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths)])


def find_spelled(words: Iterable[Sequence[int]], spellings: Mapping[int, Sequence[int]], symbols: int) -> list[int]:
    """The numbers of the spellings that stand somewhere inside a word; there are so many symbols, and 0 is in no word.

    From every place of the words at once a tree of the spellings is gone down for as long as the symbols agree.
    """
    steps: dict[int, int] = {}  # from a node, which for a single symbol is the symbol, by the next symbol to a node
    ends = {}
    for number, (node, *rest) in spellings.items():
        for symbol in rest:
            node = steps.setdefault(node * symbols + symbol, symbols + len(steps))
        ends[number] = node
    keys = np.array([*sorted(steps), np.iinfo(np.int64).max])  # the last one for what is beyond all others
    nodes = np.array([steps.get(key, 0) for key in keys.tolist()])
    reached = np.zeros(symbols + len(steps), dtype=np.bool_)
    left = iter(words)
    while batch := list(islice(left, _WORDS_AT_ONCE)):
        text = np.fromiter(chain.from_iterable((*word, 0) for word in batch), dtype=np.int64)
        places = np.flatnonzero(text)
        here = text[places]
        while len(here):
            reached[here] = True
            places = places + 1
            wanted = here * symbols + text[places]
            found = np.searchsorted(keys, wanted)
            known = keys[found] == wanted
            places, here = places[known], nodes[found[known]]
    return [number for number, node in ends.items() if reached[node]]
