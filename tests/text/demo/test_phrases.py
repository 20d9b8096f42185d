"""Sentences built from a meaning by hand, one or more for every construction of the grammar."""

import pytest

from qknorm.text.demo import lexicon
from qknorm.text.demo.lexicon import Adjective, Noun, Place, Verb
from qknorm.text.demo.phrases import (
    BEING,
    BEING_NOW,
    EL,
    EU,
    NOS,
    QUEN,
    TI,
    VOS,
    Clause,
    Phrase,
    finish,
    govern,
    join_subjects,
    name_person,
    noun_phrase,
    place_at,
)

NOUN = {noun.galician: noun for noun in lexicon.NOUNS}
ADJECTIVE = {adjective.galician: adjective for adjective in lexicon.ADJECTIVES}
PLACE = {place.noun.galician: place for place in (*lexicon.PLACES, *lexicon.SURFACES)}
VERB = {verb.galician: verb for verb in (*lexicon.TRANSITIVE_VERBS, *lexicon.PERSON_VERBS, *lexicon.INTRANSITIVE_VERBS)}
BOY, GIRL = noun_phrase(NOUN["neno"]), noun_phrase(NOUN["nena"])
BOYS = noun_phrase(NOUN["neno"], plural=True)
ANA = name_person("Ana", feminine=True)


def texts(phrase: Phrase) -> tuple[str, str]:
    return phrase.galician, phrase.english


def pair(word: Adjective, subject: Phrase) -> tuple[str, str]:
    return word.agree(subject.feminine, subject.plural), word.english


@pytest.mark.parametrize(
    ("phrase", "galician", "english"),
    [
        (noun_phrase(NOUN["neno"], adjective=ADJECTIVE["pequeno"]), "o neno pequeno", "the small boy"),
        (
            noun_phrase(NOUN["casa"], plural=True, adjective=ADJECTIVE["pequeno"]),
            "as casas pequenas",
            "the small houses",
        ),
        (noun_phrase(NOUN["can"], "my"), "o meu can", "my dog"),
        (noun_phrase(NOUN["nena"], "your all", plural=True), "as vosas nenas", "your girls"),
        (noun_phrase(NOUN["mazá"], "2", plural=True), "dúas mazás", "two apples"),
        (noun_phrase(NOUN["libro"], "22", plural=True), "vinte e dous libros", "twenty-two books"),
        (noun_phrase(NOUN["mazá"], "a"), "unha mazá", "an apple"),
        (
            noun_phrase(NOUN["camisa"], "this", plural=True, adjective=ADJECTIVE["azul"]),
            "estas camisas azuis",
            "these blue shirts",
        ),
        (
            noun_phrase(NOUN["libro"], adjective=ADJECTIVE["novo"], owner=BOYS),
            "o libro novo dos nenos",
            "the boys' new book",
        ),
        (noun_phrase(NOUN["muller"], "all", plural=True), "todas as mulleres", "all the women"),
        (join_subjects(ANA, Phrase("eu", "I", person=1)), "Ana e eu", "Ana and I"),
    ],
)
def test_noun_phrases(phrase: Phrase, galician: str, english: str) -> None:
    assert texts(phrase) == (galician, english)


def test_a_mixed_couple_is_masculine_plural_and_two_girls_feminine() -> None:
    couple = join_subjects(BOY, GIRL)
    assert couple.plural and not couple.feminine
    assert pair(ADJECTIVE["canso"], couple) == ("cansos", "tired")
    assert pair(ADJECTIVE["canso"], join_subjects(GIRL, ANA)) == ("cansas", "tired")


STATEMENTS = [
    (
        Clause(BOYS, VERB["ler"], complements=(("o libro vermello", "the red book"),), negative=True),
        "Os nenos non len o libro vermello.",
        "The boys do not read the red book.",
    ),
    (Clause(GIRL, VERB["ler"], "progressive"), "A nena está a ler.", "The girl is reading."),
    (Clause(EU, VERB["ver"], pronoun=("o", "him")), "Véxoo.", "I see him."),
    (Clause(EU, VERB["ver"], pronoun=("o", "him"), negative=True), "Non o vexo.", "I do not see him."),
    (Clause(ANA, VERB["mercar"], "want", pronoun=("a", "it")), "Ana quere mercala.", "Ana wants to buy it."),
    (Clause(EL, VERB["mercar"], "past", pronoun=("os", "them")), "El mercounos.", "He bought them."),
    (
        Clause(NOS, VERB["cantar"], "past", time=("onte", "yesterday"), time_first=True),
        "Onte cantamos.",
        "Yesterday we sang.",
    ),
    (Clause(ANA, VERB["durmir"], "future", negative=True), "Ana non durmirá.", "Ana will not sleep."),
    (Clause(TI, VERB["nadar"], "can", negative=True), "Non podes nadar.", "You cannot swim."),
    (Clause(VOS, VERB["estudar"], "must"), "Tedes que estudar.", "You have to study."),
    (Clause(ANA, VERB["nadar"], "know how"), "Ana sabe nadar.", "Ana knows how to swim."),
    (Clause(NOS, VERB["comer"], "near", pronoun=("o", "it")), "Imos comelo.", "We are going to eat it."),
    (
        Clause(EU, lexicon.REFLEXIVE_VERBS[0], pronoun=("me", ""), time=("ás sete", "at seven o'clock")),
        "Levántome ás sete.",
        "I get up at seven o'clock.",
    ),
    (
        Clause(BOY, lexicon.REFLEXIVE_VERBS[0], "past", pronoun=("se", ""), adverb=("nunca", "never")),
        "O neno nunca se levantou.",
        "The boy never got up.",
    ),
    (
        Clause(GIRL, BEING_NOW, "past", (place_at(PLACE["cociña"]),)),
        "A nena estaba na cociña.",
        "The girl was in the kitchen.",
    ),
    (
        Clause(BOY, BEING, complements=(("máis alto", "taller"), govern("ca", "than", GIRL))),
        "O neno é máis alto cá nena.",
        "The boy is taller than the girl.",
    ),
    (
        Clause(
            ANA, lexicon.GIVING_VERBS[0], "past", (("unha carta", "a letter"), govern("a", "to", BOYS)), ("lles", "")
        ),
        "Ana mandoulles unha carta aos nenos.",
        "Ana sent a letter to the boys.",
    ),
    (
        Clause(ANA, VERB["correr"], complements=(govern("por", "through", noun_phrase(NOUN["parque"])),)),
        "Ana corre polo parque.",
        "Ana runs through the park.",
    ),
    (Clause(EU, Verb("ter", "be"), complements=(("fame", "hungry"),)), "Teño fame.", "I am hungry."),
]


@pytest.mark.parametrize(("clause", "galician", "english"), STATEMENTS)
def test_statements(clause: Clause, galician: str, english: str) -> None:
    assert finish(clause.galician(), clause.english()) == (galician, english)


@pytest.mark.parametrize(
    ("clause", "galician", "english"),
    [
        (Clause(GIRL, VERB["ler"]), "le a nena", "does the girl read"),
        (Clause(ANA, VERB["ler"], "past"), "leu Ana", "did Ana read"),
        (Clause(BOYS, VERB["chorar"], "progressive"), "están a chorar os nenos", "are the boys crying"),
        (Clause(ANA, VERB["chamar"], "past", pronoun=("te", "you")), "te chamou Ana", "did Ana call you"),
        (Clause(ANA, BEING_NOW), "está Ana", "is Ana"),
    ],
)
def test_questions_put_the_verb_first_and_the_pronoun_before_it(clause: Clause, galician: str, english: str) -> None:
    assert (clause.galician(inverted=True, subordinate=True), clause.english(question=True)) == (galician, english)


def test_who_is_its_own_subject() -> None:
    clause = Clause(QUEN, VERB["ver"], "past", pronoun=("a", "her"))
    assert (clause.galician(subordinate=True), clause.english()) == ("quen a viu", "who saw her")


@pytest.mark.parametrize(
    ("subject", "pronoun"),
    [(BOY, "he"), (GIRL, "she"), (BOYS, "they"), (noun_phrase(NOUN["can"]), "it"), (NOS, "we"), (TI, "you")],
)
def test_a_second_mention_is_silent_in_galician_and_a_pronoun_in_english(subject: Phrase, pronoun: str) -> None:
    assert texts(subject.refer_back()) == ("", pronoun)


def test_an_indefinite_place_contracts() -> None:
    station = Place(Noun("estación", True, "station", "stations", "place"), "at")
    assert place_at(station, "a") == ("nunha estación", "at a station")
