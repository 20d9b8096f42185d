"""Chance for the demo corpus: which noun, which determiner, which tense; every choice is repeatable by seed."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from qknorm.text.demo import lexicon
from qknorm.text.demo.grammar import count_in_english, count_in_galician, tenses_coincide
from qknorm.text.demo.lexicon import Noun, Verb
from qknorm.text.demo.phrases import (
    EL,
    ELA,
    ELAS,
    ELES,
    EU,
    NOS,
    TI,
    VOS,
    Clause,
    Pair,
    Phrase,
    govern,
    join_subjects,
    name_person,
    noun_phrase,
    place_at,
)

Item = TypeVar("Item")

_POSSESSIVES = ("my", "your", "our", "your all")
_SUBJECT_DETERMINERS = ("the",) * 10 + _POSSESSIVES + ("this", "that", "number", "number", "many", "some")
_OBJECT_DETERMINERS = (
    ("the",) * 8
    + ("a",) * 6
    + ("",) * 3
    + _POSSESSIVES
    + ("this", "that", "number", "number", "another", "many", "all")
)
_SINGULAR_ONLY = ("a", "another")
_PLURAL_ONLY = ("", "number", "many", "some", "all")
_SIMPLE_TENSES = ("present", "past", "future")
_TENSES = ("present",) * 5 + ("past",) * 5 + ("future",) * 2 + ("progressive",) * 3 + ("near", "can", "want", "must")
_NATURAL_TENSES = {"all": _TENSES, "simple": ("present", "present", "past", "future"), "present": ("present",)}
_ADVERBS = (("sempre", "always"), ("nunca", "never"), ("tamén", "also"))
STILL = ("aínda", "still")


def is_ambiguous(clause: Clause) -> bool:
    """Whether a past could be taken for a present for want of a time."""
    return clause.tense == "past" and not clause.time[0] and tenses_coincide(clause.verb.galician, clause.subject.form)


class Chooser:
    """Draws from random.Random.random alone: the one method whose numbers Python promises never to change."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def pick(self, items: Sequence[Item]) -> Item:
        """One of the items, each as likely as the others."""
        return items[int(self._random.random() * len(items))]

    def chance(self, probability: float) -> bool:
        """True as often as the probability says."""
        return self._random.random() < probability

    def number(self) -> int:
        """A number from 2 to 29, small ones more often."""
        return self.pick(range(2, 11)) if self.chance(0.6) else self.pick(range(11, 30))

    # Nouns

    def noun(self, kinds: Sequence[str]) -> Noun:
        """A noun of one of the kinds."""
        return self.pick(lexicon.NOUNS_BY_KIND[self.pick(kinds)])

    def describe(self, noun: Noun, determiners: Sequence[str], adjective_chance: float) -> Phrase:
        """The noun with a determiner, and perhaps an adjective; mass nouns stay singular, parents plain."""
        determiner = self.pick(determiners)
        if noun in lexicon.PARENTS:
            return noun_phrase(noun, self.pick(("the", *_POSSESSIVES)))
        if noun in lexicon.KIN and determiner not in ("the", *_POSSESSIVES):
            determiner = self.pick(_POSSESSIVES)
        adjective = None
        if self.chance(adjective_chance):
            adjective = self.pick(lexicon.ADJECTIVES_BY_KIND[noun.kind])
        if noun.kind in lexicon.MASS_KINDS:
            determiner = determiner if determiner in ("the", "", "this", *_POSSESSIVES) else ""
            return noun_phrase(noun, determiner, adjective=adjective)
        plural = determiner in _PLURAL_ONLY or (determiner not in _SINGULAR_ONLY and self.chance(0.4))
        if determiner == "number":
            determiner = str(self.number())
        if determiner == "the" and self.chance(0.12):
            return noun_phrase(noun, plural=plural, adjective=adjective, owner=self.owner())
        return noun_phrase(noun, determiner, plural=plural, adjective=adjective)

    def owner(self) -> Phrase:
        """Someone something belongs to."""
        if self.chance(0.4):
            return self.name()
        return noun_phrase(self.pick(lexicon.PEOPLE), plural=self.chance(0.3))

    def definite(self, kinds: Sequence[str], adjective_chance: float = 0.2) -> Phrase:
        """A definite phrase of one of the kinds."""
        return self.describe_definite(self.noun(kinds), adjective_chance)

    def describe_definite(self, noun: Noun, adjective_chance: float) -> Phrase:
        """The noun as something known: the, this, that, or someone's."""
        return self.describe(noun, ("the", "the", "the", *_POSSESSIVES, "this", "that"), adjective_chance)

    def subject_phrase(self, kinds: Sequence[str] = ("person",)) -> Phrase:
        """A phrase fit to open a sentence."""
        if kinds == ("person",) and self.chance(0.06):
            return self.describe(self.pick(lexicon.PARENTS), _SUBJECT_DETERMINERS, 0)
        return self.describe(self.noun(kinds), _SUBJECT_DETERMINERS, 0.3)

    def object_phrase(self, verb: Verb) -> Phrase:
        """Something the verb can be done to."""
        return self.describe(self.noun(verb.objects), _OBJECT_DETERMINERS, 0.45)

    def name(self) -> Phrase:
        """A person by name."""
        if self.chance(0.5):
            return name_person(self.pick(lexicon.FEMALE_NAMES), feminine=True)
        return name_person(self.pick(lexicon.MALE_NAMES), feminine=False)

    def third_person(self) -> Phrase:
        """One or more people who are spoken of."""
        draw = self.pick(range(10))
        if draw < 5:
            return self.subject_phrase()
        if draw < 8:
            return self.name()
        return self.pick((EL, ELA, ELES, ELAS))

    def person(self) -> Phrase:
        """Any grammatical person: a pronoun, a name, a noun, or two people together."""
        draw = self.pick(range(20))
        if draw < 7:
            return self.pick((EU, EU, TI, TI, NOS, NOS, VOS))
        if draw == 7:
            return join_subjects(self.name(), replace(EU, galician="eu"))
        if draw < 10:
            first, second = (noun_phrase(self.pick(lexicon.PEOPLE)) for _ in range(2))
            if first.galician != second.galician:
                return join_subjects(first, second)
        return self.third_person()

    def other(self) -> Phrase:
        """Anyone but the speaker: one seldom asks what one does oneself."""
        return self.pick((EL, ELA, TI, TI, VOS)) if self.chance(0.4) else self.third_person()

    # Time and place

    def time(self, tense: str) -> Pair:
        """A time that fits the tense."""
        if tense == "past":
            return self.pick(lexicon.PAST_TIMES)
        if tense in ("future", "near"):
            return self.pick(lexicon.FUTURE_TIMES)
        if tense == "progressive":
            return lexicon.PRESENT_TIMES[0]
        if tense == "present":
            return self.hour() if self.chance(0.3) else self.pick(lexicon.HABITUAL_TIMES)
        return self.pick((*lexicon.PRESENT_TIMES, *lexicon.FUTURE_TIMES))

    def hour(self) -> Pair:
        """An hour of the clock."""
        hour = self.pick(range(2, 13))
        return f"ás {count_in_galician(hour, feminine=True)}", f"at {count_in_english(hour)} o'clock"

    def place(self) -> Pair:
        """Where people do things."""
        draw = self.pick(range(10))
        if draw == 0:
            return "na casa", "at home"
        if draw < 3:
            return self.city("en", "in")
        return place_at(self.pick(lexicon.PLACES), "a" if self.chance(0.2) else "the")

    def city(self, galician_preposition: str, english_preposition: str) -> Pair:
        """A city after a preposition."""
        galician, english = self.pick(lexicon.CITIES)
        return govern(galician_preposition, english_preposition, Phrase(galician, english))

    # Clauses

    def tense(self, verb: Verb) -> str:
        """A tense in which the verb sounds natural."""
        return self.pick(_NATURAL_TENSES[verb.tenses])

    def settle(self, clause: Clause, *, extras: float = 1.0) -> Clause:
        """The clause with negation, an adverb or a time, or none; always a time where the verb alone is ambiguous."""
        ambiguous = is_ambiguous(clause)
        if self.chance(0.18 * extras):
            clause = replace(clause, negative=True)
        elif self.chance(0.12 * extras) and clause.tense in _SIMPLE_TENSES:
            clause = replace(clause, adverb=self.pick(_ADVERBS))
        timeless = clause.tense == "know how" or (clause.tense == "present" and clause.verb.tenses != "all")
        if ambiguous or (not clause.adverb[0] and not timeless and self.chance(0.5 * extras)):
            first = not clause.pronoun[0] and self.chance(0.35)
            clause = replace(clause, time=self.time(clause.tense), time_first=first)
        return clause
