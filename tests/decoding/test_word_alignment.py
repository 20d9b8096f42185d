"""Which word each token is part of, and the links read off cross-attention."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qknorm.config import Dropout, Model
from qknorm.decoding.alignment import align_words, cross_attention_weights, word_numbers
from qknorm.models.translator import Translator
from qknorm.specials import END, START
from qknorm.text.subwords import Tokenizer

LINES = ["o libro vermello é grande", "a casa branca , a casa grande .", "the red book 's here", "the white house ."]
TOKENIZERS = {manner: Tokenizer.train(LINES * 3, merges=20, pretokenized=manner) for manner in (False, True)}
words = st.sampled_from(sorted({word for line in LINES for word in line.split()}))


def make_model(types: int, layers: int = 3) -> Translator:
    shape = {"width": 16, "feed_forward": 32, "encoder_layers": 1, "decoder_layers": layers, "heads": 2}
    return Translator(types, Model(**shape, dropout=Dropout.everywhere(0.3)), scale_init=12.0)


@pytest.mark.parametrize("pretokenized", [False, True])
@given(text=st.lists(words, min_size=1, max_size=12))
def test_tokens_of_a_text_are_numbered_by_its_words(pretokenized, text):
    tokenizer = TOKENIZERS[pretokenized]
    due = [number for number, word in enumerate(text) for _ in tokenizer.encode(word)]
    assert word_numbers(tokenizer, tokenizer.encode(" ".join(text))) == due


@pytest.mark.parametrize("pretokenized", [False, True])
@given(data=st.data())
@settings(max_examples=200)
def test_any_tokens_are_numbered_by_the_words_of_their_text(pretokenized, data):
    """A model may produce what no text is cut into: spaces alone, special tokens, words without an end."""
    tokenizer = TOKENIZERS[pretokenized]
    ids = data.draw(st.lists(st.integers(0, tokenizer.size - 1), min_size=1, max_size=15))
    numbers = word_numbers(tokenizer, ids)
    assert len(numbers) == len(ids)
    assert numbers == sorted(numbers)
    count = len(tokenizer.decode(ids).split())
    assert set(numbers) == set(range(max(1, count)))
    for number, word in enumerate(tokenizer.decode(ids).split()):
        own = [token for token, of in zip(ids, numbers, strict=True) if of == number]
        assert tokenizer.decode(own).strip() == word


@pytest.mark.parametrize("pretokenized", [False, True])
@pytest.mark.parametrize("text", ["a ω casa", "casω grande .", "ω"])
def test_unknown_letters_do_not_move_the_words_of_a_source(pretokenized, text):
    tokenizer = TOKENIZERS[pretokenized]
    model = make_model(tokenizer.size, layers=1)
    with torch.no_grad():
        model.decoder[0].cross_attention.norm.scale.fill_(
            0.0
        )  # every source token alike: the word with most tokens wins
    longest = max(range(len(text.split())), key=lambda i: len(tokenizer.encode(text.split()[i])))
    target = tokenizer.encode("the red book")
    assert align_words(model, tokenizer, text, target) == [(longest, word) for word in range(3)]


def test_weights_are_those_with_which_each_token_was_produced():
    model = make_model(30).train()
    source, target = [5, 9, 12, 7], [8, 6, 11]
    weights = cross_attention_weights(model, source, target)
    assert weights.shape == (3, 2, 4, 5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 2, 4))
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())
    seen = []
    first = model.decoder[0].cross_attention
    hook = first.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    with torch.no_grad():
        model.eval().decode(torch.tensor([[START, *target]]), model.encode(torch.tensor([[*source, END]])))
        hook.remove()
        query, key, _ = seen[0]
        q, k = (
            torch.nn.functional.linear(x, first.in_proj_weight[i : i + 16], first.in_proj_bias[i : i + 16])
            .view(-1, 2, 8)
            .transpose(0, 1)
            for x, i in ((query, 0), (key, 16))
        )
        cosine = (q / q.norm(dim=-1, keepdim=True)) @ (k / k.norm(dim=-1, keepdim=True)).transpose(1, 2)
    torch.testing.assert_close(weights[0], (12 * cosine).softmax(-1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layers", [1, 3])
def test_each_target_word_links_to_the_source_word_with_the_most_weight(layers):
    tokenizer = TOKENIZERS[False]
    model = make_model(tokenizer.size, layers)
    text, target = "o libro vermello", tokenizer.encode("the red book")
    source = tokenizer.encode(text)
    weights = cross_attention_weights(model, source, target)[max(0, layers - 2)].mean(0)
    sources, targets = (word_numbers(tokenizer, ids) for ids in (source, target))
    links = []
    for word in range(3):
        total = [0.0] * 3
        for row, of in enumerate(targets):
            for column, place in enumerate(sources):
                total[place] += weights[row, column].item() * (of == word)
        links.append((total.index(max(total)), word))
    assert align_words(model, tokenizer, text, target) == links


@pytest.mark.parametrize("pretokenized", [False, True])
@given(data=st.data())
@settings(max_examples=30)
def test_links_cover_the_words_of_any_translation_and_stay_in_range(pretokenized, data):
    tokenizer = TOKENIZERS[pretokenized]
    model = make_model(tokenizer.size, layers=1)
    text = data.draw(st.lists(words, min_size=1, max_size=6))
    target = data.draw(st.lists(st.integers(0, tokenizer.size - 1), max_size=10))
    links = align_words(model, tokenizer, " ".join(text), target)
    assert [word for _, word in links] == list(range(len(tokenizer.decode(target).split())))
    assert all(0 <= source < len(text) for source, _ in links)


def test_nothing_aligns_with_nothing():
    tokenizer = TOKENIZERS[False]
    model = make_model(tokenizer.size)
    some = tokenizer.encode("casa")
    assert align_words(model, tokenizer, "", some) == align_words(model, tokenizer, "o libro", []) == []
    assert align_words(model, tokenizer, "o libro", [START, END]) == []
