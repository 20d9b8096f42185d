import dataclasses
import json

import pytest

from qknorm.errors import InputError
from qknorm.scoring import ScoringOptions, score, score_report

TOKENS = ["It &apos;s the organization &apos;s office .", "I really , really loved my job .", "Is it so ?"]
WORSE = ["It &apos;s an office .", "I loved my job .", "It is ?"]
PLAIN = ["It's the organization's office.", "I really, really loved my job.", "Is it so?"]
PLAIN_WORSE = ["It's an office.", "I loved my job.", "It is?"]
FEW = {"samples": 50, "trials": 50}


def test_one_system_has_scores_and_no_comparison() -> None:
    report = score_report({"out": PLAIN_WORSE}, [PLAIN])
    assert report.systems[0].name == "out" and report.sentences == 3
    assert list(report.systems[0].scores) == score(PLAIN_WORSE, [PLAIN])
    assert report.comparisons == () and report.notes == ()


def test_tokenised_text_alone_gets_only_the_numbers_of_the_scripts() -> None:
    report = score_report({"out": WORSE}, [TOKENS], ScoringOptions(tokenized=True))
    assert list(report.systems[0].scores) == score(WORSE, [TOKENS], ("multi-bleu", "multi-bleu-detok"))
    assert report.notes == ()


@pytest.mark.parametrize(
    ("detokenizer", "unescape", "prep"),
    [
        ("moses", False, "unescape+moses-detok[en]"),
        ("moses", True, "unescape+moses-detok[en]"),
        ("treebank", True, "unescape+treebank-detok"),
    ],
)
def test_tokenised_text_is_detokenised_for_all_but_the_scripts(detokenizer: str, unescape: bool, prep: str) -> None:
    options = ScoringOptions(tokenized=True, detokenize=detokenizer, unescape=unescape)  # type: ignore[arg-type]
    first, second, *others = score_report({"out": WORSE}, [TOKENS], options).systems[0].scores
    assert [first, second] == score(WORSE, [TOKENS], ("multi-bleu", "multi-bleu-detok"))
    assert [found.value for found in others] == [found.value for found in score(PLAIN_WORSE, [PLAIN])]
    assert all(f"|prep:{prep}|version:" in found.signature for found in others)


def test_raw_references_are_left_alone() -> None:
    options = ScoringOptions(metrics=("bleu",), detokenize="moses", raw_references=True, lang="eng_Latn")
    found = score_report({"out": TOKENS}, [PLAIN], options).systems[0].scores[0]
    assert found.value == pytest.approx(100.0) and "|prep:unescape+moses-detok[en](hyp)|" in found.signature
    spaced = score_report({"out": TOKENS}, [TOKENS], options).systems[0].scores[0]
    assert spaced.value < 100.0


def test_unescaping_alone() -> None:
    found = score_report({"out": ["it &apos;s"]}, [["it 's"]], ScoringOptions(metrics=("chrf",), unescape=True))
    assert found.systems[0].scores[0].value == pytest.approx(100.0)
    assert "|prep:unescape|" in found.systems[0].scores[0].signature and found.notes == ()


def test_two_systems_are_compared_under_every_metric() -> None:
    report = score_report({"a": PLAIN_WORSE, "b": PLAIN}, [PLAIN], ScoringOptions(**FEW, lang="gl"))
    assert [comparison.metric for comparison in report.comparisons] == ["bleu", "chrf", "ter"]
    for index, comparison in enumerate(report.comparisons):
        assert [system.name for system in comparison.systems] == ["a", "b"] and comparison.baseline == "a"
        assert [s.value for s in comparison.systems] == [s.scores[index].value for s in report.systems]
        assert comparison.systems[1].randomization_p is not None
    other = score_report({"a": PLAIN_WORSE, "b": PLAIN}, [PLAIN], ScoringOptions(**FEW, baseline="b"))
    assert other.comparisons[0].systems[1].name == "a"


def test_intervals_on_request() -> None:
    report = score_report({"out": PLAIN_WORSE}, [PLAIN], ScoringOptions(intervals=True, samples=40))
    assert all(found.interval is not None and "bs:40" in found.signature for found in report.systems[0].scores)


def test_a_report_is_plain_data() -> None:
    systems = {"a": WORSE, "b": TOKENS}
    report = score_report(systems, [TOKENS], ScoringOptions(**FEW, tokenized=True, detokenize="moses"))
    read = json.loads(json.dumps(dataclasses.asdict(report), allow_nan=False))
    assert read["systems"][1]["scores"][0]["value"] == pytest.approx(100.0)
    assert read["comparisons"][0]["systems"][0]["koehn_p"] is None


def test_notes_tell_what_looks_wrong() -> None:
    report = score_report({"out": ["", *TOKENS[1:]]}, [TOKENS], reference_names=["ref.en"])
    assert len(report.notes) == 4
    assert report.notes[0].startswith("out looks tokenised (2 of 3 lines")
    assert report.notes[1].startswith("ref.en looks tokenised (3 of 3 lines")
    assert report.notes[2].startswith("ref.en has entities such as &apos; in 1 of 3 lines")
    assert report.notes[3] == "out has 1 empty of 3 lines"


def test_stages_of_progress_name_metric_and_system() -> None:
    calls: list[tuple[str, int, int | None]] = []
    options = ScoringOptions(**FEW, metrics=("bleu",))
    score_report({"a": PLAIN, "b": PLAIN}, [PLAIN], options, progress=lambda *call: calls.append(call))
    assert calls == [("bleu of a", 3, 3), ("bleu of b", 3, 3)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ScoringOptions(baseline="x"), 'baseline "x" is not among the systems: out'),
        (ScoringOptions(metrics=()), "metrics is empty"),
        (ScoringOptions(metrics=("blue",)), 'did you mean "bleu"'),
        (ScoringOptions(detokenize="nltk"), "use moses or treebank"),  # type: ignore[arg-type]
        (ScoringOptions(intervals=True, samples=-1), "at least 1"),
        (ScoringOptions(intervals=True, seed=-1), "seed must not be negative"),
    ],
)
def test_bad_options_are_refused(options: ScoringOptions, message: str) -> None:
    with pytest.raises(InputError, match=message):
        score_report({"out": PLAIN}, [PLAIN], options)


def test_file_names_stand_in_errors() -> None:
    with pytest.raises(InputError, match=r"out\.en has 1 line but ref\.en has 3 lines"):
        score_report({"out.en": ["a"]}, [PLAIN], reference_names=["ref.en"])
