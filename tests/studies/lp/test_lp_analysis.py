"""What made-up losses must be said to mean."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from lp_cases import made_up, made_up_arm, tiny_study, tiny_text

from qknorm.studies.lp.analysis import Results, compare_arms, compare_with_baseline, judge, summarise
from qknorm.studies.lp.records import Record, StudyFolder
from qknorm.studies.lp.report import make_tables, write_report

EXPONENTS = (1.0, 2.0, 3.0, 4.0)
NOISE = (0.003, -0.002, 0.001, -0.004, 0.002)


def losses(gain_by_p: dict[float, float], noise: float = 1.0) -> object:
    """Folds differ much, p differs by its gain, and every pair a little."""

    def loss(p: float | None, fold: int) -> float:
        wobble = noise * NOISE[(fold + int(p or 0)) % 5] if p != 2 else 0.0
        return 1.5 + 0.1 * fold - gain_by_p.get(p or 0.0, 0.0) + wobble

    return loss


def study(
    same: dict[float, float], matched: dict[float, float] | None, control: float = 0.0, folds: int = 5
) -> Results:
    records = made_up_arm("same-scale", EXPONENTS, folds, losses(same))  # type: ignore[arg-type]
    if matched is not None:
        records += made_up_arm("matched", (1.0, 3.0, 4.0), folds, losses(matched))  # type: ignore[arg-type]
    records += made_up_arm("dot-product", (None,), folds, losses({0.0: control}))  # type: ignore[arg-type]
    return Results(records)


def answers(results: Results) -> list[str]:
    """By the final loss."""
    return [verdict.answer for verdict in judge(results)][:4]


@pytest.mark.parametrize(
    ("same", "matched", "control", "expected"),
    [
        ({3.0: 0.05, 4.0: 0.08}, {3.0: 0.04, 4.0: 0.05}, -0.05, ["yes", "yes", "worse", "p"]),
        ({3.0: 0.05, 4.0: 0.08}, {}, 0.0, ["yes", "not shown", "not told apart", "the start"]),
        ({3.0: 0.05, 4.0: 0.08}, {3.0: -0.05, 4.0: -0.05}, 0.05, ["yes", "no", "better", "the start"]),
        ({3.0: 0.05}, {3.0: 0.05}, 0.0, ["in part", "in part", "not told apart", "not the start alone"]),
        ({3.0: 0.05, 4.0: -0.05}, {}, 0.0, ["mixed", "not shown", "not told apart", "the start"]),
        ({}, {}, 0.0, ["not shown", "not shown", "not told apart", "neither"]),
        ({3.0: -0.1}, {4.0: 0.05}, 0.0, ["no", "in part", "not told apart", "a gain only when matched"]),
        ({3.0: 0.05, 4.0: 0.08}, None, 0.0, ["yes", "open", "not told apart", "open"]),
    ],
)
def test_verdicts(
    same: dict[float, float], matched: dict[float, float] | None, control: float, expected: list[str]
) -> None:
    assert answers(study(same, matched, control)) == expected


def test_two_folds_decide_nothing() -> None:
    assert answers(study({3.0: 0.5, 4.0: 0.5}, {3.0: 0.5, 4.0: 0.5}, 0.5, folds=2)) == ["open"] * 4


def test_who_ends_lower_need_not_have_been_lower_on_the_way() -> None:
    """p = 2 comes down first and overfits; p = 3 comes later and ends lower."""
    records = [made_up("same-scale", 2.0, fold, 2.0, best=1.5 + NOISE[fold] / 100) for fold in range(5)]
    records += [made_up("same-scale", 3.0, fold, 1.8 + NOISE[fold] / 100, best=1.7) for fold in range(5)]
    final, *_, best, speed = judge(Results(records))
    assert (final.answer, best.answer, speed.answer) == ("yes", "no", "no")
    assert "worse at p = 3 (+0.2" in best.because
    assert "p = 2 is best at iteration 80 on average and ends, after 100, 0.5" in best.because
    assert speed.because.endswith("80 at p = 2, 80 at p = 3.")
    sooner = [made_up("same-scale", 3.0, fold, 1.0) for fold in range(5)]
    assert [verdict.answer for verdict in judge(Results([*records, *sooner]))][4:] == ["yes", "yes"]
    never = [made_up("same-scale", 4.0, fold, 2.5) for fold in range(5)]
    assert judge(Results([*records, *sooner, *never]))[-1].answer == "in part"
    assert "never at p = 4" in judge(Results([*records, *never]))[-1].because


def test_who_is_faster_goes_by_the_folds_that_both_have() -> None:
    quick, slow = [made_up("same-scale", 2.0, fold, 3.5, best=1.5) for fold in (0, 1)], range(2, 5)
    records = quick + [made_up("same-scale", 2.0, fold, 2.0) for fold in slow]  # down after 20 and after 80 iterations
    records += [made_up("same-scale", 3.0, fold, 1.2) for fold in slow]  # after 60
    few = [made_up("same-scale", 4.0, fold, 2.5) for fold in (2, 3)]
    expected = "56 at p = 2, 60 at p = 3 (80 at p = 2 on its folds)."
    for more in ([], few):  # two folds of another p decide nothing
        speed = judge(Results([*records, *more]))[-1]
        assert (speed.answer, speed.because.split(": ")[1]) == ("yes", expected)


def test_nobody_is_faster_or_slower_than_a_p_2_that_diverged() -> None:
    records = [made_up("same-scale", 2.0, fold, math.nan, best=2.0) for fold in range(5)]
    records += [made_up("same-scale", 3.0, fold, 1.8) for fold in range(5)]
    assert judge(Results(records))[-1].answer == "open"


def test_p_below_2_has_no_say_about_p_above_2_but_in_the_correction() -> None:
    results = study({1.0: 0.5}, None)
    assert answers(results)[0] == "not shown"
    compared = compare_with_baseline(results, "same-scale")
    assert [each.p for each in compared] == [1.0, 3.0, 4.0]
    assert [each.outcome for each in compared] == ["better", "undecided", "undecided"]
    assert compared[0].adjusted_t == pytest.approx(3 * compared[0].tested.t_p)


def test_a_line_of_too_few_folds_has_no_p_and_no_part_in_the_correction() -> None:
    records = made_up_arm("same-scale", (2.0, 3.0), 5, losses({3.0: 0.05}))  # type: ignore[arg-type]
    records += made_up_arm("same-scale", (4.0,), 2, losses({4.0: 0.08}))  # type: ignore[arg-type]
    tested, untested = compare_with_baseline(Results(records), "same-scale")
    assert tested.adjusted_t == tested.tested.t_p and tested.adjusted_wilcoxon == tested.tested.wilcoxon_p
    assert untested.outcome == "untested" and math.isclose(untested.tested.difference, -0.08, abs_tol=0.01)
    row = make_tables(Results(records))[1].rows[1]
    assert row[:2] == ("4", "2") and row[3:] == ("–", "–", "–", "–", "untested")


def test_a_run_that_diverged_is_counted_and_spoils_its_test() -> None:
    records = made_up_arm("same-scale", EXPONENTS, 4, losses({}))  # type: ignore[arg-type]
    records.append(made_up("same-scale", 4.0, 3, math.nan, best=2.0))
    results = Results(records)  # the last replaces the one before
    line = summarise(results)[-1]
    assert (line.p, line.diverged) == (4.0, 1)
    assert line.final[0] == math.inf and math.isfinite(line.best[0])
    assert compare_with_baseline(results, "same-scale")[-1].outcome == "diverged"
    assert "(1 diverged)" in make_tables(results)[0].markdown()


def test_a_p_that_diverged_is_not_passed_over() -> None:
    """Else the gain of the others would be told as that of every p."""
    records = made_up_arm("same-scale", EXPONENTS, 5, losses({3.0: 0.05, 4.0: 0.08}))  # type: ignore[arg-type]
    records += made_up_arm("matched", (3.0, 4.0), 5, losses({3.0: 0.05, 4.0: 0.08}))  # type: ignore[arg-type]
    assert answers(Results(records))[3] == "p"
    records.append(made_up("matched", 4.0, 2, math.nan))
    verdicts = judge(Results(records))
    assert [verdict.answer for verdict in verdicts[:4]] == ["yes", "mixed", "open", "not the start alone"]
    assert "since a run diverged, at p = 4." in verdicts[1].because and "nan" not in verdicts[1].because
    records += [made_up("same-scale", 2.0, 1, math.nan), *made_up_arm("dot-product", (None,), 3, lambda *_: 1.0)]
    assert answers(Results(records)) == ["not shown", "not shown", "open", "open"]


def test_nobody_comes_down_to_a_loss_that_is_no_number() -> None:
    records = [made_up("same-scale", p, fold, 2.0) for p in (2.0, 3.0) for fold in range(3)]
    records += [made_up("same-scale", 2.0, 1, math.nan), made_up("same-scale", 3.0, 2, 2.5)]
    three = summarise(Results(records))[-1]
    assert (three.iterations_to_baseline, three.reached_baseline, three.with_baseline) == (80, 1, 2)
    assert "80 (1 of 2 folds)" in make_tables(Results(records))[0].markdown()
    worse = [made_up("same-scale", 2.0, 0, 2.0), made_up("same-scale", 3.0, 0, 2.5)]
    assert "never (0 of 1 folds)" in make_tables(Results(worse))[0].markdown()


def test_a_gain_that_one_arm_shows_and_the_other_does_not_is_no_difference_between_them() -> None:
    """Significant here and not there: the start is to blame only where the arms themselves are told apart."""
    same, matched = (-0.05, -0.04, -0.06, -0.05, -0.05), (-0.12, 0.01, -0.08, 0.02, -0.05)
    records = made_up_arm("same-scale", (2.0,), 5, lambda _, fold: 2.0 + fold / 10)
    records += made_up_arm("same-scale", (3.0,), 5, lambda _, fold: 2.0 + fold / 10 + same[fold])
    records += made_up_arm("matched", (3.0,), 5, lambda _, fold: 2.0 + fold / 10 + matched[fold])
    verdicts = judge(Results(records))
    assert [verdict.answer for verdict in verdicts[:4]] == ["yes", "not shown", "open", "not shown"]
    assert "more folds are needed" in verdicts[3].because


def test_arms_that_share_no_p_are_not_weighed_against_each_other() -> None:
    records = made_up_arm("same-scale", (2.0, 3.0), 5, losses({3.0: 0.05}))  # type: ignore[arg-type]
    records += made_up_arm("matched", (4.0,), 5, losses({}))  # type: ignore[arg-type]
    assert answers(Results(records)) == ["yes", "not shown", "open", "open"]


def test_summaries_hold_what_the_curves_hold() -> None:
    records = [made_up("same-scale", 2.0, fold, 2.0 + fold / 10) for fold in range(3)]
    records += [made_up("same-scale", 3.0, fold, 1.9 + fold / 10, best=1.8 + fold / 10) for fold in range(3)]
    two, three = summarise(Results(records))
    assert two.final == pytest.approx((2.1, 0.1)) and two.reached_baseline == 3
    assert two.iterations_to_baseline == 80  # where it first has its last loss
    assert three.best == pytest.approx((1.9, 0.1)) and three.final == pytest.approx((2.0, 0.1))
    assert three.iterations_to_baseline == 80
    assert three.milliseconds[0] == pytest.approx(5.3)


def test_skipped_steps_are_summed_where_every_run_tells_them() -> None:
    counts = {2.0: (1, 0, 3), 3.0: (1, None, 3)}
    records = [
        replace(made_up("same-scale", p, fold, 2.0), skipped_steps=skipped)
        for p, each in counts.items()
        for fold, skipped in enumerate(each)
    ]
    results = Results(records)
    assert [each.skipped for each in summarise(results)] == [4, None]
    table = make_tables(results)[0]
    assert table.columns[-1] == "skipped" and [row[-1] for row in table.rows] == ["4", "–"]


def test_arms_are_compared_at_each_p() -> None:
    compared = compare_arms(study({3.0: 0.08, 4.0: 0.08}, {3.0: 0.01, 4.0: 0.2}))
    assert [(each.p, each.outcome) for each in compared] == [(1.0, "undecided"), (3.0, "worse"), (4.0, "better")]


def test_p_2_stands_in_both_arms() -> None:
    results = study({}, {})
    assert results.exponents("matched") == [1.0, 2.0, 3.0, 4.0]
    assert results.record("matched", 2.0, 0) is results.record("same-scale", 2.0, 0)


def write_made_up(path: Path, records: list[Record]) -> StudyFolder:
    folder = StudyFolder.create_or_open(path, tiny_study(), tiny_text())
    for each in records:
        folder.add(Record(each.run, folder.about.fingerprint, each.curve, each.ms_per_iteration, each.made_by))
    return folder


def test_the_page_shows_tables_pictures_and_verdicts(tmp_path: Path) -> None:
    records = made_up_arm("same-scale", EXPONENTS, 3, losses({3.0: 0.05}))  # type: ignore[arg-type]
    records += made_up_arm("matched", (3.0,), 3, losses({}))  # type: ignore[arg-type]
    records += made_up_arm("dot-product", (None,), 3, losses({}))  # type: ignore[arg-type]
    records += made_up_arm("learned-p", (2.0,), 3, losses({}, 3.0))  # type: ignore[arg-type]
    records += made_up_arm("infinity", (math.inf,), 2, lambda _, fold: 2.0 + fold)
    folder = write_made_up(tmp_path, records)
    report = write_report(folder, [made_up("matched", 4.0, 0, 1.0).run])
    assert report is not None
    page = report.markdown.read_text(encoding="utf-8")
    assert "our assumption" in page and "gap of 12 characters" in page
    assert "Not run yet: 1 runs of matched-p4" in page
    assert "`qknorm study lp --text words --arms same-scale,matched,dot-product,learned-p,infinity --p 1,2,3,4" in page
    assert "--model.context 12" in page and "--evaluate-every 4" in page and "--seed" not in page
    for table in report.tables:
        assert table.markdown() in page
        assert {len(row) for row in table.rows} == {len(table.columns)}
    assert "| infinity | ∞ | 2 |" in page
    for picture in report.pictures.values():
        assert picture.read_bytes().startswith(b"\x89PNG") and f"({picture.name})" in page
    assert {"validation-same-scale.png", "time-matched.png", "folds-same-scale.png", "scales-matched.png"} <= {
        picture.name for picture in report.pictures.values()
    }
    for verdict in report.verdicts:
        assert verdict.because in page
    html = report.html.read_text(encoding="utf-8")
    assert html.count("<table>") == len(report.tables) and html.count("<img ") == len(report.pictures)
    assert html.count("<strong>") == len(report.verdicts) and "**" not in html


def test_a_page_of_one_run_and_of_none(tmp_path: Path) -> None:
    folder = write_made_up(tmp_path / "one", [made_up("dot-product", None, 0, 1.5)])
    report = write_report(folder, [])
    assert report is not None and report.pictures == {}
    assert all(verdict.answer == "open" for verdict in report.verdicts)
    folder = write_made_up(tmp_path / "other", [made_up("matched", 3.0, 1, math.nan)])
    assert write_report(folder, []) is not None
    assert write_report(write_made_up(tmp_path / "none", []), []) is None
