import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qknorm.config import Prepare
from qknorm.errors import InputError
from qknorm.text.prepare import prepare
from qknorm.text.prepared import PreparedData, Sentences, percentile

_FORMS = ("o libro é vermello", "a casa é branca", "the book is red", "the house is white")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    (folder / "a.gl").write_text("".join(f"{_FORMS[n % 2]} {n}\n" for n in range(60)))
    (folder / "a.en").write_text("".join(f"{_FORMS[2 + n % 2]} {n}\n" for n in range(60)))
    prepare(Prepare(source="gl", target="en", train=(folder / "a.gl", folder / "a.en")), folder / "out")
    return folder / "out"


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "copy")


@given(st.lists(st.integers(0, 50), min_size=1), st.floats(0, 100))
def test_percentiles_equal_numpys(lengths, percent):
    histogram = {length: lengths.count(length) for length in lengths}
    assert percentile(histogram, percent) == pytest.approx(float(np.percentile(lengths, percent)))


def test_percentiles_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="between 0 and 100"):
        percentile({1: 1}, 101)
    with pytest.raises(ValueError, match="empty"):
        percentile({}, 50)


def test_text_and_ids_tell_the_same_sentences(whole):
    data = PreparedData.load(whole)
    for name in data.splits:
        split = data.split(name)
        for sentences, language in ((split.source, data.source), (split.target, data.target)):
            text = split.text(language)
            assert len(split) == len(sentences) == len(text)
            assert [data.tokenizer.decode(sentences[n].tolist()) for n in range(len(text))] == text
            assert sentences.lengths.tolist() == [len(sentences[n]) for n in range(len(text))]


def test_sentences_count_from_both_ends_and_no_further():
    sentences = Sentences(np.arange(5, dtype=np.uint16), np.array([0, 2, 2, 5]))
    assert [sentences[n].tolist() for n in (0, 1, 2, -1)] == [[0, 1], [], [2, 3, 4], [2, 3, 4]]
    for index in (3, -4):
        with pytest.raises(IndexError):
            sentences[index]


def test_target_types_are_those_of_the_training_target(whole):
    data = PreparedData.load(whole)
    seen = set(data.split("train").target.ids.tolist())
    assert set(np.flatnonzero(data.target_types).tolist()) == seen


def test_unknown_splits_and_languages_are_refused(whole):
    data = PreparedData.load(whole)
    with pytest.raises(InputError, match="no split valid; it has train, dev, test"):
        data.split("valid")
    with pytest.raises(InputError, match="holds gl and en, not fr"):
        data.split("train").text("fr")


@pytest.mark.parametrize(
    "name", ["train.gl", "tokenizer.json", "target_types.npy", "dev.en.ids.npy", "test.gl.offsets.npy"]
)
def test_missing_and_shortened_files_are_named(copy, name):
    content = (copy / name).read_bytes()
    (copy / name).write_bytes(content[:-1])
    with pytest.raises(InputError, match=rf"{name} has .* bytes, not .*: it is damaged"):
        PreparedData.load(copy)
    (copy / name).unlink()
    with pytest.raises(InputError, match=f"{name} is missing"):
        PreparedData.load(copy)


def test_damage_that_keeps_the_size_is_found_where_it_would_hurt(copy):
    path = copy / "train.gl.offsets.npy"
    offsets = np.load(path)
    offsets[1] = 10**6
    np.save(path, offsets)
    with pytest.raises(InputError, match="does not fit the ids"):
        PreparedData.load(copy).split("train")
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(InputError, match=r"train\.gl\.offsets\.npy is damaged"):
        PreparedData.load(copy).split("train")
    types = copy / "target_types.npy"
    types.write_bytes(b"x" * types.stat().st_size)
    with pytest.raises(InputError, match=r"target_types\.npy is damaged"):
        PreparedData.load(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "has format 2, this version reads 1"),
        ({"vocabulary": 7}, "not the 7 that"),
        ({"files": None}, "damaged"),
        ({"splits": 3}, "damaged"),
        ({"train_lengths": "abc"}, "damaged"),
    ],
)
def test_manifests_that_do_not_fit_are_refused(copy, change, message):
    manifest = json.loads((copy / "prepared.json").read_text())
    (copy / "prepared.json").write_text(json.dumps(manifest | change))
    with pytest.raises(InputError, match=message):
        PreparedData.load(copy)


def test_folders_that_are_none_of_ours_are_refused(tmp_path):
    with pytest.raises(InputError, match="is no folder"):
        PreparedData.load(tmp_path / "none")
    with pytest.raises(InputError, match=r"has no prepared\.json"):
        PreparedData.load(tmp_path)
    for content, message in ((b"{", "is damaged"), (b"[]", "was not written by"), (b"\xff", "is damaged")):
        (tmp_path / "prepared.json").write_bytes(content)
        with pytest.raises(InputError, match=message):
            PreparedData.load(tmp_path)
