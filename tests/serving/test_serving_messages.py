"""Small facts the API tells: directions, halves of pairs, scores that are no numbers; and pages kept for a while."""

import json
import math

import pytest
from pydantic import ValidationError

from qknorm.decoding.translate import Alternative, Translation
from qknorm.serving.attention import Pages
from qknorm.serving.messages import TranslateRequest, describe_sentence, direction_of, mend
from qknorm.serving.sentences import Piece


@pytest.mark.parametrize(
    ("language", "direction"),
    [
        ("he", "rtl"),
        ("AR", "rtl"),
        ("fa-IR", "rtl"),
        ("ur_PK", "rtl"),
        ("az-Arab", "rtl"),
        ("he-Latn", "ltr"),
        ("gl", "ltr"),
    ],
)
def test_which_way_languages_are_written(language, direction):
    assert direction_of(language) == direction


def test_only_halves_of_pairs_are_mended():
    assert mend("a\ud83d b\udc00") == "a\ufffd b\ufffd"
    assert mend("🙂 é \x00 \ufffd") == "🙂 é \x00 \ufffd"
    assert TranslateRequest(text=["\ud83d", "a"]).texts() == ["\ufffd", "a"]


def test_whole_numbers_are_integers_and_nothing_else_is():
    assert TranslateRequest(text="a", nbest=2.0).nbest == 2
    for wrong in (2.5, "2", True, math.inf):
        with pytest.raises(ValidationError):
            TranslateRequest(text="a", nbest=wrong)


def test_a_score_that_is_no_number_is_told_as_none():
    broken = Translation("b", -math.inf, [Alternative("b", -math.inf)])
    told = describe_sentence(Piece(" ", "a"), broken)
    assert told.score is None and told.alternatives[0].score is None
    assert told.source_words is None and json.loads(told.model_dump_json())["before"] == " "


def test_pages_make_room_for_new_ones():
    pages = Pages(most=2)
    tickets = [pages.keep(content) for content in (b"1", b"2", b"3")]
    assert [pages.find(ticket) for ticket in tickets] == [None, b"2", b"3"]
    assert len(set(tickets)) == 3 and all(len(ticket) >= 20 for ticket in tickets)
