import itertools

import pytest

from qknorm.text.spacing import SpacingSample, explain_spacing

TOKENIZED, UNTOUCHED, WAITING = ("Un gato .", "A cat ."), ("Un gato.", "A cat."), ("Agarde ...", "Wait ...")


def sample(*pairs, times=200):
    made = SpacingSample()
    for pair in itertools.chain.from_iterable(itertools.repeat(pairs, times)):
        made.add(*pair)
    return made


def explain(pretokenized, **samples):
    return explain_spacing(samples, ("gl", "en"), pretokenized)


@pytest.mark.parametrize(
    ("made", "tokenized", "untouched"),
    [
        (sample(TOKENIZED), [0, 1], []),
        (sample(UNTOUCHED), [], [0, 1]),
        (sample(*[TOKENIZED] * 19, UNTOUCHED, times=10), [0, 1], []),
        (sample(TOKENIZED, UNTOUCHED), [], []),
        (sample(TOKENIZED, times=99), [], []),
        (sample(("Non hai tal ?", "There is none ?")), [], []),
        (sample((".", ".")), [], []),
        (sample(WAITING, WAITING, TOKENIZED), [0, 1], []),
        (sample(("猫 很 小 。", "A cat.")), [0], [1]),
        (sample(("यह बिल्ली है ।", "これは猫です。")), [0], [1]),
        (sample(("Un gato .  ", "")), [0], []),
    ],
    ids=["tokenised", "untouched", "nearly", "mixed", "few", "none", "alone", "ellipses", "sides", "scripts", "blanks"],
)
def test_stops_tell_whether_a_text_is_tokenised(made, tokenized, untouched):
    assert (made.tokenized_sides(), made.untouched_sides()) == (tokenized, untouched)


def test_what_was_said_is_held_against_the_text():
    tokenized, untouched, silent = sample(TOKENIZED), sample(UNTOUCHED), sample(("a", "b"))
    assert explain(True, train=tokenized, dev=silent) is None and explain(False, train=untouched, dev=silent) is None
    told = explain(False, dev=tokenized, train=tokenized)
    assert "dev.gl, dev.en, train.gl and train.en are tokenised" in told and "give --subwords.pretokenized" in told
    assert "but stops in train.gl and train.en have no space before" in explain(True, train=untouched)


@pytest.mark.parametrize("pretokenized", [False, True])
def test_texts_that_differ_are_told_whatever_was_said(pretokenized):
    told = explain(pretokenized, dev=sample(UNTOUCHED), train=sample(TOKENIZED))
    assert "train.gl and train.en are tokenised and dev.gl and dev.en are not; bring all to one form" in told
    told = explain(pretokenized, train=sample(("Un gato .", "A cat.")))
    assert "train.gl is tokenised and train.en is not" in told
