"""What the tests of reports, pictures and the page share: made-up looks at made-up models."""

import base64
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qknorm.inspection.report import UNITS, Attention, ModelLook, Panel, Sentence, Series

SOURCE, READ, WRITTEN = "source", "target so far", "next target token"


def random_rows(rng: np.random.Generator, *shape: int, causal: bool = False) -> NDArray[np.float64]:
    """Random weights whose rows sum to 1."""
    logits = 2 * rng.normal(size=shape)
    if causal:
        logits = np.where(np.tri(*shape[-2:]) > 0, logits, -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def make_sentence(rng: np.random.Generator, source: str, target: str, layers: int, heads: int) -> Sentence:
    words, out = source.split(), target.split()
    tokens = {SOURCE: [*words, "</s>"], READ: ["<s>", *out], WRITTEN: [*out, "</s>"]}
    places = [(f"encoder.{layer}.self", SOURCE, SOURCE, False) for layer in range(layers)]
    for layer in range(layers):
        places += [(f"decoder.{layer}.self", READ, READ, True), (f"decoder.{layer}.cross", WRITTEN, SOURCE, False)]
    attentions = []
    for name, queries, keys, causal in places:
        weights = random_rows(rng, heads, len(tokens[queries]), len(tokens[keys]), causal=causal)
        measures = {
            "entropy": [float(x) for x in rng.uniform(0, 3, heads)],
            "relative_entropy": [float(x) for x in rng.uniform(0.1, 1, heads)],
            "saturation": [float(x) for x in rng.uniform(0, 0.4, heads)],
            "largest_logit": [float(x) for x in rng.uniform(1, 20, heads)],
        }
        attentions.append(Attention(name, queries, keys, weights, measures))
    return Sentence(source, tokens, attentions, target, target)


def make_look(
    name: str,
    pairs: Sequence[tuple[str, str]] = (("un dous tres catro", "one two three"), ("ola mundo", "hello world")),
    *,
    layers: int = 2,
    heads: int = 3,
    seed: int = 0,
) -> ModelLook:
    """A model that was never trained nor run."""
    rng = np.random.default_rng(seed)
    sentences = [make_sentence(rng, source, target, layers, heads) for source, target in pairs]
    names = [f"encoder.{layer}.self" for layer in range(layers)]
    panels = [
        Panel("Dev BLEU", [Series("dev", [10, 20, 30], [1.0, 12.5, 20.25])]),
        Panel("Scale g", [Series(each, [10, 20], [8.0, 7.5 + place]) for place, each in enumerate(names)]),
        Panel("Largest |logit|", [Series(each, [10, 20], [3.0, 9.0 + place]) for place, each in enumerate(names)]),
    ]
    return ModelLook(name, sentences, {"task": "gl → en"}, panels)


def unpack_weights(sentence: Mapping[str, Any]) -> dict[str, NDArray[np.float64]]:
    """The weights in a sentence of a report's JSON by attention, as the page reads them: in order, none left over."""
    whole = np.frombuffer(zlib.decompress(base64.b64decode(sentence["weights"])), dtype="<u2") / UNITS
    found = {}
    for one in sentence["attentions"]:
        shape = one["heads"], len(sentence["tokens"][one["queries"]]), len(sentence["tokens"][one["keys"]])
        part, whole = np.split(whole, [int(np.prod(shape))])
        found[one["name"]] = part.reshape(shape)
    assert not whole.size
    return found
