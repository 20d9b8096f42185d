import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qknorm.config import Cleaning
from qknorm.text.cleaning import CleaningReport, HeldOut, clean_line, drop_pairs, hash_pair, hash_text, rules_for
from qknorm.text.readers import Pair


def clean(pairs, held_out=(), **settings):
    held = HeldOut()
    for pair in held_out:
        held.add(pair)
    report = CleaningReport()
    kept = list(drop_pairs(pairs, rules_for(Cleaning(**settings), held), report))
    return kept, report


def reasons(report):
    return {rule: entry.pairs for rule, entry in report.dropped.items() if entry.pairs}


@given(st.text(st.characters()))
def test_cleaned_lines_are_normal_and_stay_as_they_are(line):
    cleaned = clean_line(line)
    assert clean_line(cleaned) == cleaned
    assert unicodedata.is_normalized("NFC", cleaned)
    assert cleaned == " ".join(cleaned.split())
    assert not any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in cleaned)


@pytest.mark.parametrize(
    ("line", "cleaned"),
    [
        ("  two\t words \u00a0\u3000 ", "two words"),
        ("e\u0301", "é"),
        ("e\x01\u0301", "é"),
        ("a\x07b\x7f\ufeffc", "abc"),
        ("a\u2028b\x85c", "a b c"),
        ("می\u200cخواهم \u200f(\u200d)", "می\u200cخواهم \u200f(\u200d)"),
        ("lone \ud800 surrogate", "lone surrogate"),
        ("▁block", "_block"),
        ("\x00\x1f", ""),
    ],
)
def test_what_cleaning_does_to_a_line(line, cleaned):
    assert clean_line(line) == cleaned


@pytest.mark.parametrize(
    ("pair", "settings", "reason"),
    [
        (("", "x"), {}, "empty"),
        (("x", " \t"), {}, "empty"),
        (("ab", "abcdef"), {"min_characters": 3}, "too short"),
        (("a" * 1_000_000, "b"), {}, "too long"),
        (("a" * 200, "b"), {}, "length ratio"),
        (("Robert Gupta", " Robert  Gupta"), {}, "identical sides"),
        (("ola", "bye"), {}, "duplicate"),
        (("held", "new"), {}, "overlap with dev or test"),
        (("new", "out"), {}, "overlap with dev or test"),
    ],
)
def test_each_rule_drops_its_kind_of_pair_and_says_so(pair, settings, reason):
    first = Pair("ola", "bye")
    kept, report = clean([first, Pair(*pair)], held_out=[Pair("held", "out")], **({"min_characters": 1} | settings))
    assert kept == [first]
    assert reasons(report) == {reason: 1}
    assert (report.read, report.kept) == (2, 1)


def test_rules_can_be_turned_off():
    pairs = [Pair("same", "same"), Pair("held", "x"), Pair("held", "x")]
    kept, report = clean(
        pairs, held_out=[Pair("held", "out")], drop_identical=False, drop_duplicates=False, drop_overlap=False
    )
    assert kept == pairs and reasons(report) == {}


def test_short_pairs_may_differ_more_than_long_ones():
    kept, _ = clean([Pair("Si", "Yes, I do think so"), Pair("s" * 20, "y" * 180)])
    assert kept == [Pair("Si", "Yes, I do think so")]


def test_examples_are_few_and_short():
    _, report = clean([Pair("a" * 3_000, str(number)) for number in range(9)])
    dropped = report.dropped["too long"]
    assert dropped.pairs == 9 and len(dropped.examples) == 3
    assert all(len(pair.source) == 80 for pair in dropped.examples)
    assert report.as_json()["dropped"]["too long"]["examples"][0] == list(dropped.examples[0])


def test_rules_that_dropped_nothing_are_in_the_report_too():
    _, report = clean([Pair("ola", "hello")])
    assert list(report.dropped) == list(rules_for(Cleaning(), HeldOut()))


def test_hashes_are_the_same_on_every_machine():
    assert hash_text("ola") == 7055272152247553082
    assert hash_pair(Pair("ola", "hello")) == 13509018979158357155
    assert hash_pair(Pair("a", "b")) != hash_pair(Pair("b", "a"))
