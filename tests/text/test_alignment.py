import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qknorm.text.alignment import OrderCheck, WordSample, find_parting
from qknorm.text.readers import read_lines


def made_up_corpus(pairs: int, seed: int = 0) -> list[tuple[str, str]]:
    """Pairs whose lengths go together and of which some share a number or ask a question."""
    rng = random.Random(seed)
    corpus = []
    for _ in range(pairs):
        words = rng.randint(2, 30)
        mark = rng.choice([" ?", " .", f" {rng.randint(1, 9999)} ."])
        source, target = ("".join(f" {letter}{rng.randint(0, 50):c}" * words) for letter in "xy")
        corpus.append((source + " palabra" * rng.randint(0, 2) + mark, target + " word" * rng.randint(0, 2) + mark))
    return corpus


def order_of(pairs) -> OrderCheck:
    check = OrderCheck()
    for pair in pairs:
        check.add(*pair)
    return check


@given(st.integers(40, 460), st.integers(1, 3), st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_lines_missing_on_one_side_are_found(place, missing, seed):
    corpus = made_up_corpus(500, seed)
    shorter = [source for source, _ in corpus]
    del shorter[place : place + missing]
    found = find_parting(shorter, [target for _, target in corpus])
    assert found is not None and abs(found - (place + 1)) <= 5


def test_the_first_of_several_gaps_is_told():
    corpus = made_up_corpus(600)
    shorter = [source for number, (source, _) in enumerate(corpus) if number not in (100, 300, 450)]
    assert abs((find_parting(shorter, [target for _, target in corpus]) or 0) - 101) <= 5


def test_lines_missing_at_the_end_are_found_there():
    corpus = made_up_corpus(300)
    assert find_parting([source for source, _ in corpus[:297]], [target for _, target in corpus]) in range(293, 299)


def test_an_empty_line_too_many_is_found_exactly():
    assert find_parting(["a", "b", "", "c"], ["a", "", "b", "", "c"]) == 2
    assert find_parting(["a", "b"], ["a", "b", "", ""]) == 3


def test_nothing_is_claimed_without_evidence():
    unrelated = [target for _, target in made_up_corpus(300, seed=2)]
    assert find_parting([source for source, _ in made_up_corpus(298, seed=1)], unrelated) is None
    many = [target for _, target in made_up_corpus(1_000, seed=4)]
    assert find_parting([source for source, _ in made_up_corpus(980, seed=3)], many) is None
    assert find_parting(["a", "b"], ["a", "b", "c"]) is None
    assert find_parting(["same"] * 50, ["same"] * 51) is None
    assert find_parting([], ["a"]) is None


def test_sides_in_order_raise_no_alarm():
    for corpus in (
        made_up_corpus(2_000),
        made_up_corpus(100),
        sorted(made_up_corpus(2_000), key=lambda pair: len(pair[0])),
    ):
        check = order_of(corpus)
        assert not check.is_disordered() and not check.is_doubtful()


@pytest.mark.parametrize("empty", ["", " \t"])
def test_missing_translations_are_no_evidence(empty):
    rng = random.Random(1)
    check = order_of((source, target if rng.random() < 0.5 else empty) for source, target in made_up_corpus(2_000))
    assert not check.is_disordered() and not check.is_doubtful()


@pytest.mark.parametrize("times", [2, 3, 5, 20])
def test_a_corpus_that_is_there_several_times_raises_no_alarm(times):
    assert not order_of(made_up_corpus(3_000 // times) * times).is_doubtful()


def test_a_short_corpus_that_is_there_many_times_raises_no_alarm():
    assert not order_of(made_up_corpus(73) * 20).is_disordered()
    assert not order_of(made_up_corpus(32) * 20).is_doubtful()


def test_a_corpus_followed_by_itself_in_capitals_raises_no_alarm():
    corpus = made_up_corpus(1_500)
    capitals = [(source.upper().rstrip("."), target.upper().rstrip(".")) for source, target in corpus]
    assert not order_of(corpus + capitals).is_doubtful()


@pytest.mark.parametrize("times", [2, 3])
def test_different_orders_are_told_of_a_corpus_that_is_there_several_times(times):
    corpus = made_up_corpus(3_000 // times)
    turned = [(source, target) for (source, _), (_, target) in zip(corpus, reversed(corpus), strict=True)]
    assert order_of(turned * times).is_disordered()


def test_sides_in_different_orders_are_told():
    corpus = made_up_corpus(2_000)
    sources, targets = [source for source, _ in corpus], [target for _, target in corpus]
    shuffled = random.Random(3).sample(targets, len(targets))
    for pairs in (zip(sources, shuffled, strict=True), zip(sources[1:], targets, strict=False)):
        check = order_of(pairs)
        assert check.is_disordered() and check.is_doubtful()


def test_sides_sorted_by_length_each_are_doubtful_by_their_numbers():
    corpus = made_up_corpus(2_000)
    sides = [sorted((pair[side] for pair in corpus), key=len) for side in (0, 1)]
    check = order_of(zip(*sides, strict=True))
    assert check.is_doubtful() and not check.is_disordered()


def test_constant_lengths_prove_nothing():
    check = order_of((f"{number:05d}", "label") for number in range(2_000))
    assert not check.is_doubtful()


def sample_of(pairs) -> WordSample:
    sample = WordSample()
    for pair in pairs:
        sample.add(*pair)
    return sample


def test_exchanged_sides_are_told_by_their_words():
    corpus = made_up_corpus(400)
    train, dev = sample_of(corpus[:200]), sample_of(corpus[200:])
    swapped = sample_of((target, source) for source, target in corpus[200:])
    assert swapped.looks_swapped_against(train)
    assert not dev.looks_swapped_against(train)
    assert not sample_of((target, source) for source, target in corpus[:5]).looks_swapped_against(train)


@pytest.mark.corpus
@pytest.mark.skipif("QKNORM_DATA" not in os.environ, reason="needs the corpora that QKNORM_DATA points at")
@pytest.mark.parametrize("name", ["ted-gl-en", "iwslt14-de-en", "multi30k-en-de", "bible-en-vi"])
def test_real_corpora_raise_no_alarm_and_shuffled_ones_do(name):
    folder = Path(os.environ["QKNORM_DATA"]) / name
    if not folder.is_dir():
        pytest.skip(f"QKNORM_DATA has no {name}")
    sides = [list(read_lines(folder / f"train.{language}")) for language in name.split("-")[-2:]]
    check = order_of(zip(*sides, strict=True))
    assert not check.is_disordered() and not check.is_doubtful()
    random.Random(0).shuffle(sides[1])
    assert order_of(zip(*sides, strict=True)).is_doubtful()
