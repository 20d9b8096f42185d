"""The embedded demo corpus: Galician–English sentence pairs with real grammar, made on the spot and always the same."""

import hashlib
import re
from collections import Counter
from collections.abc import Callable

from qknorm.errors import InputError
from qknorm.text.demo import compounds, sentences
from qknorm.text.demo.choices import Chooser

SentencePair = tuple[str, str]

TRAIN_SIZE, DEV_SIZE, TEST_SIZE = 12_000, 300, 300
_SPLIT_SEED = 2020
_TIMES_TAUGHT = 4  # how often train has every word of a held-out sentence, at least
_SHORTEST, _LONGEST = 3, 18  # words of the English side; a Galician verb alone can be a sentence: véxoo
_MAX_DRAWS_PER_PAIR = 50

_SENTENCE_WEIGHTS: dict[Callable[[Chooser], SentencePair], int] = {
    sentences.say_action: 26,
    sentences.say_activity: 10,
    sentences.say_description: 5,
    sentences.say_comparison: 4,
    sentences.say_location: 4,
    sentences.say_existence: 4,
    sentences.say_pronoun_object: 7,
    sentences.say_reflexive: 4,
    sentences.say_gift: 6,
    sentences.say_liking: 5,
    sentences.say_pain: 2,
    sentences.say_identity: 3,
    sentences.say_journey: 4,
    sentences.say_arrival: 2,
    sentences.say_skill: 3,
    sentences.say_command: 2,
    compounds.ask_what: 2,
    compounds.ask_circumstance: 4,
    compounds.ask_who: 2,
    compounds.ask_about_thing: 3,
    compounds.ask_how_many: 2,
    compounds.give_reason: 7,
    compounds.contrast: 7,
    compounds.report: 7,
    compounds.relate_subject: 6,
    compounds.relate_object: 6,
    compounds.say_weather: 4,
}
SENTENCE_KINDS = [kind for kind, weight in _SENTENCE_WEIGHTS.items() for _ in range(weight)]


def generate(count: int, seed: int = 0) -> list[SentencePair]:
    """Distinct (Galician, English) pairs, no sentence twice on either side; a smaller count is a prefix of a larger."""
    if count < 0:
        raise InputError(f"the number of demo sentence pairs cannot be negative, got {count}; ask for 0 or more")
    chooser = Chooser(seed)
    pairs: dict[str, str] = {}
    translations: set[str] = set()
    for _ in range(count * _MAX_DRAWS_PER_PAIR):
        if len(pairs) == count:
            break
        galician, english = chooser.pick(SENTENCE_KINDS)(chooser)
        fits = _SHORTEST <= len(english.split()) <= _LONGEST
        if fits and galician not in pairs and english not in translations:
            pairs[galician] = english
            translations.add(english)
    if len(pairs) < count:
        raise InputError(f"the demo grammar found only {len(pairs)} distinct pairs, not {count}; ask for fewer")
    return list(pairs.items())


def demo_splits() -> dict[str, list[SentencePair]]:
    """The fixed train, dev and test pairs: no sentence in two of them, no held-out word that train does not teach."""
    pairs = generate(TRAIN_SIZE + DEV_SIZE + TEST_SIZE, _SPLIT_SEED)
    left_in_train = Counter(word for pair in pairs for word in split_words(pair))
    held_out: list[SentencePair] = []
    for pair in sorted(pairs, key=_digest):
        words = Counter(split_words(pair))
        if all(left_in_train[word] - times >= _TIMES_TAUGHT for word, times in words.items()):
            left_in_train.subtract(words)
            held_out.append(pair)
        if len(held_out) == TEST_SIZE + DEV_SIZE:
            break
    hidden = set(held_out)
    train = [pair for pair in pairs if pair not in hidden]
    return {"train": train, "dev": held_out[TEST_SIZE:], "test": held_out[:TEST_SIZE]}


def split_words(pair: SentencePair) -> list[tuple[str, str]]:
    """The words of both sides in lower case, each with its language."""
    return [
        (language, word)
        for language, sentence in zip(("gl", "en"), pair, strict=True)
        for word in re.findall(r"[\w'-]+", sentence.lower())
    ]


def _digest(pair: SentencePair) -> str:
    return hashlib.sha256(pair[0].encode()).hexdigest()
