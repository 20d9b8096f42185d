"""The demo corpus as its users see it: distinct, grammatical, one reference a source, and fixed for ever."""

import hashlib
import re
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qknorm.errors import InputError
from qknorm.text.demo import lexicon
from qknorm.text.demo.choices import Chooser
from qknorm.text.demo_corpus import (
    DEV_SIZE,
    SENTENCE_KINDS,
    TEST_SIZE,
    TRAIN_SIZE,
    SentencePair,
    demo_splits,
    generate,
    split_words,
)


@pytest.fixture(scope="module")
def pairs() -> list[SentencePair]:
    return generate(20_000)


@pytest.fixture(scope="module")
def splits() -> dict[str, list[SentencePair]]:
    return demo_splits()


# Read and checked word by word; every construction that is more than a plain clause has one.
KNOWN = [
    ("Gústame o arroz.", "I like rice."),
    ("Non nos gustan os libros.", "We do not like books."),
    ("Á filla gústalle xogar?", "Does the daughter like playing?"),
    ("Dóenme os ollos.", "My eyes hurt."),
    ("A Breixo non lle doen os pés.", "Breixo's feet do not hurt."),
    ("Hai dez laranxas no restaurante.", "There are ten oranges at the restaurant."),
    ("Non hai arroz na universidade.", "There is no rice at the university."),
    ("Hai bonecas na illa?", "Are there any dolls on the island?"),
    ("Canto custan as miñas patacas?", "How much do my potatoes cost?"),
    ("De quen son eses barcos?", "Whose boats are those?"),
    ("De que cor é o coche?", "What colour is the car?"),
    ("Cantos anos ten Sabela?", "How old is Sabela?"),
    ("Cantas culleres pode levar el?", "How many spoons can he carry?"),
    ("Con quen vai falar Sabela?", "Who is Sabela going to speak with?"),
    ("Por que te visita Ana?", "Why does Ana visit you?"),
    ("Quen as gardou?", "Who kept them?"),
    ("Collede os garfos, por favor.", "Take the forks, please."),
    ("Se chove, bailamos nun bosque.", "If it rains, we dance in a forest."),
    ("A carta que leron os veciños é nova.", "The letter that the neighbours read is new."),
    ("O teu veciño di que Pedro o abre.", "Your neighbour says that Pedro opens it."),
    ("Ela non viaxou a Lugo comigo.", "She did not travel to Lugo with me."),
    ("Ese bombeiro ten vinte e seis anos.", "That firefighter is twenty-six years old."),
    ("A vosa sopa aínda estaba fría.", "Your soup was still cold."),
    ("Os nosos trens son máis lentos có avión.", "Our trains are slower than the plane."),
    ("El non coñece a ninguén.", "He does not know anyone."),
    ("Ela é médica.", "She is a doctor."),
]


@pytest.mark.parametrize(("galician", "english"), KNOWN)
def test_known_sentences_are_translated_as_we_would(pairs: list[SentencePair], galician: str, english: str) -> None:
    assert dict(pairs).get(galician) == english


def test_no_sentence_occurs_twice_on_either_side(pairs: list[SentencePair]) -> None:
    assert len({galician for galician, _ in pairs}) == len({english for _, english in pairs}) == len(pairs) == 20_000


def test_a_galician_sentence_never_has_two_meanings() -> None:
    chooser = Chooser(17)
    meaning: dict[str, str] = {}
    for _ in range(60_000):  # before any filter: a clash could not hide behind the removal of duplicates
        galician, english = chooser.pick(SENTENCE_KINDS)(chooser)
        assert meaning.setdefault(galician, english) == english, galician


def test_prepositions_are_contracted_wherever_the_norm_requires_it(pairs: list[SentencePair]) -> None:
    loose = re.compile(
        r"\b(?:(?:a|de|en|con|por|ca) (?:o|a|os|as)|(?:de|en|con) (?:un|unha)|(?:de|en) (?:es[te]+[aes]?s?|el|ela)) ",
        re.IGNORECASE,
    )
    assert loose.search("Vou a o parque") and loose.search("nin en esta casa")
    offenders = [galician for galician, _ in pairs if loose.search(galician)]
    assert offenders == []


def test_sentences_begin_with_a_capital_and_end_with_the_same_mark(pairs: list[SentencePair]) -> None:
    for galician, english in pairs:
        assert galician[0].isupper() and english[0].isupper()
        assert galician[-1] == english[-1] and galician[-1] in ".?"
        assert "  " not in galician + english and galician.isprintable() and english.isprintable()


def _noun_features() -> dict[str, tuple[bool, bool]]:
    """Every noun form whose gender and number can be told: form → feminine, plural."""
    features = {noun.galician: (noun.feminine, False) for noun in lexicon.NOUNS}
    return features | {noun.galician_plural: (noun.feminine, True) for noun in lexicon.NOUNS}


def test_articles_and_possessives_agree_with_their_noun(pairs: list[SentencePair]) -> None:
    agreeing = {
        (False, False): "o do no ao co polo có un dun nun cun meu teu noso voso este ese outro",
        (True, False): "a da na á coa pola cá unha dunha nunha cunha miña túa nosa vosa esta esa outra",
        (False, True): "os dos nos aos cos polos cós meus teus nosos vosos estes eses moitos algúns cantos dous",
        (True, True): "as das nas ás coas polas cás miñas túas nosas vosas estas esas moitas algunhas cantas dúas",
    }
    determiners = {word: features for features, words in agreeing.items() for word in words.split()}
    nouns = _noun_features()
    checked = Counter[str]()
    for galician, _ in pairs:
        words = re.findall(r"\w+", galician.lower().replace(" e un ", " ").replace(" e unha ", " "))  # vinte e un
        for before, word in pairwise(words):
            if before in determiners and word in nouns:
                assert determiners[before] == nouns[word], galician
                checked[before] += 1
    assert set(determiners) - set(checked) <= {"dun", "dunha", "cunha", "nos", "nas", "polos", "polas"}
    assert checked.total() > 15_000


def test_an_adjective_after_its_noun_agrees_with_it(pairs: list[SentencePair]) -> None:
    nouns = _noun_features()
    forms: dict[str, set[tuple[bool, bool]]] = {}
    for adjective in lexicon.ADJECTIVES:
        if adjective.galician == "limpo":  # limpa is also a verb form
            continue
        for feminine in (False, True):
            for plural in (False, True):
                forms.setdefault(adjective.agree(feminine, plural), set()).add((feminine, plural))
    checked = 0
    for galician, _ in pairs:
        words = re.findall(r"\w+", galician.lower())
        for word, after in pairwise(words):
            if word in nouns and after in forms:
                assert nouns[word] in forms[after], galician
                checked += 1
    assert checked > 4_000


def test_english_third_person_and_articles(pairs: list[SentencePair]) -> None:
    wrong = re.compile(
        r"\b(?:a [aeio]\w+|an [^aeiou ]\w+)\b"
        r"|(?:^|because |that )(?:(?:he|she|it) (?:do|have|are|am|were|want|say)|(?:i|they|we|you) (?:does|has|is))\b",
        re.IGNORECASE,
    )
    assert wrong.search("He have a dog.") and wrong.search("We eat because they has bread.") and wrong.search("an dog")
    assert [english for _, english in pairs if wrong.search(english)] == []


def test_lengths_and_vocabulary(pairs: list[SentencePair]) -> None:
    lengths = [len(english.split()) for _, english in pairs]
    assert min(lengths) >= 3 and max(lengths) <= 18
    assert 7 <= sum(lengths) / len(lengths) <= 8
    words = {word for pair in pairs for word in split_words(pair)}
    assert 1_800 < sum(language == "gl" for language, _ in words) < 4_000
    assert 800 < sum(language == "en" for language, _ in words) < 1_200


def test_each_galician_word_of_the_lexicon_has_one_translation() -> None:
    translations: dict[str, set[str]] = {}
    for noun in (*lexicon.NOUNS, *lexicon.BODY_PARTS):
        translations.setdefault(noun.galician, set()).add(noun.english)
        translations.setdefault(noun.galician_plural, set()).add(noun.english_plural)
    for adjective in lexicon.ADJECTIVES:
        translations.setdefault(adjective.galician, set()).add(adjective.english)
    assert {word: english for word, english in translations.items() if len(english) > 1} == {}


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 60), st.integers(0, 60))
def test_a_smaller_count_is_a_prefix_of_a_larger_one(seed: int, some: int, more: int) -> None:
    assert generate(some + more, seed)[:some] == generate(some, seed)


def test_another_seed_gives_other_sentences() -> None:
    assert generate(50, 1) != generate(50, 2)


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(InputError, match="cannot be negative, got -1"):
        generate(-1)


def test_a_grammar_that_runs_dry_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qknorm.text.demo_corpus.SENTENCE_KINDS", [lambda _: ("Chove en Vigo.", "It rains in Vigo.")])
    with pytest.raises(InputError, match="found only 1 distinct pairs, not 2"):
        generate(2)


def test_splits_have_their_sizes_and_share_no_sentence(splits: dict[str, list[SentencePair]]) -> None:
    assert {name: len(part) for name, part in splits.items()} == {
        "train": TRAIN_SIZE,
        "dev": DEV_SIZE,
        "test": TEST_SIZE,
    }
    for side in (0, 1):
        sentences = [pair[side].lower() for part in splits.values() for pair in part]
        assert len(set(sentences)) == len(sentences)


def test_train_teaches_every_held_out_word(splits: dict[str, list[SentencePair]]) -> None:
    taught = Counter(word for pair in splits["train"] for word in split_words(pair))
    for name in ("dev", "test"):
        for pair in splits[name]:
            assert min(taught[word] for word in split_words(pair)) >= 4, pair


def test_the_held_out_sentences_show_every_kind_of_difficulty(splits: dict[str, list[SentencePair]]) -> None:
    test = "\n".join(galician for galician, _ in splits["test"])
    for construction in (r"\bnon\b", r"\?", r"\besta\w* a\b", r"porque", r"\bque\b", r"gústa", r"\bmáis\b", r"lles? "):
        assert len(re.findall(construction, test)) >= 2, construction


def test_the_splits_are_fixed_for_ever(splits: dict[str, list[SentencePair]]) -> None:
    digests = {
        name: hashlib.sha256("\n".join(f"{gl}\t{en}" for gl, en in part).encode()).hexdigest()[:16]
        for name, part in splits.items()
    }
    assert digests == {"train": "17a397564deffbe9", "dev": "f91c8ff1ae7658a1", "test": "1f9d7e0f4fc11ea4"}
