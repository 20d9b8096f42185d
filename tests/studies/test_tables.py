import csv

import pytest

from qknorm.errors import InputError
from qknorm.studies.tables import Page, Table, write_csv

TABLE = Table("A <b> & B", ("name", "|x|"), (("a|b", "1.0"), ("<i>", "–")), frozenset({"name"}), ("see `x`",))


def test_markdown_keeps_bars_apart_and_numbers_at_the_right():
    assert TABLE.markdown().splitlines() == [
        "## A <b> & B",
        "",
        "| name | \\|x\\| |",
        "| --- | ---: |",
        "| a\\|b | 1.0 |",
        "| <i> | – |",
        "",
        "see `x`",
    ]


def test_html_shows_text_as_text():
    made = TABLE.html()
    assert "<caption>A &lt;b&gt; &amp; B</caption>" in made
    assert '<td class="words">&lt;i&gt;</td><td>–</td>' in made
    assert '<th class="words">name</th><th>|x|</th>' in made
    assert "<b>" not in made and "<i>" not in made


def test_a_row_that_does_not_fit_is_a_mistake():
    with pytest.raises(ValueError, match="a row of 1 cells under 2 columns"):
        Table("t", ("a", "b"), (("1",),))


def test_a_page_has_everything_in_both_forms(tmp_path):
    picture = tmp_path / "pictures" / "one.png"
    page = Page("T", ("says `<this>`", "odd ` mark"), (TABLE,), {"a picture": picture}, {"How": ("so",)})
    markdown, html = (path.read_text(encoding="utf-8") for path in page.write(tmp_path))
    assert markdown.startswith("# T\n\n- says `<this>`\n- odd ` mark\n\n## A <b> & B\n")
    assert "![a picture](pictures/one.png)" in markdown and markdown.endswith("## How\n\n- so\n")
    assert "<li>says <code>&lt;this&gt;</code></li><li>odd ` mark</li>" in html
    assert 'src="pictures/one.png" alt="a picture"' in html and "<h2>How</h2>" in html


def test_bold_words_of_a_list_are_bold_in_both_forms(tmp_path):
    written = Page("T", ("so? **<No>**: 2 * 3",), ()).write(tmp_path)
    markdown, html = (path.read_text(encoding="utf-8") for path in written)
    assert "- so? **<No>**: 2 * 3\n" in markdown
    assert "<li>so? <strong>&lt;No&gt;</strong>: 2 * 3</li>" in html


def test_a_long_word_of_a_list_does_not_widen_the_page_of_a_telephone(browser, tmp_path):
    Page("T", ("x" * 40,), (), sections={"How": (f"Commits: {'0123456789' * 9}",)}).write(tmp_path)
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.goto((tmp_path / "report.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.close()


def test_a_table_of_many_columns_fits_a_usual_window_and_leaves_its_words_room(browser, tmp_path):
    numbers = {"paper (en→vi)": "33.24", "paper's difference": "-0.84", "ours, mean ± sd": "23.01 ± 0.27"}
    numbers |= {"seeds": "1 of 3", "difference": "-0.57", "p": "0.019", "dev BLEU": "21.13 ± 0.03"}
    cells = {"system": "percentile-97.5", "settings": "percentile 97.5", **numbers, "minutes a run": "2.2 ± 1.5"}
    cells |= {"device minutes": "1.1 ± 0.7"}
    words = frozenset({"system", "settings"})
    Page("T", (), (Table("t", tuple(cells), (tuple(cells.values()),), words),)).write(tmp_path)
    page = browser.new_page(viewport={"width": 1300, "height": 800})
    page.goto((tmp_path / "report.html").as_uri())
    frame, row = "document.querySelector('div.wide')", "document.querySelector('tbody tr')"
    assert page.evaluate(f"{frame}.scrollWidth <= {frame}.clientWidth")
    assert page.evaluate(f"{row}.clientHeight") < 40  # one line, no word broken
    page.close()


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot write .*report\.md: .*; make room or get write access"):
        Page("T", (), ()).write(tmp_path / "file")
    with pytest.raises(InputError, match=r"cannot write .*r\.csv: "):
        write_csv(tmp_path / "file" / "r.csv", ("a",), [])


def test_csv_fills_what_is_missing_and_refuses_what_is_unknown(tmp_path):
    path = tmp_path / "r.csv"
    write_csv(path, ("a", "b"), [{"a": 'x,"y"'}, {"a": 1, "b": "z\nw"}])
    with path.open(encoding="utf-8", newline="") as file:
        assert list(csv.reader(file)) == [["a", "b"], ['x,"y"', ""], ["1", "z\nw"]]
    with pytest.raises(ValueError, match="c"):
        write_csv(path, ("a",), [{"c": 1}])
