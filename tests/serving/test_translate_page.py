"""The page in a real browser: typing, pointing, keys, files, right-to-left languages, and what goes wrong."""

import re
import threading
from collections.abc import Iterator

import pytest
from servers import PATIENCE, HeldEngine, make_translator, serving

from qknorm.decoding.translate import Alternative, Translation
from qknorm.serving.limits import Limits

TEXT = "O libro vermello é grande. A casa branca?\n\nThe red book!"
DONE = "#output[aria-busy=false]"


class StepEngine:
    """Makes one batch each time it is allowed to."""

    source, target = "aa", "bb"

    def __init__(self) -> None:
        self.allowed = threading.Semaphore(0)

    def explain(self, texts, **options):
        assert self.allowed.acquire(timeout=PATIENCE)
        return [Translation(text.upper(), -1.0, [Alternative(text.upper(), -1.0)], []) for text in texts]


class Opened:
    """A page with what it asked for and complained of."""

    def __init__(self, browser, server, **options) -> None:
        self.server, self.requests, self.complaints = server, [], []
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 850}, **options})
        self.page = self.context.new_page()
        self.page.set_default_timeout(1000 * PATIENCE)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(server.address)
        self.wait("html[data-ready=yes]")

    def wait(self, selector: str) -> None:
        self.page.wait_for_selector(selector, state="attached")

    def type(self, text: str) -> None:
        """Puts text in and has it translated at once."""
        self.page.locator("#source").fill(text)
        self.page.keyboard.press("Control+Enter")
        self.wait(DONE)

    def output(self) -> str:
        return self.page.locator("#output").evaluate("element => element.textContent")

    def word(self, sentence: int, word: int):
        return self.page.locator(".sentence").nth(sentence).locator(".word").nth(word)

    def lit(self) -> tuple[list[str], list[str]]:
        """The words that are lit up in the source and in the translation."""
        return (
            self.page.locator("#backdrop mark mark").all_text_contents(),
            self.page.locator("#output .word.here").all_text_contents(),
        )


@pytest.fixture
def opened(browser, running) -> Iterator[Opened]:
    page = Opened(browser, running)
    yield page
    page.context.close()
    outside = [url for url in page.requests if not url.startswith((running.address, "data:", "blob:"))]
    assert outside == [] and page.complaints == []


@pytest.fixture
def told(running) -> list[dict]:
    """What the API says of the sentences of TEXT, asked as the page does."""
    asked = running.translate(text=TEXT, nbest=4, alignment=True)
    return asked.json()["translations"][0]["sentences"]


def test_what_is_typed_is_translated_after_a_pause(opened, told):
    opened.page.locator("#source").fill(TEXT)
    opened.wait(DONE)
    assert opened.output() == "".join(each["space"] + each["text"] for each in told)
    assert opened.page.locator("#status").inner_text().startswith("3 sentences")
    assert opened.page.locator("#count").inner_text() == f"{len(TEXT)} characters"
    opened.page.locator("#clear").click()
    opened.wait(f"{DONE}:empty")


def test_sentences_are_shown_as_they_are_made(browser):
    engine = StepEngine()
    with serving({"aa-bb": engine}, Limits(batch_sentences=1)) as server:
        opened = Opened(browser, server)
        opened.page.locator("#source").fill("one. Two.")
        engine.allowed.release()
        opened.page.locator(".sentence").first.wait_for()
        assert opened.output() == "ONE." and opened.page.locator("#output").get_attribute("aria-busy") == "true"
        engine.allowed.release()
        opened.wait(DONE)
        assert opened.output() == "ONE. TWO."
        opened.context.close()


def test_pointing_at_a_word_lights_up_where_it_came_from(opened, told):
    opened.type(TEXT)
    opened.word(1, 0).hover()
    source, target = told[1]["alignment"][0]
    assert opened.lit() == ([told[1]["source_words"][source]], [told[1]["target_words"][target]])
    opened.page.locator("h1").hover()
    assert opened.lit() == ([], [])


def test_words_below_light_up_from_both_sides(opened, told):
    opened.type(TEXT)
    opened.word(0, 0).click()
    source, target = told[0]["alignment"][-1]
    below = opened.page.locator("#links p").nth(1).locator(".word")
    assert below.all_text_contents() == told[0]["target_words"]
    below.nth(target).hover()
    above = opened.page.locator("#links p").nth(0).locator(".word")
    assert above.nth(source).evaluate("word => word.classList.contains('here')")
    assert opened.lit() == ([told[0]["source_words"][source]], [told[0]["target_words"][target]])


def test_keys_go_from_sentence_to_sentence_and_from_word_to_word(opened, told):
    opened.type(TEXT)
    opened.page.locator(".sentence").first.focus()
    opened.page.keyboard.press("Tab")
    opened.page.keyboard.press("ArrowRight")
    assert opened.lit()[1] == told[1]["target_words"][:1]
    opened.page.keyboard.press("ArrowRight")
    assert opened.lit()[1] == told[1]["target_words"][1:2]
    opened.page.keyboard.press("Enter")
    assert opened.page.locator(".sentence").nth(1).get_attribute("aria-pressed") == "true"
    assert opened.page.locator("#links p").first.locator(".word").all_text_contents() == told[1]["source_words"]


def test_an_alternative_takes_the_place_of_its_sentence(opened, told):
    opened.type(TEXT)
    opened.word(2, 0).click()
    shown = opened.page.locator("#alternatives span").all_text_contents()
    assert shown == [each["text"] for each in told[2]["alternatives"]]
    scores = [float(score) for score in opened.page.locator("#alternatives small").all_text_contents()]
    assert scores == pytest.approx([each["score"] for each in told[2]["alternatives"]], abs=0.0051)
    opened.page.locator("#alternatives button").nth(1).click()
    assert opened.output().endswith(shown[1])
    opened.page.locator("#alternatives button").nth(0).click()
    assert opened.output().endswith(shown[0])


def test_the_attention_of_a_sentence_is_shown_below(opened):
    opened.type(TEXT)
    opened.page.locator("#attention summary").click()
    inside = opened.page.frame_locator("#attention-frame")
    inside.locator(".heat .cells").first.wait_for()
    assert "O libro vermello é grande." in inside.locator(".texts").inner_text()
    opened.word(1, 0).click()
    inside.get_by_text("A casa branca?", exact=True).first.wait_for()


# ------------------------------------------------------------------ files


def saved(opened: Opened) -> tuple[str, bytes]:
    with opened.page.expect_download() as download:
        opened.page.locator("#file-link").click()
    return download.value.suggested_filename, download.value.path().read_bytes()


def test_a_file_comes_back_translated(opened, running):
    text = "".join(f"A casa {number}.\r\n{'' if number % 7 else chr(10)}" for number in range(150))
    file = {"name": "notes.txt", "mimeType": "text/plain", "buffer": text.encode()}
    opened.page.locator("#file").set_input_files(file)
    opened.wait("#file-card[aria-busy=false] #file-link:not([hidden])")
    name, content = saved(opened)
    assert name == "notes.en.txt"
    # as the page sends it, in parts of so many lines
    lines = text.splitlines(keepends=True)
    parts = ["".join(lines[start : start + 60]) for start in range(0, len(lines), 60)]
    expected = "".join(running.translate(text=part).json()["translations"][0]["text"] for part in parts)
    assert content.decode() == expected and expected.count("\r\n") == 150
    assert opened.page.locator("#file-progress").evaluate("bar => bar.value") == 1


def test_a_file_that_is_dropped_on_the_page_is_translated(opened, running):
    opened.page.evaluate(
        """() => {
          const carried = new DataTransfer();
          carried.items.add(new File(["A casa branca."], "casa", { type: "text/plain" }));
          for (const kind of ["dragover", "drop"]) {
            const options = { dataTransfer: carried, bubbles: true, cancelable: true };
            document.body.dispatchEvent(new DragEvent(kind, options));
          }
        }"""
    )
    opened.wait("#file-card[aria-busy=false] #file-link:not([hidden])")
    assert saved(opened) == (
        "casa.en",
        running.translate(text="A casa branca.").json()["translations"][0]["text"].encode(),
    )


def test_a_file_larger_than_a_request_may_be_goes_in_parts(browser, engines):
    with serving(engines, Limits(characters=200, sentences=3)) as server:
        opened = Opened(browser, server)
        text = "A casa. O libro! A casa? Casa branca.\n" * 5 + "A. B! C? D! E?\n"
        sender = opened.page.locator("#file")
        sender.set_input_files({"name": "a.txt", "mimeType": "text/plain", "buffer": text.encode()})
        opened.wait("#file-card[aria-busy=false]")
        assert "sentences are more than the 3 allowed" in opened.page.locator("#file-status").inner_text()
        text = "A casa. O libro!\nCasa branca.\n" * 9
        sender.set_input_files({"name": "a.txt", "mimeType": "text/plain", "buffer": text.encode()})
        opened.wait("#file-card[aria-busy=false] #file-link:not([hidden])")
        assert saved(opened)[1].count(b"\n") == 18
        opened.context.close()


def test_a_file_that_is_no_text_is_refused(opened):
    opened.page.locator("#file").set_input_files({"name": "x.txt", "mimeType": "text/plain", "buffer": b"\xff\x00\xfe"})
    opened.wait("#file-card[aria-busy=false]")
    assert "x.txt is no text in UTF-8" in opened.page.locator("#file-status").inner_text()
    assert opened.page.locator("#file-link").is_hidden()


def test_an_empty_file_is_told_and_not_saved(opened):
    opened.page.locator("#file").set_input_files({"name": "x.txt", "mimeType": "text/plain", "buffer": b""})
    opened.wait("#file-card[aria-busy=false]")
    assert opened.page.locator("#file-status").inner_text() == "x.txt is empty; choose a file with text."
    assert opened.page.locator("#file-link").is_hidden()


# ------------------------------------------------------------------ languages, looks, troubles


def test_right_to_left_languages_and_a_choice_that_is_remembered(opened):
    assert opened.page.locator("#source").get_attribute("dir") == "ltr"
    opened.page.locator("#pair").select_option("he-ar")
    opened.page.reload()
    opened.wait("html[data-ready=yes]")
    assert opened.page.locator("#pair").input_value() == "he-ar"
    assert opened.page.locator("#pair option:checked").inner_text() == "Hebrew → Arabic"
    for box in ("#source", "#output", "#backdrop"):
        assert opened.page.locator(box).get_attribute("dir") == "rtl"
    opened.type("הספר האדום. הספר גדול?")
    first = opened.page.locator("#links .word").first.evaluate("word => word.getBoundingClientRect().right")
    edge = opened.page.locator("#links").evaluate("box => box.getBoundingClientRect().right")
    assert abs(edge - first) < 2
    opened.page.locator(".sentence").first.focus()
    opened.page.keyboard.press("ArrowLeft")
    opened.page.keyboard.press("ArrowLeft")
    assert opened.page.locator("#output .word.here").get_attribute("data-word") == "1"


def test_languages_are_swapped_where_there_is_a_way_back(browser):
    with serving({"gl-en": make_translator(), "en-gl": make_translator("en", "gl")}) as server:
        opened = Opened(browser, server)
        opened.type("A casa.")
        found = opened.output()
        opened.page.locator("#swap").click()
        opened.wait(DONE)
        assert opened.page.locator("#source").input_value() == found
        assert opened.page.locator("#pair").input_value() == "en-gl"
        opened.context.close()


def test_the_theme_is_remembered(opened):
    ground = "getComputedStyle(document.body).backgroundColor"
    light = opened.page.evaluate(ground)
    opened.page.locator("#theme").click()
    dark = opened.page.evaluate(ground)
    assert dark != light
    opened.page.reload()
    opened.wait("html[data-ready=yes]")
    assert opened.page.evaluate(ground) == dark


def test_on_a_phone_nothing_is_wider_than_the_screen(browser, running):
    opened = Opened(browser, running, viewport={"width": 360, "height": 740}, color_scheme="dark", has_touch=True)
    opened.type(f"{TEXT} {'x' * 200}")
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 360
    opened.word(0, 0).tap()
    assert opened.page.locator("#closer").is_visible()
    opened.context.close()


def test_text_is_never_taken_for_markup(opened):
    opened.type("<img src=x onerror=alert(1)> <b>casa</b>")
    opened.word(0, 0).click()
    assert opened.page.locator("main img, main b").count() == 0


def test_what_a_model_says_is_never_taken_for_markup(browser):
    engine = HeldEngine()
    engine.go.set()
    with serving({"aa-bb": engine}) as server:
        opened = Opened(browser, server)
        opened.type("<img src=x onerror=alert(1)> <b>casa</b>")
        opened.word(0, 0).click()
        assert opened.output() == "<IMG SRC=X ONERROR=ALERT(1)> <B>CASA</B>"
        assert opened.page.locator("main img, main b").count() == 0
        opened.context.close()


def test_a_refusal_is_shown_in_its_own_words(browser, engines):
    with serving(engines, Limits(characters=20)) as server:
        opened = Opened(browser, server)
        opened.type("A casa é branca e grande.")
        assert "25 characters are more than the 20 allowed" in opened.page.locator("#problem").inner_text()
        opened.type("A casa.")
        assert opened.page.locator("#problem").is_hidden() and opened.output()
        opened.context.close()


def test_a_busy_server_is_named_as_such(browser):
    engine = HeldEngine()
    with serving({"aa-bb": engine}, Limits(requests=1, waiting=0)) as server:
        opened = Opened(browser, server)
        first = threading.Thread(target=server.translate, kwargs={"text": "a"})
        first.start()
        assert engine.began.wait(PATIENCE)
        opened.type("b")
        assert re.search(r"try again later \(\d+ s\)", opened.page.locator("#problem").inner_text())
        engine.go.set()
        first.join(PATIENCE)
        opened.context.close()


def test_a_server_that_wants_a_key_is_given_one(browser, engines):
    with serving(engines, api_key="correct-horse") as server:
        opened = Opened(browser, server)
        assert opened.page.locator("#problem").is_hidden()
        for wrong in ("wrong", "ключ"):
            opened.page.locator("#key").fill(wrong)
            opened.page.keyboard.press("Enter")
            opened.page.get_by_text("does not take this key").wait_for()
        opened.page.locator("#key").fill("correct-horse")
        opened.page.keyboard.press("Enter")
        opened.wait("#pair option")
        opened.type("A casa.")
        assert opened.output() and opened.page.locator("#key-form").is_hidden()
        opened.context.close()


def test_a_server_that_is_gone_is_missed(browser, engines):
    with serving(engines) as server:
        opened = Opened(browser, server)
    opened.type("A casa.")
    assert "does not answer" in opened.page.locator("#problem").inner_text()
    opened.context.close()
