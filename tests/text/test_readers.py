import gzip
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qknorm.errors import InputError
from qknorm.text.readers import Pair, decode_lines, read_lines, read_pairs

_LINES = st.lists(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\n\r\0\ufeff")))


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def pairs_of(*paths: Path, source: str = "gl", target: str = "en") -> list[Pair]:
    return list(read_pairs(paths, source, target))


def follow(told: "pytest.ExceptionInfo[InputError]", new: Path) -> Path:
    """Runs the command that a message ends with, and gives the file that it writes."""
    command = str(told.value).rpartition(": ")[2]
    tool = command.split()[0]
    assert tool in {"awk", "cut", "gzip", "iconv", "paste", "tr"}, command
    if not shutil.which("sh") or not shutil.which(tool):
        pytest.skip(f"needs a shell and {tool}")
    subprocess.run(["sh", "-c", command], check=True)
    return new


@given(_LINES, st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_lines_come_back_whatever_they_hold(tmp_path_factory, lines, ending, marked):
    path = tmp_path_factory.mktemp("lines") / "text"
    write(path, ("\ufeff" if marked else "") + "".join(line + ending for line in lines))
    assert list(read_lines(path)) == lines


def test_other_line_breaks_do_not_end_a_line(tmp_path):
    line = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"
    assert list(read_lines(write(tmp_path / "a", line + "\nnext"))) == [line, "next"]


def test_carriage_returns_end_lines_where_there_is_no_line_feed(tmp_path):
    assert list(read_lines(write(tmp_path / "a", "\ufeffone\rtwo\r\rfour\r"))) == ["one", "two", "", "four"]
    assert list(read_lines(write(tmp_path / "a", "one\rstill one\ntwo\rstill two"))) == [
        "one\rstill one",
        "two\rstill two",
    ]


def test_invalid_utf8_names_file_line_and_byte(tmp_path):
    path = write(tmp_path / "bad.gl", b"good\nbad \xff here\n")
    with pytest.raises(InputError, match=r"bad\.gl, line 2: not UTF-8 at byte 9 of the file \(0xff\).*iconv"):
        list(read_lines(path))


def test_nul_bytes_are_refused_with_their_line(tmp_path):
    with pytest.raises(InputError, match=r"line 3: holds a NUL byte") as told:
        list(read_lines(write(tmp_path / "a", b"x\ny\nz\0\n")))
    assert "UTF-16" not in str(told.value)
    assert list(read_lines(follow(told, tmp_path / "a.new"))) == ["x", "y", "z"]


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-32"])
@pytest.mark.parametrize("name", ["old text.gl", "old text.gl.gz"])
def test_the_command_that_is_advised_converts_the_file(tmp_path, encoding, name):
    content = "ola\nmañá\n".encode(encoding)
    path = write(tmp_path / name, gzip.compress(content) if name.endswith("gz") else content)
    message = r"line 2: not UTF-8" if encoding == "latin-1" else f"is {encoding.upper()}, not UTF-8"
    with pytest.raises(InputError, match=message) as told:
        list(read_lines(path))
    assert list(read_lines(follow(told, tmp_path / "old text.new.gl"))) == ["ola", "mañá"]


def test_utf16_is_known_by_its_mark_whichever_way_round_and_without_a_nul(tmp_path):
    for encoding in ("utf-16-le", "utf-16-be"):
        with pytest.raises(InputError, match=r"a is UTF-16, not UTF-8; convert it: iconv -f UTF-16 -t UTF-8 <"):
            list(read_lines(write(tmp_path / "a", "\ufeff漢字".encode(encoding))))


@pytest.mark.parametrize("encoding", ["utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("text", ["ola\nmañá\n", "漢字", "\n\na\n", "😀\n", "Ċa\nĀ b\n", ""])
def test_utf32_is_known_by_its_mark_whichever_way_round_and_converted_as_advised(tmp_path, encoding, text):
    path = write(tmp_path / "a", ("\ufeff" + text).encode(encoding))
    with pytest.raises(InputError, match=r"a is UTF-32, not UTF-8; convert it: iconv -f UTF-32 -t UTF-8 <") as told:
        list(read_lines(path))
    assert follow(told, tmp_path / "a.new").read_bytes() == text.encode()


@pytest.mark.parametrize("kind", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize(
    "text",
    [
        "ola\nmañá\n",
        "ž š ť\n",
        "\n\na\n",
        "a\n",
        "a",
        "\r\nola\r\n",
        "Привет\nмир, ґ\n",
        "Да\nя\n",
        "Ċa\nĀ b\n",
        "x\n漢字\n",
    ],
)
def test_utf16_without_a_mark_is_converted_as_advised(tmp_path, kind, text):
    path = write(tmp_path / "a", text.encode(kind))
    with pytest.raises(InputError, match=rf"a is UTF-16, .*: iconv -f {kind.upper().replace('6-', '6')} -t") as told:
        list(read_lines(path))
    assert follow(told, tmp_path / "a.new").read_bytes() == text.encode()


@pytest.mark.parametrize(
    "content",
    [
        b"ola\0\n",
        b"\0ola\n",
        b"\0a\n",
        b"a\0b\n",
        b"ola\na\0\n",
        b"abc\n\0\n",
        b"\0\0\0\0abc\n",
        b"\0" * 64,
        b"ola\na\0\0\0\0\0\n",
        "ola\n".encode("utf-32-le"),
        b"a\0b\0cdefgh",
    ],
)
def test_a_few_nuls_or_nothing_else_make_no_utf16(tmp_path, content):
    with pytest.raises(InputError, match=r"holds a NUL byte; if it is a stray one, delete it: tr -d") as told:
        list(read_lines(write(tmp_path / "a", content)))
    assert follow(told, tmp_path / "a.new").read_bytes() == content.replace(b"\0", b"")


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1"])
def test_western_text_keeps_its_characters_when_converted_as_advised(tmp_path, encoding):
    text = "mañá «ola» ß\n" + "“5 €” – it’s…\n" * (encoding == "cp1252")
    with pytest.raises(InputError, match=r"Western European \(Windows-1252 or Latin-1\), convert it: iconv") as told:
        list(read_lines(write(tmp_path / "a", text.encode(encoding))))
    assert follow(told, tmp_path / "a.new").read_bytes() == text.encode()


def test_what_is_no_file_is_advised_a_command_alone():
    with pytest.raises(InputError, match=r"standard input, line 1: not UTF-8 .*: iconv -f CP1252 -t UTF-8$"):
        list(decode_lines([b"\xe9\n"], "standard input"))


def test_gzip_is_unpacked_and_a_torn_one_refused(tmp_path):
    whole = gzip.compress(b"ola\nadeus\n")
    assert list(read_lines(write(tmp_path / "a.gl.gz", whole))) == ["ola", "adeus"]
    for name, content in (("torn.gz", whole[:-9]), ("none.gz", b"plain text")):
        with pytest.raises(InputError, match="no whole gzip file"):
            list(read_lines(write(tmp_path / name, content)))


def test_two_plain_files_are_paired_line_by_line(tmp_path):
    source, target = write(tmp_path / "a.gl", "ola\r\nnon\r\n"), write(tmp_path / "a.en", "\ufeffhello\nno")
    assert pairs_of(source, target) == [Pair("ola", "hello"), Pair("non", "no")]


def test_a_line_of_a_million_characters_is_read(tmp_path):
    source, target = write(tmp_path / "a.gl", "x" * 1_000_000 + "\nola\n"), write(tmp_path / "a.en", "y\nhello\n")
    assert [len(pair.source) for pair in pairs_of(source, target)] == [1_000_000, 3]


def test_tsv_with_and_without_a_heading(tmp_path):
    plain = write(tmp_path / "a.tsv", "ola\thello\n\nnon\tno\n")
    headed = write(tmp_path / "b.tsv", "GL\tEN\nsi\tyes\n")
    assert pairs_of(plain, headed) == [Pair("ola", "hello"), Pair("non", "no"), Pair("si", "yes")]


@pytest.mark.parametrize("heading", ["EN\tgl", "target\tsource"])
def test_a_heading_in_the_other_order_is_obeyed(tmp_path, heading):
    assert pairs_of(write(tmp_path / "a.tsv", f"{heading}\nhello\tola\nyes\tsi\n")) == [
        Pair("ola", "hello"),
        Pair("si", "yes"),
    ]


@pytest.mark.parametrize("heading", ["id\tgl\ten", "id\ten\tgl", "en\tid\tgl", "target\tnote\tsource"])
def test_the_columns_that_a_heading_names_are_advised(tmp_path, heading):
    words = {"gl": "ola", "source": "ola", "en": "hello", "target": "hello"}
    row = "\t".join(words.get(name, "7") for name in heading.split("\t"))
    with pytest.raises(
        InputError, match=r"3 of 3 lines are not .*; keep the two columns that the heading names"
    ) as told:
        pairs_of(write(tmp_path / "a.tsv", f"{heading}\n{row}\n{row}\n"))
    assert pairs_of(follow(told, tmp_path / "a.new.tsv")) == [Pair("ola", "hello")] * 2


@pytest.mark.parametrize("line", ["only one", "one\ttwo\tthree"])
def test_tsv_with_other_than_two_columns_names_the_line(tmp_path, line):
    path = write(tmp_path / "a.tsv", f"ola\thello\n{line}\n")
    with pytest.raises(
        InputError, match=r"a\.tsv: 1 of 2 lines is not gl, a tab, en \(line 2\); keep the others"
    ) as told:
        pairs_of(path)
    assert pairs_of(follow(told, tmp_path / "a.new.tsv")) == [Pair("ola", "hello")]


def test_all_bad_lines_of_a_tsv_are_told_at_once(tmp_path):
    path = write(tmp_path / "a.tsv", "a\tb\n" * 9 + "one\n" * 6)
    with pytest.raises(InputError, match=r"6 of 15 lines are not gl, a tab, en \(lines 10, 11, 12, 13, 14, …\)"):
        pairs_of(path)


def test_bad_lines_of_a_tsv_are_handed_over_where_somebody_takes_them(tmp_path):
    path = write(tmp_path / "a.tsv", "gl\ten\nola\thello\nonly one\nsi\tyes\none\ttwo\tthree\n")
    spoiled: list[Pair] = []
    assert list(read_pairs([path], "gl", "en", spoiled.append)) == [Pair("ola", "hello"), Pair("si", "yes")]
    assert spoiled == [Pair("only one", ""), Pair("one", "two\tthree")]


def test_a_tsv_of_mostly_bad_lines_is_refused_all_the_same(tmp_path):
    path = write(tmp_path / "a.tsv", "ola\thello\n" + "si\tyes\tCC BY\n" * 3)
    with pytest.raises(
        InputError, match=r"3 of 4 lines are not .*; keep the two columns that hold gl and en, such"
    ) as told:
        list(read_pairs([path], "gl", "en", lambda pair: None))
    assert pairs_of(follow(told, tmp_path / "a.new.tsv"))[1:] == [Pair("si", "yes")] * 3
    with pytest.raises(InputError, match=r"1 of 1 line is not .* \(line 1\); put one tab into each, between gl and en"):
        list(read_pairs([write(tmp_path / "b.tsv", "ola;hello\n")], "gl", "en", lambda pair: None))


@given(st.lists(st.tuples(st.text(), st.text()), min_size=1), st.integers(0, 2))
def test_jsonl_comes_back_in_each_of_its_forms(tmp_path_factory, pairs, form):
    shapes = (
        lambda s, t: {"gl": s, "en": t},
        lambda s, t: {"translation": {"gl": s, "en": t}},
        lambda s, t: {"source": s, "target": t, "id": 7},
    )
    path = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
    write(path, "".join(json.dumps(shapes[form](*pair)) + "\n" for pair in pairs))
    assert pairs_of(path) == pairs


@pytest.mark.parametrize("line", ['{"gl": "ola"}', '{"gl": "ola", "en": 3}', "[1]", "{", "[" * 100_000, "1" * 5_000])
def test_jsonl_without_a_pair_names_the_line(tmp_path, line):
    path = write(tmp_path / "a.jsonl", '{"gl": "ola", "en": "hello"}\n' + line + "\n")
    with pytest.raises(InputError, match=r"a\.jsonl, line 2"):
        pairs_of(path)


def test_unequal_line_counts_give_both_and_the_empty_line_too_many(tmp_path):
    source = write(tmp_path / "a.gl", "un\ndous\ntres\n")
    target = write(tmp_path / "a.en", "one\n\ntwo\nthree\n")
    with pytest.raises(InputError, match=r"has 3 lines but .* has 4; they seem to part near line 2 of .*a\.en"):
        pairs_of(source, target)
    with pytest.raises(InputError, match=r"a\.en has 4 lines but .*a\.gl has 3"):
        pairs_of(target, source, source="en", target="gl")


def test_unequal_line_counts_without_evidence_claim_no_place(tmp_path):
    source, target = write(tmp_path / "a.gl", "un\ndous\n"), write(tmp_path / "a.en", "one\ntwo\nthree\n")
    with pytest.raises(InputError) as caught:
        pairs_of(source, target)
    assert "2 lines" in str(caught.value) and "part near" not in str(caught.value)


def test_empty_files_are_refused(tmp_path):
    empty, full = write(tmp_path / "a.gl", ""), write(tmp_path / "a.en", "one\n")
    with pytest.raises(InputError, match=r"a\.gl is empty"):
        pairs_of(empty, full)
    with pytest.raises(InputError, match="are empty"):
        pairs_of(empty, write(tmp_path / "b.en", ""))
    for name in ("a.tsv", "a.jsonl"):
        with pytest.raises(InputError, match="holds no sentence pair"):
            pairs_of(write(tmp_path / name, ""))


def test_wrong_sets_of_files_are_refused_before_reading(tmp_path):
    gl, en, tsv = (write(tmp_path / name, "a\tb\n") for name in ("a.gl", "a.en", "a.tsv"))
    for paths, message in (
        ((), "no file"),
        ((gl,), "two files"),
        ((gl, en, gl), "two files"),
        ((gl, tsv), "cannot be mixed"),
        ((gl, gl), "both sides"),
        ((en, gl), "wrong order"),
        ((tmp_path, en), "is a folder"),
        ((tmp_path / "none.gl", en), "does not exist"),
        ((Path("a\0b"), en), "no file name"),
    ):
        with pytest.raises(InputError, match=message):
            read_pairs(paths, "gl", "en")


@pytest.mark.parametrize("endings", [("", ""), (".gz", ".gz"), ("", ".gz"), (".gz", "")])
def test_two_sides_are_joined_as_advised_to_go_with_files_of_pairs(tmp_path, endings):
    def put(name: str, ending: str, text: str) -> Path:
        return write(tmp_path / f"{name}{ending}", gzip.compress(text.encode()) if ending else text)

    gl, en = put("a b.gl", endings[0], "ola\nsi\n"), put("a b.en", endings[1], "hello\nyes\n")
    tsv = put("more.tsv", endings[0], "non\tno\n")
    with pytest.raises(InputError, match=r"join the two sides first: (paste|gzip)") as told:
        read_pairs((tsv, gl, en), "gl", "en")
    joined = follow(told, tmp_path / "a b.new.tsv")
    assert pairs_of(tsv, joined) == [Pair("non", "no"), Pair("ola", "hello"), Pair("si", "yes")]
    with pytest.raises(InputError, match=r"first: paste train\.gl train\.en > train\.new\.tsv"):
        read_pairs((tsv, gl), "gl", "en")
