"""Word forms for the demo corpus: Galician in the norm of the Real Academia Galega, and British English.

Pure functions from strings to strings. A verb form is asked for by its person, 0 to 5: eu, ti, el, nós, vós, eles.
"""

import re
from functools import cache

_REGULAR_ENDINGS = {
    ("ar", "present"): "o as a amos ades an",
    ("er", "present"): "o es e emos edes en",
    ("ir", "present"): "o es e imos ides en",
    ("ar", "past"): "ei aches ou amos astes aron",
    ("er", "past"): "ín iches eu emos estes eron",
    ("ir", "past"): "ín iches iu imos istes iron",
}
_FUTURE_ENDINGS = "ei ás á emos edes án"
_FUTURE_STEMS = {"facer": "far", "dicir": "dir"}

_IRREGULAR_FORMS = {
    ("ser", "present"): "son es é somos sodes son",
    ("ser", "imperfect"): "era eras era eramos erades eran",
    ("estar", "present"): "estou estás está estamos estades están",
    ("estar", "imperfect"): "estaba estabas estaba estabamos estabades estaban",
    ("estar", "past"): "estiven estiveches estivo estivemos estivestes estiveron",
    ("ter", "present"): "teño tes ten temos tedes teñen",
    ("ter", "past"): "tiven tiveches tivo tivemos tivestes tiveron",
    ("facer", "present"): "fago fas fai facemos facedes fan",
    ("facer", "past"): "fixen fixeches fixo fixemos fixestes fixeron",
    ("ver", "present"): "vexo ves ve vemos vedes ven",
    ("ver", "past"): "vin viches viu vimos vistes viron",
    ("ler", "present"): "leo les le lemos ledes len",
    ("ler", "past"): "lin liches leu lemos lestes leron",
    ("ir", "present"): "vou vas vai imos ides van",
    ("ir", "past"): "fun fuches foi fomos fostes foron",
    ("traer", "present"): "traio traes trae traemos traedes traen",
    ("traer", "past"): "trouxen trouxeches trouxo trouxemos trouxestes trouxeron",
    ("saber", "present"): "sei sabes sabe sabemos sabedes saben",
    ("dicir", "present"): "digo dis di dicimos dicides din",
    ("crer", "present"): "creo cres cre cremos credes cren",
    ("querer", "past"): "quixen quixeches quixo quixemos quixestes quixeron",
    ("durmir", "present"): "durmo dormes dorme durmimos durmides dormen",
    ("doer", "present"): "doio does doe doemos doedes doen",
}

_CONTRACTED_ARTICLES = {
    "a": {"o": "ao", "a": "á", "os": "aos", "as": "ás"},
    "de": {"o": "do", "a": "da", "os": "dos", "as": "das"},
    "en": {"o": "no", "a": "na", "os": "nos", "as": "nas"},
    "con": {"o": "co", "a": "coa", "os": "cos", "as": "coas"},
    "por": {"o": "polo", "a": "pola", "os": "polos", "as": "polas"},
    "ca": {"o": "có", "a": "cá", "os": "cós", "as": "cás"},
}
_ELIDED_PREPOSITIONS = {"de": "d", "en": "n", "con": "c"}
_UN_FORMS = ("un", "unha", "uns", "unhas")
_ELIDING_WORDS = {
    "con": _UN_FORMS,
    "de": (
        *_UN_FORMS,
        *("este", "esta", "estes", "estas", "ese", "esa", "eses", "esas", "el", "ela", "eles", "elas"),
        *("algún", "algunha", "algúns", "algunhas", "outro", "outra", "outros", "outras"),
    ),
}
_ELIDING_WORDS["en"] = _ELIDING_WORDS["de"]

_ACUTE = dict(zip("aeiou", "áéíóú", strict=True))
_PLAIN = str.maketrans("áéíóú", "aeiou")

_UNITS_GL = (
    "cero un dous tres catro cinco seis sete oito nove dez "
    "once doce trece catorce quince dezaseis dezasete dezaoito dezanove"
)
_TENS_GL = {20: "vinte", 30: "trinta", 40: "corenta", 50: "cincuenta"}
_UNITS_EN = (
    "zero one two three four five six seven eight nine ten "
    "eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
)
_TENS_EN = {20: "twenty", 30: "thirty", 40: "forty", 50: "fifty"}


@cache
def pluralize_galician(word: str) -> str:
    """The plural of a Galician noun or adjective: cans, luces, animais, fáciles."""
    if word.endswith("z"):
        return word[:-1] + "ces"
    if word.endswith(("és", "ús")):
        return word[:-2] + word[-2].translate(_PLAIN) + "ses"
    if word.endswith(("r", "s")):
        return word + "es"
    if word.endswith("l"):
        stressed_before_last = any(letter in "áéíóú" for letter in word)
        one_syllable = len(re.findall("[aeiou]", word)) == 1
        return word + "es" if stressed_before_last or one_syllable else word[:-1] + "is"
    return word + "s"


def feminize(adjective: str) -> str:
    """The feminine singular of a Galician adjective: pequena, francesa, alemá, española, feliz."""
    if adjective.endswith("o"):
        return adjective[:-1] + "a"
    if adjective.endswith("és"):
        return adjective[:-2] + "esa"
    if adjective.endswith("án"):
        return adjective[:-1]
    return adjective + "a" if adjective == "español" else adjective


@cache
def conjugate(infinitive: str, tense: str, person: int) -> str:
    """The form of a Galician verb in the tense present, past (preterite), future or imperfect (ser and estar only)."""
    if tense == "future":
        return _FUTURE_STEMS.get(infinitive, infinitive) + _FUTURE_ENDINGS.split()[person]
    irregular = _IRREGULAR_FORMS.get((infinitive, tense))
    if irregular:
        return irregular.split()[person]
    ending = _REGULAR_ENDINGS[infinitive[-2:], tense].split()[person]
    return _spell_stem(infinitive, ending) + ending


def _spell_stem(infinitive: str, ending: str) -> str:
    """The stem, respelt where the ending would change its sound: busc-ei → busqu-ei, coñec-o → coñez-o."""
    stem, conjugation = infinitive[:-2], infinitive[-2:]
    if conjugation == "ar" and ending[0] == "e":
        for written, respelt in (("c", "qu"), ("g", "gu"), ("z", "c")):
            if stem.endswith(written):
                return stem[:-1] + respelt
    if conjugation != "ar" and ending[0] == "o" and stem.endswith("c"):
        return stem[:-1] + "z"
    return stem


def tenses_coincide(infinitive: str, person: int) -> bool:
    """Whether present and past look the same, as in cantamos: then only a time can tell them apart."""
    return conjugate(infinitive, "present", person) == conjugate(infinitive, "past", person)


@cache
def attach_pronoun(verb: str, pronoun: str) -> str:
    """A verb form with its enclitic pronoun, stress kept and written by rule: véxoo, comprouno, mercalo, lavámonos."""
    vowels = _find_syllable_vowels(verb)
    stressed = _find_stress(verb, vowels)
    if pronoun in ("o", "a", "os", "as"):
        if verb[-1] in "rs":
            verb, pronoun = verb[:-1], "l" + pronoun
        elif re.search("[aeiou][iu]$", verb):
            pronoun = "n" + pronoun
    elif pronoun == "nos" and verb.endswith("mos"):
        verb = verb[:-1]
    letters = list(verb.translate(_PLAIN))
    syllables_after_stress = len(vowels) - stressed
    if syllables_after_stress >= 2:
        letters[vowels[stressed]] = _ACUTE[letters[vowels[stressed]]]
    return "".join(letters) + pronoun


def _find_syllable_vowels(word: str) -> list[int]:
    """Where the main vowel of each syllable stands; the u of que and gue is silent, ei and ou are one syllable."""
    silent = re.sub("(?<=[qg])u(?=[eiéí])", "w", word)
    return [match.start() for match in re.finditer("[aeiouáéíóú][iu]?", silent)]


def _find_stress(word: str, vowels: list[int]) -> int:
    """The index of the stressed syllable, from the written accent or from the ending."""
    for index, position in enumerate(vowels):
        if word[position] in "áéíóú":
            return index
    stressed_last = re.search("[^aeiouns]$|[aeiou][iu]$", word)
    return len(vowels) - 1 if stressed_last else max(len(vowels) - 2, 0)


def contract(preposition: str, phrase: str) -> str:
    """A Galician preposition before a phrase, contracted as the norm requires: do neno, nunha casa, con este."""
    first, _, rest = phrase.partition(" ")
    known_as = first.lower() if first == "A" else first  # the article of A Coruña contracts like any other
    head = _CONTRACTED_ARTICLES.get(preposition, {}).get(known_as)
    if head is None and first in _ELIDING_WORDS.get(preposition, ()):
        head = _ELIDED_PREPOSITIONS[preposition] + first
    if head is None:
        return f"{preposition} {phrase}"
    return f"{head} {rest}" if rest else head


def contract_last(prepositions: str, phrase: str) -> str:
    """Like contract, for a prepositional group whose last word meets the phrase: debaixo de + a mesa."""
    *before, last = prepositions.split()
    return " ".join([*before, contract(last, phrase)])


def count_in_galician(number: int, feminine: bool) -> str:
    """A number from 1 to 59 in words; un and dous agree with what is counted."""
    if number >= 20:
        tens, unit = number // 10 * 10, number % 10
        return _TENS_GL[tens] + (f" e {count_in_galician(unit, feminine)}" if unit else "")
    if feminine and number in (1, 2):
        return ("unha", "dúas")[number - 1]
    return _UNITS_GL.split()[number]


def count_in_english(number: int) -> str:
    """A number from 1 to 59 in words, hyphenated."""
    if number >= 20:
        tens, unit = number // 10 * 10, number % 10
        return _TENS_EN[tens] + (f"-{count_in_english(unit)}" if unit else "")
    return _UNITS_EN.split()[number]


def pluralize_english(noun: str) -> str:
    """The plural of a regular English noun."""
    if re.search("[^aeiou]y$", noun):
        return noun[:-1] + "ies"
    return noun + ("es" if re.search("(s|x|ch|sh)$", noun) else "s")


def add_indefinite(phrase: str) -> str:
    """The phrase after a or an, by the sound of its first word."""
    vowel_sound = phrase[0].lower() in "aeiou" and not phrase.startswith("uni")
    return f"{'an' if vowel_sound else 'a'} {phrase}"


def possessive(owner: str, plural: bool) -> str:
    """The English genitive: the boy's, the princess's, the boys', the women's."""
    return owner + ("'" if plural and owner.endswith("s") else "'s")


def inflect_english(verb: str, form: str, past: str = "") -> str:
    """The third_person, past or progressive form of an English verb; the first word bears the ending: looks for."""
    head, _, particle = verb.partition(" ")
    if form == "past" and past:
        inflected = past
    elif form == "third_person":
        inflected = {"have": "has", "go": "goes"}.get(head) or pluralize_english(head)
    else:
        ending = "ed" if form == "past" else "ing"
        inflected = _join_english_ending(head, ending)
    return f"{inflected} {particle}" if particle else inflected


def _join_english_ending(verb: str, ending: str) -> str:
    if verb.endswith("e") and not verb.endswith("ee"):
        return verb[:-1] + ending
    if ending == "ed" and re.search("[^aeiou]y$", verb):
        return verb[:-1] + "ied"
    doubled = re.fullmatch("[^aeiou]*[aeiou][bdgmnprt]|forget|travel", verb)
    return verb + (verb[-1] if doubled else "") + ending
