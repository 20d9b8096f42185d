import itertools

import pytest

from qknorm.text.spacing import SpacingSample, explain_spacing

TOKENIZED, UNTOUCHED = ("Un gato .", "A cat ."), ("Un gato.", "A cat.")


def sample(*pairs, times=200):
    made = SpacingSample()
    for pair in itertools.chain.from_iterable(itertools.repeat(pairs, times)):
        made.add(*pair)
    return made


@pytest.mark.parametrize(
    ("made", "tokenized", "untouched"),
    [
        (sample(TOKENIZED), True, False),
        (sample(UNTOUCHED), False, True),
        (sample(*[TOKENIZED] * 19, ("Un gato...", "A cat ..."), times=10), True, False),
        (sample(TOKENIZED, UNTOUCHED), False, False),
        (sample(TOKENIZED, times=99), False, False),
        (sample(("Non hai tal ?", "There is none ?")), False, False),
        (sample((".", ".")), False, False),
        (sample(("猫。", "A cat .")), True, False),
        (sample(("Un gato .  ", "")), True, False),
    ],
    ids=[
        "tokenised",
        "untouched",
        "a few otherwise",
        "mixed",
        "too few",
        "no stops",
        "stops alone",
        "one side",
        "blanks",
    ],
)
def test_stops_tell_whether_a_text_is_tokenised(made, tokenized, untouched):
    assert (made.looks_tokenized(), made.looks_untouched()) == (tokenized, untouched)


def test_what_was_said_is_held_against_the_text():
    tokenized, untouched, silent = sample(TOKENIZED), sample(UNTOUCHED), sample(("a", "b"))
    assert explain_spacing({"train": tokenized, "dev": silent}, True) is None
    assert explain_spacing({"train": untouched, "dev": silent}, False) is None
    told = explain_spacing({"dev": tokenized, "test": tokenized, "train": tokenized}, False)
    assert "text of dev, test and train is tokenised" in told and "give --subwords.pretokenized" in told
    assert "but stops in train have no space before" in explain_spacing({"train": untouched}, True)


@pytest.mark.parametrize("pretokenized", [False, True])
def test_sets_that_differ_are_told_whatever_was_said(pretokenized):
    told = explain_spacing({"dev": sample(UNTOUCHED), "train": sample(TOKENIZED)}, pretokenized)
    assert "text of train is tokenised and that of dev is not" in told and told.endswith("from sets alike")
    told = explain_spacing({"train": sample(("Un gato .", "A cat."))}, pretokenized)
    assert told.endswith("from sides of one set alike")
