import errno
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest

from qknorm.config import Cleaning, Prepare, Subwords
from qknorm.errors import InputError
from qknorm.text.prepare import prepare
from qknorm.text.prepared import PreparedData

_SUBJECTS = {"o neno": "the boy", "a nena": "the girl", "o can": "the dog", "a avoa": "the grandmother"}
_VERBS = {"ve": "sees", "ten": "has", "quere": "wants", "busca": "looks for"}
_OBJECTS = {"unha casa": "a house", "o libro": "the book", "pan": "bread", "moita auga": "a lot of water"}


def made_up_pairs(count: int, seed: int = 0) -> list[tuple[str, str]]:
    rng = random.Random(seed)
    pairs = []
    for number in range(count):
        parts = [rng.choice(list(words.items())) for words in (_SUBJECTS, _VERBS, _OBJECTS)]
        more = rng.randint(0, 6)
        source, target = (" ".join(part[side] for part in parts) for side in (0, 1))
        pairs.append((f"{source}{' e máis' * more} {number}.", f"{target}{' and more' * more} {number}."))
    return pairs


def write_pairs(folder: Path, name: str, pairs) -> tuple[Path, Path]:
    paths = folder / f"{name}.gl", folder / f"{name}.en"
    for side, path in enumerate(paths):
        path.write_text("".join(pair[side] + "\n" for pair in pairs), encoding="utf-8")
    return paths


def settings_for(folder: Path, train, **others) -> Prepare:
    for split in ("dev", "test"):
        if split in others:
            others[split] = write_pairs(folder, split, others[split])
    return Prepare(source="gl", target="en", train=write_pairs(folder, "in", train), **others)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def pairs_in(data: PreparedData, split: str) -> list[tuple[str, str]]:
    return list(zip(data.split(split).text("gl"), data.split(split).text("en"), strict=True))


def test_a_corpus_becomes_a_folder_that_loads(tmp_path):
    seen = []
    report = prepare(
        settings_for(tmp_path, made_up_pairs(300)), tmp_path / "out", progress=lambda *step: seen.append(step)
    )
    data = PreparedData.load(tmp_path / "out")
    assert (data.source, data.target, data.splits) == ("gl", "en", ("train", "dev", "test"))
    assert {name: len(data.split(name)) for name in data.splits} == {"train": 240, "dev": 30, "test": 30}
    assert sorted(pair for name in data.splits for pair in pairs_in(data, name)) == sorted(made_up_pairs(300))
    assert data.tokenizer.size == report.vocabulary and data.fingerprint == report.fingerprint
    train = data.split("train")
    lengths = np.concatenate([train.source.lengths, train.target.lengths])
    assert data.length_percentile(97.5) == np.percentile(lengths, 97.5)
    assert report.splits["train"].source_tokens == train.source.lengths.sum()
    assert report.warnings == [] and report.folder == tmp_path / "out"
    assert {"reading train", "learning subwords", "encoding test.en"} <= {stage for stage, _, _ in seen}
    assert all(total is None or done <= total for _, done, total in seen)


def test_the_same_text_gives_the_same_bytes(tmp_path):
    settings = settings_for(tmp_path, made_up_pairs(200))
    for name in ("one", "two"):
        prepare(settings, tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(files) == 21
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_given_sets_keep_every_pair_and_their_sentences_leave_training(tmp_path):
    train = made_up_pairs(100)
    dev = [train[3], ("", "an empty side"), ("same", "same"), ("same", "same"), ("  e\u0301 \t x ", "y" * 3_000)]
    test = [(train[7][0], "another translation"), ("outra", train[9][1])]
    report = prepare(settings_for(tmp_path, train, dev=dev, test=test), tmp_path / "out")
    data = PreparedData.load(tmp_path / "out")
    assert pairs_in(data, "dev") == [*dev[:-1], ("é x", "y" * 3_000)]
    assert pairs_in(data, "test") == test
    assert pairs_in(data, "train") == [pair for number, pair in enumerate(train) if number not in (3, 7, 9)]
    assert report.cleaning.dropped["overlap with dev or test"].pairs == 3


def test_the_report_adds_up(tmp_path):
    train = [*made_up_pairs(50), *made_up_pairs(5), ("", "x"), ("x" * 5_000, "y"), ("same", "same")]
    report = prepare(settings_for(tmp_path, train), tmp_path / "out").cleaning
    dropped = sum(entry.pairs for entry in report.dropped.values())
    assert report.read == 58 == report.kept + report.held_out + dropped
    assert json.loads((tmp_path / "out" / "prepared.json").read_text())["cleaning"] == report.as_json()


def test_lines_of_a_tsv_that_are_no_pairs_are_dropped_and_told_but_not_of_a_dev_set(tmp_path):
    lines = ["\t".join(pair) for pair in made_up_pairs(50)]
    lines[10:10] = ["only one", "one\ttwo\tthree"]
    (tmp_path / "a.tsv").write_text("\n".join(lines))
    report = prepare(Prepare(source="gl", target="en", train=(tmp_path / "a.tsv",)), tmp_path / "out").cleaning
    assert report.read == 52 == report.kept + report.held_out + 2
    assert report.dropped["not two columns"].examples == [("only one", ""), ("one", "two three")]
    dev = Prepare(source="gl", target="en", train=(tmp_path / "a.tsv",), dev=(tmp_path / "a.tsv",))
    with pytest.raises(InputError, match=r"a\.tsv: 2 of 52 lines are not gl, a tab, en \(lines 11, 12\)"):
        prepare(dev, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_split_off_sets_do_not_depend_on_the_order_of_the_text(tmp_path):
    pairs = made_up_pairs(200)
    held_out = []
    for name, order in (("a", pairs), ("b", pairs[::-1])):
        prepare(settings_for(tmp_path, order), tmp_path / name)
        data = PreparedData.load(tmp_path / name)
        held_out.append([sorted(pairs_in(data, split)) for split in ("dev", "test")])
    assert held_out[0] == held_out[1]


@pytest.mark.parametrize("wanted", [15, 1_000])
def test_pairs_added_later_move_no_test_pair_to_training(tmp_path, wanted):
    pairs = made_up_pairs(400)
    prepare(settings_for(tmp_path, pairs[:300], dev_pairs=wanted, test_pairs=wanted), tmp_path / "before")
    prepare(settings_for(tmp_path, pairs, dev_pairs=wanted, test_pairs=wanted), tmp_path / "after")
    before, after = PreparedData.load(tmp_path / "before"), PreparedData.load(tmp_path / "after")
    assert len(before.split("test")) == min(wanted, 30)
    assert not set(pairs_in(before, "test")) & set(pairs_in(after, "train"))


def test_copies_of_split_off_sentences_leave_training_whatever_the_settings(tmp_path):
    pairs = made_up_pairs(100)
    cleaning = Cleaning(drop_duplicates=False, drop_overlap=False)
    train = [*pairs, *pairs, *((source, f"other {target}") for source, target in pairs)]
    prepare(settings_for(tmp_path, train, cleaning=cleaning), tmp_path / "out")
    data = PreparedData.load(tmp_path / "out")
    held_out = [pair for split in ("dev", "test") for pair in pairs_in(data, split)]
    assert len(held_out) == len(set(held_out)) == 40
    kept = pairs_in(data, "train")
    assert kept and not {source for source, _ in held_out} & {source for source, _ in kept}
    assert not {target for _, target in held_out} & {target for _, target in kept}


@pytest.mark.parametrize(("drop", "kept"), [(False, 90), (True, 45)])
def test_overlap_with_a_given_set_stays_if_so_set_though_the_other_set_is_split_off(tmp_path, drop, kept):
    pairs = made_up_pairs(100)
    others = {"dev": pairs[:50], "test_pairs": 10, "cleaning": Cleaning(drop_overlap=drop)}
    report = prepare(settings_for(tmp_path, pairs, **others), tmp_path / "out")
    assert (report.splits["train"].pairs, report.splits["test"].pairs) == (kept, kept // 9)


def test_small_corpora_and_sizes_of_zero_split_nothing_off(tmp_path):
    report = prepare(settings_for(tmp_path, made_up_pairs(9)), tmp_path / "small")
    assert list(report.splits) == ["train"] and "9 pairs are too few to split off dev and test" in report.warnings[0]
    report = prepare(settings_for(tmp_path, made_up_pairs(1)), tmp_path / "one")
    assert "1 pair is too few to split off" in report.warnings[0]
    report = prepare(settings_for(tmp_path, made_up_pairs(50), dev_pairs=0, test_pairs=0), tmp_path / "none")
    assert report.splits["train"].pairs == 50 and not report.warnings


def test_tokenised_text_that_is_not_said_to_be_is_told_of(tmp_path):
    pairs = [(source.replace(".", " ."), target.replace(".", " .")) for source, target in made_up_pairs(300)]
    report = prepare(settings_for(tmp_path, pairs, dev=pairs[:150]), tmp_path / "out")
    assert len(report.warnings) == 1 and "dev.gl, dev.en, train.gl and train.en are tokenised" in report.warnings[0]
    said = settings_for(tmp_path, pairs, subwords=Subwords(pretokenized=True))
    assert not prepare(said, tmp_path / "said").warnings


def test_a_catalogue_that_its_header_turns_around_is_told_of(tmp_path):
    pytest.importorskip("polib")
    paths = [tmp_path / f"{name}.po" for name in "abcd"]
    for path, language in zip(paths, ("gl_ES", "gl", "en", "Galician"), strict=True):
        path.write_text(f'msgid ""\nmsgstr "Language: {language}\\n"\n\nmsgid "{path.stem} ola"\nmsgstr "hello"\n')
    settings = Prepare(source="gl", target="en", train=tuple(paths), dev=(paths[0],), test=(paths[2],))
    report = prepare(settings.model_copy(update={"cleaning": Cleaning(drop_overlap=False)}), tmp_path / "out")
    why = "read from msgstr to msgid because the header's Language: names gl, the source; if that is wrong, correct the"
    told = [f"{paths[0]} was {why} header", f"{paths[0]} and 1 more catalogue were {why} header"]
    unknown = f"{paths[3]} was read from msgid as gl to msgstr as en, for the header's Language: tells neither; "
    assert report.warnings[:2] == told and report.warnings[2].startswith(unknown) and len(report.warnings) == 3
    train = pairs_in(PreparedData.load(tmp_path / "out"), "train")
    assert train == [("hello", "a ola"), ("hello", "b ola"), ("c ola", "hello"), ("d ola", "hello")]


def test_merges_are_as_asked_or_a_warning_says_why_not(tmp_path):
    train = made_up_pairs(60)
    report = prepare(settings_for(tmp_path, train, subwords=Subwords(merges=20, pretokenized=True)), tmp_path / "a")
    assert report.merges == 20 and PreparedData.load(tmp_path / "a").tokenizer.pretokenized
    report = prepare(settings_for(tmp_path, train, subwords=Subwords(merges=9_000)), tmp_path / "b")
    assert report.merges < 9_000 and "of the 9,000 merges" in report.warnings[0]


def test_large_corpora_learn_subwords_from_a_sample(tmp_path, monkeypatch):
    settings = settings_for(tmp_path, made_up_pairs(300), dev_pairs=0, test_pairs=0)
    whole = prepare(settings, tmp_path / "whole")
    monkeypatch.setattr("qknorm.text.prepare._MOST_PAIRS_FOR_MERGES", 50)
    sampled = prepare(settings, tmp_path / "sampled")
    assert sampled.merges < whole.merges
    assert sampled.splits["train"].pairs == 300


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("en", "EN", "are both"),
        ("../x", "en", "source = '../x' is no language code"),
        ("gl", "a/b", "target"),
        ("gl", "", "target"),
        ("gl", "a\\b", "target"),
        (".", "en", "source"),
    ],
)
def test_language_codes_that_cannot_be_file_names_are_refused(tmp_path, source, target, message):
    settings = settings_for(tmp_path, made_up_pairs(20)).model_copy(update={"source": source, "target": target})
    with pytest.raises(InputError, match=message):
        prepare(settings, tmp_path / "out")
    assert names_in(tmp_path) == ["in.en", "in.gl"]


def test_what_exists_is_replaced_only_if_asked_and_only_if_it_is_prepared_data(tmp_path):
    settings = settings_for(tmp_path, made_up_pairs(30))
    out = tmp_path / "out"
    prepare(settings, out)
    with pytest.raises(InputError, match="exists already"):
        prepare(settings, out)
    prepare(settings_for(tmp_path, made_up_pairs(40)), out, overwrite=True)
    assert PreparedData.load(out).manifest["cleaning"]["read"] == 40
    (out / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"also holds notes\.txt"):
        prepare(settings, out, overwrite=True)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="is not overwritten"):
        prepare(settings, foreign, overwrite=True)
    for overwrite in (True, False):
        with pytest.raises(InputError, match="is a file, not a folder to write to, which comes first"):
            prepare(settings, foreign / "thesis.txt", overwrite=overwrite)
    assert (foreign / "thesis.txt").read_text() == "mine" and (out / "notes.txt").read_text() == "mine"


def test_input_that_lies_in_the_folder_to_overwrite_is_not_lost(tmp_path):
    out = tmp_path / "out"
    prepare(settings_for(tmp_path, made_up_pairs(30)), out)
    again = Prepare(source="gl", target="en", train=(out / "train.gl", out / "train.en"))
    with pytest.raises(InputError, match="would be overwritten"):
        prepare(again, out, overwrite=True)
    assert PreparedData.load(out)


def test_a_full_disk_leaves_nothing_behind_and_the_old_folder_in_place(tmp_path, monkeypatch):
    settings, out = settings_for(tmp_path, made_up_pairs(30)), tmp_path / "out"
    prepare(settings, out)
    before = names_in(tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    for place, overwrite in ((tmp_path / "new", False), (out, True)):
        with pytest.raises(InputError, match=r"cannot be written \(No space left on device\)"):
            prepare(settings, place, overwrite=overwrite)
    assert names_in(tmp_path) == before
    assert len(PreparedData.load(out).split("train")) == 24


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    settings = settings_for(tmp_path, made_up_pairs(30))
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        prepare(settings, tmp_path / "file" / "out")


def test_a_mistake_in_the_text_leaves_nothing_behind(tmp_path):
    settings = settings_for(tmp_path, made_up_pairs(30))
    settings.train[1].write_bytes(b"fine\n\xff\n")
    with pytest.raises(InputError, match="line 2: not UTF-8"):
        prepare(settings, tmp_path / "out")
    assert names_in(tmp_path) == ["in.en", "in.gl"]


def test_text_of_which_nothing_is_left_is_refused_with_the_reasons(tmp_path):
    with pytest.raises(InputError, match=r"no training pair is left of 3 \(empty 2, identical sides 1\)"):
        prepare(settings_for(tmp_path, [("", "a"), ("b", ""), ("c", "c")]), tmp_path / "out")


def test_sides_in_different_orders_and_exchanged_sides_are_refused(tmp_path):
    pairs = made_up_pairs(2_000)
    targets = random.Random(1).sample([target for _, target in pairs], len(pairs))
    mixed = list(zip((source for source, _ in pairs), targets, strict=True))
    with pytest.raises(InputError, match="not in the same order"):
        prepare(settings_for(tmp_path, mixed), tmp_path / "out")
    swapped = [(target, source) for source, target in pairs[:200]]
    with pytest.raises(InputError, match="the dev files have gl and en the other way round"):
        prepare(settings_for(tmp_path, pairs[200:], dev=swapped), tmp_path / "out")


def test_every_kind_of_file_can_be_prepared(tmp_path):
    pairs = made_up_pairs(40)
    (tmp_path / "a.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in pairs[:20]))
    lines = (json.dumps({"translation": {"gl": source, "en": target}}) for source, target in pairs[20:])
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    report = prepare(
        Prepare(source="gl", target="en", train=(tmp_path / "a.tsv", tmp_path / "b.jsonl")), tmp_path / "out"
    )
    assert report.cleaning.read == 40


@pytest.mark.corpus
@pytest.mark.skipif("QKNORM_DATA" not in os.environ, reason="needs the corpora that QKNORM_DATA points at")
def test_galician_has_the_papers_length_percentile(tmp_path):
    folder = Path(os.environ["QKNORM_DATA"]) / "ted-gl-en"
    if not folder.is_dir():
        pytest.skip("QKNORM_DATA has no ted-gl-en")
    sides = {split: (folder / f"{split}.gl", folder / f"{split}.en") for split in ("train", "dev", "test")}
    subwords = Subwords(merges=3_000, pretokenized=True)
    report = prepare(Prepare(source="gl", target="en", **sides, subwords=subwords), tmp_path / "out")
    assert PreparedData.load(tmp_path / "out").length_percentile(97.5) == 79
    assert not report.warnings
