"""Text in, text out, with small random models: what must not depend on batches, blanks or lengths."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qknorm.config import Decoding, Dropout, Model
from qknorm.decoding.results import join_texts
from qknorm.decoding.translate import TextTranslator, split_long, translate_ids
from qknorm.errors import InputError
from qknorm.models.translator import Translator
from qknorm.specials import END, START
from qknorm.text.subwords import Tokenizer

LINES = ["o libro vermello é grande.", "a casa branca, a casa grande.", "the red book is big.", "the white house."]
WORDS = ["o", "a", "libro", "casa", "vermello", "branca", "grande", "the", "red", "book", "house"]
sentences = st.lists(st.sampled_from(WORDS), max_size=9).map(" ".join)


def make_tokenizer(pretokenized: bool = False) -> Tokenizer:
    return Tokenizer.train(LINES * 3, merges=25, pretokenized=pretokenized)


def make_model(types: int, **changes) -> Translator:
    torch.manual_seed(1)
    shape = {"width": 16, "feed_forward": 32, "encoder_layers": 1, "decoder_layers": 2, "heads": 2}
    allowed = torch.ones(types, dtype=torch.bool)
    allowed[:END] = False
    chosen = Model(**shape, **changes, dropout=Dropout.everywhere(0.3))
    model = Translator(types, chosen, scale_init=8.0, allowed=allowed)
    with torch.no_grad():  # far enough from uniform that rounding decides nothing
        model.output_bias.normal_()
        model.output_bias[END] += 1.0
        for parameter in model.parameters():
            parameter.mul_(2.0 if parameter.dim() > 1 else 1.0)
    return model


TOKENIZER = make_tokenizer()
MODEL = make_model(TOKENIZER.size)


def make_translator(longest: int = 60, **decoding) -> TextTranslator:
    return TextTranslator(MODEL, TOKENIZER, "gl", "en", Decoding(**{"extra_length": 8, **decoding}), longest)


@pytest.mark.slow
@given(st.lists(sentences, min_size=1, max_size=8), st.sampled_from([1, 30, 200, 10_000]), st.integers(1, 4))
@settings(max_examples=10)
def test_the_company_of_a_sentence_does_not_change_its_translation(texts, budget, beam):
    together = make_translator(batch_tokens=budget, beam=beam).explain(texts)
    for text, found in zip(texts, together, strict=True):
        (alone,) = make_translator(batch_tokens=10_000, beam=beam).explain([text])
        assert found.text == alone.text
        assert found.score == pytest.approx(alone.score, abs=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"positions": "rotary", "kv_heads": 1},
        {"norm_position": "post", "tie": "none"},
        {"norm": "scale", "fixnorm": False},
    ],
    ids=str,
)
def test_other_models_are_no_more_moved_by_company(changes):
    model = make_model(TOKENIZER.size, **changes)
    sources = [TOKENIZER.encode(line) for line in (*LINES, "a", "o libro branca", *WORDS)]
    together = translate_ids(model, sources, Decoding(extra_length=6))
    alone = [translate_ids(model, [source], Decoding(extra_length=6))[0] for source in sources]
    assert [best.tokens for (best,) in together] == [best.tokens for (best,) in alone]


def reference_greedy(model: Translator, source: list[int], longest: int) -> list[int]:
    """The likeliest next token by whole passes, without a cache; no end at the first step."""
    model.eval()
    found: list[int] = []
    while len(found) < longest:
        with torch.no_grad():
            logits = model(torch.tensor([[*source, END]]), torch.tensor([[START, *found]]))[0, -1]
        if not found:
            logits[END] = -torch.inf
        best = int(logits.argmax())
        if best == END:
            break
        found.append(best)
    return found


def test_beam_1_is_the_likeliest_token_at_every_step():
    sources = [TOKENIZER.encode(line) for line in (*LINES, "casa", "the red house")]
    found = [best.tokens for (best,) in translate_ids(MODEL, sources, Decoding(beam=1, extra_length=5))]
    assert found == [reference_greedy(MODEL, source, len(source) + 5) for source in sources]
    assert len(set(map(tuple, found))) > 1


def test_scores_are_the_log_probability_over_the_length_penalty():
    source = TOKENIZER.encode(LINES[0])
    (hypotheses,) = translate_ids(MODEL, [source], Decoding(beam=4, extra_length=20), nbest=4)
    for hypothesis in hypotheses:
        target = [*hypothesis.tokens, END]
        with torch.no_grad():
            logits = MODEL.eval()(torch.tensor([[*source, END]]), torch.tensor([[START, *hypothesis.tokens]]))[0]
        log_p = logits.log_softmax(-1)[range(len(target)), target]
        if len(target) > len(source) + 20:  # broke off at the limit, without an end
            log_p, target = log_p[:-1], target[:-1]
        assert hypothesis.log_probability == pytest.approx(log_p.sum().item(), abs=1e-3)
        assert hypothesis.score == pytest.approx(log_p.sum().item() / ((5 + len(target)) / 6) ** 0.6, abs=1e-3)


def test_empty_and_blank_lines_translate_to_nothing_in_their_places():
    texts = ["", LINES[0], "   ", "\t\u00a0", LINES[1], ""]
    translator = make_translator()
    found = translator.explain(texts, nbest=2, align=True)
    assert [found[i].text for i in (0, 2, 3, 5)] == [""] * 4
    assert all(found[i].alignment == [] and len(found[i].alternatives) == 1 for i in (0, 2, 3, 5))
    assert [found[1].text, found[4].text] == translator.translate([LINES[0], LINES[1]])
    assert translator.translate([]) == []


def test_one_string_is_refused():
    with pytest.raises(TypeError, match="list of sentences"):
        make_translator().translate("o libro")


def test_the_model_is_left_in_the_mode_it_was_in():
    model = make_model(TOKENIZER.size).train()
    translate_ids(model, [TOKENIZER.encode("casa")], Decoding(beam=1, extra_length=1))
    assert model.training


def test_alternatives_are_sorted_distinct_and_as_many_as_asked_for():
    for found in make_translator(beam=2).explain(LINES, nbest=5):
        scores = [alternative.score for alternative in found.alternatives]
        assert scores == sorted(scores, reverse=True) and len(scores) == 5
        assert (found.text, found.score) == (found.alternatives[0].text, scores[0])
    (hypotheses,) = translate_ids(MODEL, [TOKENIZER.encode(LINES[0])], Decoding(beam=5), nbest=5)
    assert len({tuple(hypothesis.tokens) for hypothesis in hypotheses}) == 5


def test_a_beam_that_is_asked_for_does_not_grow():
    with pytest.raises(InputError, match="a beam of 2 finds no 3 alternatives"):
        make_translator().explain(LINES, beam=2, nbest=3)


def test_options_of_a_call_go_over_the_settings():
    texts = [LINES[0], LINES[1]]
    asked = make_translator().explain(texts, beam=1, length_penalty=0.0, no_repeat_ngram=1)
    assert asked == make_translator(beam=1, length_penalty=0.0, no_repeat_ngram=1).explain(texts)
    assert asked != make_translator().explain(texts)


@given(st.lists(st.sampled_from([*WORDS, "grande.", "casa,"]), min_size=1, max_size=60), st.integers(3, 30))
def test_parts_of_a_long_text_fit_and_put_together_are_the_text(words, longest):
    text = " ".join(words)
    parts = split_long(TOKENIZER, text, longest)
    assert "".join(parts).replace(" ", "") == text.replace(" ", "")
    assert all(len(TOKENIZER.encode(part)) <= longest for part in parts)
    if len(TOKENIZER.encode(text)) <= longest:
        assert parts == [text]
    if max(len(TOKENIZER.encode(word)) for word in words) <= longest:
        assert " ".join(parts) == text


def test_a_long_text_is_cut_after_punctuation_near_its_middle():
    text = "o libro vermello grande casa. a casa branca o libro a casa"
    parts = split_long(TOKENIZER, text, len(TOKENIZER.encode(text)) - 1)
    assert parts == ["o libro vermello grande casa.", "a casa branca o libro a casa"]


def test_a_word_without_spaces_is_cut_between_letters():
    word = "x" * 500
    parts = split_long(TOKENIZER, word, 20)
    assert "".join(parts) == word
    assert all(len(TOKENIZER.encode(part)) <= 20 for part in parts)
    assert split_long(TOKENIZER, "é", 0) == ["é"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("男が外にいる。犬が走る。」猫", ["男が外にいる。", "犬が走る。」猫"]),  # nearest to the middle
        ("犬が走る。」猫が座っていて、寝る", ["犬が走る。」", "猫が座っていて、寝る"]),
        ("価格は1,000円です、はい", ["価格は1,000円です、", "はい"]),
    ],
)
def test_a_text_without_spaces_is_cut_after_a_stop(text, parts):
    longest = max(len(TOKENIZER.encode(part)) for part in parts)
    assert split_long(TOKENIZER, text, longest) == parts


def test_pieces_are_joined_as_their_script_wants():
    assert join_texts(["", " a  b", "", "c "]) == "a b c"
    assert join_texts(["男。", "犬、", "猫」", "A", "カ", "ナ”", "字"]) == "男。犬、猫」A カナ”字"
    assert join_texts(["남자", "개"]) == "남자 개"


def test_words_of_parts_that_are_joined_without_a_space_are_one(monkeypatch):
    translator, text = make_translator(longest=20), " ".join(LINES)
    before = translator.explain([text], align=True)[0]
    monkeypatch.setattr("qknorm.decoding.results._NO_SPACE", re.compile("\0"))
    (found,) = translator.explain([text], align=True)
    assert found.text != before.text
    assert sorted({target for _, target in found.alignment}) == list(range(len(found.text.split())))


def test_a_very_long_sentence_is_translated_in_parts_and_joined():
    text = " ".join([*LINES, *LINES, *LINES])
    translator = make_translator(longest=20)
    (found,) = translator.explain([text])
    parts = split_long(TOKENIZER, text, 20)
    assert found.parts == len(parts) > 3
    assert found.text == " ".join(filter(None, translator.translate(parts)))
    (short,) = translator.explain([LINES[3]])
    assert short.parts == 1


@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=40).map(" ".join), st.sampled_from([8, 15, 60]))
@settings(max_examples=20)
def test_an_alignment_links_every_target_word_to_a_source_word(text, longest):
    (found,) = make_translator(longest=longest).explain([text], align=True)
    assert [target for _, target in found.alignment] == list(range(len(found.text.split())))
    assert all(0 <= source < len(text.split()) for source, _ in found.alignment)


def test_words_of_a_sentence_in_parts_are_counted_through_on_both_sides():
    translator, text = make_translator(longest=20), " ".join(LINES)
    links, sources, targets = [], 0, 0
    for part in split_long(TOKENIZER, text, 20):
        (found,) = translator.explain([part], align=True)
        links += [(sources + source, targets + target) for source, target in found.alignment]
        sources, targets = sources + len(part.split()), targets + len(found.text.split())
    (whole,) = translator.explain([text], align=True)
    assert whole.alignment == links
    assert max(source for source, _ in links) > len(LINES[0].split())


def test_progress_counts_up_to_all_sentences_that_hold_anything():
    seen = []
    make_translator(batch_tokens=50).explain(
        [*LINES, "", *LINES], progress=lambda stage, done, total: seen.append((stage, done, total))
    )
    assert seen[-1] == ("translate", 8, 8)
    assert [done for _, done, _ in seen] == sorted({done for _, done, _ in seen})


@pytest.mark.parametrize("pretokenized", [False, True])
def test_both_manners_of_tokenizers_translate(pretokenized):
    tokenizer = make_tokenizer(pretokenized)
    translator = TextTranslator(
        make_model(tokenizer.size), tokenizer, "gl", "en", Decoding(beam=2, extra_length=5), longest=50
    )
    found = translator.explain([*LINES, "zzz"], align=True)
    assert all(translation.text.strip() for translation in found)
    for line, translation in zip([*LINES, "zzz"], found, strict=True):
        assert [target for _, target in translation.alignment] == list(range(len(translation.text.split())))
        assert all(0 <= source < len(line.split()) for source, _ in translation.alignment)
