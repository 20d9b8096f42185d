"""Is a text tokenised, stops between spaces as Moses leaves them, or as people write it?"""

from collections.abc import Mapping

_STOPS = tuple(".。．।۔።։")
_ENOUGH = 100  # lines that end with a stop; fewer prove nothing
_NEARLY_ALL = 0.9


class SpacingSample:
    """Watches pairs go by; of lines that end with a full stop, how many have a space before it?"""

    def __init__(self) -> None:
        self._stops, self._spaced = [0, 0], [0, 0]

    def add(self, source: str, target: str) -> None:
        for side, line in enumerate((source, target)):
            line = line.rstrip()
            if len(line) > 1 and line.endswith(_STOPS) and line[-2] not in _STOPS:  # an ellipsis stays whole
                self._stops[side] += 1
                self._spaced[side] += line[-2] == " "

    def tokenized_sides(self) -> list[int]:
        """Those of which nearly all stops stand alone."""
        return [side for side, share in self._shares() if share > _NEARLY_ALL]

    def untouched_sides(self) -> list[int]:
        """Those of which nearly all stops belong to a word."""
        return [side for side, share in self._shares() if share < 1 - _NEARLY_ALL]

    def _shares(self) -> list[tuple[int, float]]:
        """Of the sides that tell."""
        return [(side, self._spaced[side] / self._stops[side]) for side in (0, 1) if self._stops[side] >= _ENOUGH]


def explain_spacing(samples: Mapping[str, SpacingSample], languages: tuple[str, str], pretokenized: bool) -> str | None:
    """What is wrong with how texts of sets, by name, are spaced, or with what was said of it; None where nothing is."""
    tokenized = [f"{name}.{languages[side]}" for name, each in samples.items() for side in each.tokenized_sides()]
    untouched = [f"{name}.{languages[side]}" for name, each in samples.items() for side in each.untouched_sides()]
    if tokenized and untouched:
        return (
            f"by the spaces before stops, {_join(tokenized)} {_are(tokenized)} tokenised and {_join(untouched)} "
            f"{_are(untouched)} not; bring all to one form, tokenised or not, or scores will suffer"
        )
    if tokenized and not pretokenized:
        return (
            f"by the spaces before stops, {_join(tokenized)} {_are(tokenized)} tokenised, and translations will have "
            "these spaces too; give --subwords.pretokenized if so"
        )
    if untouched and pretokenized:
        return (
            f"--subwords.pretokenized was given, but stops in {_join(untouched)} have no space before them: a word "
            "with a stop or a comma would be another word; leave it out if the text is not tokenised"
        )
    return None


def _join(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _are(names: list[str]) -> str:
    return "are" if len(names) > 1 else "is"
