"""What a target language code asks of scoring."""

import re

# The languages that scoring or detokenising treats in their own way, by the three-letter codes of ISO 639-3.
_SHORT_CODES = {
    "ces": "cs",
    "cmn": "zh",
    "eng": "en",
    "fin": "fi",
    "fra": "fr",
    "gle": "ga",
    "ita": "it",
    "jpn": "ja",
    "kor": "ko",
    "zho": "zh",
}


def primary_language(code: str) -> str:
    """The language of a code without its script or region: `zh` of zh-TW, zh_CN and zho_Hans; empty of empty."""
    primary = re.split("[-_]", code.strip(), maxsplit=1)[0].lower()
    return _SHORT_CODES.get(primary, primary)
