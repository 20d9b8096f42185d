import csv

import pytest
from paper_cases import finish, prepare_copy

from qknorm.errors import InputError
from qknorm.studies.grid.jobs import TRANSLATIONS, Result
from qknorm.studies.paper.experiments import BEYOND, TABLES
from qknorm.studies.paper.plan import make_plan
from qknorm.studies.paper.report import CSV_COLUMNS, Extras, write_report


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("pairs")
    for source in ("gl", "sk"):
        prepare_copy(place / "text" / source, source=source).folder.rename(place / f"{source}-en")
    return place


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """A pair whose text is in tokens, as the paper's is."""
    return prepare_copy(tmp_path_factory.mktemp("tokens"), pretokenized=True).folder


def cells(written, title):
    table = next(each for each in written.page.tables if each.title.startswith(title))
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows], table


def test_a_hyphen_within_a_language_is_none_between_languages(tmp_path):
    data = prepare_copy(tmp_path, source="zh-cn", target="pt-BR")
    plan = make_plan([TABLES["2"], BEYOND["width-query"]], tmp_path, data.folder)
    for each in plan.planned:
        finish(each.job, data, wrong=1)
    text = write_report(plan, tmp_path, "").markdown.read_text(encoding="utf-8")
    assert "| zh-cn→pt-BR | baseline |" in text and "zh-cn→pt-BR, cross-attention" in text
    assert "zh→cn" not in text and "pt→BR" not in text


def test_translations_that_are_cut_give_no_verdict(folder, tmp_path):
    plan = make_plan([TABLES["2"]], tmp_path, folder, pair="gl-en")
    for each in plan.planned:
        finish(each.job, each.data, wrong=2)
    job = plan.jobs[0]
    (job.folder / TRANSLATIONS).write_bytes(b"UN DOUS\n")
    with pytest.raises(InputError, match=f"has 1 lines for 10 sentences; remove {job.folder} and run"):
        write_report(plan, tmp_path, "")
    assert not (tmp_path / "report.md").exists()


def test_the_paper_and_ours_stand_side_by_side(folder, tmp_path):
    plan = make_plan([TABLES["2"]], tmp_path, folder, seeds=2)
    for each in plan.planned:
        finish(each.job, each.data, wrong=8 if each.system.name == "baseline" else each.seed)
    written = write_report(plan, tmp_path, "qknorm study paper --table 2")
    rows, table = cells(written, "Table 2")
    own = {(row["pair"], row["system"]): row for row in rows}
    line = own["gl→en", "qknorm"]
    assert (line["paper"], line["paper's difference"], line["seeds"], line["outcome"]) == (
        "24.21",
        "+2.20",
        "2",
        "holds",
    )
    assert float(line["p"]) < 0.01
    assert (line["minutes a run"], line["device minutes"]) == ("1.0 ± 0.0", "0.5 ± 0.0")
    assert own["gl→en", "baseline"]["difference"] == "–"
    assert any(note.startswith("Average gain over 2 pairs: +") for note in table.notes)
    assert any("tok:13a" in note for note in table.notes)
    text = written.markdown.read_text(encoding="utf-8")
    assert "Table 2, 2 comparisons of the paper: holds 2." in text
    assert "Data not here: en→vi, ar→en, en→he; see below." in text
    assert "`qknorm corpora download ted-ar-en`, then `qknorm prepare" in text
    assert (
        "`qknorm study paper --table 2`" in text
        and "8 runs, 0.13 hours of training in all, 0.07 hours of devices." in text
    )
    assert "<td>24.21</td>" in written.html.read_text(encoding="utf-8")


def test_what_runs_cost_is_left_open_where_nobody_counted(folder, tmp_path):
    plan = make_plan([TABLES["2"]], tmp_path, folder, pair="gl-en")
    for each in plan.planned:
        finish(each.job, each.data, wrong=0, of_device=None if each.system.name == "qknorm" else 60.0)
    written = write_report(plan, tmp_path, "qknorm study paper --table 2")
    rows, _ = cells(written, "Table 2")
    assert [row["device minutes"] for row in rows] == ["1.0", "–"]
    assert "2 runs, 0.03 hours of training in all." in written.markdown.read_text(encoding="utf-8")


def test_each_table_has_its_own_average_gain_of_the_paper(folder, tmp_path):
    plan = make_plan([TABLES["2"], TABLES["3"]], tmp_path, folder)
    for each in plan.planned:
        finish(each.job, each.data, wrong=8 if each.system.name == "baseline" else 0)
    written = write_report(plan, tmp_path, "command")
    for table, gain in (("Table 2", "+0.928"), ("Table 3", "+0.990")):
        assert any(note.endswith(f"the paper's, over five: {gain}.") for note in cells(written, table)[1].notes)


def test_the_page_says_what_measure_it_has(folder, tokens, tmp_path):
    """Text that was never in tokens is not scored by the paper's scripts, whatever its table is called."""
    experiments = [TABLES["2"], TABLES["3"], TABLES["4"], BEYOND["norms"]]
    titles = {}
    for name, data in (("plain", folder / "gl-en"), ("tokens", tokens)):
        plan = make_plan(experiments, tmp_path / name, data, pair="gl-en")
        page = write_report(plan, tmp_path / name, "command").page
        titles[name] = [table.title for table in page.tables[:2]]
        said = "gl→en: text that was never tokenised, scored by SacreBLEU"
        told = [any(note.startswith(said) for note in table.notes) for table in page.tables]
        assert told == ([True, True, True, False] if name == "plain" else [False] * 4)
    assert titles["plain"] == ["Table 2: Test BLEU, SacreBLEU", "Table 3: Test BLEU, SacreBLEU"]
    assert titles["tokens"] == ["Table 2: Test BLEU, Moses scripts", "Table 3: Test BLEU, SacreBLEU"]


def test_every_run_is_in_the_csv(folder, tmp_path):
    plan = make_plan([TABLES["6"].choose(["without-g"])], tmp_path, folder, pair="gl-en", seeds=2)
    finish(plan.planned[0].job, plan.planned[0].data, wrong=2)
    plan.planned[2].job.write()
    Result("diverged", "the loss, and so on", 30.0, 7, 0, None).write(plan.planned[2].job.folder)
    written = write_report(plan, tmp_path, "command")
    with written.results.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == CSV_COLUMNS
    assert [row["status"] for row in rows] == ["finished", "missing", "diverged", "missing"]
    assert float(rows[0]["bleu"]) > 50 and rows[0]["seconds"] == "60.0" and rows[2]["reason"] == "the loss, and so on"
    table, _ = cells(written, "Table 6")
    assert table[1]["seeds"] == "1 of 2 (1 diverged)" and table[1]["ours, mean ± sd"] == "–"
    assert table[1]["paper (en→vi)"] == "24.53"
    assert "Not finished: 2 of 4 runs. The same command goes on with them." in written.page.summary
    summary = write_report(plan, tmp_path, "qknorm study paper --report").page.summary
    assert "Not finished: 2 of 4 runs. The same command without --report goes on with them." in summary


def test_beyond_the_paper_the_difference_itself_is_told(folder, tmp_path):
    plan = make_plan([BEYOND["control"]], tmp_path, folder, pair="gl-en")
    wrong = {"layernorm-dot-products": 4, "baseline": 4, "scalenorm-qknorm": 0, "qknorm": 0}
    for each in plan.planned:
        finish(each.job, each.data, wrong=wrong[each.system.name])
    written = write_report(plan, tmp_path, "command")
    rows, table = cells(written, "Beyond the paper")
    assert "paper" not in table.columns
    assert [row["outcome"] for row in rows] == ["", "no difference shown", "better", "better"]
    assert any(line.startswith("gl→en, QKNorm and LayerNorm: better (+") for line in written.page.summary)


def test_what_diverged_is_not_told_as_not_run(folder, tmp_path):
    experiments = [TABLES["6"].choose(["without-g"]), BEYOND["norms"].choose(["rms"])]
    plan = make_plan(experiments, tmp_path, folder, pair="gl-en")
    for each in plan.planned:
        each.job.write()
        if each.system.name == "qknorm":
            finish(each.job, each.data, wrong=2)
        else:
            Result("diverged", "no number", 5.0, 3, 0, None).write(each.job.folder)
    summary = write_report(plan, tmp_path, "command").page.summary
    assert "Table 6, 1 comparison of the paper: diverged 1." in summary
    assert "gl→en, RMSNorm on queries and keys: diverged." in summary


def test_the_quick_form_has_no_p_and_no_verdict(folder, tmp_path):
    """Its models are too small to say anything, and whoever skims the page reads the outcome alone."""
    plan = make_plan([TABLES["2"]], tmp_path, folder, pair="gl-en")
    for each in plan.planned:
        finish(each.job, each.data, wrong=0 if each.system.name == "baseline" else 8)
    assert "reversed 1." in write_report(plan, tmp_path, "command").page.summary[0]
    written = write_report(plan, tmp_path, "command", Extras(quick=True))
    rows, _ = cells(written, "Table 2")
    assert [(row["p"], row["outcome"]) for row in rows] == [("–", ""), ("–", "too small to say")]
    assert float(rows[1]["difference"]) < 0
    assert "Table 2, 1 comparison of the paper: too small to say 1." in written.page.summary


def test_a_report_of_nothing_is_a_report(folder, tmp_path):
    plan = make_plan([TABLES["5"]], tmp_path, folder, pair="gl-en")
    written = write_report(plan, tmp_path, "command")
    assert "Table 5, 6 comparisons of the paper: not run yet 6." in written.page.summary
