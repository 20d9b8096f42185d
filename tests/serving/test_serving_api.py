"""The API over real connections: what it translates, and what it makes of what is asked wrongly."""

import json
import re
import threading

import pytest
from servers import PATIENCE, BrokenEngine, HeldEngine, make_translator, serving

from qknorm.serving.limits import Limits
from qknorm.serving.server import name_pairs

TEXT = "O libro vermello é grande. A casa branca?\n\n  The red book!\n"


# ------------------------------------------------------------------ translations


def test_a_text_is_translated_sentence_by_sentence_in_its_own_white_space(running, engines):
    answer = running.translate(text=TEXT)
    assert answer.status_code == 200
    first, second, third = engines["gl-en"].translate(["O libro vermello é grande.", "A casa branca?", "The red book!"])
    (found,) = answer.json()["translations"]
    assert found["text"] == f"{first} {second}\n\n  {third}\n"
    assert [each["source"] for each in found["sentences"]] == [
        "O libro vermello é grande.",
        "A casa branca?",
        "The red book!",
    ]


def test_lists_alternatives_and_alignments(running, engines):
    asked = {"text": ["A casa.", "", "O libro"], "pair": "he-ar", "nbest": 3, "alignment": True, "beam": 4}
    answer = running.translate(**asked).json()
    assert answer["pair"] == "he-ar"
    assert [len(each["sentences"]) for each in answer["translations"]] == [1, 0, 1]
    assert answer["translations"][1]["text"] == ""
    direct = engines["he-ar"].explain(["A casa.", "O libro"], nbest=3, align=True, beam=4)
    told = [answer["translations"][place]["sentences"][0] for place in (0, 2)]
    for said, meant in zip(told, direct, strict=True):
        assert [each["text"] for each in said["alternatives"]] == [each.text for each in meant.alternatives]
        assert said["score"] == pytest.approx(meant.score, abs=1e-4)
        assert [tuple(link) for link in said["alignment"]] == meant.alignment
        assert said["target_words"] == meant.text.split()
    assert told[0]["source_words"] == ["A", "casa."]


def test_a_stream_says_the_same_line_by_line(running):
    whole = running.translate(text=[TEXT, "A casa."], nbest=2).json()["translations"]
    with running.client.stream("POST", "/translate/stream", json={"text": [TEXT, "A casa."], "nbest": 2}) as answer:
        assert answer.headers["content-type"].startswith("application/x-ndjson")
        first, *lines, last = [json.loads(line) for line in answer.iter_lines()]
    assert first == {"pair": "gl-en", "sentences": 4}
    assert [line["text"] for line in lines] == [0, 0, 0, 1]
    for line, sentence in zip(lines, [each for text in whole for each in text["sentences"]], strict=True):
        assert line["sentence"]["score"] == pytest.approx(sentence["score"], abs=1e-4)
        assert {**line["sentence"], "score": 0, "alternatives": 0} == {**sentence, "score": 0, "alternatives": 0}
    assert last == {"done": True, "after": ["\n", ""]}


def test_sentences_arrive_before_the_last_one_is_made():
    engine = HeldEngine()
    limits = Limits(batch_sentences=1, batch_wait_ms=0)
    with (
        serving({"aa-bb": engine}, limits) as server,
        server.client.stream("POST", "/translate/stream", json={"text": "One. Two."}) as answer,
    ):
        lines = answer.iter_lines()
        assert json.loads(next(lines)) == {"pair": "aa-bb", "sentences": 2}
        assert engine.began.wait(PATIENCE) and engine.batches == [["One."]]
        engine.go.set()
        assert json.loads(next(lines))["sentence"]["text"] == "ONE."
        assert json.loads(next(lines))["sentence"]["text"] == "TWO."
        assert json.loads(next(lines))["done"]


def test_requests_that_come_together_share_a_batch():
    engine = HeldEngine()
    with serving({"aa-bb": engine}) as server:
        answers: list[str] = []
        ask = lambda text: answers.append(server.translate(text=text).json()["translations"][0]["text"])  # noqa: E731
        first = threading.Thread(target=ask, args=["first"])
        first.start()
        assert engine.began.wait(PATIENCE)
        others = [threading.Thread(target=ask, args=[f"other {number}"]) for number in range(8)]
        for thread in others:
            thread.start()
        server.wait_for_metric("qknorm_sentences_waiting", 8)
        engine.go.set()
        for thread in (first, *others):
            thread.join(PATIENCE)
    assert sorted(answers) == ["FIRST", *(f"OTHER {number}" for number in range(8))]
    assert [len(batch) for batch in engine.batches] == [1, 8]


def test_a_page_about_the_attention_of_a_sentence_is_kept_for_a_while(running):
    answer = running.client.post("/attention", json={"text": "A casa branca."})
    assert answer.status_code == 200
    page = running.client.get(answer.json()["address"])
    assert page.status_code == 200 and "A casa branca." in page.text
    assert page.headers["x-frame-options"] == "SAMEORIGIN"
    assert running.client.get("/attention/nothing").status_code == 404


# ------------------------------------------------------------------ what is asked wrongly


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 422, "body"),
        (b"{", 422, "no valid JSON"),
        (b'{"text": "a"', 422, "no valid JSON"),
        (b"\xff\xfe", 422, "no valid JSON"),
        (b'{"text": "\xff"}', 400, "the body cannot be read; send an object"),
        (b"[" * 100_000, 400, "the body cannot be read; send an object"),
        (b"[]", 422, "body is no JSON object"),
        (b"{}", 422, "text"),
        (b'{"text": 3}', 422, "text"),
        (b'{"text": null}', 422, "text"),
        (b'{"text": ["a", 1]}', 422, "text"),
        (b'{"text": "a", "pair": "zz-zz"}', 422, "gl-en"),
        (b'{"text": "a", "beam": 0}', 422, "beam"),
        (b'{"text": "a", "beam": 9}', 422, "beam is at most 8"),
        (b'{"text": "a", "beam": "2"}', 422, "beam"),
        (b'{"text": "a", "beam": 1e999}', 422, "beam"),
        (b'{"text": "a", "nbest": 100}', 422, "nbest is at most 8"),
        (b'{"text": "a", "nbest": 3, "beam": 2}', 422, "a beam of 2 finds no 3 alternatives"),
        (b'{"text": "a", "temperature": 1}', 422, "temperature"),
        (b'{"text": "a", "\\ud800": 1}', 422, "body"),
    ],
)
@pytest.mark.parametrize("path", ["/translate", "/translate/stream"])
def test_what_is_asked_wrongly_is_answered_in_a_sentence(running, path, body, status, words):
    answer = running.client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["detail"] and words in answer.json()["detail"]
    assert "Traceback" not in answer.text and "/src/" not in answer.text and "pydantic" not in answer.text


@pytest.mark.parametrize(
    "text", ["\x00", "a\x00b", "\x00" * 50, "\ufeff", "\u2028\u2029", "\u202e abc", "🙂" * 30, "a\u0301" * 40]
)
def test_odd_characters_are_translated_all_the_same(running, text):
    answer = running.translate(text=text, alignment=True)
    assert answer.status_code == 200, answer.text
    assert "".join(each["before"] + each["source"] for each in answer.json()["translations"][0]["sentences"]) in text


@pytest.mark.parametrize("path", ["/translate", "/translate/stream", "/attention"])
def test_half_a_pair_of_surrogates_is_a_character_that_could_not_be_read(running, path):
    body = rb'{"text": "a casa \ud83d grande \udc00, \ud83d\ude42"}'
    answer = running.client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200
    if path == "/translate":
        assert answer.json()["translations"][0]["sentences"][0]["source"] == "a casa \ufffd grande \ufffd, 🙂"


def test_more_than_the_limits_allow_is_refused(engines):
    with serving(engines, Limits(characters=30, sentences=2, body_bytes=1_024)) as server:
        assert server.translate(text="A casa. O libro.").status_code == 200
        for text, words in {"x" * 31: "31 characters", "A. B? C! D?": "sentences"}.items():
            answer = server.translate(text=text)
            assert answer.status_code == 413 and words in answer.json()["detail"]
        assert server.translate(text=["", "", ""]).status_code == 413
        answer = server.translate(text="x" * 2_000)
        assert answer.status_code == 413 and "1,024 bytes" in answer.json()["detail"]
        assert server.client.post("/attention", json={"text": "x" * 31}).status_code == 413
        assert server.client.post("/attention", json={"text": " "}).status_code == 422


def test_only_a_body_said_to_be_json_is_read(running):
    """A form of another site can send what it likes as text, and must not have it translated."""
    answer = running.client.post("/translate", content=b'{"text": "a"}', headers={"Content-Type": "text/plain"})
    assert answer.status_code == 422 and "Content-Type: application/json" in answer.json()["detail"]


def test_a_server_of_this_machine_answers_to_its_own_names_only(running):
    for name, status in {
        "localhost": 200,
        f"127.0.0.1:{running.port}": 200,
        "[::1]:80": 200,
        "evil.example": 421,
    }.items():
        assert running.client.get("/health", headers={"Host": name}).status_code == status


def test_unknown_paths_and_methods(running):
    for path in ("/nothing", "/static/../app.py", "/static/%2e%2e/app.py", "/static/", "/docs", "/translate/"):
        assert running.client.get(path).status_code in (404, 405), path
    assert running.client.get("/translate").status_code == 405
    assert running.client.request("DELETE", "/pairs").status_code == 405


def test_what_the_framework_answers_by_itself_is_a_sentence_too(running):
    for path in ("/nothing", "/static/nothing"):
        answer = running.client.get(path)
        assert answer.status_code == 404 and "nothing at this path; see /openapi.json" in answer.json()["detail"]
    answer = running.client.request("DELETE", "/pairs")
    assert answer.headers["allow"] == "GET" and "does not take that method; see" in answer.json()["detail"]
    assert "ask for it again" in running.client.get("/attention/nothing").json()["detail"]


# ------------------------------------------------------------------ keys, states, headers


def test_a_key_is_wanted_where_one_is_set(engines):
    with serving(engines, api_key="correct-horse") as server:
        for path in ("/health", "/ready", "/", "/openapi.json"):
            assert server.client.get(path).status_code == 200
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic correct-horse"}):
            for path in ("/pairs", "/metrics"):
                assert server.client.get(path, headers=given).status_code == 401
            for path in ("/translate", "/translate/stream", "/attention"):
                answer = server.client.post(path, json={"text": "a"}, headers=given)
                assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        right = {"Authorization": "Bearer correct-horse"}
        assert server.client.get("/pairs", headers=right).status_code == 200
        assert server.client.post("/translate", json={"text": "a"}, headers=right).status_code == 200
        assert "security" in server.client.get("/openapi.json").json()["paths"]["/translate"]["post"]


def test_pairs_say_which_way_they_are_written(running):
    told = running.client.get("/pairs").json()
    assert told["pairs"][1] == {
        "name": "he-ar",
        "source": "he",
        "target": "ar",
        "source_direction": "rtl",
        "target_direction": "rtl",
    }
    assert told["limits"] == {"characters": 20_000, "sentences": 500, "beam": 8}


def test_a_second_model_of_a_pair_has_a_name_of_its_own():
    translators = [make_translator(), make_translator("en", "gl"), make_translator(), make_translator()]
    assert list(name_pairs(translators)) == ["gl-en", "en-gl", "gl-en-2", "gl-en-3"]


def test_answers_carry_headers_that_keep_the_page_to_itself(running):
    for path in ("/", "/static/js/main.js", "/health", "/nothing", "/pairs"):
        headers = running.client.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"
        assert "server" not in headers
        assert "access-control-allow-origin" not in headers


def test_a_model_that_fails_keeps_its_secrets(engines):
    with serving({"xx-yy": BrokenEngine(), **engines}) as server:
        answer = server.translate(text="a")
        assert answer.status_code == 500 and "secret" not in answer.text and "model failed" in answer.json()["detail"]
        stream = server.client.post("/translate/stream", json={"text": "a"})
        assert "secret" not in stream.text and "error" in json.loads(stream.text.splitlines()[-1])
        assert server.client.post("/attention", json={"text": "a"}).status_code == 500
        assert server.translate(text="A casa.", pair="gl-en").status_code == 200


def test_states_and_counts(running):
    assert running.client.get("/health").json() == {"status": "alive"}
    assert running.client.get("/ready").json() == {"status": "ready"}
    before = running.metric('qknorm_sentences_total{pair="gl-en"}')
    running.translate(text="A casa. O libro!")
    assert running.metric('qknorm_sentences_total{pair="gl-en"}') == before + 2
    assert running.client.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")


def test_the_page_names_no_address_outside(running):
    page = running.client.get("/").text
    names = [*re.findall(r'(?:href|src)="([^"]+)"', page)]
    scripts = ["api", "closer", "elements", "files", "main", "sentences"]
    for name in [*names, *(f"/static/js/{script}.js" for script in scripts)]:
        assert name.startswith(("/static/", "data:", "#"))
        if name.startswith("/"):
            content = running.client.get(name)
            assert content.status_code == 200
            assert len(content.text.splitlines()) <= 400
            assert set(re.findall(r"https?://[^\s\"'`)]+", content.text)) <= {"http://www.w3.org/2000/svg"}
