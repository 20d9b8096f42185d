import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from sacremoses import MosesDetokenizer, MosesTokenizer

from qknorm.scoring import detokenize, treebank_detokenize, unescape_entities

ESCAPES = [("&", "&amp;"), ("'", "&apos;"), ('"', "&quot;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;")]
ESCAPES += [("[", "&#91;"), ("]", "&#93;")]


def escape(text: str) -> str:
    for plain, escaped in ESCAPES:
        text = text.replace(plain, escaped)
    return text


@given(st.text(alphabet="ab &;'\"<>|[]#aposqutlg1249"))
def test_unescaping_undoes_escaping(text: str) -> None:
    assert unescape_entities(escape(text)) == text
    assert unescape_entities(unescape_entities(escape(escape(text)))) == text


@given(st.lists(st.sampled_from([*(e for _, e in ESCAPES), "&bar;", "&bra;", "&ket;", "amp;", "quot;", "&", "x", " "])))
def test_unescaping_is_that_of_moses(pieces: list[str]) -> None:
    line = "".join(pieces)
    assert unescape_entities(line) == MosesDetokenizer().unescape_xml(line)


def test_an_escaped_entity_is_unescaped_once() -> None:
    assert unescape_entities("&amp;quot; &amp;amp;") == "&quot; &amp;"
    assert unescape_entities("&nbsp; &amp &APOS;") == "&nbsp; &amp &APOS;"


@pytest.mark.parametrize(
    ("lang", "tokens", "text"),
    [
        ("en", "I &apos;m at the organization &apos;s office .", "I'm at the organization's office."),
        ("en", "He said : &quot; No , thanks ! &quot;", 'He said: "No, thanks!"'),
        ("en", "a well @-@ known ( and old ) trick", "a well-known (and old) trick"),
        ("en", "$ 5 &amp; more", "$5 & more"),
        ("eng_Latn", "it &apos;s", "it's"),
        ("fr", "l&apos; homme , oui ?", "l'homme, oui ?"),
        ("gl", "¿ Que é isto ?", "¿Que é isto?"),
        ("", "a , b .", "a, b."),
        ("zh", "你好 世界 。", "你好世界。"),
        ("en", "", ""),
        ("en", "  two   spaces  ", "two spaces"),
    ],
)
def test_moses_detokenisation(lang: str, tokens: str, text: str) -> None:
    assert detokenize([tokens], lang) == [text]


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ("Bylo tam 25 lidí v roce 2010 .", "Bylo tam 25 lidí v roce 2010."),
        ("cena je 3 , 5 koruny", "cena je 3,5 koruny"),
        ("od 1 , 2 , 3", "od 1,2,3"),
        ("je' - li to e' - mail .", "je'-li to e'-mail."),
        ("", ""),
    ],
)
def test_czech_numbers_and_dashes(tokens: str, text: str) -> None:
    assert detokenize([tokens], "cs") == [text]


@pytest.mark.parametrize("text", ["Hello, world!", "It's 3.5% (or so).", 'He said: "Yes." & left.', "A [b] | c"])
def test_moses_tokens_go_back_to_the_text(text: str) -> None:
    assert detokenize([MosesTokenizer("en").tokenize(text, return_str=True)], "en") == [text]


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ("hello , i ca n't feel my feet ! Help ! !", "hello, i can't feel my feet! Help!!"),
        ("He 's here , I 'm not , they 'll go .", "He's here, I'm not, they'll go."),
        ("`` Good muffins , '' he said .", '"Good muffins," he said.'),
        ("They cost $ 3.88 ( or 5 % more ) .", "They cost $3.88 (or 5% more)."),
        ("the dogs ' bowl ; mine : yours", "the dogs' bowl; mine: yours"),
        ("I can not ; gim me what 's gon na be", "I cannot; gimme what's gonna be"),
        ("so 't is", "so 'tis"),
        ("wait ... what -- no ?", "wait...what--no?"),
        ("a . b .", "a . b."),
        ("( end . )", "(end.)"),
        ("would n't 've", "wouldn't've"),
        ("I scan nothing", "I scan nothing"),
        ("it &apos;s", "it &apos;s"),
        ("", ""),
    ],
)
def test_treebank_detokenisation(tokens: str, text: str) -> None:
    assert treebank_detokenize([tokens]) == [text]


TOKEN = st.sampled_from(["a", "3", ".", ",", "'", "'s", "n't", '"', "(", ")", "?", "...", "--", "$", "%", "-", "li"])


@given(st.lists(TOKEN | st.text(min_size=1, max_size=4)))
def test_detokenising_only_moves_blanks(tokens: list[str]) -> None:
    line = " ".join(tokens)
    letters = "".join(line.split())
    assume(not any(rewritten in letters for rewritten in ("&", "@-@", "``", "''", "\u2063")))
    assert "".join(treebank_detokenize([line])[0].split()) == letters
    for lang in ("en", "cs", "fr"):
        assert "".join(detokenize([line], lang)[0].split()) == letters
