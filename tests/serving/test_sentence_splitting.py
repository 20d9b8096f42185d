"""Sentences and the white space between them: nothing is lost, and cuts are where sentences end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qknorm.serving.sentences import split_sentences

ALPHABET = "aA.!?… \n\t\r\"'«»(),。！؟ש\u00a0\u2028-1éDr"


@given(st.text(ALPHABET, max_size=60) | st.text(max_size=40))
def test_put_together_again_they_are_the_text(text):
    cut = split_sentences(text)
    assert "".join(piece.before + piece.text for piece in cut.pieces) + cut.after == text
    assert all(piece.text.strip() == piece.text != "" for piece in cut.pieces)
    assert all(not piece.before.strip() for piece in cut.pieces) and not cut.after.strip()
    assert not any("\n" in piece.text for piece in cut.pieces)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", []),
        (" \n\t ", []),
        ("Ola", ["Ola"]),
        ("Ola! Que tal? Ben…  E ti?!", ["Ola!", "Que tal?", "Ben…", "E ti?!"]),
        ("He said: «Come.» She came.", ["He said: «Come.»", "She came."]),
        ('"Stop!" he cried.', ['"Stop!" he cried.']),
        ("O Sr. García e a Dra. López. J. R. R. Tolkien.", ["O Sr. García e a Dra. López.", "J. R. R. Tolkien."]),
        ("It is 3.5 km. 4 of us went.", ["It is 3.5 km.", "4 of us went."]),
        ("I said no. He left.", ["I said no.", "He left."]),
        ("e.g. this one, i.e. that one", ["e.g. this one, i.e. that one"]),
        ("¿Como? ¡Así! (Mira.) Ben.", ["¿Como?", "¡Así!", "(Mira.)", "Ben."]),
        ("one line\nanother\r\n\r\nlast. ", ["one line", "another", "last."]),
        ("你好。再见！ 好吗？", ["你好。", "再见！", "好吗？"]),
        ("שלום עולם. מה שלומך? טוב.", ["שלום עולם.", "מה שלומך?", "טוב."]),
        ("كيف حالك؟ أنا بخير.", ["كيف حالك؟", "أنا بخير."]),
        ("क्या हाल है। सब ठीक।", ["क्या हाल है।", "सब ठीक।"]),
    ],
)
def test_cuts_are_where_sentences_end(text, sentences):
    assert [piece.text for piece in split_sentences(text).pieces] == sentences


@pytest.mark.parametrize("text", ["." * 10**5, "a" + " " * 10**5 + "b", ". (" * 10**5, ".'" * 10**5, "。" * 10**5])
def test_odd_texts_take_no_longer_than_others(text):
    """A pattern that went over them again and again would take minutes here."""
    cut = split_sentences(text)
    assert cut.joined([piece.text for piece in cut.pieces]) == text


def test_other_sentences_get_the_same_white_space():
    cut = split_sentences("\n One. Two!\n\n\tThree?\n")
    assert cut.joined(["A.", "B!", "C?"]) == "\n A. B!\n\n\tC?\n"


@pytest.mark.parametrize(
    ("text", "translations", "expected"),
    [
        (
            "男が外にいる。犬が走る。　猫。",
            ["A man is outside.", "A dog runs.", "A cat."],
            "A man is outside. A dog runs. A cat.",
        ),
        ("A man. A dog!  A cat.\n\nEnd. ", ["男。", "犬！", "猫", "終"], "男。犬！猫\n\n終 "),
        ("A man.  A dog.", ["Ein Mann.", "Ein Hund."], "Ein Mann.  Ein Hund."),
        ("A man. A dog.", ["ผู้ชาย", "สุนัข"], "ผู้ชาย สุนัข"),
        ("A man. A dog.", ["남자.", "개."], "남자. 개."),
        ("一。二。", ["", "Two."], "Two."),
        ("一。二。三。", ["One.", "", "Three."], "One. Three."),
    ],
)
def test_the_script_of_the_target_decides_on_spaces(text, translations, expected):
    assert split_sentences(text).joined(translations) == expected
