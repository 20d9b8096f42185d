"""Word forms worked out by hand, and what holds for every form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qknorm.text.demo import lexicon
from qknorm.text.demo.grammar import (
    add_indefinite,
    attach_pronoun,
    conjugate,
    contract,
    contract_last,
    count_in_english,
    count_in_galician,
    feminize,
    inflect_english,
    pluralize_english,
    pluralize_galician,
    possessive,
    tenses_coincide,
)

VERBS = [verb.galician for verb in (*lexicon.TRANSITIVE_VERBS, *lexicon.PERSON_VERBS, *lexicon.INTRANSITIVE_VERBS)]


@pytest.mark.parametrize(
    ("singular", "plural"),
    [
        *[("can", "cans"), ("casa", "casas"), ("mazá", "mazás"), ("rei", "reis"), ("flor", "flores")],
        *[("rapaz", "rapaces"), ("autobús", "autobuses"), ("francés", "franceses"), ("gris", "grises")],
        *[("xornal", "xornais"), ("hotel", "hoteis"), ("azul", "azuis"), ("fácil", "fáciles"), ("camión", "camións")],
    ],
)
def test_galician_plurals(singular: str, plural: str) -> None:
    assert pluralize_galician(singular) == plural


@pytest.mark.parametrize(
    ("masculine", "feminine"),
    [("pequeno", "pequena"), ("inglés", "inglesa"), ("alemán", "alemá"), ("español", "española"), ("azul", "azul")],
)
def test_galician_feminines(masculine: str, feminine: str) -> None:
    assert feminize(masculine) == feminine


@pytest.mark.parametrize(
    ("infinitive", "tense", "forms"),
    [
        ("mercar", "present", "merco mercas merca mercamos mercades mercan"),
        ("buscar", "past", "busquei buscaches buscou buscamos buscastes buscaron"),
        ("pagar", "past", "paguei pagaches pagou pagamos pagastes pagaron"),
        ("abrazar", "past", "abracei abrazaches abrazou abrazamos abrazastes abrazaron"),
        ("coñecer", "present", "coñezo coñeces coñece coñecemos coñecedes coñecen"),
        ("comer", "past", "comín comiches comeu comemos comestes comeron"),
        ("abrir", "past", "abrín abriches abriu abrimos abristes abriron"),
        ("durmir", "present", "durmo dormes dorme durmimos durmides dormen"),
        ("ler", "future", "lerei lerás lerá leremos leredes lerán"),
        ("ir", "past", "fun fuches foi fomos fostes foron"),
    ],
)
def test_verb_forms(infinitive: str, tense: str, forms: str) -> None:
    assert " ".join(conjugate(infinitive, tense, person) for person in range(6)) == forms


@pytest.mark.parametrize(
    ("verb", "pronoun", "joined"),
    [
        *[("vexo", "o", "véxoo"), ("merca", "as", "mércaas"), ("mercan", "o", "mércano"), ("ven", "a", "vena")],
        *[("mercas", "o", "mércalo"), ("mercamos", "os", "mercámolos"), ("mercar", "a", "mercala")],
        *[("mercou", "o", "mercouno"), ("merquei", "a", "merqueina"), ("comín", "o", "comino"), ("verá", "o", "verao")],
        *[
            ("levantamos", "nos", "levantámonos"),
            ("levantades", "vos", "levantádesvos"),
            ("levanto", "me", "levántome"),
        ],
        *[("mandan", "lles", "mándanlles"), ("mandará", "lle", "mandaralle"), ("mandar", "lle", "mandarlle")],
        *[
            ("gusta", "me", "gústame"),
            ("doen", "che", "dóenche"),
            ("queixa", "se", "quéixase"),
            ("pague", "o", "págueo"),
        ],
    ],
)
def test_enclitic_pronouns(verb: str, pronoun: str, joined: str) -> None:
    assert attach_pronoun(verb, pronoun) == joined


@given(
    st.sampled_from(VERBS),
    st.sampled_from(["present", "past", "future"]),
    st.integers(0, 5),
    st.sampled_from(["me", "te", "o", "a", "os", "as", "nos", "vos", "se", "lle", "lles"]),
)
def test_an_enclitic_form_has_at_most_one_accent_and_keeps_its_letters(
    infinitive: str, tense: str, person: int, pronoun: str
) -> None:
    form = conjugate(infinitive, tense, person)
    joined = attach_pronoun(form, pronoun)
    assert sum(letter in "áéíóú" for letter in joined) <= 1
    assert joined.endswith(pronoun)
    plain = str.maketrans("áéíóú", "aeiou")
    kept = form.translate(plain)
    assert joined.translate(plain).startswith(kept[:-1])
    if kept[-1] not in "rs":
        assert joined.translate(plain).startswith(kept)


@pytest.mark.parametrize(
    ("preposition", "phrase", "contracted"),
    [
        *[
            ("de", "o neno", "do neno"),
            ("en", "a casa", "na casa"),
            ("a", "os pais", "aos pais"),
            ("a", "a nai", "á nai"),
        ],
        *[("por", "o parque", "polo parque"), ("con", "a avoa", "coa avoa"), ("con", "un can", "cun can")],
        *[("en", "unha illa", "nunha illa"), ("de", "esta mesa", "desta mesa"), ("en", "outro país", "noutro país")],
        *[("ca", "as casas", "cás casas"), ("ca", "este gato", "ca este gato"), ("con", "este can", "con este can")],
        *[
            ("en", "A Coruña", "na Coruña"),
            ("a", "Ana", "a Ana"),
            ("de", "oito nenos", "de oito nenos"),
            ("de", "o", "do"),
        ],
    ],
)
def test_contractions(preposition: str, phrase: str, contracted: str) -> None:
    assert contract(preposition, phrase) == contracted


def test_only_the_last_preposition_of_a_group_contracts() -> None:
    assert contract_last("ao lado de", "a ponte") == "ao lado da ponte"


def test_numbers_agree_in_galician_and_take_a_hyphen_in_english() -> None:
    assert [count_in_galician(number, True) for number in (1, 2, 3, 16, 20, 22)] == [
        *("unha", "dúas", "tres", "dezaseis", "vinte", "vinte e dúas")
    ]
    assert count_in_galician(21, False) == "vinte e un" and count_in_galician(32, False) == "trinta e dous"
    assert [count_in_english(number) for number in (2, 12, 30, 45)] == ["two", "twelve", "thirty", "forty-five"]


@given(st.lists(st.integers(1, 59), min_size=2, max_size=2, unique=True), st.booleans())
def test_two_numbers_never_share_their_words(numbers: list[int], feminine: bool) -> None:
    first, second = numbers
    assert count_in_galician(first, feminine) != count_in_galician(second, feminine)
    assert count_in_english(first) != count_in_english(second)


def test_present_and_past_coincide_in_the_first_person_plural_of_regular_verbs_only() -> None:
    assert [person for person in range(6) if tenses_coincide("cantar", person)] == [3]
    assert not any(tenses_coincide(verb, person) for verb in ("ver", "ter", "ir") for person in range(6))


@pytest.mark.parametrize(
    ("verb", "form", "past", "inflected"),
    [
        *[
            ("cry", "third_person", "", "cries"),
            ("play", "third_person", "", "plays"),
            ("have", "third_person", "", "has"),
        ],
        *[("wash", "third_person", "", "washes"), ("look for", "third_person", "", "looks for")],
        *[
            ("run", "progressive", "", "running"),
            ("write", "progressive", "", "writing"),
            ("see", "progressive", "", "seeing"),
        ],
        *[
            ("forget", "progressive", "", "forgetting"),
            ("travel", "past", "", "travelled"),
            ("open", "past", "", "opened"),
        ],
        *[("study", "past", "", "studied"), ("get up", "past", "got", "got up"), ("hug", "past", "", "hugged")],
    ],
)
def test_english_verb_forms(verb: str, form: str, past: str, inflected: str) -> None:
    assert inflect_english(verb, form, past) == inflected


def test_english_nouns() -> None:
    assert [pluralize_english(noun) for noun in ("city", "boy", "box", "church", "dog")] == [
        *("cities", "boys", "boxes", "churches", "dogs")
    ]
    nouns = ("old man", "English boy", "university", "boy")
    assert [add_indefinite(noun) for noun in nouns] == ["an old man", "an English boy", "a university", "a boy"]
    assert possessive("the boys", True) == "the boys'" and possessive("the women", True) == "the women's"
    assert possessive("the princess", False) == "the princess's"
