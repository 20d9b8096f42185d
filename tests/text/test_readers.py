import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qknorm.errors import InputError
from qknorm.text.readers import Pair, read_lines, read_pairs

_LINES = st.lists(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\n\r\0\ufeff")))


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def pairs_of(*paths: Path, source: str = "gl", target: str = "en") -> list[Pair]:
    return list(read_pairs(paths, source, target))


@given(_LINES, st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_lines_come_back_whatever_they_hold(tmp_path_factory, lines, ending, marked):
    path = tmp_path_factory.mktemp("lines") / "text"
    write(path, ("\ufeff" if marked else "") + "".join(line + ending for line in lines))
    assert list(read_lines(path)) == lines


def test_other_line_breaks_do_not_end_a_line(tmp_path):
    line = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"
    assert list(read_lines(write(tmp_path / "a", line + "\nnext"))) == [line, "next"]


def test_invalid_utf8_names_file_line_and_byte(tmp_path):
    path = write(tmp_path / "bad.gl", b"good\nbad \xff here\n")
    with pytest.raises(InputError, match=r"bad\.gl, line 2: not UTF-8 at byte 9 of the file \(0xff\).*iconv"):
        list(read_lines(path))


def test_nul_bytes_are_refused_with_their_line(tmp_path):
    with pytest.raises(InputError, match=r"line 3: holds a NUL byte"):
        list(read_lines(write(tmp_path / "a", b"x\ny\nz\0\n")))


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


@pytest.mark.parametrize("line", ["only one", "one\ttwo\tthree"])
def test_tsv_with_other_than_two_columns_names_the_line(tmp_path, line):
    with pytest.raises(InputError, match=r"a\.tsv, line 2: . columns where 2 are needed"):
        pairs_of(write(tmp_path / "a.tsv", f"ola\thello\n{line}\n"))


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
