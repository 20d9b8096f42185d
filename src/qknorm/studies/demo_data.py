"""The embedded corpus, prepared for the quick form of a study."""

from pathlib import Path

from qknorm import files
from qknorm.config import Prepare, Subwords
from qknorm.progress import Progress
from qknorm.text.demo_corpus import demo_splits
from qknorm.text.prepare import prepare
from qknorm.text.prepared import MANIFEST


def prepare_demo(folder: Path, merges: int, held_out: int, progress: Progress | None = None) -> None:
    """Prepares it once, with `held_out` pairs of its dev and test sets: two cores translate them for every run."""
    if (folder / MANIFEST).is_file():
        return
    text = folder.parent / "corpus"
    paths: dict[str, tuple[Path, ...]] = {}
    for split, pairs in demo_splits().items():
        kept = pairs if split == "train" else pairs[:held_out]
        paths[split] = (text / f"{split}.gl", text / f"{split}.en")
        for path, lines in zip(paths[split], zip(*kept, strict=True), strict=True):
            files.write_text(path, "".join(f"{line}\n" for line in lines))
    settings = Prepare(source="gl", target="en", **paths, subwords=Subwords(merges=merges))  # type: ignore[arg-type]
    prepare(settings, folder, progress=progress)
