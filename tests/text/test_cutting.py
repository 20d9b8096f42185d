"""BPE-dropout as arrays: the law of the plain way, word by word."""

import random
from collections import Counter
from collections.abc import Mapping
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qknorm.text.cleaning import clean_line
from qknorm.text.cutting import Cutter, number_words
from qknorm.text.subwords import SPACE, SPECIALS, Tokenizer

_TEXT = [
    "O neno non le o libro vermello, pero a nena leo os libros.",
    "The boy does not read the red book, but the girl reads the books in 1986!",
    "می\u200cخواهم नमस्ते दुनिया <s> a</w>b <pad>",
] * 3
_LETTERS = "".join(sorted(set("".join(_TEXT)) - {" "}))
_KNOWN_TEXT = st.text(st.sampled_from(_LETTERS + "  ")).map(clean_line)
_ANY_TEXT = st.text(st.characters(exclude_categories=("Cs",))).map(clean_line)


@pytest.fixture(scope="module", params=[False, True], ids=["raw", "pretokenized"])
def tokenizer(request):
    return Tokenizer.train(_TEXT, 150, request.param)


def cut(tokenizer: Tokenizer, lines: list[str], dropout: float, seed: int = 0) -> list[list[int]]:
    rules, words, (numbered,) = number_words(tokenizer, [lines])
    ids, lengths = Cutter(rules, words, dropout).cut(numbered, (seed, 1, 2))
    assert lengths.sum() == len(ids)
    ends = lengths.cumsum()
    return [ids[end - length : end].tolist() for end, length in zip(ends, lengths, strict=True)]


@given(st.lists(_ANY_TEXT, max_size=5))
def test_without_dropout_it_is_encode(tokenizer, lines):
    assert cut(tokenizer, lines, 0.0) == [tokenizer.encode(line) for line in lines]


@given(st.lists(_KNOWN_TEXT, max_size=5), st.sampled_from([0.1, 0.5, 0.9]), st.integers(0, 2**40))
def test_the_text_stays_and_a_seed_repeats(tokenizer, lines, dropout, seed):
    found = cut(tokenizer, lines, dropout, seed)
    assert [tokenizer.decode(ids) for ids in found] == [tokenizer.decode(tokenizer.encode(line)) for line in lines]
    assert cut(tokenizer, lines, dropout, seed) == found


@given(st.lists(_ANY_TEXT, max_size=5))
def test_full_dropout_gives_characters(tokenizer, lines):
    due = [tokenizer.encode_with_dropout(line, 1.0, random.Random(0)) for line in lines]
    assert cut(tokenizer, lines, 1.0) == due


def test_other_seeds_and_longer_words_than_dropout_takes(tokenizer):
    assert cut(tokenizer, _TEXT, 0.3, 1) != cut(tokenizer, _TEXT, 0.3, 2)
    assert cut(tokenizer, ["the" * 33_000], 0.5) == [tokenizer.encode("the" * 33_000)]


@pytest.mark.parametrize("dropout", [-0.1, 1.1, float("nan")])
def test_dropout_outside_its_range_is_refused(tokenizer, dropout):
    with pytest.raises(ValueError, match="between 0 and 1"):
        cut(tokenizer, ["a"], dropout)


# ------------------------------------------------------------------ the law

_WORDS = ("ababcab", "bcab", "cc")
_MERGES = [("a", "b"), ("ab", "ab"), ("b", "c"), ("c", "ab"), (SPACE, "b"), ("abab", "cab")]


def law(symbols: tuple[str, ...], dropout: float) -> Mapping[tuple[str, ...], float]:
    """How probable each outcome is, from the definition: of the merges due, best first, each is dropped or done."""
    ranks = {pair: rank for rank, pair in enumerate(_MERGES)}
    due = sorted(
        (ranks[pair], place)
        for place in range(len(symbols) - 1)
        if (pair := (symbols[place], symbols[place + 1])) in ranks
    )
    found = Counter({symbols: dropout ** len(due)})
    for before, (_, place) in enumerate(due):
        merged = (*symbols[:place], symbols[place] + symbols[place + 1], *symbols[place + 2 :])
        for outcome, chance in law(merged, dropout).items():
            found[outcome] += dropout**before * (1 - dropout) * chance
    return found


@pytest.mark.parametrize("dropout", [0.1, 0.6])
@pytest.mark.parametrize("way", ["arrays", "plain"])
def test_every_outcome_is_as_frequent_as_the_law_has_it(dropout, way):
    letters = (*SPECIALS, SPACE, "a", "b", "c", *("".join(pair) for pair in _MERGES))
    tokenizer = Tokenizer({token: number for number, token in enumerate(letters)}, _MERGES, pretokenized=False)
    line, count = " ".join(_WORDS), 20_000
    if way == "arrays":
        rows = cut(tokenizer, [line] * count, dropout, seed=3)
    else:
        rng = random.Random(3)
        rows = [tokenizer.encode_with_dropout(line, dropout, rng) for _ in range(count)]
    seen = Counter(tuple(tokenizer.tokens(row)) for row in rows)
    laws = [law((SPACE, *word), dropout) for word in _WORDS]
    assert all(sum(each.values()) == pytest.approx(1) for each in laws)
    due: Counter[tuple[str, ...]] = Counter()
    for outcomes in product(*(each.items() for each in laws)):
        chance = 1.0
        for _, one in outcomes:
            chance *= one
        due[tuple(token for outcome, _ in outcomes for token in outcome)] += chance
    assert seen.keys() <= due.keys()
    for outcome, chance in due.items():
        spread = (count * chance * (1 - chance)) ** 0.5
        assert abs(seen[outcome] - count * chance) < 5 * spread + 1, outcome
