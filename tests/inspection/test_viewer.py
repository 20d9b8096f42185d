"""The page in a real browser: what it shows is what the report holds, by pointer, by keys and for screen readers."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from looks import SOURCE, WRITTEN, make_look, unpack_weights

from qknorm.errors import InputError
from qknorm.inspection.report import Attention, ModelLook, Report, Sentence
from qknorm.inspection.viewer import render_page, write_page

HEBREW = ("הילדים הקטנים משחקים בגינה", "the small children play in the garden")
NASTY = "</script><script>fetch('http://example.invalid')</script> & \u2028 \u2029 {{title}} <!-- 'x' \"y\""


# ------------------------------------------------------------------ without a browser


def embedded(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="report">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_data_can_not_break_out_of_its_element() -> None:
    report = Report([make_look(NASTY, [(NASTY, NASTY)])], NASTY)
    page = render_page(report)
    assert page.count("<script") == page.count("</script>") == 2
    assert "\u2028" not in page.split('id="report">')[1] and "<title>&lt;/script&gt;" in page
    held = embedded(page)
    assert held["title"] == held["models"][0]["name"] == held["models"][0]["sentences"][0]["text"] == NASTY


def test_the_page_names_no_address_and_its_policy_allows_none() -> None:
    page = render_page(Report([make_look("a")]))
    # the name of SVG's elements is no address that anything is fetched from
    assert set(re.findall(r"https?://[^\s\"'<>]+", page)) == {"http://www.w3.org/2000/svg"}
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    rules = policy[1].split("; ")
    assert rules[0] == "default-src 'none'"
    assert not [rule for rule in rules if "unsafe" in rule or "*" in rule or "http" in rule]


def test_half_a_pair_of_surrogates_is_written_and_read(tmp_path: Path) -> None:
    write_page(Report([make_look("a", [("broken \ud83d text", "b")])]), tmp_path / "a.html")
    assert (
        embedded((tmp_path / "a.html").read_text(encoding="utf-8"))["models"][0]["sentences"][0]["text"][7] == "\ud83d"
    )


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        write_page(Report([make_look("a")]), tmp_path / "file" / "a.html")


def test_scripts_are_short_enough_to_read() -> None:
    folder = Path(render_page.__code__.co_filename).parent
    files = [*folder.glob("js/*.js"), folder / "page.css", folder / "page.html"]
    assert len(files) > 5
    for file in files:
        assert len(file.read_text(encoding="utf-8").splitlines()) <= 400, file.name


# ------------------------------------------------------------------ with one


class Opened:
    """A page of the browser with what it asked for and complained of."""

    def __init__(self, browser, path: Path, report: Report, **options) -> None:
        write_page(report, path)
        self.report, self.address = report, path.as_uri()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.page.set_default_timeout(10_000)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(self.address)
        self.page.wait_for_selector("html[data-ready=yes]")

    def start(self) -> None:
        """As it was when it was opened."""
        self.page.evaluate("history.replaceState(null, '', location.pathname)")
        self.page.reload()
        self.page.wait_for_selector("html[data-ready=yes]")

    def wait_for_shown(self, part: str) -> None:
        """Waits until what the heat maps show has this in it: sentence/attention/head/view/shade."""
        self.page.wait_for_function("part => document.getElementById('detail').dataset.shown.includes(part)", arg=part)

    def pick(self, name: str, value: str) -> None:
        self.page.locator(f"input[name={name}][value={value}]").check(force=True)

    def value(self, model: int = 0) -> tuple[int, int, str]:
        """Row, column and weight that a heat map reads out."""
        output = self.page.locator(".heat output").nth(model)
        return int(output.get_attribute("data-row")), int(output.get_attribute("data-column")), output.inner_text()

    def choose(self, attention: str, head: int) -> None:
        self.page.locator(f".thumb[data-attention='{attention}'][data-head='{head}']").first.click()
        self.wait_for_shown(f"/{attention}/{head}/")

    def held(self, attention: str, head: int, row: int, column: int, *, model: int = 0, sentence: int = 0) -> str:
        """The weight in the report, as the page must show it."""
        plain = self.report.to_json()["models"][model]["sentences"][sentence]
        return f"{unpack_weights(plain)[attention][head, row, column]:.4f}"

    def hover(self, row: int, column: int, shape: tuple[int, int], model: int = 0) -> None:
        """Puts the pointer over a cell, by its place on the screen."""
        cells = self.page.locator(".cells").nth(model)
        cells.scroll_into_view_if_needed()
        box = cells.bounding_box()
        x, y = box["width"] * (column + 0.5) / shape[1], box["height"] * (row + 0.5) / shape[0]
        cells.hover(position={"x": x, "y": y})


@pytest.fixture(scope="module")
def opened_once(browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    report = Report([make_look("one"), make_look("other", seed=1)])
    opened = Opened(browser, tmp_path_factory.mktemp("page") / "two.html", report)
    yield opened
    opened.page.close()


@pytest.fixture
def two(opened_once: Opened) -> Iterator[Opened]:
    """Two models over two sentences; whatever a test does with it asks for no file but its own, without complaint."""
    opened_once.start()
    yield opened_once
    assert {request.split("#")[0] for request in opened_once.requests} == {opened_once.address}
    assert opened_once.complaints == []


def test_a_chosen_head_shows_its_values_under_the_pointer(two: Opened) -> None:
    two.choose("encoder.1.self", 2)
    assert "Encoder self, layer 2, head 3" in two.page.locator(".heat figcaption").first.inner_text()
    for row, column in ((0, 0), (2, 4), (4, 1)):
        two.hover(row, column, (5, 5))
        for model in (0, 1):  # the cursors of both go together, for both read the same tokens
            assert two.value(model) == (row, column, two.held("encoder.1.self", 2, row, column, model=model))


def test_arrow_keys_move_and_are_spoken(two: Opened) -> None:
    two.choose("decoder.0.cross", 1)
    cells = two.page.locator(".cells").first
    cells.focus()
    for key in ("Control+Home", "ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft"):
        cells.press(key)
    assert two.value() == (1, 1, two.held("decoder.0.cross", 1, 1, 1))
    assert two.page.locator("#spoken").inner_text() == f"two, row 2; dous, column 2: {two.value()[2]}"
    cells.press("End")
    cells.press("PageDown")
    cells.press("ArrowRight")
    assert two.value()[:2] == (3, 4), "the cursor stays inside"
    assert "4 rows (next target token) by 5 columns (source)" in cells.get_attribute("aria-label")


def test_sentences_are_chosen_and_the_address_keeps_the_view(two: Opened) -> None:
    two.choose("encoder.0.self", 0)
    two.page.select_option("#sentence", "1")
    two.wait_for_shown("1/encoder")
    assert two.page.locator("#texts").inner_text().split("\n")[:2] == ["source", "ola mundo"]
    assert two.page.locator(".rows").first.inner_text().split() == ["ola", "mundo", "</s>"]
    assert two.page.locator("#sentence-after").is_disabled()
    assert "sentence=2" in two.page.url and "attention=encoder.0.self" in two.page.url
    two.page.reload()
    two.page.wait_for_selector("html[data-ready=yes]")
    assert two.page.locator("#sentence").input_value() == "1"
    two.page.click("#sentence-before")
    two.wait_for_shown("0/encoder")


def test_models_are_shown_alone_and_together(two: Opened) -> None:
    for view, count in (("A", 1), ("B", 1), ("both", 2)):
        two.pick("view", view)
        two.wait_for_shown(f"/{view}/")
        assert two.page.locator(".heat").count() == count
        assert two.page.locator("#table tbody tr").count() == count * 6 * 3


def test_thumbnails_are_walked_by_arrows_and_one_is_reached_by_tab(two: Opened) -> None:
    two.choose("encoder.0.self", 0)
    grid = two.page.locator("[role=grid]").first
    assert grid.locator("[tabindex='0']").count() == 1
    grid.locator("[tabindex='0']").focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "Enter"):
        two.page.keyboard.press(key)
    two.wait_for_shown("/encoder.1.self/1/")
    assert grid.locator("[aria-selected=true]").get_attribute("aria-label").startswith("encoder self, layer 2, head 2")
    marked = two.page.locator("#table tr.chosen td:nth-child(2)").all_inner_texts()
    assert marked == ["encoder self, layer 2"] * 2, "one line of each model"


def test_the_table_sorts_by_any_column(two: Opened) -> None:
    two.pick("view", "A")
    two.pick("scope", "all")
    header = two.page.locator("th:has([data-sort=entropy])")
    look = two.report.models[0]
    expected = sorted(value for name in look.attentions for value in look.measures(name)["entropy"])

    def shown() -> list[float]:
        column = 1 + two.page.locator("#table th").all_inner_texts().index(header.inner_text())
        return [float(text) for text in two.page.locator(f"#table tbody td:nth-child({column})").all_inner_texts()]

    header.locator("button").click()
    assert header.get_attribute("aria-sort") == "descending"
    assert shown() == pytest.approx(expected[::-1], rel=1e-3)
    header.locator("button").press("Enter")
    assert header.get_attribute("aria-sort") == "ascending", "the focus stays on the button"
    assert shown() == pytest.approx(expected, rel=1e-3)
    two.pick("scope", "one")
    assert shown() == pytest.approx(
        sorted(v for a in look.sentences[0].attentions for v in a.measures["entropy"]), rel=1e-3
    )
    two.pick("view", "both")


def test_weights_as_a_table(two: Opened) -> None:
    two.choose("decoder.1.cross", 0)
    two.page.locator(".as-table summary").first.click()
    row = two.page.locator(".as-table").first.locator("tbody tr").nth(2)
    row.wait_for()  # browsers tell that it was opened a little later
    cells = row.locator("td").all_inner_texts()
    assert cells == [two.held("decoder.1.cross", 0, 2, column) for column in range(5)]
    two.page.locator(".as-table summary").first.click()


def test_the_theme_changes_and_is_drawn_anew(two: Opened) -> None:
    def ground() -> str:
        return two.page.evaluate("getComputedStyle(document.body).backgroundColor")

    light, before = ground(), two.page.locator(".cells").first.screenshot()
    two.page.click("#theme")
    assert two.page.get_attribute("#theme", "aria-pressed") == "true"
    assert ground() != light
    assert two.page.locator(".cells").first.screenshot() != before
    two.page.click("#theme")
    assert ground() == light


def test_curves_maps_and_multiples_are_there(two: Opened) -> None:
    assert two.page.locator("#curves figcaption").all_inner_texts() == ["Dev BLEU", "Scale g", "Largest |logit|"]
    assert "dev ends at 20.25" in two.page.locator("#curves svg").first.get_attribute("aria-label")
    assert two.page.locator("#maps svg").count() == 2 * 3
    assert two.page.locator("#maps .dot").count() == 2 * 18
    assert two.page.locator("#multiples figure").count() == 4


def test_hebrew_runs_from_the_right(browser, tmp_path: Path) -> None:
    report = Report([make_look("he", [HEBREW])])
    opened = Opened(browser, tmp_path / "he.html", report)
    opened.choose("decoder.0.cross", 1)
    page, tokens = opened.page, report.models[0].sentences[0].tokens
    assert page.locator(".columns span").all_inner_texts() == tokens[SOURCE]
    places = [page.locator(".columns span").nth(at).bounding_box()["x"] for at in range(len(tokens[SOURCE]))]
    assert places == sorted(places, reverse=True), "the first source token is the rightmost"
    rows, cells = page.locator(".rows").bounding_box(), page.locator(".cells").bounding_box()
    assert rows["x"] >= cells["x"] + cells["width"], "row labels stand where columns begin"
    shape = (len(tokens[WRITTEN]), len(tokens[SOURCE]))
    opened.hover(2, 0, shape)  # the leftmost cell is the last source token
    assert opened.value() == (2, shape[1] - 1, opened.held("decoder.0.cross", 1, 2, shape[1] - 1))
    page.locator(".cells").focus()
    page.keyboard.press("ArrowRight")
    assert opened.value()[1] == shape[1] - 2, "keys go the way they point on the screen"
    opened.choose("decoder.0.self", 0)
    places = [page.locator(".columns span").nth(at).bounding_box()["x"] for at in range(3)]
    assert places == sorted(places), "English keys run from the left in the same report"
    assert opened.complaints == []
    page.close()


def test_a_phone_needs_no_sideways_scrolling_and_dark_is_the_systems_choice(browser, tmp_path: Path) -> None:
    words = " ".join(f"word{i}" for i in range(40))
    report = Report([make_look("long", [(words, words)], layers=1, heads=8)])
    opened = Opened(browser, tmp_path / "a.html", report, viewport={"width": 360, "height": 700}, color_scheme="dark")
    assert opened.page.evaluate("document.documentElement.scrollWidth") == 360
    assert opened.page.get_attribute("#theme", "aria-pressed") == "true"
    assert opened.complaints == []
    opened.page.close()


def test_many_heads_have_smaller_dots_that_do_not_hide_each_other(browser, tmp_path: Path) -> None:
    report = Report([make_look("deep", [("a b c", "d e")], layers=16, heads=16)])
    opened = Opened(browser, tmp_path / "deep.html", report)
    dots = opened.page.locator("#maps figure").first.locator(".dot circle")
    radii = {float(radius) for radius in dots.evaluate_all("all => all.map((one) => one.getAttribute('r'))")}
    assert dots.count() == 256 and len(radii) == 1
    (radius,) = radii
    assert 2 < radius < 7 and opened.page.locator("#maps .dot text").first.text_content() == ""
    assert opened.page.locator("#maps .dot title").first.text_content().startswith("head 1.1: ")
    places = dots.evaluate_all(
        "all => all.map((one) => one.parentNode.getAttribute('transform').match(/[-\\d.]+/g).map(Number))"
    )
    gaps = [math.dist(one, other) for at, one in enumerate(places) for other in places[:at]]
    assert min(gaps) > radius, "no middle of a dot is covered"
    assert opened.complaints == []
    opened.page.close()


def test_nasty_text_is_text_and_a_model_without_measures_is_shown(browser, tmp_path: Path) -> None:
    tokens = {"text": ["<b>x</b>", " ", "\n\u200b", ""]}
    weights = make_look("a").sentences[0].attention("decoder.0.self").weights[:1]
    bare = Sentence(NASTY, tokens, [Attention("attn", "text", "text", weights)])
    opened = Opened(browser, tmp_path / "a.html", Report([ModelLook(NASTY, [bare])], NASTY, [NASTY]))
    assert opened.page.locator("h1").inner_text().startswith("</script><script>fetch")
    assert opened.page.locator(".rows span").all_inner_texts() == ["<b>x</b>", "␣", "⏎U+200B", "∅"]
    assert opened.page.locator("#training").is_hidden()
    assert opened.complaints == []
    opened.page.close()
