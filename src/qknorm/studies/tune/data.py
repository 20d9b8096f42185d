"""One corpus cut into subwords by several numbers of merges: the same sentences each time, and no test set."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qknorm import files
from qknorm.config import Cleaning, Prepare, Subwords
from qknorm.errors import InputError
from qknorm.progress import Progress
from qknorm.studies.kind import ABOUT, read_about
from qknorm.text.prepare import prepare
from qknorm.text.prepared import MANIFEST, PreparedData, fingerprint, text_name

TRAINED_ON = ("train", "dev")


@dataclass
class DataByMerges:
    """The training and dev text of prepared data, prepared again under `folder` for each number of merges."""

    base: PreparedData
    folder: Path
    progress: Progress | None = None
    _opened: dict[int, PreparedData] = field(default_factory=dict)

    @property
    def merges(self) -> int:
        """The number that the base has."""
        return int(self.base.manifest["merges"])

    def at(self, merges: int) -> PreparedData:
        """The text in subwords of so many merges; it stays as it was, so that BLEU on dev can be compared."""
        if merges not in self._opened:
            self._opened[merges] = self._open(merges)
        return self._opened[merges]

    def _open(self, merges: int) -> PreparedData:
        out = self.folder / f"{self.base.fingerprint[:12]}-{merges}"
        if not (out / MANIFEST).is_file():
            prepare(self._settings(merges), out, progress=self.progress)
        data = PreparedData.load(out)
        for split in TRAINED_ON:
            for language in (self.base.source, self.base.target):
                if data.split(split).text(language) != self.base.split(split).text(language):
                    raise InputError(f"{out} and {self.base.folder} have other {split}.{language}; remove {out}")
        return data

    def _settings(self, merges: int) -> Prepare:
        base = self.base
        if "dev" not in base.splits:
            raise InputError(f"{base.folder} has no dev set to choose by; prepare it with --dev, or with more pairs")
        languages = (base.source, base.target)
        files = {split: tuple(base.folder / text_name(split, each) for each in languages) for split in TRAINED_ON}
        return Prepare(
            source=base.source,
            target=base.target,
            **files,  # type: ignore[arg-type]
            test_pairs=0,
            cleaning=Cleaning.model_validate(base.manifest["settings"]["cleaning"]),
            subwords=Subwords(merges=merges, pretokenized=base.tokenizer.pretokenized),
        )


def require_same_text(base: PreparedData, out: Path) -> None:
    """Refuses a folder that holds a search on another text, whose report and best settings would be lost.

    Other merges of the same text are no other text.
    """
    kept = _kept(out)
    texts = [kept] if kept else list(_searched_before(out))
    mark = _about(base)["fingerprint"] if texts else ""
    for text in texts:
        if text["fingerprint"] != mark:
            told = f"{text['pairs']:,} pairs of {text['source']}→{text['target']}"
            raise InputError(f"{out} holds a search on {told}, not on the text of {base.folder}; name another --out")


def keep_text(base: PreparedData, out: Path) -> None:
    """Writes down which text the searches of a folder are on."""
    if not (out / ABOUT).is_file():
        files.write_json(out / ABOUT, {"text": _about(base)})


def _kept(out: Path) -> dict[str, Any] | None:
    """The text that the folder's own file tells; None where it has no such file."""
    content = read_about(out)
    if content is None:
        return None
    try:
        text = {name: content["text"][name] for name in ("source", "target", "pairs", "fingerprint")}
        return {**text, "pairs": int(text["pairs"])}
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{out / ABOUT} is damaged; move it away, or name another folder") from None


def _searched_before(out: Path) -> Iterator[dict[str, Any]]:
    """The texts of a folder whose search is older than `ABOUT`, by what `DataByMerges` left there; none before a run.

    The demo is passed over: it is prepared before anyone asks whether it may be searched on here.
    """
    if not any(out.glob("runs/*")):
        return
    for manifest in sorted(out.glob(f"data/*-*/{MANIFEST}")):
        try:
            yield _about(PreparedData.load(manifest.parent))
        except InputError:  # damaged: it tells nothing, and whoever needs it says so
            continue


def _about(base: PreparedData) -> dict[str, Any]:
    names = [text_name(split, language) for split in TRAINED_ON for language in (base.source, base.target)]
    pairs = base.manifest["splits"]["train"]["pairs"]
    mark = fingerprint(base.folder, [name for name in names if (base.folder / name).is_file()])
    return {"source": base.source, "target": base.target, "pairs": pairs, "fingerprint": mark}
