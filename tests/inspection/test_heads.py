"""What heads do: patterns put in by hand are found, and the mathematics of likeness holds."""

import math
from collections.abc import Iterable
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from looks import random_rows

from qknorm.inspection.heads import ROLES, find_patterns, head_distances, is_delimiter, map_points

WORDS = ["O", "gato", "negro", "dorme", "."]


def shifted(step: int, size: int = 5) -> np.ndarray:
    """All weight of query t on key t + step; at the edge, which has no such key, on all alike."""
    weights = np.eye(size, k=step)
    weights[weights.sum(axis=1) == 0] = 1 / size
    return weights


@pytest.mark.parametrize(
    ("role", "weights"),
    [
        ("previous", shifted(-1)),
        ("same", shifted(0)),
        ("next", shifted(1)),
        ("first", np.eye(5)[[0] * 5]),
        ("delimiters", np.eye(5)[[4] * 5]),
        ("broad", np.full((5, 5), 0.2)),
        ("focused", np.eye(5)[[2, 3, 4, 0, 1]]),
        ("mixed", np.tile([0.3, 0.3, 0.2, 0.1, 0.1], (5, 1)) ** 2 / 0.24),
    ],
)
def test_each_role_is_found(role: str, weights: np.ndarray) -> None:
    background = np.full((1, 5, 5), 0.2)  # a second head, which shows that all keys are visible
    found = find_patterns(np.concatenate([weights[None], background]), WORDS, one_text=True)
    assert [pattern.role for pattern in found] == [role, "broad"]
    assert role in ROLES


def test_shares_are_means_over_queries_that_have_a_choice() -> None:
    """The first query of causal attention sees itself alone, and so says nothing about its head."""
    causal = np.array([[[1.0, 0, 0], [0.75, 0.25, 0], [0.5, 0.3, 0.2]]])
    found = find_patterns(causal, ["<s>", "a", "."], one_text=True)[0]
    assert found.previous == pytest.approx((0.75 + 0.3) / 2)
    assert found.same == pytest.approx((0.25 + 0.2) / 2)
    assert found.first == pytest.approx((0.75 + 0.5) / 2)
    assert found.delimiters == pytest.approx((0 + 0.2) / 2), "the first key is counted as first"
    entropy = [-sum(p * math.log(p) for p in row) for row in ((0.75, 0.25), (0.5, 0.3, 0.2))]
    assert found.evenness == pytest.approx((entropy[0] / math.log(2) + entropy[1] / math.log(3)) / 2)


def test_neighbours_mean_nothing_between_two_texts() -> None:
    found = find_patterns(np.eye(5)[None], WORDS, one_text=False)[0]
    assert (found.previous, found.same, found.next) == (0, 0, 0)


def test_keys_that_no_head_gives_any_weight_count_where_they_are_known_to_be_visible() -> None:
    """As where logits lie so far apart that all other weights are 0 in float32."""
    half = np.zeros((1, 4, 50))
    half[..., 1:3] = 0.5
    words = [f"w{n}" for n in range(50)]
    alone, known = (find_patterns(half, words, one_text=False, visible=seen)[0] for seen in (None, np.full((1, 4), 50)))
    assert (alone.role, alone.evenness) == ("broad", 1)
    assert (known.role, known.evenness) == ("focused", pytest.approx(math.log(2) / math.log(50)))
    previous = np.eye(5)[[0, 0, 1, 2, 3]][None]
    assert find_patterns(previous, WORDS, one_text=True, visible=np.arange(1, 6))[0].role == "previous"
    assert math.isnan(find_patterns(previous, WORDS, one_text=True)[0].evenness)


def test_a_saturated_head_over_two_keys_is_not_broad() -> None:
    half = np.zeros((1, 4, 4))
    half[..., 1:3] = 0.5
    everyone = np.full((1, 4, 4), 0.25)
    roles = [pattern.role for pattern in find_patterns(np.concatenate([half, everyone]), WORDS[:4], one_text=False)]
    assert roles == ["mixed", "broad"]


def test_rows_that_see_nothing_count_for_nothing() -> None:
    weights = np.concatenate([np.zeros((1, 2, 5)), np.eye(5)[None, 2:, :]], axis=1)
    pattern = find_patterns(np.concatenate([weights, np.full((1, 5, 5), 0.2)]), WORDS, one_text=True)[0]
    assert np.isfinite(list(vars(pattern).values())).all()


@pytest.mark.parametrize("weights", [np.ones((2, 3, 1)), np.full((2, 3, 4), np.nan), np.zeros((2, 3, 4))])
def test_heads_without_a_choice_have_no_pattern(weights: np.ndarray) -> None:
    assert [pattern.role for pattern in find_patterns(weights, WORDS[: weights.shape[2]], one_text=False)] == [
        "mixed"
    ] * 2


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="over 3 keys do not fit 5 key tokens"):
        find_patterns(np.full((1, 2, 3), 1 / 3), WORDS, one_text=False)
    with pytest.raises(ValueError, match="heads, queries, keys"):
        find_patterns(np.eye(3), WORDS, one_text=False)


@pytest.mark.parametrize(
    ("token", "expected"),
    [(".", True), ("?!", True), ("</s>", True), ("▁,", True), ("،", True), (".</w>", True), ("[SEP]", True),
     ("a.", False), ("<unk>", False), ("", False), ("▁", False), ("5", False)],
)  # fmt: skip
def test_delimiters(token: str, expected: bool) -> None:
    assert is_delimiter(token) is expected


# ------------------------------------------------------------------ likeness


def scipys() -> ModuleType:
    """SciPy's distances; skips the test where they cannot be had."""
    found: ModuleType = pytest.importorskip("scipy.spatial.distance", reason="SciPy is what we compare with")
    return found


def apart(points: np.ndarray) -> np.ndarray:
    """The distance of each point from each."""
    distances: np.ndarray = scipys().squareform(scipys().pdist(points))
    return distances


def distributions(size: int) -> st.SearchStrategy[np.ndarray]:
    masses = arrays(np.float64, size, elements=st.floats(0, 1, allow_subnormal=False))
    return masses.filter(lambda mass: mass.sum() > 1e-6).map(lambda mass: mass / mass.sum())


def jensen_shannon(p: Iterable[float], q: Iterable[float]) -> float:
    """The divergence by its definition, in nats."""
    pairs = list(zip(p, q, strict=True))
    both = pairs + [(y, x) for x, y in pairs]
    return sum(x * math.log(2 * x / (x + y)) for x, y in both if x > 0) / 2


@given(distributions(5), distributions(5))
def test_the_distance_is_the_root_of_a_divergence_as_scipy_has_it_too(p: np.ndarray, q: np.ndarray) -> None:
    found = head_distances([[p], [q], [p]])
    divergence = found[0, 1] ** 2
    assert found[1, 0] == found[0, 1] and found[0, 2] == pytest.approx(0, abs=1e-7)
    assert divergence <= math.log(2) + 1e-12
    assert divergence == pytest.approx(jensen_shannon(p, q), abs=1e-12)
    theirs = scipys().jensenshannon(p, q)
    assert divergence == pytest.approx(0 if np.isnan(theirs) else theirs**2, abs=1e-9)


def test_heads_that_share_nothing_are_at_the_root_of_ln_2() -> None:
    assert head_distances([[[1, 0, 0]], [[0, 0.5, 0.5]]])[0, 1] == pytest.approx(math.sqrt(math.log(2)))


def test_distances_of_heads_are_roots_of_mean_divergences() -> None:
    heads = random_rows(np.random.default_rng(1), 4, 6, 5)
    heads[3] = heads[0]
    found = head_distances(heads)
    expected = [[math.sqrt(np.mean([*map(jensen_shannon, one, other)])) for other in heads] for one in heads]
    np.testing.assert_allclose(found, expected, atol=1e-7)
    assert found[0, 3] == pytest.approx(0, abs=1e-7)
    np.testing.assert_array_equal(found, found.T)


def test_one_head_is_at_no_distance() -> None:
    assert head_distances(random_rows(np.random.default_rng(0), 1, 3, 3)).tolist() == [[0.0]]
    assert map_points([[0.0]]).tolist() == [[0.0, 0.0]]


@given(arrays(np.float64, (7, 2), elements=st.floats(-10, 10)))
def test_scaling_recovers_distances_in_the_plane(points: np.ndarray) -> None:
    distances = apart(points)
    found = map_points(distances)
    np.testing.assert_allclose(apart(found), distances, atol=1e-5)


def test_the_same_distances_give_the_same_map() -> None:
    distances = apart(np.random.default_rng(0).normal(size=(6, 2)))
    found = map_points(distances)
    np.testing.assert_array_equal(found, map_points(distances))
    assert (found[np.abs(found).argmax(axis=0), [0, 1]] > 0).all()


def test_distances_are_square() -> None:
    with pytest.raises(ValueError, match="square"):
        map_points(np.zeros((2, 3)))
