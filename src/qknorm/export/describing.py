"""What any export says of the run it was made from."""

from typing import Any

from qknorm.decoding.translate import TextTranslator
from qknorm.export.card import Card


def describe(translator: TextTranslator, engine: str, precision: str = "float32", **details: Any) -> Card:
    """The card that stands beside an exported translator."""
    settings = translator.settings
    return Card(
        engine=engine,
        source=translator.source,
        target=translator.target,
        vocabulary=translator.model.vocabulary,
        longest=translator.longest,
        beam=settings.beam,
        length_penalty=settings.length_penalty,
        extra_length=settings.extra_length,
        no_repeat_ngram=settings.no_repeat_ngram,
        batch_tokens=settings.batch_tokens,
        forbidden_types=(~translator.model.allowed).nonzero().flatten().tolist(),
        precision=precision,
        details=details,
    )
