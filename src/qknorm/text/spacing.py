"""Is a text tokenised, stops between spaces as Moses leaves them, or as people write it?"""

from collections.abc import Mapping

_ENOUGH = 100  # lines that end with a stop; fewer prove nothing
_NEARLY_ALL = 0.9


class SpacingSample:
    """Watches pairs go by; of lines that end with a full stop, how many have a space before it?"""

    def __init__(self) -> None:
        self._stops, self._spaced = [0, 0], [0, 0]

    def add(self, source: str, target: str) -> None:
        for side, line in enumerate((source, target)):
            line = line.rstrip()
            if line.endswith(".") and len(line) > 1:
                self._stops[side] += 1
                self._spaced[side] += line[-2] == " "

    def looks_tokenized(self) -> bool:
        """Whether nearly all stops of a side stand alone."""
        return any(share > _NEARLY_ALL for share in self._shares())

    def looks_untouched(self) -> bool:
        """Whether nearly all stops of a side belong to a word."""
        return any(share < 1 - _NEARLY_ALL for share in self._shares())

    def _shares(self) -> list[float]:
        """Of the sides that tell."""
        counts = zip(self._spaced, self._stops, strict=True)
        return [spaced / stops for spaced, stops in counts if stops >= _ENOUGH]


def explain_spacing(samples: Mapping[str, SpacingSample], pretokenized: bool) -> str | None:
    """What is wrong with how sets of pairs, by name, are spaced and with what was said of it; None where nothing is."""
    tokenized = [name for name, sample in samples.items() if sample.looks_tokenized()]
    untouched = [name for name, sample in samples.items() if sample.looks_untouched()]
    if tokenized and untouched:
        told = f"by the spaces before stops, the text of {_join(tokenized)} is tokenised"
        sets = "sides of one set" if set(tokenized) & set(untouched) else "sets"
        return f"{told} and that of {_join(untouched)} is not; a model is to learn, and to be scored, from {sets} alike"
    if tokenized and not pretokenized:
        return (
            f"by the spaces before stops, the text of {_join(tokenized)} is tokenised, and translations will have "
            "these spaces too; give --subwords.pretokenized if it is"
        )
    if untouched and pretokenized:
        return (
            f"--subwords.pretokenized was given, but stops in {_join(untouched)} have no space before them: a word "
            "with a stop or a comma would be another word; leave it out if the text is not tokenised"
        )
    return None


def _join(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
