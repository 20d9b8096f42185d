import math

import pytest
import sacrebleu
import sacrebleu.tokenizers.tokenizer_ja_mecab as ja_mecab
import sacrebleu.tokenizers.tokenizer_ko_mecab as ko_mecab

from qknorm.errors import InputError
from qknorm.scoring import Score, score

HYPOTHESES = ["The cat sat on the mat today.", "It's raining , again", "", "Nobody knows why they left so early."]
REFERENCE = ["The cat sat on the red mat.", "It is raining again.", "Yes.", "Nobody knows why they left early."]
SECOND = ["A cat was sitting on the mat today.", "It's raining again.", "Indeed.", "No one knows why they went."]
VERSION = sacrebleu.__version__


def multi_bleu(hypotheses: list[str], references: list[list[str]], *, lowercase: bool = False) -> Score:
    return score(hypotheses, references, "multi-bleu", lowercase=lowercase)[0]


def test_values_are_those_of_sacrebleu() -> None:
    bleu, chrf, ter, chrf2 = score(HYPOTHESES, [REFERENCE, SECOND], ("bleu", "chrf", "ter", "chrf++"))
    references = [REFERENCE, SECOND]
    assert bleu.value == pytest.approx(sacrebleu.corpus_bleu(HYPOTHESES, references).score)
    assert chrf.value == pytest.approx(sacrebleu.corpus_chrf(HYPOTHESES, references).score)
    assert ter.value == pytest.approx(sacrebleu.corpus_ter(HYPOTHESES, references).score)
    assert chrf2.value == pytest.approx(sacrebleu.corpus_chrf(HYPOTHESES, references, word_order=2).score)


def test_a_long_text_counts_as_one_corpus() -> None:
    hypotheses, reference = HYPOTHESES * 40, REFERENCE * 40
    found = score(hypotheses, [reference], "bleu")[0].value
    assert found == pytest.approx(sacrebleu.corpus_bleu(hypotheses, [reference]).score)
    assert found == pytest.approx(score(HYPOTHESES, [REFERENCE], "bleu")[0].value)


def test_signatures_are_those_of_sacrebleu() -> None:
    signatures = [found.signature for found in score(HYPOTHESES, [REFERENCE, SECOND])]
    assert signatures == [
        f"nrefs:2|case:mixed|eff:no|tok:13a|smooth:exp|version:{VERSION}",
        f"nrefs:2|case:mixed|eff:yes|nc:6|nw:0|space:no|version:{VERSION}",
        f"nrefs:2|case:lc|tok:tercom|norm:no|punct:yes|asian:no|version:{VERSION}",
    ]


def test_details_make_up_the_score() -> None:
    found = score(HYPOTHESES, [REFERENCE], "bleu")[0]
    precisions, penalty = found.details["precisions"], found.details["brevity_penalty"]
    assert isinstance(precisions, list) and isinstance(penalty, float)
    assert found.value == pytest.approx(penalty * math.exp(sum(map(math.log, precisions)) / 4))
    ter = score(["a b c d"], [["a b c x"]], ("ter",))[0]
    assert ter.details == {"edits": 1, "reference_length": 4.0} and ter.value == 25.0


def test_intervals_are_those_of_sacrebleu() -> None:
    metric = sacrebleu.BLEU()
    expected = metric.corpus_score(HYPOTHESES, [REFERENCE], n_bootstrap=200)
    found = score(HYPOTHESES, [REFERENCE], ("bleu",), samples=200)[0]
    assert found.interval is not None
    assert found.interval.mean == pytest.approx(expected._mean)
    assert (found.interval.high - found.interval.low) / 2 == pytest.approx(expected._ci)
    assert found.signature == str(metric.get_signature())
    assert "bs:200|seed:12345" in found.signature


def test_multi_bleu_by_hand() -> None:
    # 6 of 7 words, 4 of 6 pairs, 3 of 5 triples and 2 of 4 quadruples match; the lengths are equal.
    found = multi_bleu(["the cat sat on the mat today"], [["the cat sat on the red mat"]])
    assert found.value == pytest.approx(100 * (6 / 7 * 4 / 6 * 3 / 5 * 2 / 4) ** 0.25)
    assert found.details["matches"] == [6, 4, 3, 2] and found.details["ngrams"] == [7, 6, 5, 4]
    assert found.signature == (
        f"nrefs:1|case:mixed|eff:no|tok:ascii-blanks|smooth:none|script:multi-bleu|version:{VERSION}"
    )


def test_multi_bleu_detok_makes_its_own_tokens_of_tokens_and_entities() -> None:
    # "I & apos ; m here ." against "I & apos ; m there .": 6 of 7, 4 of 6, 3 of 5, 2 of 4 (worked out by hand)
    found = score(["I &apos;m here ."], [["I &apos;m there ."]], "multi-bleu-detok")[0]
    assert found.details["matches"] == [6, 4, 3, 2] and found.details["ngrams"] == [7, 6, 5, 4]
    assert found.value == pytest.approx(100 * (6 / 7 * 4 / 6 * 3 / 5 * 2 / 4) ** 0.25)
    assert found.signature == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:none|script:multi-bleu-detok|version:{VERSION}"
    assert multi_bleu(["I &apos;m here ."], [["I &apos;m there ."]]).details["matches"] == [3, 1, 0, 0]


def test_multi_bleu_by_hand_over_two_sentences() -> None:
    # Counts add up over sentences before they are divided: 8/9, 6/7, 4/5, 2/3; 9 words against 10.
    found = multi_bleu(["a b c d x", "p q r s"], [["a b c d e", "p q r s t"]])
    assert found.value == pytest.approx(100 * math.exp(1 - 10 / 9) * (8 / 9 * 6 / 7 * 4 / 5 * 2 / 3) ** 0.25)


def test_multi_bleu_clips_repeats_and_punishes_brevity() -> None:
    assert multi_bleu(["a a a a a"], [["a a a a b"]]).details["matches"] == [4, 3, 2, 1]
    assert multi_bleu(["a b c d"], [["a b c d e f"]]).value == pytest.approx(100 * math.exp(1 - 6 / 4))
    assert multi_bleu(["a b c d e f"], [["a b c d"]]).details["brevity_penalty"] == 1.0


def test_multi_bleu_takes_the_shorter_of_two_references_equally_near() -> None:
    found = multi_bleu(["a b c d e"], [["a b c d e f"], ["a b c d"]])
    assert found.details["reference_length"] == 4 and found.value == pytest.approx(100.0)


@pytest.mark.parametrize("hypothesis", ["the cat sat on the mat", "a b", "", "zz zz zz zz zz zz"])
def test_multi_bleu_is_zero_where_an_order_has_no_match(hypothesis: str) -> None:
    assert multi_bleu([hypothesis], [["the cat is on the mat"]]).value == 0.0


def test_multi_bleu_minds_case_and_lowers_only_ascii() -> None:
    assert multi_bleu(["A b c d"], [["a b c d"]]).value == 0.0
    lowered = multi_bleu(["A b c d"], [["a B c d"]], lowercase=True)
    assert lowered.value == pytest.approx(100.0) and "case:lc-ascii" in lowered.signature
    assert multi_bleu(["Ä b c d e"], [["ä b c d e"]], lowercase=True).details["matches"] == [4, 3, 2, 1]


def test_multi_bleu_parts_words_only_at_ascii_blanks() -> None:
    found = multi_bleu(["a\u00a0b\u2028c\u3000d \t e"], [["a\u00a0b\u2028c\u3000d e"]])
    assert found.details["ngrams"] == [2, 1, 0, 0] and found.details["matches"] == [2, 1, 0, 0]


def test_chinese_is_scored_by_characters() -> None:
    bleu, _, ter = score(["我爱北京"], [["我爱上海"]], lang="zho_Hans")
    assert "tok:zh" in bleu.signature and bleu.details["hypothesis_length"] == 4
    assert "asian:yes" in ter.signature and ter.value == 50.0


@pytest.mark.parametrize(("lang", "wanted"), [("ja", "ja-mecab"), ("ko", "ko-mecab")])
def test_characters_stand_in_for_a_missing_tokeniser(lang: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ja_mecab, "MeCab", None)
    monkeypatch.setattr(ko_mecab, "mecab_ko", None, raising=False)
    monkeypatch.setattr(ko_mecab, "MeCab", None, raising=False)
    found = score(["abcd"], [["abcx"]], ("bleu",), lang=lang)[0]
    assert "tok:char" in found.signature and f"wanted:{wanted}" in found.signature
    with pytest.raises(InputError, match=rf"{wanted}.*pip install"):
        score(["a"], [["a"]], ("bleu",), tokenizer=wanted)


def test_a_named_tokeniser_is_used() -> None:
    found = score(["a-b c."], [["a-b c."]], ("bleu",), tokenizer="none", lowercase=True)[0]
    assert "tok:none" in found.signature and "case:lc" in found.signature and found.details["hypothesis_length"] == 2


def test_unknown_names_get_a_suggestion() -> None:
    with pytest.raises(InputError, match='unknown metric "belu": did you mean "bleu"'):
        score(["a"], [["a"]], ("belu",))
    with pytest.raises(InputError, match='unknown tokenizer "xyz": known: 13a'):
        score(["a"], [["a"]], tokenizer="xyz")


def test_lines_too_long_for_ter_are_named() -> None:
    endless = "so " * 3_000
    with pytest.raises(InputError, match=r"line 2: 3,000 words against 3,000 are too many for TER"):
        score(["a", endless], [["a", endless]])
    assert score(["a", endless], [["a", endless]], ("bleu",))[0].value == pytest.approx(100.0)


def test_different_numbers_of_lines_are_refused_everywhere() -> None:
    for metric in ("bleu", "multi-bleu"):
        with pytest.raises(InputError, match="has 2 lines but the reference has 1 line"):
            score(["a", "b"], [["a"]], metric)


def test_progress_reaches_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    calls: list[tuple[str, int, int | None]] = []
    score(["tokenised ."] * 120, [["tokenised ."] * 120], ("bleu",), progress=lambda *call: calls.append(call))
    assert calls == [("bleu", 50, 120), ("bleu", 100, 120), ("bleu", 120, 120)]
    assert capfd.readouterr() == ("", "")
