"""What was seen of one or two models, as plain data: sentences, the weights and measures of every head, curves."""

import base64
import re
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from qknorm.inspection.heads import ROLES, find_patterns, head_distances, map_points
from qknorm.training.metrics import to_strict_json

if TYPE_CHECKING:
    from qknorm.inspection.monitor import Call

MOST_MODELS = 2
UNITS = 10_000
"""Weights are kept in whole units of one in so many: what is shown, to four digits, is what was computed."""

MEASURES: dict[str, tuple[str, str]] = {
    "entropy": ("entropy", "of the weights, in nats: 0 when one key has everything"),
    "relative_entropy": ("relative entropy", "entropy over that of equal weights on the visible keys: 0 to 1"),
    "saturation": ("saturation", "share of queries that give more than 0.99 to one key"),
    "effective_keys": ("effective keys", "over how many keys the weight is spread: e to the entropy"),
    "largest_logit": ("largest |logit|", "the largest logit without its sign; with QKNorm (p = 2) never above g"),
    "logit_std": ("logit spread", "standard deviation of the logits"),
    "qk_frobenius": ("‖QKᵀ‖", "Frobenius norm of the products of queries and keys"),
    "qk_frobenius_scaled": ("‖QKᵀ‖/√d", "the same over the root of the head's size"),
    "distance": ("distance", "how many tokens away attention looks, on the mean"),
    "first_share": ("first token", "share of the weight on the first key, a common sink"),
    "diagonal_share": ("diagonal", "share of the weight on the key of the query's own place"),
    "q_norm": ("‖q‖", "mean length of the queries"),
    "k_norm": ("‖k‖", "mean length of the keys"),
}
"""Label and meaning of the measures we know; others are shown by their name."""

SHOWN = ("relative_entropy", "saturation", "largest_logit", "effective_keys", "logit_std", "distance", "first_share")
"""Measures for a table, the first the most telling, for one that has room for few."""
TAKE_LARGEST = frozenset({"largest_logit"})
"""Measures whose largest value over heads or sentences is the one to see; of all others it is the mean."""

HeadNumbers = Mapping[str, Sequence[float | None]]
"""A number for each head, by measure; None where it is not defined."""

Direction = Literal["ltr", "rtl"]


def over_known(measure: str, values: Iterable[float | None]) -> float | None:
    """A measure over heads or sentences, as TAKE_LARGEST says; what is no finite number is left out."""
    known = [value for value in values if value is not None and np.isfinite(value)]
    if not known:
        return None
    return max(known) if measure in TAKE_LARGEST else float(np.mean(known))


@dataclass(frozen=True)
class Attention:
    """What one attention did with one sentence: weights (heads, queries, keys), and whose tokens stand on its axes."""

    name: str
    queries: str
    keys: str
    weights: NDArray[np.float64]
    measures: HeadNumbers = field(default_factory=dict)
    visible: NDArray[np.int64] | None = None
    """How many keys each query may see (heads, queries); where nobody knows, those that any head gives weight."""

    @property
    def heads(self) -> int:
        """How many heads it has."""
        return len(self.weights)


@dataclass(frozen=True)
class Sentence:
    """A text as a model saw it: its tokens on every side, and every attention over them."""

    text: str
    tokens: dict[str, list[str]]
    attentions: list[Attention]
    translation: str | None = None
    reference: str | None = None

    def __post_init__(self) -> None:
        for one in self.attentions:
            expected = (one.heads, len(self.tokens[one.queries]), len(self.tokens[one.keys]))
            if one.weights.ndim != 3 or one.weights.shape != expected:
                raise ValueError(f"{one.name} has weights {one.weights.shape} where its tokens ask for {expected}")

    def attention(self, name: str) -> Attention:
        """The attention of this name."""
        for one in self.attentions:
            if one.name == name:
                return one
        raise ValueError(f"there is no attention {name}; there are {', '.join(a.name for a in self.attentions)}")


@dataclass(frozen=True)
class Series:
    """A curve over training steps."""

    name: str
    steps: list[int]
    values: list[float]


@dataclass(frozen=True)
class Panel:
    """Curves that are looked at together."""

    title: str
    series: list[Series]


@dataclass(frozen=True)
class ModelLook:
    """One model: what it made of every sentence, and how it got there."""

    name: str
    sentences: list[Sentence]
    facts: dict[str, str] = field(default_factory=dict)
    panels: list[Panel] = field(default_factory=list)

    @property
    def attentions(self) -> list[str]:
        """The names of its attentions, in order."""
        return [one.name for one in self.sentences[0].attentions] if self.sentences else []

    def measures(self, attention: str) -> HeadNumbers:
        """Every measure of an attention over all sentences."""
        seen = [sentence.attention(attention).measures for sentence in self.sentences]
        return {
            name: [over_known(name, values) for values in zip(*(each[name] for each in seen), strict=True)]
            for name in (seen[0] if seen else ())
        }

    def roles(self, attention: str) -> list[str]:
        """What each head of an attention does, over all sentences: words of `heads.ROLES`."""
        votes = [_roles_in(sentence, attention) for sentence in self.sentences]
        return [_most_frequent(of_head) for of_head in zip(*votes, strict=True)]

    def heads_map(self, attentions: Sequence[str]) -> NDArray[np.float64]:
        """Points (heads, 2), near each other where heads of these attentions, all over the same tokens, do alike.

        Distances are means over all sentences.
        """
        total: NDArray[np.float64] | None = None
        for sentence in self.sentences:
            together = np.concatenate([sentence.attention(name).weights for name in attentions])
            squares = head_distances(together) ** 2 / len(self.sentences)
            total = squares if total is None else total + squares
        return np.zeros((0, 2)) if total is None else map_points(np.sqrt(total))


@dataclass(frozen=True)
class Report:
    """One model, or two to compare, over the same sentences."""

    models: list[ModelLook]
    title: str = "What attention does"
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not 1 <= len(self.models) <= MOST_MODELS:
            raise ValueError(f"a report is of one or {MOST_MODELS} models, not {len(self.models)}")
        if len({len(model.sentences) for model in self.models}) > 1:
            raise ValueError("both models of a report see the same sentences")

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON can hold it."""
        plain: dict[str, Any] = to_strict_json(
            {
                "title": self.title,
                "notes": self.notes,
                "units": UNITS,
                "measures": {name: {"label": label, "meaning": said} for name, (label, said) in MEASURES.items()},
                "roles": ROLES,
                "models": [_plain_model(model) for model in self.models],
            }
        )
        return plain


# ------------------------------------------------------------------ names and directions


def split_name(name: str) -> tuple[str, int]:
    """The kind of an attention and its layer, from 0: ("encoder self", 0) of encoder.0.self."""
    parts = re.split(r"[._/]", name)
    numbers = [int(part) for part in parts if part.isdigit()]
    return " ".join(part for part in parts if part and not part.isdigit()) or "attention", numbers[0] if numbers else 0


def group_attentions(sentence: Sentence) -> dict[str, list[str]]:
    """Names of attentions by kind, such as all encoder self-attentions; those of a kind see the same tokens."""
    groups: dict[str, list[str]] = {}
    sides: dict[str, tuple[str, str, int]] = {}
    for one in sentence.attentions:
        kind, seen = split_name(one.name)[0], (one.queries, one.keys, one.heads)
        while sides.setdefault(kind, seen) != seen:
            kind += " *"
        groups.setdefault(kind, []).append(one.name)
    return groups


def direction(tokens: Iterable[str]) -> Direction:
    """Which way a text of these tokens runs, by most of its letters."""
    kinds = [unicodedata.bidirectional(letter) for token in tokens for letter in token]
    rightwards = kinds.count("L")
    return "rtl" if kinds.count("R") + kinds.count("AL") > rightwards else "ltr"


# ------------------------------------------------------------------ from captured calls


def sentence_of_calls(
    tokens: "Sequence[str] | Mapping[str, Sequence[str]] | None",
    calls: "Iterable[Call]",
    *,
    text: str | None = None,
    translation: str | None = None,
    reference: str | None = None,
    sides: Callable[[str], tuple[str, str]] | None = None,
) -> Sentence:
    """A sentence as captured calls of any model saw it, of the first sequence of their batch.

    `tokens` are those of the one text, or a list by side of a model with more; without any, positions are counted, as
    they are for attentions that no side fits. Tokens of one text that fit none are refused.
    `sides` says, for an attention's name, which sides its queries and keys are of, where names and lengths do not.
    """
    known = {
        side: list(some) for side, some in (tokens if isinstance(tokens, Mapping) else {"text": tokens or ()}).items()
    }
    given = dict(known)
    attentions: list[Attention] = []
    for call in calls:
        call = call.first(1)
        weights = call.weights()[0].double().cpu().numpy()
        queries, keys = sides(call.name) if sides else _guess_sides(call.name, known, weights.shape[1:])
        for side, length in ((queries, weights.shape[1]), (keys, weights.shape[2])):
            known.setdefault(side, [str(place + 1) for place in range(length)])
        visible = call.count_visible_keys()[0].cpu().numpy()
        name, measures = _fresh(call.name, attentions), call.measure().as_dict()
        attentions.append(Attention(name, queries, keys, weights, measures, visible))
    used = {side for one in attentions for side in (one.queries, one.keys)}
    if attentions and len(given) == 1 and any(given.values()) and used.isdisjoint(given):
        (some,), (_, queries, keys) = given.values(), attentions[0].weights.shape
        raise ValueError(
            f"{len(some)} tokens were given where {attentions[0].name} has {queries} queries and {keys} keys; give as"
            " many as the model read, special ones too, or None to count positions"
        )
    known = {side: some for side, some in known.items() if side in used}
    said = " ".join(next(iter(known.values()), [])) if text is None else text
    return Sentence(said, known, attentions, translation, reference)


def _guess_sides(name: str, known: Mapping[str, Sequence[str]], shape: tuple[int, ...]) -> tuple[str, str]:
    """The sides whose lengths fit, by preference those that the name speaks of; else counted positions."""
    first, *_, last = [*known, *known]
    across = re.search(r"cross|encoder_attn|multihead_attn|encdec|enc_dec", name, re.IGNORECASE)
    own = first if "encoder" in name.lower() else last
    preferred = (last, first) if across else (own, own)
    found = []
    for side, length in zip(preferred, shape, strict=True):
        fitting = [one for one in (side, *known) if len(known[one]) == length]
        found.append(fitting[0] if fitting else f"position of {length}")
    return found[0], found[1]


def _fresh(name: str, attentions: Sequence[Attention]) -> str:
    """The name, with a number where the same attention was called before."""
    before = sum(one.name == name or one.name.startswith(f"{name} call ") for one in attentions)
    return f"{name} call {before + 1}" if before else name


# ------------------------------------------------------------------ to JSON


def _plain_model(model: ModelLook) -> dict[str, Any]:
    groups = group_attentions(model.sentences[0]) if model.sentences else {}
    return {
        "name": model.name,
        "facts": model.facts,
        "groups": [
            {
                "name": kind,
                "attentions": names,
                "layers": _layer_numbers(names),
                "map": _rounded(model.heads_map(names), 4),
            }
            for kind, names in groups.items()
        ],
        "measures": {name: model.measures(name) for name in model.attentions},
        "roles": {name: model.roles(name) for name in model.attentions},
        "sentences": [_plain_sentence(sentence) for sentence in model.sentences],
        "panels": [
            {"title": p.title, "series": [{"name": s.name, "steps": s.steps, "values": s.values} for s in p.series]}
            for p in model.panels
        ],
    }


def _plain_sentence(sentence: Sentence) -> dict[str, Any]:
    return {
        "text": sentence.text,
        "translation": sentence.translation,
        "reference": sentence.reference,
        "tokens": sentence.tokens,
        "directions": {side: direction(tokens) for side, tokens in sentence.tokens.items()},
        "attentions": [
            {"name": one.name, "queries": one.queries, "keys": one.keys, "heads": one.heads, "measures": one.measures}
            for one in sentence.attentions
        ],
        "weights": pack_weights([one.weights for one in sentence.attentions]),
    }


def pack_weights(arrays: Iterable[NDArray[np.float64]]) -> str:
    """Weights one after another as whole units, 16 bits each, deflated, in base 64; what is no number becomes 0."""
    whole = [np.rint(np.nan_to_num(np.clip(array, 0.0, 1.0)) * UNITS).astype("<u2").tobytes() for array in arrays]
    return base64.b64encode(zlib.compress(b"".join(whole))).decode("ascii")


# ------------------------------------------------------------------ numbers


def _layer_numbers(names: Sequence[str]) -> list[int]:
    """Layers counted from 1, as their names have them, or in order where names do not tell them apart."""
    numbers = [split_name(name)[1] + 1 for name in names]
    return numbers if len(set(numbers)) == len(numbers) else list(range(1, len(names) + 1))


def _roles_in(sentence: Sentence, attention: str) -> list[str]:
    one = sentence.attention(attention)
    keys, one_text = sentence.tokens[one.keys], one.queries == one.keys
    patterns = find_patterns(one.weights, keys, one_text=one_text, visible=one.visible)
    return [pattern.role for pattern in patterns]


def _most_frequent(words: Sequence[str]) -> str:
    return max(dict.fromkeys(words), key=words.count)


def _rounded(points: NDArray[np.float64], digits: int) -> list[list[float]]:
    rounded: list[list[float]] = np.round(points, digits).tolist()
    return rounded
