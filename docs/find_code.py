"""Names the commits whose code made a run, by the `code` that its result, a page or a results.csv tells.

python docs/find_code.py 0.1.0+9af1ce2d3dc888da
"""

import ast
import functools
import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PACKAGE = "src/qknorm"
JOBS = PurePosixPath("studies/grid/jobs.py")


def main(wanted: list[str]) -> None:
    found: dict[str, list[str]] = {code: [] for code in wanted}
    for commit, digest in digests(Path(__file__).parents[1]):
        for code in wanted:
            if code.split("+")[-1] == digest:
                found[code].append(commit[:7])
    for code, commits in found.items():
        print(f"{code}: {', '.join(commits) or 'no commit of this branch, as far as its history is here'}")


def digests(repository: Path) -> Iterator[tuple[str, str]]:
    """Every commit, the newest first, with the digest that qknorm.studies.grid.jobs.code_version would have there."""
    for commit in _git(repository, "log", "--format=%H").decode().split():
        listed = _git(repository, "ls-tree", "-r", commit, PACKAGE).decode().splitlines()
        blobs = {PurePosixPath(line.split("\t")[1]).relative_to(PACKAGE): line.split()[2] for line in listed}
        if JOBS not in blobs:  # older than studies on a grid
            continue
        total = hashlib.blake2b(digest_size=8)
        for part in _deciding(_read(repository, blobs[JOBS]).decode()):
            for file in sorted(each for each in blobs if each.is_relative_to(part) and each.suffix == ".py"):
                total.update(f"{file}\n".encode())
                total.update(_read(repository, blobs[file]))
        yield commit, total.hexdigest()


def _deciding(source: str) -> tuple[str, ...]:
    """The parts of the code that decide what a training gives, as that commit saw it."""
    found = re.search(r"^DECIDING = (\(.*?\))", source, re.MULTILINE | re.DOTALL)
    return ast.literal_eval(found.group(1)) if found else ()


@functools.cache
def _read(repository: Path, blob: str) -> bytes:
    return _git(repository, "cat-file", "blob", blob)


def _git(repository: Path, *words: str) -> bytes:
    return subprocess.run(["git", "-C", str(repository), *words], check=True, capture_output=True).stdout


if __name__ == "__main__":
    main(sys.argv[1:] or sys.exit(__doc__))
