"""Many sentences, which a GPU translates by recorded searches; these run on the CPU too, only slower."""

import copy
import pickle
import threading

import pytest
import torch
from test_translate import LINES, TOKENIZER, WORDS, make_model, make_translator

from qknorm.config import Decoding
from qknorm.decoding import translate
from qknorm.decoding.recorded_search import RecordedSearch
from qknorm.decoding.translate import TextTranslator, translate_ids
from qknorm.models.quantized import quantize

TEXTS = ["", *LINES, *WORDS, " ".join(LINES), "  ", *(f"{a} {b}." for a in WORDS[:4] for b in WORDS), *LINES]


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(translate, "_may_record", lambda model: True)


@pytest.mark.parametrize(
    ("batch_tokens", "options"),
    [(None, {}), (None, {"beam": 1}), (120, {"nbest": 6}), (None, {"no_repeat_ngram": 1})],
    ids=str,
)
def test_recorded_searches_give_the_same_translations_in_the_same_order(monkeypatch, options, batch_tokens):
    translator = make_translator(longest=30, batch_tokens=batch_tokens)
    expected = translator.explain(TEXTS, **options)
    assert len(TEXTS) >= translate.MANY and translator._recorded is None  # on a CPU
    monkeypatch.setattr(translate, "_may_record", lambda model: True)
    found = translator.explain(TEXTS, **options)
    assert translator._recorded is not None
    for mine, reference in zip(found, expected, strict=True):
        assert mine.text == reference.text and mine.parts == reference.parts
        assert [each.text for each in mine.alternatives] == [each.text for each in reference.alternatives]
        assert [each.score for each in mine.alternatives] == pytest.approx(
            [each.score for each in reference.alternatives], abs=1e-4
        )
    assert [each.text for each in found[:1]] == [""]


@pytest.mark.usefixtures("recording")
def test_another_model_or_precision_is_not_translated_with_the_recordings_of_the_first(monkeypatch):
    monkeypatch.setattr(translate, "MANY", 5)
    translator, other = make_translator(), make_model(TOKENIZER.size, positions="rotary").eval()
    before = translator.translate(LINES * 2)
    translator.model = other
    expected = [TOKENIZER.decode(best.tokens) for (best,) in translate_ids(other, _ids(LINES * 2), translator.settings)]
    assert translator.translate(LINES * 2) == expected != before
    translator.precision = torch.bfloat16
    translator.translate(LINES * 2)
    assert translator._recorded is not None and translator._recorded.precision == torch.bfloat16


def _ids(lines: list[str]) -> list[list[int]]:
    return [TOKENIZER.encode(line) for line in lines]


@pytest.mark.usefixtures("recording")
def test_threads_share_a_translator(monkeypatch):
    monkeypatch.setattr(translate, "MANY", 5)
    translator = make_translator(beam=2)
    works = [[" ".join(WORDS[i : i + 1 + j % 3]) for j in range(6)] for i in range(6)]
    expected, found = [translator.translate(work) for work in works], {}
    translator = make_translator(beam=2)

    def work(i: int) -> None:
        found[i] = [translator.translate(works[i]) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(len(works))] == [[each] * 3 for each in expected]


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))], ids=["deep", "pickle"]
)
def test_a_translator_can_be_copied_and_the_copy_has_recordings_of_its_own(monkeypatch, copied):
    monkeypatch.setattr(translate, "MANY", 5)
    translator = make_translator()
    expected = translator.translate(LINES * 2)
    another: TextTranslator = copied(translator)
    assert another._recorded is None and translator._recorded is not None
    assert another.translate(LINES * 2) == expected
    assert another._recorded is not None and another._recorded is not translator._recorded
    assert another._recorded.model is another.model


@pytest.mark.parametrize("recorded", [False, True])
def test_a_progress_that_fails_leaves_the_model_in_its_mode_and_the_translator_of_use(monkeypatch, recorded):
    model = make_model(TOKENIZER.size).train()
    search = RecordedSearch(model, torch.float32) if recorded else None

    def fail(stage: str, done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        translate_ids(model, _ids(LINES), Decoding(extra_length=3), search=search, progress=fail)
    assert model.training
    monkeypatch.setattr(translate, "MANY", 3)
    monkeypatch.setattr(translate, "_may_record", lambda model: recorded)
    translator = make_translator()
    with pytest.raises(KeyboardInterrupt):
        translator.translate(LINES, progress=fail)
    seen: list[list[str]] = []
    inner = translator.translate(LINES, progress=lambda *_: seen.append(translator.translate(LINES)))
    assert seen and all(each == inner for each in seen)


def test_a_quantised_model_is_never_recorded():
    assert not translate._may_record(quantize(make_model(TOKENIZER.size)))
