"""From text files to token ids."""

from pathlib import Path

from pydantic import Field

from qknorm.config.group import Settings


class Cleaning(Settings):
    """Which training pairs `prepare` drops. Given dev and test sets are normalised but never lose a pair."""

    min_characters: int = Field(default=1, ge=1)
    """Shorter sentences are dropped."""
    max_characters: int = Field(default=2_000, ge=1)
    """Longer sentences are dropped."""
    max_ratio: float = Field(default=4.0, ge=1)
    """Largest ratio of the two sides' lengths in characters; 15 are added to both, so that short pairs may differ."""
    drop_duplicates: bool = True
    """Drop a pair that stands earlier in the training text."""
    drop_identical: bool = True
    """Drop a pair whose two sides are the same."""
    drop_overlap: bool = True
    """Drop a training pair whose source or target sentence stands in the given dev or test set.

    Sets that are split off from the training text never overlap with it."""


class Subwords(Settings):
    """How words are cut into subwords."""

    merges: int | None = Field(default=None, ge=0)
    """BPE merges learned from both languages together; chosen from the size of the corpus if not given."""
    pretokenized: bool = False
    """The text is tokenised already (Moses or the like): words are what stands between spaces, and stay so."""


class Prepare(Settings):
    """Settings of `qknorm prepare`."""

    source: str
    """Code of the language to translate from, such as gl."""
    target: str
    """Code of the language to translate to, such as en."""
    train: tuple[Path, ...]
    """Training text: two plain text files (source, target), or files that hold both sides (TSV, JSONL, TMX, PO, MO)."""
    dev: tuple[Path, ...] = ()
    """Development set, in the same forms; if not given, split off from the training text."""
    test: tuple[Path, ...] = ()
    """Test set, in the same forms; if not given, split off from the training text."""
    dev_pairs: int = Field(default=1_000, ge=0)
    """How many pairs to split off as dev where none is given; never more than a tenth of the corpus."""
    test_pairs: int = Field(default=1_000, ge=0)
    """How many pairs to split off as test where none is given; never more than a tenth of the corpus."""
    cleaning: Cleaning = Cleaning()
    subwords: Subwords = Subwords()
