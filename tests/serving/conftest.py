"""A server that many tests ask and none changes."""

from collections.abc import Iterator

import pytest
from servers import Running, make_translator, serving

from qknorm.decoding.translate import TextTranslator


@pytest.fixture(scope="session")
def engines() -> dict[str, TextTranslator]:
    return {"gl-en": make_translator("gl", "en"), "he-ar": make_translator("he", "ar")}


@pytest.fixture(scope="session")
def running(engines) -> Iterator[Running]:
    with serving(engines) as server:
        yield server
