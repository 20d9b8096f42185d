import itertools
import random
from collections import Counter

import numpy as np
import pytest
import sacrebleu
from numpy.typing import NDArray
from sacrebleu.significance import PairedTest

from qknorm.errors import InputError
from qknorm.scoring import Comparison, compare

WORDS = ["the", "a", "cat", "dog", "sees", "hears", "big", "small", "red", "old", "house", "tree", "in", "on", "near"]


def some_sentences(count: int, seed: int) -> list[str]:
    chooser = random.Random(seed)
    return [" ".join(chooser.choices(WORDS, k=chooser.randint(6, 14))) for _ in range(count)]


def spoil(lines: list[str], share: float, seed: int) -> list[str]:
    chooser = random.Random(seed)
    return [" ".join("wrong" if chooser.random() < share else word for word in line.split()) for line in lines]


REFERENCE = some_sentences(80, seed=1)
GOOD, SIMILAR, POOR = (spoil(REFERENCE, share, seed) for share, seed in ((0.2, 2), (0.22, 3), (0.5, 4)))
SYSTEMS = {"base": GOOD, "similar": SIMILAR, "poor": POOR}


def plain_counts(hypotheses: list[str], reference: list[str]) -> NDArray[np.float64]:
    """Per sentence: both lengths, then matches and totals of orders 1 to 4, counted in the plainest way."""
    rows = []
    for hypothesis, expected in zip(hypotheses, reference, strict=True):
        h, r = hypothesis.split(), expected.split()
        row = [len(h), len(r)]
        grams = [[Counter(zip(*(s[i:] for i in range(n)), strict=False)) for n in range(1, 5)] for s in (h, r)]
        row += [sum((a & b).values()) for a, b in zip(*grams, strict=True)]
        row += [sum(a.values()) for a in grams[0]]
        rows.append(row)
    return np.array(rows, dtype=np.float64)


def plain_bleu(totals: NDArray[np.float64]) -> float:
    precisions = totals[2:6] / totals[6:10]
    return float(100 * min(1.0, np.exp(1 - totals[1] / totals[0])) * np.exp(np.log(precisions).mean()))


def test_bleu_of_every_draw_and_all_p_values_match_a_plain_computation() -> None:
    samples, trials, seed = 300, 200, 99
    found = compare(SYSTEMS, [REFERENCE], "base", samples=samples, trials=trials, seed=seed, tokenizer="none")
    counts = {name: plain_counts(lines, REFERENCE) for name, lines in SYSTEMS.items()}
    chosen = np.random.default_rng(seed).choice(80, size=(samples, 80), replace=True)
    heads = np.random.default_rng(seed).integers(2, size=(trials, 80), dtype=bool)[:, :, None]
    base = counts["base"]
    for system in found.systems[1:]:
        own = counts[system.name]
        observed = plain_bleu(own.sum(0)) - plain_bleu(base.sum(0))
        drawn = np.array([plain_bleu(own[i].sum(0)) - plain_bleu(base[i].sum(0)) for i in chosen])
        swapped = np.array(
            [plain_bleu(np.where(h, base, own).sum(0)) - plain_bleu(np.where(h, own, base).sum(0)) for h in heads]
        )
        assert system.difference == pytest.approx(observed) and observed < 0
        assert system.win_rate == np.mean(drawn > 0)
        assert system.koehn_p == (np.sum(drawn >= 0) + 1) / (samples + 1)
        assert system.bootstrap_p == (np.sum(abs(drawn) - abs(drawn).mean() >= abs(observed)) + 1) / (samples + 1)
        assert system.randomization_p == (np.sum(abs(swapped) >= abs(observed)) + 1) / (trials + 1)


@pytest.mark.parametrize("metric", ["bleu", "chrf", "ter"])
def test_p_values_and_intervals_are_those_of_sacrebleu_where_nothing_ties(metric: str) -> None:
    found = compare(SYSTEMS, [REFERENCE], "base", metric, samples=200, trials=300)
    theirs = {"bleu": sacrebleu.BLEU, "chrf": sacrebleu.CHRF, "ter": sacrebleu.TER}[metric]
    tables = {}
    for kind, draws in (("bs", 200), ("ar", 300)):
        _, table = PairedTest(list(SYSTEMS.items()), {metric: theirs()}, [REFERENCE], kind, draws)()
        tables[kind] = next(column for name, column in table.items() if name != "System")
    for ours, bootstrap, randomization in zip(found.systems, tables["bs"], tables["ar"], strict=True):
        assert ours.value == pytest.approx(bootstrap.score)
        assert ours.interval.mean == pytest.approx(bootstrap.mean, rel=1e-5)
        assert (ours.interval.high - ours.interval.low) / 2 == pytest.approx(bootstrap.ci, rel=1e-4)
        if metric != "ter":  # TER has few values, so differences tie, and ties are what we count otherwise
            assert ours.bootstrap_p == bootstrap.p_value and ours.randomization_p == randomization.p_value


def test_randomisation_approaches_the_share_among_all_swaps() -> None:
    reference, base, system = REFERENCE[:10], GOOD[:10], spoil(REFERENCE[:10], 0.3, 8)
    a, b = plain_counts(base, reference), plain_counts(system, reference)
    observed = abs(plain_bleu(a.sum(0)) - plain_bleu(b.sum(0)))
    swaps = [np.array(choice)[:, None] for choice in itertools.product([True, False], repeat=10)]
    differences = [plain_bleu(np.where(s, a, b).sum(0)) - plain_bleu(np.where(s, b, a).sum(0)) for s in swaps]
    exact = np.mean(np.abs(differences) >= observed - 1e-9)
    found = compare({"a": base, "b": system}, [reference], "a", tokenizer="none", samples=10, trials=20_000)
    assert 0.02 < exact < 0.98
    assert found.systems[1].randomization_p == pytest.approx(exact, abs=0.02)


@pytest.mark.parametrize("metric", ["bleu", "chrf", "ter", "multi-bleu"])
def test_identical_systems_do_not_differ(metric: str) -> None:
    twin = compare({"a": GOOD, "b": list(GOOD)}, [REFERENCE], "a", metric, samples=100, trials=100).systems[1]
    assert (twin.koehn_p, twin.bootstrap_p, twin.randomization_p) == (1.0, 1.0, 1.0)
    assert (twin.difference, twin.win_rate, twin.tie_rate) == (0.0, 0.0, 1.0)


def test_systems_that_differ_in_one_sentence_are_not_told_apart() -> None:
    changed = [*GOOD[:-1], REFERENCE[-1]]
    found = compare({"a": GOOD, "b": changed}, [REFERENCE], "a", samples=200, trials=200).systems[1]
    assert found.difference > 0 and found.randomization_p == 1.0
    assert found.koehn_p is not None and found.koehn_p > 0.2


@pytest.mark.parametrize("metric", ["bleu", "chrf", "ter", "multi-bleu"])
@pytest.mark.parametrize("baseline", ["base", "poor"])
def test_a_clearly_better_system_is_told_apart(metric: str, baseline: str) -> None:
    found = compare({"base": GOOD, "poor": POOR}, [REFERENCE], baseline, metric, samples=500, trials=500)
    other = found.systems[1]
    assert found.systems[0].name == baseline == found.baseline
    for p in (other.koehn_p, other.bootstrap_p, other.randomization_p):
        assert p is not None and p < 0.01
    assert other.win_rate == (1.0 if other.name == "base" else 0.0)
    assert found.higher_is_better == (metric != "ter")


def test_the_same_seed_gives_the_same_comparison() -> None:
    def run(seed: int) -> Comparison:
        return compare({"a": GOOD, "b": SIMILAR}, [REFERENCE], "a", samples=100, trials=100, seed=seed)

    assert run(0) == run(0)
    assert run(0).systems[1].interval != run(1).systems[1].interval


def test_the_signature_tells_draws_and_seed() -> None:
    found = compare({"a": GOOD, "b": POOR}, [REFERENCE], "a", samples=50, trials=60, seed=7)
    assert found.signature.startswith("nrefs:1|bs:50|ar:60|seed:7|case:mixed|eff:no|tok:13a|smooth:exp|version:")


def test_impossible_comparisons_are_refused() -> None:
    with pytest.raises(InputError, match='baseline "c" is not among the systems: a, b'):
        compare({"a": GOOD, "b": POOR}, [REFERENCE], "c")
    with pytest.raises(InputError, match="at least two"):
        compare({"a": GOOD}, [REFERENCE], "a")
    with pytest.raises(InputError, match="no translation"):
        compare({}, [REFERENCE], "a")
    with pytest.raises(InputError, match="b has 1 line but the reference has 80 lines"):
        compare({"a": GOOD, "b": ["x"]}, [REFERENCE], "a")
