"""What all tests of studies share."""

import pytest


@pytest.fixture(autouse=True)
def _no_corpora(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told does not depend on the corpora of this machine."""
    monkeypatch.delenv("QKNORM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
