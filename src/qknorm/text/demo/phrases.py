"""Phrases and clauses of the demo corpus: one meaning, written down in Galician and in English."""

from dataclasses import dataclass, replace

from qknorm.text.demo.grammar import (
    add_indefinite,
    attach_pronoun,
    conjugate,
    contract_last,
    count_in_english,
    count_in_galician,
    inflect_english,
    possessive,
)
from qknorm.text.demo.lexicon import Adjective, Noun, Place, Verb

Pair = tuple[str, str]

BEING = Verb("ser", "be")
BEING_NOW = Verb("estar", "be")

# Masculine, feminine, and their plurals, where there is such a form; then English singular and plural.
_DETERMINERS = {
    "the": ("o a os as", "the", "the"),
    "a": ("un unha", "a", ""),
    "this": ("este esta estes estas", "this", "these"),
    "that": ("ese esa eses esas", "that", "those"),
    "my": ("o_meu a_miña os_meus as_miñas", "my", "my"),
    "your": ("o_teu a_túa os_teus as_túas", "your", "your"),
    "our": ("o_noso a_nosa os_nosos as_nosas", "our", "our"),
    "your all": ("o_voso a_vosa os_vosos as_vosas", "your", "your"),
    "another": ("outro outra", "another", ""),
    "many": ("- - moitos moitas", "", "many"),
    "some": ("- - algúns algunhas", "", "some"),
    "all": ("- - todos_os todas_as", "", "all the"),
}

# How a tense is made in Galician: auxiliary, its tense, and what joins it to the infinitive.
_PERIPHRASES = {
    "progressive": ("estar", "present", "a"),
    "near": ("ir", "present", ""),
    "can": ("poder", "present", ""),
    "want": ("querer", "present", ""),
    "must": ("ter", "present", "que"),
    "know how": ("saber", "present", ""),
}
_ENGLISH_MODALS = {"want": ("want", "to"), "must": ("have", "to"), "know how": ("know", "how to")}


@dataclass(frozen=True)
class Phrase:
    """A noun phrase or pronoun in both languages, with what agrees with it; a null subject has no Galician."""

    galician: str
    english: str
    person: int = 3
    plural: bool = False
    feminine: bool = False
    human: bool = False

    @property
    def form(self) -> int:
        """The person of the verb, 0 to 5."""
        return self.person - 1 + (3 if self.plural else 0)

    def refer_back(self) -> "Phrase":
        """The same one mentioned again: nothing in Galician, a pronoun in English."""
        if self.person < 3:
            pronoun = {0: "I", 1: "you", 3: "we", 4: "you"}[self.form]
        elif self.plural:
            pronoun = "they"
        elif self.human:
            pronoun = "she" if self.feminine else "he"
        else:
            pronoun = "it"
        return replace(self, galician="", english=pronoun)


EU, TI, NOS, VOS = (
    Phrase("", "I", person=1, human=True),
    Phrase("", "you", person=2, human=True),
    Phrase("", "we", person=1, plural=True, human=True),
    Phrase("", "you", person=2, plural=True, human=True),
)
EL, ELA = Phrase("el", "he", human=True), Phrase("ela", "she", feminine=True, human=True)
ELES = Phrase("eles", "they", plural=True, human=True)
ELAS = Phrase("elas", "they", plural=True, feminine=True, human=True)
QUEN = Phrase("quen", "who", human=True)


def noun_phrase(
    noun: Noun,
    determiner: str = "the",
    *,
    plural: bool = False,
    adjective: Adjective | None = None,
    owner: Phrase | None = None,
) -> Phrase:
    """A noun with its determiner (or a number in digits, or none), an adjective after it and an owner after that."""
    words = [noun.galician_plural if plural else noun.galician]
    if adjective:
        words.append(adjective.agree(noun.feminine, plural))
    if owner:
        words.append(contract_last("de", owner.galician))
    head = noun.english_plural if plural else noun.english
    english = f"{adjective.english} {head}" if adjective else head
    galician_determiner, english_determiner = _translate_determiner(determiner, noun.feminine, plural)
    if owner:
        english_determiner = possessive(owner.english, owner.plural)
    elif english_determiner == "a":
        english, english_determiner = add_indefinite(english), ""
    return Phrase(
        join(galician_determiner, *words),
        join(english_determiner, english),
        plural=plural,
        feminine=noun.feminine,
        human=noun.kind in ("person", "parent"),
    )


def _translate_determiner(determiner: str, feminine: bool, plural: bool) -> Pair:
    if not determiner:
        return "", ""
    if determiner.isdecimal():
        number = int(determiner)
        return count_in_galician(number, feminine), count_in_english(number)
    forms, singular_english, plural_english = _DETERMINERS[determiner]
    galician = forms.split()[2 * plural + feminine]
    return galician.replace("_", " "), plural_english if plural else singular_english


def name_person(name: str, feminine: bool) -> Phrase:
    """A person by name, the same in both languages."""
    return Phrase(name, name, feminine=feminine, human=True)


def join_subjects(first: Phrase, second: Phrase) -> Phrase:
    """Two subjects as one: feminine only if both are; with eu, the first person."""
    return Phrase(
        f"{first.galician} e {second.galician}",
        f"{first.english} and {second.english}",
        person=min(first.person, second.person),
        plural=True,
        feminine=first.feminine and second.feminine,
        human=first.human,
    )


def place_at(place: Place, determiner: str = "the") -> Pair:
    """In, at or on a place: na cociña, in the kitchen."""
    phrase = noun_phrase(place.noun, determiner)
    return contract_last("en", phrase.galician), f"{place.preposition} {phrase.english}"


def govern(galician_preposition: str, english_preposition: str, phrase: Phrase) -> Pair:
    """A prepositional phrase, contracted on the Galician side."""
    return contract_last(galician_preposition, phrase.galician), f"{english_preposition} {phrase.english}"


def join(*words: str) -> str:
    """The words that are not empty, with one space between."""
    return " ".join(word for word in words if word)


@dataclass(frozen=True)
class Clause:
    """A subject and what is said of it; renders itself as a statement, a question or a subordinate clause."""

    subject: Phrase
    verb: Verb
    tense: str = "present"
    complements: tuple[Pair, ...] = ()
    pronoun: Pair = ("", "")
    negative: bool = False
    adverb: Pair = ("", "")
    time: Pair = ("", "")
    time_first: bool = False

    def galician(self, *, inverted: bool = False, subordinate: bool = False) -> str:
        """The Galician words; a subordinate clause (or a wh-question) draws the pronoun before the verb."""
        before_verb, verb = self._galician_verb(subordinate)
        subject = self.subject.galician
        core = [before_verb, verb, subject] if inverted else [subject, before_verb, verb]
        words = [*core, *(galician for galician, _ in self.complements)]
        return join(*([self.time[0], *words] if self.time_first else [*words, self.time[0]]))

    def _galician_verb(self, subordinate: bool) -> Pair:
        """What stands before the verb, and the verb with what is attached to it."""
        before_verb = join(self.adverb[0], "non" if self.negative else "")
        pronoun = self.pronoun[0]
        if self.tense in _PERIPHRASES:
            auxiliary, tense, link = _PERIPHRASES[self.tense]
            infinitive = self.verb.galician
            main = attach_pronoun(infinitive, pronoun) if pronoun else infinitive
            return before_verb, join(conjugate(auxiliary, tense, self.subject.form), link, main)
        copula_past = self.tense == "past" and self.verb.english == "be"
        finite = conjugate(self.verb.galician, "imperfect" if copula_past else self.tense, self.subject.form)
        if not pronoun:
            return before_verb, finite
        if before_verb or subordinate:
            return join(before_verb, pronoun), finite
        return "", attach_pronoun(finite, pronoun)

    def english(self, *, question: bool = False) -> str:
        """The English words; a question has its operator before the subject."""
        operator, rest = self._english_operator()
        adverb = self.adverb[1]
        if question:
            core = [operator, self.subject.english, adverb, rest]
        elif self.negative:
            denied = "cannot" if operator == "can" else f"{operator} not"
            core = [self.subject.english, denied, adverb, rest]
        elif operator in ("do", "does", "did"):
            core = [self.subject.english, adverb, self._plain_english(operator, rest)]
        else:
            core = [self.subject.english, operator, adverb, rest]
        words = [*core, self.pronoun[1], *(english for _, english in self.complements)]
        return join(*([self.time[1], *words] if self.time_first else [*words, self.time[1]]))

    def _english_operator(self) -> Pair:
        """The auxiliary that questions and negation need, and the rest of the verb."""
        base = self.verb.english
        if self.tense == "progressive":
            return self._be("present"), inflect_english(base, "progressive")
        if self.tense == "near":
            return self._be("present"), f"going to {base}"
        if self.tense in ("future", "can"):
            return {"future": "will", "can": "can"}[self.tense], base
        if base == "be" and self.tense not in _ENGLISH_MODALS:
            return self._be(self.tense), ""
        if self.tense in _ENGLISH_MODALS:
            modal, link = _ENGLISH_MODALS[self.tense]
            base = f"{modal} {link} {base}"
        third_singular = self.subject.form == 2
        return "did" if self.tense == "past" else "does" if third_singular else "do", base

    def _plain_english(self, operator: str, rest: str) -> str:
        """A finite verb in place of do-support: does go → goes."""
        if operator == "do":
            return rest
        return inflect_english(rest, "past" if operator == "did" else "third_person", self.verb.english_past)

    def _be(self, tense: str) -> str:
        if tense == "past":
            return "was" if self.subject.form in (0, 2) else "were"
        return {0: "am", 2: "is"}.get(self.subject.form, "are")


def finish(galician: str, english: str, mark: str = ".") -> Pair:
    """Both sides as a sentence: a capital at the start, the mark at the end."""
    return galician[0].upper() + galician[1:] + mark, english[0].upper() + english[1:] + mark
