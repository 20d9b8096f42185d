import pytest

from qknorm.scoring.languages import primary_language


@pytest.mark.parametrize(
    ("code", "language"),
    [("zh-TW", "zh"), ("zho_Hans", "zh"), ("JA", "ja"), ("eng_Latn", "en"), ("gl", "gl"), (" en ", "en"), ("", "")],
)
def test_region_and_script_are_left_off(code: str, language: str) -> None:
    assert primary_language(code) == language
