import pytest
from hypothesis import given
from hypothesis import strategies as st

from qknorm.errors import InputError
from qknorm.scoring import score
from qknorm.scoring.repeated import RepeatedBleu

REFERENCE = ["a house is here , small .", "it 's a city by the sea .", "\u00a0two\u00a0words and \u2028 more , 1.5 %"]
lines = st.text(st.sampled_from("a b.,'%1\u00a0\u2028é"), max_size=30)


@given(st.lists(st.lists(lines | st.sampled_from(REFERENCE), min_size=3, max_size=3), min_size=1, max_size=4))
def test_it_scores_what_those_score_that_count_everything_anew(systems):
    tokenized, raw = RepeatedBleu(REFERENCE, tokenized=True), RepeatedBleu(REFERENCE, tokenized=False, lang="en")
    for system in [*systems, systems[0], systems[0]]:
        assert tokenized(system) == score(system, [REFERENCE], "multi-bleu")[0].value
        assert raw(system) == score(system, [REFERENCE], "bleu", lang="en")[0].value
    assert tokenized(REFERENCE) == pytest.approx(100)


def test_lines_must_stand_side_by_side():
    with pytest.raises(InputError, match="2 lines"):
        RepeatedBleu(REFERENCE, tokenized=True)(REFERENCE[:2])
    with pytest.raises(InputError, match="only empty lines"):
        RepeatedBleu(["", ""], tokenized=False)
