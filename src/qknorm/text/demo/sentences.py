"""The kinds of sentence in the demo corpus: each function draws one meaning and gives it in Galician and English."""

from dataclasses import replace

from qknorm.text.demo import lexicon
from qknorm.text.demo.choices import STILL, Chooser, is_ambiguous
from qknorm.text.demo.grammar import attach_pronoun, conjugate, contract, inflect_english, possessive
from qknorm.text.demo.lexicon import Noun, Verb
from qknorm.text.demo.phrases import (
    BEING,
    BEING_NOW,
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
    finish,
    govern,
    join,
    noun_phrase,
    place_at,
)

_ACCUSATIVES = ("me", "te", "o", "nos", "vos", "os")
_DATIVES = ("me", "che", "lle", "nos", "vos", "lles")
_REFLEXIVES = ("me", "te", "se", "nos", "vos", "se")
_ENGLISH_OBJECTS = {0: "me", 1: "you", 3: "us", 4: "you", 5: "them"}
_DESCRIBED_KINDS = (
    "person person animal text thing container tableware clothes vehicle openable "
    "building transport dish drink food place"
)
_HURTING = Verb("doer", "hurt", "hurt")
COMPANY_VERBS = ("xogar", "bailar", "traballar", "falar", "estudar", "viaxar")
_LIKING = Verb("gustar", "like")
_SKILLS = (
    (Verb("falar", "speak", "spoke"), lexicon.LANGUAGES),
    (Verb("aprender", "learn"), lexicon.LANGUAGES),
    (Verb("xogar", "play"), lexicon.GAMES),
    (Verb("tocar", "play"), lexicon.INSTRUMENTS),
)


def state(clause: Clause) -> Pair:
    """The clause as a statement."""
    return finish(clause.galician(), clause.english())


def state_or_ask(chooser: Chooser, clause: Clause) -> Pair:
    """A statement, or now and then a yes/no question; a bare verb goes before its subject when it asks."""
    if clause.subject.person != 1 and chooser.chance(0.2):
        inverted = not clause.complements and not clause.pronoun[0]
        return finish(clause.galician(inverted=inverted), clause.english(question=True), "?")
    return state(chooser.settle(clause))


def both_texts(phrase: Phrase) -> Pair:
    """The phrase in Galician and in English."""
    return phrase.galician, phrase.english


# Clauses that several kinds of sentence share


def draw_action(chooser: Chooser, subject: Phrase) -> Clause:
    """Something done to something or someone."""
    verb = chooser.pick((*lexicon.TRANSITIVE_VERBS, *lexicon.PERSON_VERBS, lexicon.HAVING, lexicon.WANTING))
    complements = [both_texts(chooser.object_phrase(verb))]
    if verb.tenses == "all" and chooser.chance(0.3):
        complements.append(chooser.place())
    return Clause(subject, verb, chooser.tense(verb), tuple(complements))


def draw_activity(chooser: Chooser, subject: Phrase) -> Clause:
    """Something done, perhaps somewhere or somehow."""
    verb = chooser.pick((*lexicon.INTRANSITIVE_VERBS, lexicon.LIVING))
    if verb is lexicon.LIVING:
        return Clause(subject, verb, chooser.tense(verb), (chooser.place(),))
    complements = []
    if verb.galician == "viaxar":
        complements.append(chooser.city("a", "to"))
    elif verb.galician == "falar" and chooser.chance(0.4):
        complements.append(govern("de", "about", chooser.describe(chooser.noun(("animal", "text")), ("the", "a"), 0.3)))
    elif verb.galician in ("camiñar", "correr") and chooser.chance(0.4):
        complements.append(govern("por", "through", noun_phrase(chooser.pick(lexicon.PATHS))))
    elif chooser.chance(0.3):
        complements.append(chooser.pick(lexicon.MANNERS))
    if verb.galician in COMPANY_VERBS and chooser.chance(0.3):
        complements.append(draw_company(chooser, subject))
    if verb.galician not in ("viaxar", "nadar", "camiñar", "correr") and chooser.chance(0.4):
        complements.append(chooser.place())
    return Clause(subject, verb, chooser.tense(verb), tuple(complements))


def draw_company(chooser: Chooser, subject: Phrase) -> Pair:
    """With whom something is done; nobody is company for himself."""
    if subject.person == 3 and chooser.chance(0.4):
        return chooser.pick(lexicon.COMPANIONS)
    return govern("con", "with", chooser.describe(chooser.pick(lexicon.PEOPLE), ("the", "a", "my", "your"), 0.2))


def draw_condition(chooser: Chooser, subject: Phrase) -> Clause:
    """How someone is for now: está canso, ten fame."""
    if chooser.chance(0.4):
        galician, english = chooser.pick(lexicon.STATES)
        return Clause(subject, Verb("ter", "be"), complements=((galician, english),))
    fitting = [a for a in lexicon.ADJECTIVES if a.copula == "estar" and "person" in a.kinds]
    adjective = chooser.pick(fitting)
    return Clause(
        subject, BEING_NOW, complements=((adjective.agree(subject.feminine, subject.plural), adjective.english),)
    )


def draw_description(chooser: Chooser, subject: Phrase, kind: str) -> Clause:
    """What something of the kind is like."""
    adjective = chooser.pick(lexicon.ADJECTIVES_BY_KIND[kind])
    copula = BEING if adjective.copula == "ser" else BEING_NOW
    complement = (adjective.agree(subject.feminine, subject.plural), adjective.english)
    tense = chooser.pick(("present", "present", "present", "past"))
    return Clause(subject, copula, tense, (complement,))


def draw_pronoun_object(chooser: Chooser, subject: Phrase) -> Clause:
    """Something done to a pronoun; with verbs for people o is him, with verbs for things it."""
    if chooser.chance(0.6):
        verb = chooser.pick(lexicon.PERSON_VERBS)
        others = [who for who in (EU, TI, NOS, VOS) if who.person != subject.person]
        target = chooser.pick((*others, EL, ELA, ELES, ELAS))
        english = _ENGLISH_OBJECTS.get(target.form) or ("her" if target.feminine else "him")
    else:
        verb = chooser.pick(lexicon.PRONOUN_VERBS)
        target = chooser.pick((EL, ELA, ELES, ELAS))
        english = "them" if target.plural else "it"
    pronoun = _ACCUSATIVES[target.form]
    if target.feminine:
        pronoun = {"o": "a", "os": "as"}[pronoun]
    tense = chooser.tense(verb)
    if tense == "future" and chooser.chance(0.8):
        tense = "near"  # mercarao is right, but vai mercalo is what people say
    if tense == "past" and pronoun == "nos" and subject.form == 2:
        tense = "present"  # convidounos is both convidou + os and convidou + nos
    return Clause(subject, verb, tense, pronoun=(pronoun, english))


# Sentences


def say_action(chooser: Chooser) -> Pair:
    """Os nenos non len o libro vermello."""
    clause = draw_action(chooser, chooser.person())
    if chooser.chance(0.06):
        nothing = ("a ninguén", "anyone") if clause.verb in lexicon.PERSON_VERBS else ("nada", "anything")
        if not is_ambiguous(clause):
            return state(replace(clause, negative=True, complements=(nothing,)))
    return state_or_ask(chooser, clause)


def say_activity(chooser: Chooser) -> Pair:
    """A nena está a durmir no cuarto."""
    return state_or_ask(chooser, draw_activity(chooser, chooser.person()))


def say_description(chooser: Chooser) -> Pair:
    """As casas son pequenas; O neno e a nena están cansos."""
    if chooser.chance(0.3):
        clause = draw_condition(chooser, chooser.person())
    else:
        kind = chooser.pick(_DESCRIBED_KINDS.split())
        clause = draw_description(chooser, chooser.definite((kind,), adjective_chance=0), kind)
    if clause.verb is not BEING and chooser.chance(0.15):
        return state(replace(clause, adverb=STILL))
    if chooser.chance(0.15):
        return finish(clause.galician(), clause.english(question=True), "?")
    return state(replace(clause, negative=chooser.chance(0.25)))


def say_comparison(chooser: Chooser) -> Pair:
    """O can é máis grande có gato."""
    adjective = chooser.pick([adjective for adjective in lexicon.ADJECTIVES if adjective.comparative])
    kind = chooser.pick(adjective.kinds)
    nouns = lexicon.NOUNS_BY_KIND[kind]
    noun = chooser.pick(nouns)
    first = chooser.describe_definite(noun, 0)
    second = chooser.describe_definite(chooser.pick([other for other in nouns if other.english != noun.english]), 0)
    form = adjective.agree(first.feminine, first.plural)
    copula = BEING if adjective.copula == "ser" else BEING_NOW
    than = (contract("ca", second.galician), f"than {second.english}")
    return state(Clause(first, copula, complements=((f"máis {form}", adjective.comparative), than)))


def say_location(chooser: Chooser) -> Pair:
    """O gato está debaixo da mesa."""
    small = chooser.chance(0.6)
    subject = chooser.subject_phrase(("text", "tableware", "animal") if small else ("person",))
    if small and chooser.chance(0.5):
        where = place_at(chooser.pick((*lexicon.SURFACES, *lexicon.INSIDES)))
    elif small:
        where = govern(*chooser.pick(lexicon.RELATIVE_POSITIONS), chooser.definite(("thing", "building"), 0))
    else:
        where = chooser.place()
    clause = Clause(subject, BEING_NOW, chooser.pick(("present", "present", "past")), (where,))
    if chooser.chance(0.15):
        return finish(clause.galician(), clause.english(question=True), "?")
    return state(replace(clause, negative=chooser.chance(0.2)))


def say_existence(chooser: Chooser) -> Pair:
    """Hai dúas mulleres na praza; Non hai leite na cociña."""
    noun = chooser.noun(("person", "animal", "food", "dish", "drink", "thing"))
    where = place_at(chooser.pick(lexicon.PLACES))
    be = "is" if noun.kind in lexicon.MASS_KINDS else "are"
    bare = noun_phrase(noun, "", plural=be == "are")
    if chooser.chance(0.25):
        return finish(join("non hai", bare.galician, where[0]), join(f"there {be} no", bare.english, where[1]))
    if chooser.chance(0.25):
        return finish(join("hai", bare.galician, where[0]), join(f"{be} there any", bare.english, where[1]), "?")
    phrase = chooser.describe(noun, ("a", "number", "many", "some"), 0.3)
    be = "are" if phrase.plural else "is"
    return finish(join("hai", phrase.galician, where[0]), join(f"there {be}", phrase.english, where[1]))


def say_pronoun_object(chooser: Chooser) -> Pair:
    """Véxoo; Non o vexo; Quero mercala."""
    return state_or_ask(chooser, draw_pronoun_object(chooser, chooser.person()))


def say_reflexive(chooser: Chooser) -> Pair:
    """Levántome ás sete."""
    subject, verb = chooser.person(), chooser.pick(lexicon.REFLEXIVE_VERBS)
    clause = Clause(subject, verb, chooser.tense(verb), pronoun=(_REFLEXIVES[subject.form], ""))
    if clause.tense == "present" and chooser.chance(0.6):
        return state(replace(clause, time=chooser.hour()))
    return state_or_ask(chooser, clause)


def say_gift(chooser: Chooser) -> Pair:
    """A nai mándalle unha carta ao fillo."""
    verb = chooser.pick(lexicon.GIVING_VERBS)
    receiver = chooser.name() if chooser.chance(0.3) else chooser.definite(lexicon.ANYONE, 0.1)
    complements = (both_texts(chooser.object_phrase(verb)), govern("a", "to", receiver))
    clause = Clause(chooser.person(), verb, chooser.tense(verb), complements, (_DATIVES[receiver.form], ""))
    return state_or_ask(chooser, clause)


def _draw_liked(chooser: Chooser) -> Phrase:
    """What is liked in general takes the article in Galician and none in English: o café, coffee."""
    draw = chooser.pick(range(10))
    if draw < 3:
        verb = chooser.pick([v for v in lexicon.INTRANSITIVE_VERBS if v.galician != "chorar"])
        return Phrase(verb.galician, inflect_english(verb.english, "progressive"))
    if draw < 7:
        noun = chooser.noun(("dish", "drink", "food", "animal", "text"))
        plural = noun.kind not in lexicon.MASS_KINDS
        return replace(noun_phrase(noun, plural=plural), english=noun_phrase(noun, "", plural=plural).english)
    return chooser.describe(chooser.noun(("clothes", "vehicle", "text")), ("my", "your", "this", "that"), 0.2)


def say_liking(chooser: Chooser) -> Pair:
    """Gústame o café; Aos nenos non lles gustan as patacas."""
    third = chooser.chance(0.5)
    who = chooser.third_person() if third else chooser.pick((EU, TI, NOS, VOS))
    liked, dative = _draw_liked(chooser), _DATIVES[who.form]
    finite = conjugate("gustar", "present", 5 if liked.plural else 2)
    topic = contract("a", who.galician) if third else ""
    negative, asking = chooser.chance(0.25), who.person != 1 and chooser.chance(0.25)
    verb = join("non", dative, finite) if negative and not asking else attach_pronoun(finite, dative)
    clause = Clause(who, _LIKING, complements=(both_texts(liked),), negative=negative and not asking)
    return finish(join(topic, verb, liked.galician), clause.english(question=asking), "?" if asking else ".")


def say_pain(chooser: Chooser) -> Pair:
    """Dóeme a cabeza; A Ana dóenlle os pés."""
    part = chooser.pick(lexicon.BODY_PARTS)
    body = noun_phrase(part, plural=part.kind == "many")
    who = chooser.pick((EU, TI, chooser.name(), noun_phrase(chooser.pick(lexicon.PEOPLE))))
    owner = {0: "my", 1: "your"}.get(who.form) or possessive(who.english, plural=False)
    topic = contract("a", who.galician) if who.galician else ""
    finite, dative = conjugate("doer", "present", body.form), _DATIVES[who.form]
    negative = chooser.chance(0.25)
    verb = join("non", dative, finite) if negative else attach_pronoun(finite, dative)
    english_body = replace(body, english=body.english.replace("the", owner, 1))
    return finish(join(topic, verb, body.galician), Clause(english_body, _HURTING, negative=negative).english())


def say_identity(chooser: Chooser) -> Pair:
    """O meu pai é médico; Ana é de Vigo; Uxía ten dez anos."""
    draw = chooser.pick(range(3))
    subject = chooser.pick((EU, TI, EL, ELA, chooser.name(), chooser.definite(lexicon.ANYONE, 0)))
    if draw == 0:
        return state(Clause(subject, BEING, complements=(chooser.city("de", "from"),), negative=chooser.chance(0.2)))
    if draw == 1:
        age = noun_phrase(Noun("ano", False, "year", "years", "time"), str(chooser.number()), plural=True)
        return state(Clause(subject, Verb("ter", "be"), complements=((age.galician, f"{age.english} old"),)))
    noun = chooser.pick([noun for noun in lexicon.PROFESSIONS if noun.feminine == subject.feminine])
    bare, indefinite = noun_phrase(noun, "", plural=subject.plural), noun_phrase(noun, "a")
    job = (bare.galician, bare.english if subject.plural else indefinite.english)
    return state(Clause(subject, BEING, complements=(job,), negative=chooser.chance(0.2)))


def say_journey(chooser: Chooser) -> Pair:
    """Ana foi á Coruña en tren."""
    goal = [govern("a", "to", noun_phrase(chooser.pick(lexicon.PLACES).noun))]
    if chooser.chance(0.5):
        goal = [chooser.city("a", "to"), chooser.pick(lexicon.MEANS)]
    tense = chooser.pick(("present", "past", "past", "future", "can", "want", "must"))
    return state_or_ask(chooser, Clause(chooser.person(), lexicon.GOING, tense, tuple(goal)))


def say_arrival(chooser: Chooser) -> Pair:
    """O tren chega ás oito."""
    verb, subject = chooser.pick(lexicon.ARRIVALS), chooser.subject_phrase(("transport", "transport", "person"))
    clause = Clause(subject, verb, chooser.pick(("present", "past", "future")))
    if clause.tense == "present" or chooser.chance(0.3):
        return state(replace(clause, time=chooser.hour(), negative=chooser.chance(0.2)))
    return state_or_ask(chooser, clause)


def say_skill(chooser: Chooser) -> Pair:
    """Sabela sabe tocar o piano."""
    verb, things = chooser.pick(_SKILLS)
    tense = "know how" if verb.english in ("play", "speak") and chooser.chance(0.3) else chooser.tense(verb)
    return state_or_ask(chooser, Clause(chooser.person(), verb, tense, (chooser.pick(things),)))


def say_command(chooser: Chooser) -> Pair:
    """Abre a porta, por favor."""
    verb = chooser.pick([v for v in lexicon.TRANSITIVE_VERBS if v.tenses == "all" and v.galician != "roubar"])
    what = chooser.describe(chooser.noun(verb.objects), ("the", "the", "this", "that", "my", "our"), 0.3)
    order = verb.galician[:-1] + "de" if chooser.chance(0.4) else conjugate(verb.galician, "present", 2)
    return finish(f"{order} {what.galician}, por favor", f"{verb.english} {what.english}, please")
