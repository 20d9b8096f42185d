"""Questions with a question word, and sentences of two clauses, for the demo corpus."""

from dataclasses import replace

from qknorm.text.demo import lexicon
from qknorm.text.demo.choices import Chooser, is_ambiguous
from qknorm.text.demo.lexicon import Verb
from qknorm.text.demo.phrases import (
    BEING,
    BEING_NOW,
    QUEN,
    Clause,
    Pair,
    Phrase,
    finish,
    join,
    noun_phrase,
    place_at,
)
from qknorm.text.demo.sentences import (
    COMPANY_VERBS,
    draw_action,
    draw_activity,
    draw_condition,
    draw_description,
    draw_pronoun_object,
)

_COSTING = Verb("custar", "cost", "cost")
_WEATHER_VERBS = (Verb("chover", "rain"), Verb("nevar", "snow"))
_IT = Phrase("", "it")
_WHERE, _WHEN, _WHY = ("onde", "where"), ("cando", "when"), ("por que", "why")


def _ask(question_word: Pair, clause: Clause, ending: str = "") -> Pair:
    galician = clause.galician(inverted=True, subordinate=True)
    english = join(question_word[1], clause.english(question=True), ending)
    return finish(f"{question_word[0]} {galician}", english, "?")


def _draw_unambiguous(chooser: Chooser, subject: Phrase, verb: Verb) -> Clause:
    """A clause without a time, in a tense that its verb form tells."""
    clause = Clause(subject, verb, chooser.tense(verb))
    return replace(clause, tense="present") if is_ambiguous(clause) else clause


def ask_what(chooser: Chooser) -> Pair:
    """Que le a nena?"""
    verb = chooser.pick((*lexicon.TRANSITIVE_VERBS, lexicon.WANTING))
    return _ask(("que", "what"), _draw_unambiguous(chooser, chooser.other(), verb))


def ask_circumstance(chooser: Chooser) -> Pair:
    """Onde vive o mestre? Por que chora o neno? Por que te chamou Ana?"""
    if chooser.chance(0.15):
        return _ask(_WHY, draw_pronoun_object(chooser, chooser.third_person()))
    if chooser.chance(0.2):
        return _ask(_WHERE, Clause(chooser.definite(("person", "animal", "thing")), BEING_NOW))
    if chooser.chance(0.2):
        verb, word = chooser.pick(lexicon.ARRIVALS), _WHEN
        return _ask(word, Clause(chooser.definite(("transport",)), verb, chooser.pick(("present", "past", "future"))))
    if chooser.chance(0.15):
        return _ask(_WHERE, Clause(chooser.other(), lexicon.LIVING))
    verb = chooser.pick(lexicon.INTRANSITIVE_VERBS)
    if verb.galician in COMPANY_VERBS and chooser.chance(0.4):
        return _ask(("con quen", "who"), _draw_unambiguous(chooser, chooser.third_person(), verb), "with")
    return _ask(chooser.pick((_WHERE, _WHY, _WHY)), _draw_unambiguous(chooser, chooser.other(), verb))


def ask_who(chooser: Chooser) -> Pair:
    """Quen comeu a mazá? Quen o viu?"""
    draw_clause = chooser.pick((draw_action, draw_action, draw_activity, draw_pronoun_object))
    clause = draw_clause(chooser, QUEN)
    return finish(clause.galician(subordinate=True), clause.english(), "?")


def ask_about_thing(chooser: Chooser) -> Pair:
    """Canto custan os zapatos? De quen é este libro? De que cor é o teu coche?"""
    draw = chooser.pick(range(4))
    if draw == 0:
        return _ask(("canto", "how much"), Clause(chooser.definite(("clothes", "text", "food", "vehicle")), _COSTING))
    if draw == 1:
        return _ask(("de que cor", "what colour"), Clause(chooser.definite(("clothes", "vehicle"), 0), BEING))
    if draw == 2:
        who = chooser.name() if chooser.chance(0.5) else chooser.definite(lexicon.ANYONE, 0)
        return _ask(("cantos anos", "how old"), Clause(who, Verb("ter", "be")))
    noun, plural = chooser.noun(("text", "thing", "clothes", "vehicle", "animal")), chooser.chance(0.4)
    this = chooser.pick(("this", "that"))
    owned = noun_phrase(noun, this, plural=plural)
    demonstrative, thing = owned.english.split(maxsplit=1)
    english = f"whose {thing} {'are' if plural else 'is'} {demonstrative}"
    return finish(f"de quen {'son' if plural else 'é'} {owned.galician}", english, "?")


def ask_how_many(chooser: Chooser) -> Pair:
    """Cantas mazás mercou Ana?"""
    verb = chooser.pick((lexicon.HAVING, *lexicon.TRANSITIVE_VERBS))
    countable = [kind for kind in verb.objects if kind not in lexicon.MASS_KINDS]
    if not countable:
        return ask_how_many(chooser)
    counted = noun_phrase(chooser.noun(countable), "", plural=True)
    how_many = "cantas" if counted.feminine else "cantos"
    question = (f"{how_many} {counted.galician}", f"how many {counted.english}")
    return _ask(question, _draw_unambiguous(chooser, chooser.other(), verb))


def give_reason(chooser: Chooser) -> Pair:
    """O neno non come porque está canso."""
    subject = chooser.person()
    draw_main = chooser.pick((draw_action, draw_activity))
    main = chooser.settle(replace(draw_main(chooser, subject), tense="present"), extras=0.5)
    reason = draw_condition(chooser, subject.refer_back())
    return finish(f"{main.galician()} porque {reason.galician()}", f"{main.english()} because {reason.english()}")


def contrast(chooser: Chooser) -> Pair:
    """O neno le o libro, pero a nena xoga no parque."""
    first, second = chooser.third_person(), chooser.third_person()
    tense = chooser.pick(("present", "present", "past", "future"))
    left = draw_action(chooser, first)
    tense = "present" if left.verb.tenses == "present" else tense
    left = replace(left, tense=tense)
    right = replace(draw_activity(chooser, second), tense=tense)
    if tense == "present" and chooser.chance(0.4):
        right = draw_condition(chooser, second)
    joiners = ((", pero", ", but"), (" e", " and"), (" mentres", " while"))
    galician, english = chooser.pick(joiners[:2] if tense == "future" else joiners)
    return finish(f"{left.galician()}{galician} {right.galician()}", f"{left.english()}{english} {right.english()}")


def report(chooser: Chooser) -> Pair:
    """A nai di que o neno está canso; Sei que Ana te busca."""
    verb = chooser.pick(lexicon.SAYING_VERBS)
    inner_subject = chooser.third_person()
    draw_inner = chooser.pick((draw_action, draw_activity, draw_condition, draw_pronoun_object))
    outer, inner = Clause(chooser.person(), verb), draw_inner(chooser, inner_subject)
    return finish(
        f"{outer.galician()} que {inner.galician(subordinate=True)}", f"{outer.english()} that {inner.english()}"
    )


def _describe_as_of(relative: Clause, description: Clause) -> Clause:
    """The description, in the past only if what it is told by is past too."""
    return description if relative.tense == "past" else replace(description, tense="present")


def relate_subject(chooser: Chooser) -> Pair:
    """O neno que vive en Lugo ten un can."""
    head = noun_phrase(
        chooser.pick(lexicon.PEOPLE), chooser.pick(("the", "the", "this", "that")), plural=chooser.chance(0.4)
    )
    relative = draw_activity(chooser, replace(head, galician="que", english="who"))
    subject = replace(
        head,
        galician=f"{head.galician} {relative.galician()}",
        english=f"{head.english} {relative.english()}",
    )
    if chooser.chance(0.5):
        main = draw_action(chooser, subject)
    else:
        main = _describe_as_of(relative, draw_description(chooser, subject, "person"))
    return finish(main.galician(), main.english())


def relate_object(chooser: Chooser) -> Pair:
    """O libro que mercou a nena é caro."""
    verb = chooser.pick(lexicon.TRANSITIVE_VERBS)
    noun = chooser.noun(verb.objects)
    plural = noun.kind not in lexicon.MASS_KINDS and chooser.chance(0.4)
    head = noun_phrase(noun, plural=plural)
    relative = _draw_unambiguous(chooser, chooser.person(), verb)
    subject = replace(
        head,
        galician=f"{head.galician} que {relative.galician(inverted=True, subordinate=True)}",
        english=f"{head.english} that {relative.english()}",
    )
    main = _describe_as_of(relative, draw_description(chooser, subject, noun.kind))
    return finish(main.galician(), main.english())


def say_weather(chooser: Chooser) -> Pair:
    """Cando chove, os nenos xogan na casa; Onte choveu."""
    verb = chooser.pick(_WEATHER_VERBS)
    if chooser.chance(0.3):
        tense = chooser.pick(("present", "past", "future", "progressive", "near"))
        place = chooser.city("en", "in") if chooser.chance(0.5) else place_at(chooser.pick(lexicon.OUTDOORS))
        weather = chooser.settle(Clause(_IT, verb, tense, (place,)))
        return finish(weather.galician(), weather.english())
    condition = Clause(_IT, verb)
    galician, english = chooser.pick((("cando", "when"), ("se", "if")))
    then = replace(draw_activity(chooser, chooser.person()), tense="present", negative=chooser.chance(0.3))
    return finish(
        f"{galician} {condition.galician()}, {then.galician()}", f"{english} {condition.english()}, {then.english()}"
    )
