"""The viewer's page about one sentence, kept for a short while under a name that cannot be guessed."""

import secrets
from collections import OrderedDict

from qknorm.decoding.translate import TextTranslator, translate_ids
from qknorm.inspection.reading import MOST_TOKENS, read_translation
from qknorm.inspection.report import ModelLook, Report, Sentence
from qknorm.inspection.viewer import render_page
from qknorm.text.cleaning import clean_line

KEPT = 16
"""Pages that are kept; a new one takes the place of the oldest."""


class Pages:
    """Pages by ticket."""

    def __init__(self, most: int = KEPT) -> None:
        self._most = most
        self._pages: OrderedDict[str, bytes] = OrderedDict()

    def keep(self, page: bytes) -> str:
        """The ticket for a page."""
        ticket = secrets.token_urlsafe(18)
        self._pages[ticket] = page
        while len(self._pages) > self._most:
            self._pages.popitem(last=False)
        return ticket

    def find(self, ticket: str) -> bytes | None:
        """The page of a ticket, while it is kept."""
        return self._pages.get(ticket)


def attention_page(translator: TextTranslator, text: str) -> bytes:
    """A page that shows every attention of a model while it translates a sentence."""
    look = ModelLook(f"{translator.source} → {translator.target}", [_read(translator, text)])
    page = render_page(Report([look], "What attention did in this sentence"))
    return page.encode("utf-8", "backslashreplace")


def _read(translator: TextTranslator, text: str) -> Sentence:
    source = translator.tokenizer.encode(clean_line(text))[:MOST_TOKENS]
    best = translate_ids(translator.model, [source], translator.settings, precision=translator.precision)[0][0]
    said = translator.tokenizer.decode(best.tokens)
    return read_translation(translator, text, source, best.tokens[:MOST_TOKENS], said)
