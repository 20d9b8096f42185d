"""What the API is asked and what it answers, as its OpenAPI description shows it."""

import math
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field, field_validator

from qknorm.decoding.translate import Translation
from qknorm.serving.sentences import Piece, Pieces, space_before
from qknorm.text.cleaning import clean_line

RIGHT_TO_LEFT = frozenset(
    {"ar", "arc", "ckb", "dv", "fa", "he", "iw", "ks", "nqo", "ps", "sd", "syr", "ug", "ur", "yi"}
)
"""Primary codes of languages that are written from right to left."""


class Asked(BaseModel):
    """Strict about names and types."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @field_validator("text", check_fields=False)
    @classmethod
    def _mend(cls, text: str | list[str]) -> str | list[str]:
        """U+FFFD for halves of surrogate pairs, which JSON can hold but no answer could repeat."""
        return mend(text) if isinstance(text, str) else [mend(each) for each in text]


class TranslateRequest(Asked):
    """Text to translate."""

    text: str | list[str]
    """One text, or a list of them; each is cut into sentences, and put together again with its own line breaks."""
    pair: str | None = None
    """Which of /pairs; the first if not given."""
    beam: int | None = Field(default=None, ge=1)
    """Width of the beam; that of the model's settings if not given."""
    nbest: int = Field(default=1, ge=1)
    """How many alternatives of each sentence to give: at most `beam`, which grows to it where it is not given."""
    alignment: bool = False
    """Whether to say which source word each word of a translation came from."""

    @field_validator("beam", "nbest", mode="before")
    @classmethod
    def _read_whole(cls, number: object) -> object:
        """To JSON 2.0 is an integer as 2 is."""
        return int(number) if isinstance(number, float) and number.is_integer() else number

    def texts(self) -> list[str]:
        """The texts, also where it is one."""
        return [self.text] if isinstance(self.text, str) else self.text


class AttentionRequest(Asked):
    """A sentence whose translation is to be looked at."""

    text: str
    pair: str | None = None
    """Which of /pairs; the first if not given."""


class AlternativeOut(BaseModel):
    """One translation of a sentence; the score is its log-probability over its length penalty."""

    text: str
    score: float | None


class SentenceOut(BaseModel):
    """A sentence, the white space that stood before it, and its translation with that which goes before it."""

    before: str
    source: str
    space: str
    """Like `before`, but for what the target's script wants within a line: none in Japanese, some in English."""
    text: str
    score: float | None
    alternatives: list[AlternativeOut]
    source_words: list[str] | None = None
    """The words that `alignment` counts, where it was asked for."""
    target_words: list[str] | None = None
    alignment: list[tuple[int, int]] | None = None
    """Pairs of a source word and the target word that came from it, counted from 0."""


class TextOut(BaseModel):
    """The translation of one text, and the sentences it is made of."""

    text: str
    sentences: list[SentenceOut]


class TranslateResponse(BaseModel):
    """A translation of every text, in the order given."""

    pair: str
    translations: list[TextOut]


class PairOut(BaseModel):
    """A model that is served."""

    name: str
    source: str
    target: str
    source_direction: str = "ltr"
    target_direction: str = "ltr"


class PublicLimits(BaseModel):
    """What a request may ask for."""

    characters: int
    sentences: int
    beam: int


class PairsResponse(BaseModel):
    """The models that are served, and what a request may ask of them."""

    pairs: list[PairOut]
    limits: PublicLimits


class AttentionResponse(BaseModel):
    """Where the page about a sentence stands for a while."""

    address: str


class State(BaseModel):
    """How the server is."""

    status: str


class Problem(BaseModel):
    """What is wrong with a request, and the way out."""

    detail: str


def mend(text: str) -> str:
    """The text with U+FFFD for every half of a surrogate pair that stands alone."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def describe_pair(name: str, source: str, target: str) -> PairOut:
    """A pair with the directions its languages are written in."""
    return PairOut(
        name=name,
        source=source,
        target=target,
        source_direction=direction_of(source),
        target_direction=direction_of(target),
    )


def direction_of(language: str) -> str:
    """Which way a language is written: ltr or rtl."""
    primary, *subtags = language.lower().replace("_", "-").split("-")
    if "latn" in subtags:
        return "ltr"
    return "rtl" if primary in RIGHT_TO_LEFT or {"arab", "hebr"} & set(subtags) else "ltr"


def describe_sentence(piece: Piece, translation: Translation, former: str = "") -> SentenceOut:
    """A sentence as the API tells of it, after the translation of the one before it in its text."""
    aligned = translation.alignment is not None
    return SentenceOut(
        before=piece.before,
        source=piece.text,
        space=space_before(piece, former, translation.text),
        text=translation.text,
        score=_finite(translation.score),
        alternatives=[AlternativeOut(text=each.text, score=_finite(each.score)) for each in translation.alternatives],
        source_words=clean_line(piece.text).split() if aligned else None,
        target_words=translation.text.split() if aligned else None,
        alignment=translation.alignment,
    )


def describe_text(pieces: Pieces, sentences: Sequence[SentenceOut]) -> TextOut:
    """A text as the API tells of it."""
    return TextOut(text=pieces.joined([sentence.text for sentence in sentences]), sentences=list(sentences))


def _finite(score: float) -> float | None:
    return score if math.isfinite(score) else None
