import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qknorm.errors import InputError
from qknorm.text.cleaning import clean_line
from qknorm.text.readers import read_lines
from qknorm.text.subwords import END_OF_WORD, SPACE, SPECIALS, Tokenizer, choose_merges

_TEXT = [
    "O neno non le o libro vermello, pero a nena leo os libros.",
    "The boy does not read the red book, but the girl reads the books.",
    "En 1986 había 1234 casas (e 56 rúas) na vila!",
    'In 1986 there were 1234 houses (and 56 streets) in the "village"!',
    "می\u200cخواهم नमस्ते दुनिया 日本語のテキスト",
    "<s> <unk> </w> a</w>b <pad> </s> a</w>b <unk><unk> a</w>b",
] * 3
_LETTERS = "".join(sorted(set("".join(_TEXT)) - {" "}))
_KNOWN_TEXT = st.text(st.sampled_from(_LETTERS + "  ")).map(clean_line)
_ANY_TEXT = st.text(st.characters(exclude_categories=("Cs",)))


@pytest.fixture(scope="module", params=[False, True], ids=["raw", "pretokenized"])
def tokenizer(request):
    return Tokenizer.train(_TEXT, 150, request.param)


@pytest.fixture(scope="module")
def raw():
    return Tokenizer.train(_TEXT, 150, pretokenized=False)


@given(_KNOWN_TEXT)
def test_raw_text_of_known_characters_comes_back(raw, text):
    assert raw.decode(raw.encode(text)) == text
    assert raw.unknown_id not in raw.encode(text)


def test_trained_text_comes_back_in_both_manners(tokenizer):
    for line in map(clean_line, _TEXT):
        assert tokenizer.decode(tokenizer.encode(line)) == line


@given(_ANY_TEXT)
def test_batches_and_zero_dropout_equal_encode(tokenizer, text):
    cleaned = clean_line(text)
    assert tokenizer.encode_batch([cleaned, "", cleaned]) == [tokenizer.encode(cleaned), [], tokenizer.encode(cleaned)]
    assert tokenizer.encode_with_dropout(cleaned, 0.0, random.Random(1)) == tokenizer.encode(cleaned)


@given(_KNOWN_TEXT)
def test_spaces_that_cleaning_would_take_do_not_part_the_ways_either(tokenizer, text):
    spaced = f"  {text}  x  "
    assert tokenizer.encode_batch([spaced]) == [tokenizer.encode(spaced)]
    assert tokenizer.encode_with_dropout(spaced, 0.0, random.Random(1)) == tokenizer.encode(spaced)


@given(_KNOWN_TEXT, st.sampled_from([0.1, 0.5, 0.9, 1.0]), st.integers())
def test_dropout_keeps_the_text_and_repeats_by_seed(raw, text, dropout, seed):
    ids = raw.encode_with_dropout(text, dropout, random.Random(seed))
    assert raw.decode(ids) == text
    assert ids == raw.encode_with_dropout(text, dropout, random.Random(seed))
    assert len(ids) >= len(raw.encode(text))


def test_full_dropout_gives_characters(raw):
    assert raw.tokens(raw.encode_with_dropout("the book", 1.0, random.Random(0))) == list("▁the▁book")


def test_the_types_within_a_text_are_all_that_dropout_may_cut_it_into(tokenizer):
    rng, found = random.Random(0), set()
    for line in _TEXT[:6] * 300:
        found.update(tokenizer.encode_with_dropout(line, rng.choice((0.1, 0.5, 0.9)), rng))
    within = set(tokenizer.types_within(_TEXT))
    assert found <= within and not within & set(range(len(SPECIALS)))
    assert len(within - found) <= len(within) / 50, "rare cuts of long words, and no more"
    some = tokenizer.types_within(["the red"])
    assert set(tokenizer.encode("the red")) <= set(some) and len(some) < len(within) / 4
    assert tokenizer.types_within([""]) == []


@given(st.lists(_KNOWN_TEXT | st.sampled_from(["the book", "vermello " * 2, "book" * 200, "bo" * 300])))
def test_types_within_are_those_whose_symbols_stand_in_a_row_in_some_word(tokenizer, lines):
    words = {word for line in lines if line for chunk in line.split(" ") for word in tokenizer.spell(chunk)}
    text = "".join(f"|{row(word)}" for word in words)
    spelled = {number: (number,) for number in range(tokenizer.size)}
    within = {number for word in words for number in word}
    for (left, right), (_, made) in tokenizer.ranks.items():
        spelled[made] = spelled[left] + spelled[right]
    within.update(number for number, symbols in spelled.items() if row(symbols) in text)
    assert tokenizer.types_within(lines) == sorted(within)


def row(symbols):
    return "".join(f" {symbol} " for symbol in symbols)


def test_dropout_drops_as_often_as_it_says():
    """With the one merge a+b, a word "ab" stays apart exactly when that merge is dropped."""
    vocabulary = {token: number for number, token in enumerate((*SPECIALS, SPACE, "a", "b", "ab"))}
    tokenizer = Tokenizer(vocabulary, [("a", "b")], pretokenized=False)
    rng = random.Random(5)
    apart = sum(len(tokenizer.encode_with_dropout("ab", 0.3, rng)) == 3 for _ in range(20_000))
    assert apart / 20_000 == pytest.approx(0.3, abs=0.015)


def test_after_a_drop_the_next_best_merge_gets_its_chance():
    """Of a b c with merges bc (first) and ab: bc 1-p, ab p(1-p), neither p²."""
    vocabulary = {token: number for number, token in enumerate((*SPECIALS, SPACE, "a", "b", "c", "bc", "ab"))}
    tokenizer = Tokenizer(vocabulary, [("b", "c"), ("a", "b")], pretokenized=False)
    rng = random.Random(6)
    seen = ["".join(tokenizer.tokens(tokenizer.encode_with_dropout("abc", 0.4, rng))[1:2]) for _ in range(20_000)]
    whole = [tokenizer.tokens(tokenizer.encode_with_dropout("abc", 0.4, rng))[1:] for _ in range(20_000)]
    assert seen.count("ab") / 20_000 == pytest.approx(0.4 * 0.6, abs=0.015)
    assert whole.count(["a", "bc"]) / 20_000 == pytest.approx(0.6, abs=0.015)
    assert whole.count(["a", "b", "c"]) / 20_000 == pytest.approx(0.16, abs=0.015)


@pytest.mark.parametrize("dropout", [-0.1, 1.1, float("nan")])
def test_dropout_outside_its_range_is_refused(raw, dropout):
    with pytest.raises(ValueError, match="between 0 and 1"):
        raw.encode_with_dropout("a", dropout, random.Random(0))


def test_words_digits_and_punctuation_are_never_one_token(raw):
    for token in raw.tokens(range(len(SPECIALS), raw.size)):
        body = token.removeprefix(SPACE)
        kinds = {"digit" if letter.isdigit() else letter.isalpha() or letter in "\u200c्ेसिुा" for letter in body}
        assert len(kinds) <= 1, token
        assert "digit" not in kinds or len(body) == 1
        assert SPACE not in body


def test_special_tokens_spelled_out_in_text_are_just_text(tokenizer):
    for special in SPECIALS:
        ids = tokenizer.encode(f"a {special} b{special}b")
        assert not {tokenizer.pad_id, tokenizer.start_id, tokenizer.end_id} & set(ids)
        assert tokenizer.decode([*ids, tokenizer.end_id]) == f"a {special} b{special}b"


def test_unknown_characters_become_unknown_and_specials_decode_to_nothing(tokenizer):
    ids = tokenizer.encode("Ж")
    assert tokenizer.unknown_id in ids
    marks = [tokenizer.start_id, *tokenizer.encode("the boy"), tokenizer.end_id, tokenizer.pad_id]
    assert tokenizer.decode(marks) == "the boy"


def test_a_word_of_a_hundred_thousand_letters_is_encoded(tokenizer):
    word = "the" * 33_000
    ids = tokenizer.encode(word)
    assert tokenizer.decode(ids) == word
    assert tokenizer.encode_with_dropout(word, 0.1, random.Random(0)) == ids == tokenizer.encode_batch([word])[0]


def test_remembered_words_stay_bounded(monkeypatch):
    monkeypatch.setattr("qknorm.text.subwords._MOST_KNOWN_CHUNKS", 10)
    tokenizer = Tokenizer.train(_TEXT, 50, pretokenized=False)
    for line in _TEXT:
        assert tokenizer.encode_batch([line]) == [tokenizer.encode(line)]
        assert tokenizer.encode_with_dropout(line, 0.0, random.Random(0)) == tokenizer.encode(line)
    assert len(tokenizer._ids) < 40


@pytest.mark.parametrize("pretokenized", [False, True])
@pytest.mark.parametrize("merges", [0, 1, 40])
def test_merges_and_size_are_as_asked(merges, pretokenized):
    tokenizer = Tokenizer.train(_TEXT[:4] * 3, merges, pretokenized)
    characters = Tokenizer.train(_TEXT[:4], 0, pretokenized)
    assert tokenizer.merges == merges
    assert 0 <= characters.size + merges - tokenizer.size <= merges // 10
    assert tokenizer.tokens(range(4)) == list(SPECIALS)


def test_merges_seen_once_are_not_learned():
    assert Tokenizer.train(["abc def"], 100, pretokenized=False).merges == 0
    assert Tokenizer.train([], 100, pretokenized=True).size == len(SPECIALS)


def test_training_twice_gives_the_same_and_saving_keeps_it(tokenizer, tmp_path):
    again = Tokenizer.train(_TEXT, 150, tokenizer.pretokenized)
    tokenizer.save(tmp_path / "a.json")
    again.save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    loaded = Tokenizer.load(tmp_path / "a.json")
    assert (loaded.size, loaded.merges, loaded.pretokenized) == (
        tokenizer.size,
        tokenizer.merges,
        tokenizer.pretokenized,
    )
    assert loaded.encode_batch(_TEXT) == tokenizer.encode_batch(_TEXT)


def test_the_end_of_a_word_is_marked_in_the_pretokenized_manner():
    tokenizer = Tokenizer.train(_TEXT, 150, pretokenized=True)
    tokens = tokenizer.tokens(tokenizer.encode("the books"))
    assert "".join(tokens) == f"the{END_OF_WORD}books{END_OF_WORD}"


def damaged(content):
    gap = json.loads(json.dumps(content))
    gap["model"]["vocab"]["zzz"] = 10**6
    foreign_merge = json.loads(json.dumps(content))
    foreign_merge["model"]["merges"].append(["zz", "yy"])
    specials = json.loads(json.dumps(content))
    specials["model"]["vocab"] |= {"<pad>": 1, "<unk>": 0}
    return {
        "gaps": gap,
        "unknown token": foreign_merge,
        "special tokens": specials,
        "another kind": content | {"model": content["model"] | {"type": "WordPiece"}},
        "split in another way": content | {"pre_tokenizer": {"type": "ByteLevel"}},
        "damaged or no tokenizer": [],
        "no tokenizer of qknorm": {"model": None},
        "damaged": content | {"model": content["model"] | {"vocab": {"<pad>": "x"}}},
    }


def test_damaged_and_foreign_files_are_refused(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(InputError, match="cannot be read"):
        Tokenizer.load(path)
    tokenizer.save(path)
    text = path.read_text(encoding="utf-8")
    for message, content in damaged(json.loads(text)).items():
        path.write_text(json.dumps(content), encoding="utf-8")
        with pytest.raises(InputError, match=message):
            Tokenizer.load(path)
    for content in (text[: len(text) // 2].encode(), b"\xff\xfe", b""):
        path.write_bytes(content)
        with pytest.raises(InputError, match="no JSON"):
            Tokenizer.load(path)


def test_merges_grow_with_the_corpus():
    counts = [0, 1_000, 5_000, 20_000, 80_000, 500_000, 10_000_000]
    assert [choose_merges(count) for count in counts] == [1_000, 1_000, 2_000, 4_000, 8_000, 16_000, 16_000]


@pytest.mark.corpus
@pytest.mark.skipif("QKNORM_DATA" not in os.environ, reason="needs the corpora that QKNORM_DATA points at")
def test_the_papers_figures_for_galician():
    folder = Path(os.environ["QKNORM_DATA"]) / "ted-gl-en"
    if not folder.is_dir():
        pytest.skip("QKNORM_DATA has no ted-gl-en")
    lines = [line for language in ("gl", "en") for line in read_lines(folder / f"train.{language}")]
    tokenizer = Tokenizer.train(lines, 3_000, pretokenized=True)
    encoded = tokenizer.encode_batch(lines)
    lengths = [len(ids) for ids in encoded]
    assert np.percentile(lengths, 97.5) == 79
    assert sum(lengths) == pytest.approx(559_292, rel=1e-3)
    assert len({number for ids in encoded for number in ids}) + len(SPECIALS) == pytest.approx(3_165, abs=5)
    assert [tokenizer.decode(ids) for ids in encoded] == [clean_line(line) for line in lines]
