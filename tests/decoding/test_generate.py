"""Writing: seeds, prompts, streaming, and how it slides past the context."""

import itertools

import pytest
import torch

from qknorm.config import Generation
from qknorm.config import LanguageModel as Settings
from qknorm.decoding.generate import SlidingReader, TextGenerator
from qknorm.errors import InputError
from qknorm.models.language_model import LanguageModel
from qknorm.text.characters import Characters

CHARACTERS = Characters.of("\nabcdefg ñ")


def make(positions: str = "learned", context: int = 8) -> TextGenerator:
    torch.manual_seed(0)
    shape = {"width": 16, "feed_forward": 32, "layers": 2, "heads": 2, "context": context, "positions": positions}
    model = LanguageModel(CHARACTERS.size, Settings(**shape))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # so that it prefers some characters
    return TextGenerator(model, CHARACTERS, Generation(length=30, temperature=1.0))


def greedy_by_hand(generator: TextGenerator, prompt: str, length: int) -> str:
    """Without a cache: the window that a character is predicted from, read whole each time."""
    model, context = generator.model, generator.model.settings.context
    window, written = CHARACTERS.encode(prompt).tolist()[-context:], []
    for _ in range(length):
        with torch.no_grad():
            chosen = int(model(torch.tensor([window]))[0, -1].argmax())
        written.append(chosen)
        window = [*window, chosen]
        if len(window) > context:
            window = window[-(context // 2) :]
    return CHARACTERS.decode(written)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("prompt", ["a", "abcd", "abcdefga", "gfedcba abcdefg"])
def test_greedy_writing_with_a_cache_is_writing_without(positions, prompt):
    generator = make(positions)
    expected = greedy_by_hand(generator, prompt, 40)
    assert generator.generate(prompt, length=40, temperature=0) == prompt + expected
    assert len(set(expected)) > 1


def test_the_model_always_sees_half_of_its_context_or_more():
    reader, lengths = SlidingReader(make().model), []
    with torch.no_grad():
        for token in range(40):
            reader.read([token % CHARACTERS.size])
            lengths.append(reader._cache[0].length)
    assert lengths[:8] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert lengths[8:] == list(itertools.islice(itertools.cycle([4, 5, 6, 7, 8]), 32))


@pytest.mark.parametrize("context", [2, 3])
def test_the_shortest_contexts_slide_too(context):
    assert len(make(context=context).generate("abc", length=9)) == 12


def test_the_seed_decides():
    generator = make()
    first, again, other = (generator.generate("ab", seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len(first) == 2 + 30 and first.startswith("ab")


def test_a_longer_text_begins_with_a_shorter_one():
    generator = make()
    assert generator.generate("ab", length=50, seed=3).startswith(generator.generate("ab", length=20, seed=3))


def test_what_is_streamed_is_what_is_written():
    generator = make()
    streamed = list(generator.stream("a", length=7, seed=5, top_k=3, top_p=0.9))
    assert [len(part) for part in streamed] == [1] * 7
    assert generator.generate("a", length=7, seed=5, top_k=3, top_p=0.9) == "a" + "".join(streamed)
    assert list(generator.stream("a", length=0)) == []
    assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()


def test_without_a_prompt_it_starts_after_a_line():
    generator = make()
    assert "\n" + generator.generate("", seed=4) == generator.generate("\n", seed=4)


def test_other_random_numbers_are_left_alone():
    state = torch.get_rng_state()
    make_state = make()
    torch.set_rng_state(state)
    make_state.generate("a")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"temperature": -1.0}, "temperature: Input should be greater than or equal to 0"),
        ({"temperature": float("nan")}, "temperature: Input should be"),
        ({"top_k": 0}, "top_k: Input should be greater than or equal to 1"),
        ({"top_p": 0.0}, "top_p: Input should be greater than 0"),
        ({"top_p": 1.5}, "top_p: Input should be less than or equal to 1"),
        ({"length": -1}, "length: Input should be greater than or equal to 0"),
        ({"seed": -1}, "a seed is a whole number from 0 on"),
    ],
)
def test_bad_options_are_told_before_anything_is_written(options, complaint):
    with pytest.raises(InputError, match=complaint):
        make().stream("a", **options)


def test_an_unknown_character_is_named_at_once():
    with pytest.raises(InputError, match=r"the character 'x' \(U\+0078\) does not occur in the text"):
        make().stream("abx")
