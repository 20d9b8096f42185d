import builtins
import gzip

import pytest

from qknorm.errors import InputError
from qknorm.text.readers import Pair, read_pairs

polib = pytest.importorskip("polib")
pytest.importorskip("lxml")


def read(path, content, source="gl", target="en"):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(read_pairs([path], source, target))


def tmx(*units, head=""):
    return f"<?xml version='1.0'?>{head}<tmx version='1.4'><header/><body>{''.join(units)}</body></tmx>"


def unit(**texts):
    variants = (f'<tuv xml:lang="{code.replace("_", "-")}"><seg>{text}</seg></tuv>' for code, text in texts.items())
    return f"<tu>{''.join(variants)}</tu>"


def test_tmx_units_with_both_languages_are_read(tmp_path):
    content = tmx(unit(gl="ola", en="hello", fr="salut"), unit(gl="só"), unit(EN_us="no &amp; no", GL_es="non"))
    assert read(tmp_path / "a.tmx", content) == [Pair("ola", "hello"), Pair("non", "no & no")]
    assert read(tmp_path / "a.tmx.gz", gzip.compress(content.encode()))[0] == Pair("ola", "hello")


def test_tmx_codes_match_exactly_before_they_match_by_primary_subtag(tmp_path):
    content = tmx(unit(pt_PT="autocarro", pt_BR="ônibus", en="bus"), unit(pt_PT="comboio", en="train"))
    assert read(tmp_path / "a.tmx", content, "pt-BR", "en") == [Pair("ônibus", "bus"), Pair("comboio", "train")]
    assert read(tmp_path / "a.tmx", content, "pt-BR", "pt-PT") == [Pair("ônibus", "autocarro")]


def test_tmx_markup_codes_are_left_out_and_highlighted_text_kept(tmp_path):
    inner = 'a <bpt i="1">&lt;b&gt;</bpt>bold<ept i="1">&lt;/b&gt;</ept> <hi>and</hi><!-- note --> on'
    assert read(tmp_path / "a.tmx", tmx(unit(gl=inner, en="x"))) == [Pair("a bold and on", "x")]


def test_tmx_with_an_external_dtd_is_read_without_it(tmp_path):
    content = tmx(unit(gl="ola", en="hello"), head='<!DOCTYPE tmx SYSTEM "tmx14.dtd">')
    assert read(tmp_path / "a.tmx", content) == [Pair("ola", "hello")]


def test_entity_bombs_and_outside_entities_are_refused(tmp_path):
    bomb = '<!ENTITY a "aaaaaaaaaa">' + "".join(
        f'<!ENTITY {chr(98 + n)} "{f"&{chr(97 + n)};" * 10}">' for n in range(20)
    )
    outside = '<!ENTITY u SYSTEM "file:///etc/hostname">'
    for declared, used in ((bomb, "&u;"), (outside, "&u;"), (bomb, "harmless")):
        with pytest.raises(InputError, match="declares XML entities"):
            read(tmp_path / "a.tmx", tmx(unit(gl=used, en="x"), head=f"<!DOCTYPE tmx [{declared}]>"))


def test_the_first_fault_of_a_tmx_is_told_with_its_line_also_after_another_broken_file(tmp_path):
    units = tmx("\n", unit(gl="a&nbsp;b", en="x"), *("\n" + unit(gl="a", en="b") for _ in range(9)))
    for entity in ("nbsp", "euro"):
        with pytest.raises(
            InputError, match=rf"a\.tmx, line 2: broken XML \(Entity '{entity}' not defined, column 36\)"
        ):
            read(tmp_path / "a.tmx", units.replace("nbsp", entity))


def test_broken_or_foreign_tmx_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"a\.tmx, line 2: broken XML"):
        read(tmp_path / "a.tmx", "<tmx><body>\n<tu></body></tmx>")
    for content in (b"", b"\x89PNG\r\n", b"<tmx" + b"\0" * 9):
        with pytest.raises(InputError, match=r"a\.tmx"):
            read(tmp_path / "a.tmx", content)
    with pytest.raises(InputError, match="no unit with both gl and en; its languages are de, fr"):
        read(tmp_path / "a.tmx", tmx(unit(de="ja", fr="oui")))
    with pytest.raises(InputError, match="no sentence pair"):
        read(tmp_path / "a.tmx", "<html/>")
    with pytest.raises(InputError, match="no whole gzip"):
        read(tmp_path / "a.tmx.gz", gzip.compress(tmx(unit(gl="a", en="b")).encode())[:-12])


_PO = """msgid ""
msgstr "Content-Type: text/plain; charset=UTF-8\\n"

msgid "Open\u2028file"
msgstr "Abrir ficheiro"

#, fuzzy
msgid "Guess"
msgstr "Quizais"

msgid "Untranslated"
msgstr ""

msgid "one file"
msgid_plural "%d files"
msgstr[0] "un ficheiro"
msgstr[1] "%d ficheiros"

#~ msgid "Old"
#~ msgstr "Vello"
"""


def test_po_gives_translated_entries_and_plurals(tmp_path):
    expected = [
        Pair("Open file", "Abrir ficheiro"),
        Pair("one file", "un ficheiro"),
        Pair("%d files", "%d ficheiros"),
    ]
    assert read(tmp_path / "a.po", _PO) == expected
    assert read(tmp_path / "a.po.gz", gzip.compress(_PO.encode())) == expected


def test_mo_gives_the_same_entries_as_the_po_it_was_made_of(tmp_path):
    (tmp_path / "b.po").write_text(_PO.replace("\u2028", " "), encoding="utf-8")
    polib.pofile(str(tmp_path / "b.po")).save_as_mofile(str(tmp_path / "b.mo"))
    assert sorted(read_pairs([tmp_path / "b.mo"], "en", "gl")) == sorted(read(tmp_path / "a.po", _PO))


def test_a_language_without_plural_gives_one_pair(tmp_path):
    po = 'msgid "one file"\nmsgid_plural "%d files"\nmsgstr[0] "%d ファイル"\n'
    assert read(tmp_path / "a.po", po) == [Pair("%d files", "%d ファイル")]


@pytest.mark.parametrize(
    ("language", "source", "target", "turned"),
    [
        ("gl", "gl", "en", True),
        ("gl_ES", "gl", "en", True),
        ("gl", "gl-ES", "en", True),
        ("gl@reintegrado", "gl", "en", True),
        ("pt_BR", "pt-BR", "pt-PT", True),
        ("pt", "pt-BR", "pt-PT", False),
        ("gl", "en", "gl", False),
        ("en", "gl", "en", False),
        ("fr", "gl", "en", False),
        ("", "gl", "en", False),
    ],
)
def test_the_language_of_a_catalogue_tells_which_side_is_the_source(tmp_path, language, source, target, turned):
    path = tmp_path / "a.po"
    expected = Pair("ola", "hello") if turned else Pair("hello", "ola")
    content = f'msgid ""\nmsgstr "Language: {language}\\n"\n\nmsgid "hello"\nmsgstr "ola"\n'
    assert read(path, content, source, target) == [expected]
    polib.pofile(str(path)).save_as_mofile(str(tmp_path / "a.mo"))
    assert list(read_pairs([tmp_path / "a.mo"], source, target)) == [expected]


def test_broken_gettext_files_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"a\.po, line 2: not the PO format"):
        read(tmp_path / "a.po", 'msgid "a"\nnonsense\n')
    other = tmp_path / "other.po"
    other.write_text('msgid "secret"\nmsgstr "x"\n')
    with pytest.raises(InputError, match="not the PO format"):
        read(tmp_path / "a.po", str(other))
    for content in (b"", b"text", b"\xde\x12\x04\x95", b"\xde\x12\x04\x95" + b"\xff" * 40):
        with pytest.raises(InputError, match=r"a\.mo is no whole MO file"):
            read(tmp_path / "a.mo", content)


@pytest.mark.parametrize(("package", "name"), [("lxml", "a.tmx"), ("polib", "a.po"), ("polib", "a.mo")])
def test_a_missing_package_is_named_with_the_way_to_get_it(tmp_path, monkeypatch, package, name):
    find = builtins.__import__

    def without(wanted, *rest):
        if wanted.partition(".")[0] == package:
            raise ImportError(wanted)
        return find(wanted, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=rf"needs the package {package}.*pip install 'qknorm\[formats\]'"):
        read(tmp_path / name, "x")
