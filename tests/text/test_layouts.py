"""Published archives, in the shapes their publishers gave them, become aligned files."""

import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qknorm.errors import InputError
from qknorm.text import layouts


def pack(path: Path, files: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return path


def table(path: Path, *rows: str) -> Path:
    path.write_bytes("".join(row + "\n" for row in rows).encode())
    return path


def test_ted_rows_without_one_of_the_two_are_left_out(tmp_path: Path) -> None:
    path = table(
        tmp_path / "t.tsv",
        "talk_name\ten\tgl\tsk",
        "a\tone\tun\t__NULL__",
        "a\t__NULL__\tdous\tdva",
        "a\tthree\t__NULL__\ttri",
        "a\tfour\t_ _ NULL _ _\tštyri",
        "a\t \tcinco\tpäť",
        "a\tsix\t\tšesť",
        "a\tseven",
        "a\teight \u2028 & \r more\toito \t\r",
        'a\t"nine"\t"nove\t',
        "a\tNULL\tnulo\tnula",
    )
    assert list(layouts.read_ted_table(path, "gl", "en")) == [
        ("un", "one"),
        ("oito", "eight \u2028 & \r more"),
        ('"nove', '"nine"'),
        ("nulo", "NULL"),
    ]
    assert [target for _, target in layouts.read_ted_table(path, "en", "sk")] == ["tri", "štyri", "šesť", "nula"]


def test_ted_table_without_the_column_says_what_it_has(tmp_path: Path) -> None:
    path = table(tmp_path / "t.tsv", "talk_name\ten\tgl")
    with pytest.raises(InputError, match=r"t\.tsv, line 1: there is no column 'sk' among talk_name, en, gl"):
        list(layouts.read_ted_table(path, "sk", "en"))


cell = st.text(st.characters(exclude_characters="\t\n", exclude_categories=("Cs",)), max_size=8)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(cell, cell, cell), max_size=8))
def test_ted_table_round_trip(tmp_path: Path, rows: list[tuple[str, str, str]]) -> None:
    path = table(tmp_path / "t.tsv", "talk_name\ten\the", *("\t".join(row) for row in rows))
    kept = [(he.strip(), en.strip()) for _, en, he in rows if he.strip() and en.strip()]
    assert list(layouts.read_ted_table(path, "he", "en")) == kept


def test_ted_archive(tmp_path: Path) -> None:
    files = {
        f"all_talks_{split}.tsv": f"talk_name\ten\tgl\nx\t{split}\tgl {split}\n" for split in ("train", "dev", "test")
    }
    archive = pack(tmp_path / "ted.tgz", files | {"readme.txt": "no"})
    out = tmp_path / "out"
    out.mkdir()
    layouts.ted("gl", "en")({"ted.tgz": archive}, out, None)
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        f"{split}.{language}": f"{prefix}{split}\n"
        for split in ("train", "dev", "test")
        for language, prefix in (("gl", "gl "), ("en", ""))
    }


def test_flores_archive(tmp_path: Path) -> None:
    files = {
        "./flores200_dataset/dev/glg_Latn.dev": "Ola.\n",
        "./flores200_dataset/devtest/glg_Latn.devtest": "Adeus.\n",
        "./flores200_dataset/metadata_dev.tsv": "URL\n",
        "./flores200_dataset/README": "read me\n",
    }
    out = tmp_path / "out"
    out.mkdir()
    layouts.flores({"f": pack(tmp_path / "f", files)}, out, None)
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        "dev.glg_Latn": "Ola.\n",
        "devtest.glg_Latn": "Adeus.\n",
    }


def iwslt14_files() -> dict[str, str]:
    notes = "<url>http://x</url>\n<keywords>a, b</keywords>\n<speaker>N. N.</speaker>\n<talkid>1</talkid>\n"
    files = {}
    for language in ("de", "en"):
        sentences = "".join(f" {language} {number} < 5 \n" for number in range(1, 46))
        more = "<reviewer href='x'>R</reviewer>\n" if language == "de" else ""
        files[f"de-en/train.tags.de-en.{language}"] = f"{notes}{more}<title>{language} title</title>\n{sentences}"
        for name in layouts.IWSLT14_TEST_SETS:
            segments = f'<seg id="1"> {language} {name} &amp; so </seg>\n<seg id="2">two\n lines</seg>\n'
            files[f"de-en/IWSLT14.{name}.de-en.{language}.xml"] = f"<mteval>\n<doc>\n{segments}</doc>\n</mteval>\n"
    return files


def arranged_iwslt14(folder: Path, files: dict[str, str]) -> dict[str, list[str]]:
    out = folder / "out"
    out.mkdir()
    layouts.iwslt14({"de-en.tgz": pack(folder / "de-en.tgz", files)}, out, None)
    return {path.name: path.read_text().splitlines() for path in out.iterdir()}


def test_iwslt14_archive(tmp_path: Path) -> None:
    arranged = arranged_iwslt14(tmp_path, iwslt14_files())
    assert sorted(arranged) == ["dev.de", "dev.en", "test.de", "test.en", "train.de", "train.en"]
    assert arranged["train.de"][:2] == ["de title", "de 1 < 5"]
    assert arranged["dev.en"] == ["en 22 < 5", "en 45 < 5"]  # 46 sentences with the title, the 23rd and the 46th
    assert len(arranged["train.en"]) == len(arranged["train.de"]) == 44
    assert arranged["test.de"][:3] == ["de TED.dev2010 & so", "two lines", "de TEDX.dev2012 & so"]
    assert len(arranged["test.en"]) == 10


def test_iwslt14_archive_that_is_not_as_expected(tmp_path: Path) -> None:
    files = iwslt14_files()
    files["de-en/train.tags.de-en.de"] += "one more\n"
    with pytest.raises(InputError, match=r"train\.tags\.de-en\.\* has 47 German and 46 English lines"):
        arranged_iwslt14(tmp_path, files)
    del files["de-en/train.tags.de-en.de"]
    (tmp_path / "again").mkdir()
    with pytest.raises(InputError, match=r"holds no train\.tags\.de-en\.de"):
        arranged_iwslt14(tmp_path / "again", files)


@pytest.mark.parametrize(
    ("content", "lines"), [(b"", 0), (b"a", 1), (b"a\n", 1), (b"a\n\n", 2), (b"a\r\nb\xe2\x80\xa8c\x0b\x0c", 2)]
)
def test_count_lines(tmp_path: Path, content: bytes, lines: int) -> None:
    (tmp_path / "x").write_bytes(content)
    assert layouts.count_lines(tmp_path / "x") == lines
