import math

import pytest

from qknorm.studies.published import (
    AVERAGE_GAIN,
    SCORES,
    SOFTMAX_EXAMPLE,
    TABLE_1,
    average_gain,
    nearest_pair,
    published_bleu,
)
from qknorm.studies.recipes import PAIRS


def test_the_average_gain_is_that_of_table_2():
    gains = [published_bleu("Table 2", pair, "qknorm") - published_bleu("Table 2", pair, "baseline") for pair in PAIRS]
    assert math.fsum(gains) / len(gains) == pytest.approx(AVERAGE_GAIN, abs=5e-4)
    assert average_gain("Table 2") == pytest.approx(AVERAGE_GAIN) and average_gain("Table 3") == pytest.approx(0.990)


def test_every_table_has_all_its_numbers_once():
    counts = {where: sum(each.where == where for each in SCORES) for where in dict.fromkeys(e.where for e in SCORES)}
    assert counts == {"Table 2": 10, "Table 3": 10, "Table 4": 5, "Table 5": 7, "Table 6": 6}
    assert len({(each.where, each.pair, each.system) for each in SCORES}) == len(SCORES)
    assert {row.pair for row in TABLE_1} == set(PAIRS)


def test_tables_4_to_6_agree_with_table_2_on_the_paper_s_own_system():
    own = published_bleu("Table 2", "en-vi", "qknorm")
    names = {"Table 4": "heads-8", "Table 5": "percentile-97.5", "Table 6": "qknorm"}
    assert {published_bleu(where, "en-vi", system) for where, system in names.items()} == {own}


def test_an_unknown_number_is_none():
    assert published_bleu("Table 4", "gl-en", "heads-8") is None
    assert published_bleu("Table 2", "de-en", "qknorm") is None


@pytest.mark.parametrize("logits", list(SOFTMAX_EXAMPLE))
def test_the_softmax_example_is_as_printed(logits):
    top = max(logits)
    parts = [math.exp(each - top) for each in logits]
    assert [each / math.fsum(parts) for each in parts] == pytest.approx(SOFTMAX_EXAMPLE[logits], abs=6e-6)


def test_the_nearest_pair_is_nearest_by_ratio():
    assert [nearest_pair(count) for count in (5_000, 29_000, 160_000, 10**7)] == ["gl-en", "sk-en", "en-vi", "ar-en"]
    with pytest.raises(ValueError, match="at least one example"):
        nearest_pair(0)
