"""Texts as characters: there and back, what is refused, how a text is split."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qknorm.errors import InputError
from qknorm.text.characters import Characters, CharacterText

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60)


@given(TEXTS)
def test_what_is_encoded_is_decoded(text):
    characters = Characters.of(text)
    ids = characters.encode(text)
    assert characters.decode(ids.tolist()) == text
    assert characters.size == len(set(text))
    assert sorted(set(ids.tolist())) == list(range(characters.size))


@given(TEXTS, st.characters())
def test_a_character_that_is_not_known_is_named(text, stranger):
    characters = Characters.of(text)
    if stranger in text:
        assert characters.encode(stranger).tolist() == [characters.characters.index(stranger)]
    else:
        with pytest.raises(InputError) as caught:
            characters.encode(text + stranger)
        assert f"U+{ord(stranger):04X}" in str(caught.value)


def test_the_vocabulary_is_kept(tmp_path: Path) -> None:
    characters = Characters.of('b\na\u2028ñ🙂 "\\')
    characters.save(tmp_path / "c.json")
    assert Characters.load(tmp_path / "c.json").characters == characters.characters
    with pytest.raises(ValueError, match="at least one character"):
        Characters("")
    with pytest.raises(ValueError, match="each once"):
        Characters("aa")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"kind": "bpe"}',
        '{"kind": "characters"}',
        '{"kind": "characters", "characters": "ba"}',
        "\xff",
        '{"kind": "characters", "characters": ["a", "b"]}',
    ],
)
def test_a_damaged_vocabulary_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(content, encoding="latin-1")
    with pytest.raises(InputError, match=r"c\.json is no vocabulary"):
        Characters.load(tmp_path / "c.json")
    with pytest.raises(InputError, match="missing"):
        Characters.load(tmp_path / "absent.json")


def test_a_file_is_read_however_it_was_written(tmp_path: Path) -> None:
    plain, other, packed = tmp_path / "plain.txt", tmp_path / "other.txt", tmp_path / "packed.txt.gz"
    plain.write_bytes("á\nb\n".encode())
    other.write_bytes("\ufeffá\r\nb\r\n".encode())
    packed.write_bytes(gzip.compress("á\nb\n".encode()))
    texts = [CharacterText.load(path) for path in (plain, other, packed)]
    assert {text.fingerprint for text in texts} == {texts[0].fingerprint}
    assert all(text.tokenizer.characters == "\nbá" and text.ids.tolist() == [2, 0, 1, 0] for text in texts)


def test_what_is_no_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"one\ntwo\nthr\xe9e")
    with pytest.raises(InputError, match=r"latin\.txt, line 3: not UTF-8 at byte 11 of the file \(0xe9\)"):
        CharacterText.load(tmp_path / "latin.txt")
    (tmp_path / "wide.txt").write_bytes("one".encode("utf-16"))
    with pytest.raises(InputError, match=r"wide\.txt is UTF-16, not UTF-8; convert it: iconv -f UTF-16 -t UTF-8"):
        CharacterText.load(tmp_path / "wide.txt")
    (tmp_path / "wider.txt").write_bytes("one\ntwo".encode("utf-32"))
    with pytest.raises(InputError, match=r"wider\.txt is UTF-32, not UTF-8; convert it: iconv -f UTF-32 -t UTF-8"):
        CharacterText.load(tmp_path / "wider.txt")
    (tmp_path / "unmarked.txt").write_bytes("one\ntwo\nthré".encode("utf-16-be"))
    with pytest.raises(InputError, match=r"unmarked\.txt is UTF-16, not UTF-8; convert it: iconv -f UTF-16BE -t UTF-8"):
        CharacterText.load(tmp_path / "unmarked.txt")
    (tmp_path / "ascii.txt").write_bytes("one\ntwo".encode("utf-16-le"))  # every byte of which is UTF-8
    with pytest.raises(InputError, match=r"ascii\.txt is UTF-16, not UTF-8"):
        CharacterText.load(tmp_path / "ascii.txt")
    (tmp_path / "nul.txt").write_bytes(b"one\ntwo and\0 three")
    with pytest.raises(InputError, match=r"nul\.txt, line 2: holds a NUL byte"):
        CharacterText.load(tmp_path / "nul.txt")
    (tmp_path / "empty.txt").write_bytes(b"\xef\xbb\xbf")
    with pytest.raises(InputError, match="is empty"):
        CharacterText.load(tmp_path / "empty.txt")
    packed = gzip.compress(bytes(range(97, 123)) * 9)
    for damaged in (packed[:-9], packed[:12] + b"\xff" * 9 + packed[21:], b"no gzip"):
        (tmp_path / "damaged.gz").write_bytes(damaged)
        with pytest.raises(InputError, match="cannot be read to its end"):
            CharacterText.load(tmp_path / "damaged.gz")
    with pytest.raises(InputError, match="does not exist"):
        CharacterText.load(tmp_path / "absent.txt")


@pytest.mark.parametrize("types", [3, 300, 70_000])
def test_ids_are_as_narrow_as_they_can_be(types: int, tmp_path: Path) -> None:
    text = "".join(chr(0x10000 + i) for i in range(types))
    (tmp_path / "t.txt").write_text(text, encoding="utf-8")
    ids = CharacterText.load(tmp_path / "t.txt").ids
    assert ids.dtype == {3: np.uint8, 300: np.uint16, 70_000: np.uint32}[types]
    assert ids.tolist() == list(range(types))


@given(st.integers(2, 400), st.floats(0.01, 0.99))
def test_a_split_is_the_text_cut_once(length, share):
    text = CharacterText(Path("x"), "ab" * length)
    train, dev = text.split(share)
    assert np.array_equal(np.concatenate([train, dev]), text.ids)
    assert abs(len(dev) - share * len(text)) <= 0.5
